"""Generated pages are those that the code generates; links lead somewhere; commands parse.

Commands stand in fenced `bash` blocks. A block after the comment `<!-- cpu -->` runs on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import yaml
from long_results import Results

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "python" / "sglang").rglob("*.md"))
PAGES += [ROOT / folder / "README.md" for folder in ("examples", "sgl-kernel", "docker")]
PAGES += sorted((ROOT / "benchmark").rglob("*.md"))
CPU = "<!-- cpu -->"
SERVERS = ("sglang.launch_server", "sglang.bench_one_batch")
# Of bench_one_batch itself, all with a value.
BENCH_FLAGS = {"--batch-size", "--input-len", "--output-len"}
PLANNER = "python/sglang/srt/disaggregation/afd/planner"


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- generated pages ----------------------------------------------------------------------------


def test_flag_table_is_generated_from_the_config():
    assert (ROOT / "docs" / "flags.md").read_text() == _script("gen_flags").text()


def test_patch_table_is_generated_from_the_rows():
    assert (ROOT / "docs" / "patches.md").read_text() == _script("patch_table").docs_text()


def test_benchmark_tables_are_generated_from_the_results():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == _script("gen_benchmarks").text()


def test_error_messages_are_generated_from_the_sources():
    assert (ROOT / "docs" / "errors.md").read_text() == _script("gen_errors").text()


def test_reliability_is_generated_from_the_last_long_run():
    assert (ROOT / "docs" / "reliability.md").read_text() == _script("gen_reliability").text()


def test_figures_of_a_long_run_are_shown(tmp_path, monkeypatch):
    script = _script("gen_reliability")
    loss = "test/afd/served/test_loss.py::test_a_lost_process_ends_the_server_long"
    sizes = {"mib_at_start": 900, "mib_after_warm_up": 910.4, "mib_at_end": 911}
    soak = {
        **{"requests": 20000, "concurrency": 64, "topology": "2A1F", "traffic_seconds": 1800},
        **{"answered": {"chat": 18000, "aborted": 2000}, "wrong": 0, "changed": 1, "steps": 9},
        **{"attn_tokens": [5, 6], "ffn_tokens": [11]},
        "memory": {"scheduler_DP0": {**sizes, "mib_per_1000_requests": 0.04}},
    }
    tests = {
        "test/afd/served/test_soak.py::test_soak": {"outcome": "passed", "seconds": 1.0, **soak},
        f"{loss}[ffn-SIGKILL-idle]": {"outcome": "passed", "seconds": 9.0},
        f"{loss}[leader-SIGSTOP-load]": {"outcome": "failed", "seconds": 9.0},
        "test/afd/served/test_off.py::test_off[a]": {"outcome": "passed", "seconds": 2.0},
        "test/afd/served/test_off.py::test_off[b]": {"outcome": "failed", "seconds": 2.0},
        "test/afd/served/test_off.py::test_other": {"outcome": "skipped", "seconds": 0.0},
    }
    runs = [("2026-01-01", "abc"), ("2026-01-02", "abd")]
    for index, test in enumerate(tests.values()):
        test["date"], test["commit"] = runs[index == 1]
    path = tmp_path / "long.json"
    path.write_text(json.dumps({"tests": tests}))
    monkeypatch.setattr(script, "RESULTS", path)
    text = script.text()
    assert "on 2026-01-01, 2026-01-02, commit abc, abd: 3 passed, 2 failed, 1 skipped." in text
    assert "| `scheduler_DP0` | 900 | 910 | 911 | 0.04 |" in text
    assert "| answered in full | 18000 |" in text
    assert "| ffn | passed |  |" in text
    assert "| leader |  | failed |" in text
    assert "| `served/test_off.py::test_off` | 1 of 2 | 4 |" in text
    assert "test_other" not in text


def test_a_part_of_a_long_run_keeps_what_is_still_a_test(tmp_path):
    """Each entry says at which commit it ran; a test that is gone has no entry."""
    path = tmp_path / "results.json"
    here = "test/afd/test_docs.py"
    old = {"outcome": "failed", "seconds": 9.0, "date": "2026-01-01", "commit": "abc"}
    names = (f"{here}::one", f"{here}::two", f"{here}::gone", "test/afd/gone.py::three")
    elsewhere = "test/afd/test_gate.py::four"  # not collected by this run
    path.write_text(json.dumps({"tests": dict.fromkeys((*names, elsewhere), old)}))
    results = Results(path)
    items = [SimpleNamespace(nodeid=name) for name in names[:2]]
    results.pytest_collection_modifyitems(SimpleNamespace(rootpath=ROOT), items)
    for when in ("setup", "call", "teardown"):
        results.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=names[0], duration=1.0, outcome="passed", user_properties=[], when=when
            )
        )
    kept = json.loads(path.read_text())["tests"]
    assert set(kept) == {*names[:2], elsewhere}
    assert kept[names[1]] == kept[elsewhere] == old
    assert (kept[names[0]]["outcome"], kept[names[0]]["seconds"]) == ("passed", 3.0)
    assert kept[names[0]]["commit"] != "abc"


def test_every_generator_is_compared_with_its_page():
    tests = "".join(path.read_text() for path in (ROOT / "test").rglob("test_*.py"))
    for script in sorted((ROOT / "scripts").glob("gen_*.py")):
        assert re.search(rf'[/"]{script.stem}(\.py)?"', tests), f"no test reads {script.name}"


def test_recipes_are_generated_from_the_planner():
    assert (ROOT / "docs" / "recipes.md").read_text() == _script("gen_recipes").text()


def test_every_error_of_ours_has_a_table_and_advice():
    errors = _script("gen_errors")
    kinds = errors.error_classes(errors.modules())
    text = (ROOT / "docs" / "errors.md").read_text()
    made = {entry.kind for entry in errors.entries(errors.modules())}
    assert {"AFDConfigError", "PatchError", "HandshakeRefused", "PeerLost"} <= made
    for kind in made:
        assert f"## {kind}\n" in text
        assert kind in errors.WHAT_TO_DO, f"say in gen_errors.py what to do about {kind}"
    assert set(errors.WHAT_TO_DO) <= set(kinds)


def test_messages_are_read_from_strings_variables_and_helpers(tmp_path, monkeypatch):
    errors = _script("gen_errors")
    (tmp_path / "errors.py").write_text(
        "class AFDError(Exception):\n    'Base.'\n\nclass Lost(AFDError):\n    'Gone.'\n"
    )
    (tmp_path / "some.py").write_text(
        "def helper(x):\n    return f'helped {x.y:.1f} | done'\n\n"
        "class A:\n    def go(self, peers):\n"
        "        text = 'in a ' + 'variable'\n"
        "        self.fail(Lost(text))\n"
        "        raise Lost(helper(1)) from None\n"
        "        raise ValueError('not ours')\n"
    )
    monkeypatch.setattr(errors, "PACKAGE", tmp_path)
    found = list(errors.entries(errors.modules()))
    assert [(entry.kind, entry.where, entry.messages) for entry in found] == [
        ("Lost", "A.go", ("in a variable",)),
        ("Lost", "A.go", ("helped {y} | done",)),
    ]
    assert "`helped {y} \\| done`" in errors.text()


# --- links --------------------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and the site make them."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ +(.+)$", text, re.M):
        plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found.add(slug)
    return found


@pytest.mark.pain(67)
def test_a_row_that_failed_its_gate_is_not_published(tmp_path, monkeypatch):
    script = _script("gen_benchmarks")
    path = script.RESULTS / "link_2xh200.json"
    result = json.loads(path.read_text())
    row = next(r for r in result["rows"] if r["tokens"] == 64)
    result["rows"].append({**row, "tokens": 65, "gate": "attn 0: 3 values differ"})
    (tmp_path / path.name).write_text(json.dumps(result))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert "| 64 |" in script.text()
    assert "| 65 |" not in script.text()


@pytest.mark.pain(39)
def test_every_connector_says_whether_it_can_be_captured():
    lines = (ROOT / "docs" / "connectors.md").read_text().splitlines()
    header = next(line for line in lines if line.startswith("| |"))
    (graphs,) = [line for line in lines if line.startswith("| CUDA graphs |")]
    offered = [name for name in registry.names() if name not in ("loopback", "null")]
    assert re.findall(r"`(\w+)`", header) == offered
    said = [cell.strip() for cell in graphs.strip("|").split("|")[1:]]
    assert len(said) == len(offered)
    assert set(said) <= {"yes", "no"}


@pytest.mark.parametrize("page", PAGES, ids=map(_id, PAGES))
def test_internal_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text())
    for link in (markdown or html for markdown, html in links):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        goal = page.parent / target if target else page
        assert goal.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in _anchors(goal), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation():
    def targets(nav):
        for entry in nav:
            (target,) = entry.values()
            yield from targets(target) if isinstance(target, list) else [target]

    nav = list(targets(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(nav) == len(set(nav))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(nav)


# --- commands -----------------------------------------------------------------------------------


class Command(NamedTuple):
    page: Path
    words: tuple[str, ...]
    cpu: bool


def _commands(page: Path) -> list[Command]:
    """Simple commands of all bash blocks, without variables set in front and comments."""
    found = []
    blocks = re.findall(rf"({CPU}\n)?^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    for mark, block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("&|;"):
                    if words:
                        found.append(Command(page, tuple(words), bool(mark)))
                    words = []
                elif words or not re.match(r"[A-Z_]+=", word):
                    words.append(word)
    return found


COMMANDS = [command for page in PAGES for command in _commands(page)]


def test_the_marks_for_cpu_are_seen():
    marks = sum(page.read_text().splitlines().count(CPU) for page in PAGES)
    blocks = sum(len(re.findall(rf"{CPU}\n```bash", page.read_text())) for page in PAGES)
    assert marks == blocks > 0
    assert any(command.cpu for command in COMMANDS)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def test_server_commands_parse(parser, capsys):
    seen = 0
    for command in COMMANDS:
        words = command.words
        if words[:2] != ("python", "-m") or words[2] not in SERVERS:
            continue
        typed = list(words[3:])
        if words[2] == "sglang.bench_one_batch":
            for flag in BENCH_FLAGS & set(typed):
                at = typed.index(flag)
                del typed[at : at + 2]
        try:
            args = parser.parse_args(typed)
        except SystemExit:
            pytest.fail(f"{_id(command.page)}: {shlex.join(words)}\n{capsys.readouterr().err}")
        if command.cpu:
            assert args.afd_connector in ("auto", "gloo"), words
        seen += 1
    assert seen >= 8


def test_other_commands_name_what_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in COMMANDS:
        where = f"{_id(command.page)}: {shlex.join(command.words)}"
        program, *arguments = command.words
        if program == "make":
            named = [word for word in arguments if "=" not in word]
            assert set(named) <= targets, where
        elif program in ("python", "python3") and not arguments[0].startswith(("-", "$")):
            assert (ROOT / arguments[0]).exists(), where
        elif program.endswith((".sh", ".ci/run")):
            assert (ROOT / program).is_file(), where


PLANS = [command for command in COMMANDS if command.cpu and command.words[1:2] == (PLANNER,)]


@pytest.mark.parametrize("command", PLANS, ids=lambda command: command.page.name)
def test_planner_commands_run(command):
    done = subprocess.run(
        [sys.executable, *command.words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "verdict:" in done.stdout


@pytest.mark.parametrize("target", ["unit", "test-long", "test-models"])
def test_pytest_takes_the_options_of_a_make_target(target):
    # Options of a conftest are known only if pytest found its folder before it read them.
    recipe = subprocess.run(
        ["make", "-n", "-o", "install", target, f"VENV={sys.prefix}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (command,) = [line for line in recipe.stdout.splitlines() if " -m pytest " in line]
    done = subprocess.run(
        [*shlex.split(command), "--markers"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "known_failures" in done.stdout
