"""`layout.cuh`, compiled for the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
from sglang_afd_kernel import abi, build

HERE = Path(__file__).resolve().parent


@cache
def layout_library() -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "layout.so"
        subprocess.run(
            [
                compiler,
                "-std=c++17",
                "-Wall",
                "-Werror",
                "-shared",
                "-fPIC",
                f"-I{build.sources()}",
                str(HERE / "layout_shim.cpp"),
                "-o",
                str(made),
            ],
            check=True,
            timeout=60,
        )
        library = ctypes.CDLL(str(made))  # stays mapped when the file is gone
    library.shim_layout.restype = None
    library.shim_share.restype = ctypes.c_uint32
    library.shim_reached.argtypes = [ctypes.c_uint32, ctypes.c_uint32]
    return library


def layout(shape: abi.Shape) -> abi.Layout:
    found = abi.Layout()
    layout_library().shim_layout(ctypes.byref(shape), ctypes.byref(found))
    return found
