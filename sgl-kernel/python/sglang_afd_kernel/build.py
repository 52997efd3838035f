"""Finds or makes the shared library of `csrc/afd`.

`library()` takes, in this order: the file that SGLANG_AFD_KERNEL_LIBRARY names; `libafd.so` beside
this file, which an ahead-of-time build puts there; a build of this machine's nvcc, kept in the
user's cache and made again when a source, the compiler or an architecture changes.

    python -m sglang_afd_kernel.build --arch 90a,100a --out libafd.so
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from sglang_afd_kernel import abi

LIBRARY_ENV = "SGLANG_AFD_KERNEL_LIBRARY"
ARCHITECTURES = ("90a", "100a")  # Hopper, run; Blackwell, compiled only
_HERE = Path(__file__).resolve().parent
_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-lineinfo")
_TIMEOUT_S = 600


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says what to do."""


def sources() -> Path:
    """The folder of the CUDA sources: in the installed package, or in the source tree.

    Raises:
        BuildError
    """
    for folder in (_HERE / "csrc", _HERE.parents[1] / "csrc" / "afd"):
        if (folder / "link.cu").is_file():
            return folder
    raise BuildError(f"the CUDA sources are not beside {_HERE}; install sglang-afd-kernel again")


def find_nvcc() -> Path:
    """CUDA_HOME's compiler, else the one on PATH, in /usr/local/cuda or in NVIDIA's wheel.

    Raises:
        BuildError
    """
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    on_path = shutil.which("nvcc")
    candidates = [home / "bin" / "nvcc" for home in homes]
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/nvcc"), _wheel() / "bin" / "nvcc"]
    for nvcc in candidates:
        if os.access(nvcc, os.X_OK):
            return nvcc
    raise BuildError(
        "no nvcc found to compile the kernels of sglang-afd-kernel: set CUDA_HOME, install a CUDA "
        f"toolkit, or name a library that was built elsewhere in {LIBRARY_ENV}"
    )


def compile_library(out: Path, architectures: tuple[str, ...], nvcc: Path | None = None) -> None:
    """Compile for all of `architectures` ("90a") into `out`, which appears when it is complete.

    Raises:
        BuildError: with the compiler's words.
    """
    nvcc = nvcc or find_nvcc()
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [str(nvcc), *_FLAGS]
    for arch in architectures:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    if nvcc.is_relative_to(_wheel()):  # its headers and libraries are not where nvcc looks
        command += [f"-I{_wheel() / 'include'}", f"-L{_wheel() / 'lib'}"]
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / out.name
        command += [str(sources() / "link.cu"), "-o", str(made)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise BuildError(f"{nvcc} did not compile the kernels: {exc}") from exc
        if done.returncode != 0:
            raise BuildError(
                f"{nvcc} exited with {done.returncode}:\n{(done.stderr or done.stdout)[-4000:]}"
            )
        made.replace(out)


def load(path: Path) -> ctypes.CDLL:
    """Load a build and check that it fits this package.

    Raises:
        BuildError
    """
    try:
        return abi.declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError, RuntimeError) as exc:
        raise BuildError(f"{path} is no kernel library of this package: {exc}") from exc


@cache
def library(architecture: str) -> ctypes.CDLL:
    """The kernels for a GPU of `architecture` ("90a"). Ranks that start together build once.

    Raises:
        BuildError
    """
    named = os.environ.get(LIBRARY_ENV)
    if named:
        return load(Path(named))
    if (_HERE / "libafd.so").is_file():
        return load(_HERE / "libafd.so")
    nvcc = find_nvcc()
    made = _cache() / _digest(nvcc, architecture) / "libafd.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            compile_library(made, (architecture,), nvcc)
    return load(made)


def _wheel() -> Path:
    """Where NVIDIA's wheels put a toolkit; it may be in another environment on the path."""
    for folder in sys.path:
        if (Path(folder) / "nvidia" / "cu13" / "bin" / "nvcc").is_file():
            return Path(folder) / "nvidia" / "cu13"
    return Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_afd_kernel"


def _digest(nvcc: Path, architecture: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources().glob("*.cu*")):
        digest.update(path.read_bytes())
    version = subprocess.run(
        [str(nvcc), "--version"], capture_output=True, timeout=60, check=False
    ).stdout
    digest.update(b"\0".join([version, architecture.encode(), " ".join(_FLAGS).encode()]))
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time.")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), help="by comma (%(default)s)")
    parser.add_argument("--out", type=Path, default=_HERE / "libafd.so")
    args = parser.parse_args()
    try:
        compile_library(args.out, tuple(args.arch.split(",")))
        load(args.out)
    except BuildError as exc:
        raise SystemExit(f"sglang_afd_kernel.build: {exc}") from exc
    print(f"{args.out}: {args.out.stat().st_size} bytes, for sm_{args.arch.replace(',', ', sm_')}")


if __name__ == "__main__":
    main()
