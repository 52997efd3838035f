"""The two entry points through which upstream finds this package.

`bootstrap` (group sglang.srt.platforms) runs in every process while sglang is being imported;
`register` (group sglang.srt.plugins) runs wherever upstream loads plugins. Both may run twice.
"""

from __future__ import annotations

from types import ModuleType

from sglang.srt.disaggregation.afd.imports import after_import

_done = False


def bootstrap() -> None:
    """Prepare this process; returning None tells upstream that we are no hardware platform."""
    global _done
    if _done:
        return
    _done = True
    from sglang.srt.disaggregation.afd import cpu

    after_import("sglang.srt.server_args", _swap_server_args)
    if cpu.is_cpu_only():
        cpu.bootstrap()
        # Not before upstream's registry exists: this runs in the middle of `import sglang`.
        after_import("sglang.srt.plugins.hook_registry", _apply_cpu_rows)


def register() -> None:
    """Upstream's general plugin call. The AFD hooks follow when a server asks for the mode."""
    bootstrap()


def _swap_server_args(module: ModuleType) -> None:
    # It puts its class in the place of upstream's, also when somebody imports it first.
    import sglang.srt.disaggregation.afd.server_args  # noqa: F401


def _apply_cpu_rows(module: ModuleType) -> None:
    from sglang.srt.disaggregation.afd import patches

    patches.apply("cpu")
