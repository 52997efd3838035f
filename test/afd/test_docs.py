"""Generated pages are those that the code generates, and internal links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "python" / "sglang").rglob("*.md"))
PAGES += [ROOT / folder / "README.md" for folder in ("examples", "sgl-kernel", "docker")]


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flag_table_is_generated_from_the_config():
    assert (ROOT / "docs" / "flags.md").read_text() == _script("gen_flags").text()


def test_patch_table_is_generated_from_the_rows():
    assert (ROOT / "docs" / "patches.md").read_text() == _script("patch_table").docs_text()


def test_benchmark_tables_are_generated_from_the_results():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == _script("gen_benchmarks").text()


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_internal_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", page.read_text()):
        link = target[0] or target[1]
        if not re.match(r"[a-z]+:", link):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
