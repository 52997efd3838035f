"""The command line: every command answers, every mistake is one line and exit code 2."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from planner.harness import PLANNER, ROOT

from sglang.srt.disaggregation.afd.planner import cli

PLAN = ["plan", "--model", "Qwen3-235B-A22B-FP8", "--hardware", "h200", "--gpus", "8"]
MODEL = PLAN[1:5]
SWEEP = ["sweep", *MODEL, "--attn-ranks", "2,4,6", "--ffn-ranks", "2"]
# What a module of the planner may import beside the standard library and the planner.
ALLOWED = {
    "sglang.srt.disaggregation.afd.errors",
    "sglang.srt.disaggregation.afd.connector",
    "sglang.srt.disaggregation.afd.planner",
    "PIL",
}

# Nothing but the standard library, the planner and what it may use; then the planner as a script.
ISOLATED = """
import runpy, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Block())
sys.argv = ["planner", *{arguments!r}]
try:
    runpy.run_path({folder!r}, run_name="__main__")
except SystemExit as end:
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in {blocked!r})
    print("LOADED", loaded)
    sys.exit(end.code)
"""
BLOCKED = ["torch", "transformers", "numpy", "triton", "zmq", "msgspec", "psutil", "PIL"]


def run(capsys, *arguments: str) -> str:
    assert cli.main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def test_plan(capsys):
    out = run(capsys, *PLAN)
    for term in ("T_a = ", "T_e = ", "T_c = ", "binds", "from the boundary", "verdict", "KV"):
        assert term in out


def test_plan_takes_a_checkpoint_and_a_hardware_file(capsys, tmp_path):
    config = json.loads((PLANNER / "data/models/MiniMax-M2.5.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    machine = json.loads((PLANNER / "data/hardware.json").read_text())["h200"]
    (tmp_path / "mine.json").write_text(json.dumps(machine))
    out = run(
        capsys, "plan", "--model", tmp_path, "--hardware", tmp_path / "mine.json", "--gpus", 8,
        "--model-path", "/models/mine",
    )  # fmt: skip
    assert "256 experts" in out
    assert "--model-path /models/mine" in out


def test_a_measured_step_changes_the_plan(capsys):
    out = run(capsys, *PLAN, "--step-ms", "30,8,20", "--step-batch", 55, "--step-ep", 8)
    assert "times: measured step" in out
    assert "FMHA 30.00 + dense 8.00 + MoE 20.00 = 58.00 ms" in out


def test_a_step_from_a_results_file(capsys, tmp_path):
    """Synthetic file."""
    file = tmp_path / "synthetic.json"
    row = {
        "connector": "colocated", "attn_ranks": 8, "microbatches": 1, "batch_per_rank": 55,
        "context": 8192, "step_ms": 58, "fmha_ms": 30, "dense_ms": 8, "moe_ms": 20,
    }  # fmt: skip
    file.write_text(json.dumps({"bench": "decode", "rows": [row]}))
    out = run(capsys, *PLAN, "--step-file", file)
    assert "FMHA 30.00 + dense 8.00 + MoE 20.00 = 58.00 ms" in out


def test_sweep_writes_a_plot(capsys, tmp_path):
    out = run(capsys, *SWEEP, "--out", tmp_path / "s.svg")
    assert (tmp_path / "s.svg").read_text().startswith("<svg")
    assert out.count("hidden") + out.count("exposed") == 3
    assert "colocated EP" in out


def test_ranges_of_ranks(capsys):
    assert cli._ranks("4:12:4") == [4, 8, 12]
    assert cli._ranks("7") == [7]


def test_project(capsys):
    out = run(capsys, "project", "--step-ms", ".424,.147,.429")
    assert "1.75 x colocated" in out
    assert "2.36 x (1 / FMHA share)" in out
    out = run(
        capsys, "project", *MODEL[:3], "rubin-nvl72", "--accelerator", "lpx-rack", "--gpus", 72
    )
    assert "experts need 2 unit(s)" in out
    assert "MB per GPU and step" in out


def test_compare(capsys):
    out = run(capsys, "compare", ROOT / "benchmark/afd/results/link_2xh200.json")
    assert "error %" in out
    assert "deepep" in out


def test_list_shows_a_source_for_every_number(capsys):
    out = run(capsys, "list")
    assert "memory_gb_per_s = 4800: NVIDIA H200 datasheet" in out
    assert "kv_share = 0.85: " in out


def test_files_of_the_benchmarks_are_named_in_the_error(capsys, tmp_path):
    assert cli.main(["compare", str(tmp_path / "absent.json")]) == 2
    assert "absent.json: cannot be read" in capsys.readouterr().err


BAD = [
    ([*PLAN, "--model", "Qwen9"], "--model Qwen9 is neither a folder with a config.json nor one"),
    ([*PLAN, "--hardware", "h999"], "--hardware h999 is unknown; choose one of h100"),
    ([*PLAN, "--hardware", "x.json"], "--hardware x.json: cannot be read"),
    ([*PLAN, "--context", "0"], "--context is 0"),
    ([*PLAN, "--gpus", "0"], "--gpus is 0"),
    ([*PLAN, "--slo-ms", "0"], "--slo-ms is 0"),
    ([*PLAN, "--microbatches", "4"], "--microbatches 4"),
    ([*PLAN, "--connector", "gloo"], "--connector gloo: the planner has no numbers"),
    ([*PLAN, "--linear-bits", "0"], "--linear-bits is 0"),
    ([*PLAN, "--kv-bits", "800"], "--kv-bits is 800"),
    ([*PLAN, "--set", "kv_read"], "--set kv_read: must be KEY=NUMBER"),
    ([*PLAN, "--set", "kv_reed=1"], "unknown key 'kv_reed'"),
    ([*PLAN, "--step-ms", "1,2"], "must be three numbers, FMHA,DENSE,MOE in ms"),
    ([*PLAN, "--step-ms", "a,b,c"], "must be three numbers"),
    ([*PLAN, "--step-ms", "10,5,10"], "--step-ms needs --step-batch"),
    ([*PLAN, "--step-ms", "0,0,0", "--step-batch", "8"], "takes no time"),
    ([*PLAN, "--step-ms", "10,5,10", "--step-batch", "0"], "--step-batch is 0"),
    ([*PLAN, "--step-file", "x.json"], "cannot be read"),
    ([*SWEEP, "--slo-ms", "-1"], "--slo-ms is -1"),
    ([*SWEEP, "--out", "x.gif"], "ends in .svg or .png"),
    ([*SWEEP, "--attn-ranks", "1:2000:1"], "give at most 500"),
    (["project", "--step-ms", "1,1,1", "--accelerator", "lpx-rack"], "--accelerator needs --model"),
    (["project"], "give --model and --hardware, or a measured step"),
    (["project", "--step-ms", "0,1,1"], "FMHA takes no time"),
    (["project", *MODEL, "--ep", "1"], "--ep 1: not one request fits"),
]  # fmt: skip


@pytest.mark.pain(73)
@pytest.mark.parametrize(("arguments", "text"), BAD, ids=[text for _, text in BAD])
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments, text):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize(
    "arguments",
    [[], ["plan"], ["dance"], [*PLAN, "--gpu", "8"], [*SWEEP, "--attn-ranks", "0"],
     [*SWEEP, "--attn-ranks", "4:8"], [*PLAN, "--gpus", "many"]],
    ids=str,
)  # fmt: skip
def test_misspelt_commands(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


def isolated(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    code = ISOLATED.format(blocked=BLOCKED, arguments=arguments, folder=str(PLANNER))
    return subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_started_by_path_it_needs_no_torch():
    """With torch, transformers, numpy and others blocked, plan answers."""
    done = isolated(PLAN)
    assert done.returncode == 0, done.stderr
    assert "verdict" in done.stdout
    assert "LOADED []" in done.stdout


def test_started_by_path_it_refuses_without_a_traceback():
    done = isolated(["plan", *MODEL, "--gpus", "0"])
    assert done.returncode == 2
    assert done.stderr == "error: --gpus is 0, must be from 1 to 100000\n"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted(PLANNER.rglob("*.py")), ids=lambda p: p.name)
def test_imports(path):
    """The standard library, the planner, errors and the connector registry; Pillow in one place."""
    for name in imports(path):
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        assert any(name == ok or name.startswith(ok + ".") for ok in ALLOWED), name
        assert not name.startswith("PIL") or path.name == "canvas.py"
