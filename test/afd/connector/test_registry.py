"""The list of connectors: what may be chosen, and what a refusal says."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.errors import AFDConfigError


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Packages that count as installed; none unless the test adds one."""
    names = set()
    monkeypatch.setattr(
        registry.importlib.util, "find_spec", lambda name: name if name in names else None
    )
    return names


def test_names(installed):
    assert registry.names() == ("loopback", "gloo", "nccl", "deepep", "nvlink", "null")
    assert registry.available() == ("gloo", "nccl")
    assert registry.available("cuda") == ("nccl",)
    installed.add("deep_ep")
    assert registry.available() == ("gloo", "nccl", "deepep")
    assert registry.info("gloo").device == "cpu"
    assert registry.info("loopback").one_process


@pytest.mark.pain(51)
def test_a_missing_package_is_named(installed):
    with pytest.raises(AFDConfigError) as refusal:
        registry.info("deepep")
    assert str(refusal.value) == (
        "--afd-connector deepep needs the Python package deep_ep, which is not installed; "
        "install it, or choose gloo or nccl"
    )
    installed.add("deep_ep")
    assert registry.info("deepep").device == "cuda"


def test_an_unknown_name_is_refused():
    with pytest.raises(
        AFDConfigError, match="--afd-connector ucx is unknown; choose auto or gloo or nccl"
    ):
        registry.info("ucx")


@pytest.mark.pain(44)
def test_auto(installed):
    installed.add("deep_ep")
    assert registry.resolve_auto("cpu") == "gloo"
    assert registry.resolve_auto("cuda") == "nccl"
    with pytest.raises(AFDConfigError, match=r"--device npu.*gloo \(cpu\); nccl \(cuda\)"):
        registry.resolve_auto("npu")


def test_importing_the_registry_imports_no_backend():
    """By its source: `sglang` itself imports torch, so a look at sys.modules proves nothing."""
    tree = ast.parse(Path(inspect.getfile(registry)).read_text())
    imported = [
        alias.name if isinstance(node, ast.Import) else f"{node.module}"
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert set(imported) == {
        "__future__",
        "dataclasses",
        "importlib",
        "importlib.util",
        "typing",
        "sglang.srt.disaggregation.afd.errors",
    }
