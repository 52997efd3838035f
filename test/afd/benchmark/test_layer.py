"""bench_layer: a whole run on CPU, where its rows are compared with FP32, and its page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gen_benchmarks
import pytest

from sglang.srt.disaggregation.afd.planner import results

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_path_runs_on_cpu(tmp_path):
    out = tmp_path / "layer.json"
    command = [sys.executable, str(ROOT / "benchmark/afd/bench_layer.py"), "--device", "cpu"]
    command += ["--shape", "tiny", "--layers", "2", "--reps", "2", "--batch", "5"]
    command += ["--ffn-ranks", "1,3", "--attn-ranks", "1,2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = results.load(out)
    rows = result["rows"]
    assert [(row["ffn_ranks"], row["attn_ranks"]) for row in rows] == [
        (1, 1),
        (1, 2),
        (3, 1),
        (3, 2),
    ]
    assert all(row["gate"] == "pass" and row["us"] > 0 for row in rows)
    # One rank of one holds all eight experts, and each row has two.
    assert rows[1]["rows_per_expert"] == 2 * 5 * 2 / 8
    assert rows[2]["experts"] < rows[0]["experts"] == 8
    assert any("| 3 | 2 | 5 |" in line for line in gen_benchmarks._layer("layer.json", result))


def test_rows_that_failed_are_not_on_the_page():
    row = {"model": "tiny", "topk": 2, "layers": 2, "reps": 1, "ffn_ranks": 1, "attn_ranks": 1}
    row |= {"batch_per_rank": 4, "rows_per_expert": 1.0, "GB_per_s": 1.0, "tflops": 1.0}
    rows = [{**row, "us": us, "gate": gate} for us, gate in ((7.0, "pass"), (8.0, "fail"))]
    page = "\n".join(gen_benchmarks._layer("f", {"gpus": [], "commit": "c" * 40, "rows": rows}))
    assert "| 7.0 |" in page and "8.0" not in page
    assert gen_benchmarks._layer("f", {"gpus": [], "commit": "c", "rows": rows[1:]}) == []
