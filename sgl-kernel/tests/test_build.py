"""The kernels compile for every architecture, and what goes wrong says what to do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_afd_kernel import abi, build


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("build") / "libafd.so"
    build.compile_library(out, build.ARCHITECTURES)
    return out


def test_compiles_for_hopper_and_blackwell(made):
    data = made.read_bytes()
    for arch in build.ARCHITECTURES:
        assert f"sm_{arch}".encode() in data


def test_structs_are_those_of_the_build(made):
    library = build.load(made)
    shape = abi.Shape(2, 1, 32, 2048, 8, 64, 2, 1)
    found = abi.Layout()
    library.afd_layout(ctypes.byref(shape), ctypes.byref(found))
    import host

    expected = host.layout(shape)
    for name, _ in abi.Layout._fields_:
        assert getattr(found, name) == getattr(expected, name)


def test_a_struct_that_changed_is_refused(made, monkeypatch):
    class Longer(abi.State):
        _fields_ = [("more", ctypes.c_uint32)]

    monkeypatch.setattr(abi, "STRUCTS", (*abi.STRUCTS[:3], Longer, *abi.STRUCTS[4:]))
    with pytest.raises(build.BuildError, match="build it again"):
        build.load(made)


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libafd.so"
    path.write_text("no")
    with pytest.raises(build.BuildError, match="is no kernel library"):
        build.load(path)


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(build.BuildError, match="CUDA_HOME"):
        build.find_nvcc()


def test_the_compiler_of_nvidias_wheel_is_found_and_compiles(tmp_path, monkeypatch):
    """On a machine without a toolkit, the wheels that come with SGLang are enough."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    known, real = build._wheel() / "bin" / "nvcc", os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == known and real(path, mode))
    assert build.find_nvcc() == known
    build.compile_library(tmp_path / "libafd.so", ("90a",), known)
    build.load(tmp_path / "libafd.so")


def test_a_compiler_that_fails_is_quoted(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho unsupported gpu architecture >&2\nexit 3\n")
    nvcc.chmod(0o755)
    with pytest.raises(build.BuildError, match="exited with 3:\nunsupported gpu architecture"):
        build.compile_library(tmp_path / "libafd.so", ("90a",), nvcc)
    assert not (tmp_path / "libafd.so").exists()


def test_ranks_that_start_together_build_once(tmp_path):
    """Two processes ask at once; the compiler runs in one of them."""
    log = tmp_path / "log"
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    real = build.find_nvcc()
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo run >> {log}\nexec {real} "$@"\n')
    nvcc.chmod(0o755)
    root = build.sources().parents[1] / "python"
    wheel = build._wheel()
    environment = {
        **os.environ,
        "CUDA_HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(root),
        "CPATH": str(wheel / "include"),
        "LIBRARY_PATH": str(wheel / "lib"),
    }
    environment.pop(build.LIBRARY_ENV, None)
    code = "from sglang_afd_kernel import build; print(build.library('90a')._name)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = [process.communicate(timeout=200)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert paths[0] == paths[1]
    assert log.read_text() == "run\n"
