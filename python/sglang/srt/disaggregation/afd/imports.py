"""Calls back right after a module ran, before anybody copies names out of it.

Hooks thus cost no process an import that it would not do by itself, which matters: a server is
half a dozen processes, and upstream's modules take seconds to import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Callback = Callable[[ModuleType], None]


def after_import(name: str, callback: Callback) -> None:
    """Call `callback(module)` now if module `name` is imported, else when it will be.

    An exception from the callback fails the import with that exception.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_running(module):
        callback(module)
        return
    _finder().callbacks.setdefault(name, []).append(callback)


def _is_running(module: ModuleType) -> bool:
    """True while the module's own code runs; its names are not complete yet."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self._asking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.callbacks or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_then_call(module: ModuleType) -> None:
            run(module)
            for callback in self.callbacks.pop(fullname, []):
                callback(module)

        spec.loader.exec_module = run_then_call  # type: ignore[method-assign]
        return spec


def _finder() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder
