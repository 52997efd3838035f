"""Generated pages and plots are those that the code generates; the example runs; data is packaged."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import PurePosixPath

from planner.harness import PLANNER, ROOT

IMAGES = ("identity", "reference", "sweep", "sweep_fast")


def script():
    spec = importlib.util.spec_from_file_location("gen_planner", ROOT / "scripts/gen_planner.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_page_is_generated():
    assert (ROOT / "docs/planner_numbers.md").read_text() == script().text()


def test_plots_are_generated(tmp_path):
    script().plots(tmp_path)
    for name in IMAGES:
        file = f"planner_{name}.svg"
        assert (ROOT / "docs/images" / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_example_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples/plan_qwen3_235b.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    h200, rack, fast = done.stdout.split("\n=== ")[1:]
    assert "verdict: don't run AFD here" in h200
    assert "verdict: don't run AFD here" in rack
    assert "verdict: run AFD" in fast
    for part in (h200, rack, fast):
        assert "python -m sglang.launch_server" in part


def test_every_data_file_is_packaged():
    """pyproject.toml names a pattern for each file of the planner that is no module."""
    project = tomllib.loads((ROOT / "python/pyproject.toml").read_text())
    package = "sglang.srt.disaggregation.afd.planner"
    patterns = project["tool"]["setuptools"]["package-data"][package]
    files = [
        path.relative_to(PLANNER)
        for path in PLANNER.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert len(files) > 5
    for file in files:
        assert any(
            PurePosixPath(file).match(pattern) and len(file.parts) == pattern.count("/") + 1
            for pattern in patterns
        ), file
