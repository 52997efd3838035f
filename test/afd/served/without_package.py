"""An environment with everything of this one but our package."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

# Upstream's PyPI wheels cannot be imported on a machine without a GPU. This is the least that lets
# them, and no line of ours: names instead of kernels, each of which raises when it is called.
_WITHOUT_LIBCUDA = """
import importlib.machinery, sys, types


class Absent(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_args, **_kwargs):
            raise RuntimeError(f"{self.__name__}.{name} needs a GPU")

        return absent


for name in ("sgl_kernel", "sgl_kernel.mamba"):
    sys.modules[name] = Absent(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
"""


def make(folder: Path) -> Path:
    """Its interpreter. Packages are links to those of this environment; ours has none there: no
    files, no metadata, no import finder."""
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, check=True)
    site = Path(done.stdout.strip())
    # More than one where an environment was lent (`.ci/run`).
    lenders = [Path(path) for path in sys.path if Path(path).name == "site-packages"]
    for lender in lenders:
        for path in lender.iterdir():
            ours = "sglang_afd" in path.name or path.suffix == ".pth" and "lent" in path.name
            target = site / path.name
            if not ours and path.name != "__pycache__" and not target.exists():
                target.symlink_to(path)
    (site / "sitecustomize.py").write_text(_WITHOUT_LIBCUDA)
    return interpreter
