"""Results files: what is read, what is refused, and predicted beside measured.

The decode rows in this file are synthetic. They stand for no measurement.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner.harness import ROOT

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import compare, estimate, hardware, results

# A made-up attention side: seconds per KV token of a rank, and per pass.
FMHA_S, DENSE_S = 2e-8, 4e-3


def row(connector: str, batch: int, step_ms: float, m: int = 1, **extra) -> dict:
    return {
        "model": "synthetic",
        "layers": 10,
        "quant": "fp8",
        "connector": connector,
        "attn_ranks": 1,
        "ffn_ranks": 0 if connector in ("colocated", "null") else 1,
        "microbatches": m,
        "batch_per_rank": batch,
        "context": 4096,
        "gate": "pass",
        "step_ms": step_ms,
        **extra,
    }


def true_ms(batch: int, m: int) -> float:
    return (FMHA_S * batch * 4096 + m * DENSE_S) * 1e3


def null(batch: int) -> dict:
    return row("null", batch, true_ms(batch, 1))


def write(tmp_path: Path, rows: list, **extra) -> Path:
    path = tmp_path / "synthetic.json"
    path.write_text(json.dumps({"bench": "decode", "rows": rows, **extra}))
    return path


def decode(path: Path) -> list[str]:
    return compare.decode(results.load(path), f"--result {path}")


def test_null_rows_separate_fmha_from_dense(tmp_path):
    rows = [null(16), null(64), row("nccl", 96, true_ms(96, 2), m=2)]
    side = results.attention(rows, rows[-1], "t")
    assert side.fmha_s == pytest.approx(FMHA_S)
    assert side.dense_s == pytest.approx(DENSE_S)


def test_a_split_colocated_row_settles_it():
    split = row("colocated", 32, 20, fmha_ms=8, dense_ms=5, moe_ms=7)
    side = results.attention([split, null(16)], row("nccl", 64, 1, m=2), "t")
    assert side.fmha_s == pytest.approx(0.008 / 32 / 4096)
    assert side.dense_s == pytest.approx(0.005)


def test_error_has_a_column(tmp_path):
    """Synthetic: an exact row, one 4 % slower than predicted, and one microbatch."""
    rows = [
        null(16),
        null(64),
        row("nccl", 96, true_ms(96, 2), m=2),
        row("nccl", 80, true_ms(80, 2) / 0.96, m=2),
        row("nccl", 80, 3 * true_ms(80, 1), m=1),
    ]
    lines = decode(write(tmp_path, rows))
    assert "error %" in lines[0]
    assert lines[1].split()[-2:] == ["+0.0", "0.0"]
    assert lines[2].split()[-2] == "-4.0"
    assert "(bound)" in lines[3]
    assert "rows with overlap: 2; within 5%: 2; within 2%: 1" in lines[-1]


@pytest.mark.pain(67)
def test_failed_gates_are_not_compared(tmp_path):
    good = row("nccl", 96, true_ms(96, 2), m=2)
    bad = row("nccl", 32, 1, m=2, gate="fail")
    assert len(decode(write(tmp_path, [null(16), null(64), good, bad]))) == 3


def test_rows_of_another_model_do_not_count(tmp_path):
    other = [dict(null(16), model="other"), dict(null(64), model="other")]
    path = write(tmp_path, [*other, row("nccl", 96, 10, m=2)])
    with pytest.raises(AFDConfigError, match="no null row of one microbatch for synthetic"):
        decode(path)


BAD = [
    ([null(16), row("nccl", 96, 9, m=2)], "one point cannot separate FMHA from dense"),
    ([null(16), null(16), row("nccl", 96, 9, m=2)], "one point cannot separate FMHA from dense"),
    ([null(16), null(64)], "no AFD row to compare"),
    (
        [row("null", 16, 9), row("null", 64, 5), row("nccl", 9, 9, m=2)],
        "larger sizes take no longer",
    ),
    ([row("null", 16, 1), row("null", 64, 50), row("nccl", 9, 9, m=2)], "a dense time of"),
    ([], "has no rows"),
    ([dict(null(16), step_mss=3)], "row 0: unknown key 'step_mss'"),
    ([{"step_ms": 3}], "key 'connector' is missing"),
    ([dict(null(16), step_ms=0)], "row 0: step_ms is 0"),
    ([dict(null(16), step_ms=-1)], "row 0: step_ms is -1"),
    ([dict(null(16), step_ms="9")], "row 0: step_ms is '9', must be a number"),
    ([dict(null(16), batch_per_rank=0)], "batch_per_rank is 0"),
    ([{"connector": "null", "step_ms": 3}], "a null row lacks 'attn_ranks'"),
    ([dict(null(16), gate="fail")], "no decode row (step_ms) that passed its gate"),
    (["row"], "row 0 is a str, must be a JSON object"),
]


@pytest.mark.pain(73)
@pytest.mark.parametrize(("rows", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_rows(tmp_path, rows, text):
    with pytest.raises(AFDConfigError) as caught:
        decode(write(tmp_path, rows))
    assert text in str(caught.value)
    assert "synthetic.json" in str(caught.value) or "point" in text or "larger" in text


@pytest.mark.pain(73)
def test_unknown_key_of_the_file(tmp_path):
    with pytest.raises(AFDConfigError, match="unknown key 'host'"):
        results.load(write(tmp_path, [null(16)], host="x"))


def test_measured_step_for_planning():
    split = row("colocated", 32, 20, fmha_ms=8, dense_ms=5, moe_ms=7)
    parts, context, ep = results.measured_step([null(16), split], "t")
    assert (parts.total_s, parts.batch, context, ep) == (pytest.approx(0.020), 32, 4096, 1)
    with pytest.raises(AFDConfigError, match="type the step with --step-ms"):
        results.measured_step([null(16)], "t")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmark/afd/results").glob("*.json")), ids=str)
def test_published_results_can_be_compared(path):
    """Every results file of this repository, whatever it is of."""
    result = results.load(path)
    if any("step_ms" in r for r in result["rows"]):
        assert decode(path)
        return
    if result["bench"] == "idle":  # of processes that wait, and no GPU
        return
    machine = compare.machine(result, None)
    lines = compare.links(result, str(path), machine, estimate.load())
    errors = [abs(float(line.split()[-1])) for line in lines[1:]]
    assert len(errors) == sum(
        r["gate"] == "pass" and r["microbatches"] == 1 for r in result["rows"]
    )
    # The numbers of deepep are of BF16 rows; with FP8 its smallest transfers are shorter by a fifth.
    assert max(errors) < (25 if any(r.get("wire") == "fp8" for r in result["rows"]) else 20)
    assert sum(errors) / len(errors) < 7


def test_machine_of_a_results_file():
    assert compare.machine({"gpus": ["NVIDIA H200"]}, None) == hardware.load("h200")
    assert compare.machine({"gpus": ["Abacus"]}, "b200").name == "b200"
    with pytest.raises(AFDConfigError, match="'Abacus', which is unknown; give --hardware"):
        compare.machine({"gpus": ["Abacus"]}, None)
