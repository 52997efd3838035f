"""The list of connectors: what may be chosen, and what a refusal says."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.errors import AFDConfigError


def test_names():
    assert registry.names() == ("loopback", "gloo", "nccl", "deepep", "nvlink")
    assert registry.available() == ("gloo",)
    assert registry.info("gloo").device == "cpu"
    assert registry.info("loopback").one_process


@pytest.mark.parametrize("name", ["nccl", "deepep", "nvlink"])
def test_a_reserved_name_is_refused(name):
    with pytest.raises(AFDConfigError) as refusal:
        registry.info(name)
    assert str(refusal.value) == (
        f"--afd-connector {name} is not part of this version; choose gloo"
    )


def test_an_unknown_name_is_refused():
    with pytest.raises(AFDConfigError, match="--afd-connector ucx is unknown; choose auto or gloo"):
        registry.info("ucx")


def test_auto():
    assert registry.resolve_auto("cpu") == "gloo"
    with pytest.raises(AFDConfigError, match=r"--device cuda.*gloo \(cpu\)"):
        registry.resolve_auto("cuda")


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
        "importlib",
        "dataclasses",
        "typing",
        "sglang.srt.disaggregation.afd.errors",
    }
