"""Reads benchmark results files and puts the prediction beside each measured row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import checks, fit
from sglang.srt.disaggregation.afd.planner.step import Decomposition

_FILE = ("bench", "command", "commit", "versions", "gpus", "date", "rows")
# Every key that a row of any benchmark may have; a decode row may split its step.
_ROW = frozenset(
    "model layers quant connector attn_ranks ffn_ranks microbatches graph batch_per_rank context "
    "kv_dtype attention_backend routing max_rows_per_expert resident_rule logical beyond_host gate "
    "step_ms step_ms_p99 wall_step_ms tokens_per_s_per_gpu samples reps iqr op tokens hidden topk us "
    "wire baseline bytes GB_per_s baseline_us ratio experts "
    "ffn_busy_ms under_attention under_fmha fmha_ms dense_ms moe_ms comm_ms step_ms_mean part layout "
    "a2a weights moe_runner_backend device ahead wave context_mid ready_s capture_s graph_mib weight_mib "
    "ffn_weight_mib kv_tokens configuration "
    "sleep_on_idle process seconds percent_of_core percent_main_thread percent_other_threads "
    "resident ffn_rank steps us_p99 rows_per_expert tflops mfu".split()
)
COLOCATED, NULL = "colocated", "null"
# What must agree between two rows for one to say something about the other.
_ALIKE = ("model", "layers", "quant", "kv_dtype", "attention_backend")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention side of one model as measured: step = fmha_per_token * B * context + m * dense.

    Attributes:
        fmha_s: seconds per token in the KV cache of a rank.
        dense_s: seconds per pass over all layers.
        source: which rows it is from.
    """

    fmha_s: float
    dense_s: float
    source: str


def load(path: Path) -> Mapping[str, Any]:
    """A results file, checked.

    Raises:
        AFDConfigError: unknown or missing key, no rows, or a number that cannot be right.
    """
    result = checks.read_json(path, "--result")
    where = f"--result {path}"
    checks.keys(where, result, ("bench", "rows"), _FILE)
    if not isinstance(result["rows"], list) or not result["rows"]:
        raise AFDConfigError(f"{where} has no rows; there is nothing to compare")
    for index, row in enumerate(result["rows"]):
        at = f"{where}: row {index}"
        checks.keys(at, checks.mapping(at, row), ("connector",), _ROW)
        for key in ("step_ms", "us", "fmha_ms", "dense_ms", "moe_ms"):
            if row.get(key) is not None:
                low = 0.0 if key in ("fmha_ms", "dense_ms", "moe_ms") else 1e-6
                checks.number(f"{at}: {key}", row[key], low, 1e7)
    return result


def decode_rows(result: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Rows with a decode step whose correctness gate did not fail; not those of an FFN rank alone.

    Raises:
        AFDConfigError: there are none, or one lacks what a prediction needs.
    """
    rows = [
        row
        for row in result["rows"]
        if "step_ms" in row and row.get("gate") != "fail" and row.get("part") != "ffn"
    ]
    if not rows:
        raise AFDConfigError(f"{where} has no decode row (step_ms) that passed its gate")
    for row in rows:
        for key in ("attn_ranks", "batch_per_rank", "context", "microbatches"):
            if key not in row:
                raise AFDConfigError(f"{where}: a {row['connector']} row lacks {key!r}")
            checks.count(f"{where}: {key}", row[key])
    return rows


def alike(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both rows ran the same model in the same precision on the same kernels."""
    return all(row.get(key) == other.get(key) for key in _ALIKE)


def attention(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], where: str) -> Attention:
    """What colocated and null rows say about the attention side of `row`.

    A colocated row that splits its step (fmha_ms, dense_ms, moe_ms) settles it. Otherwise null
    rows, which run attention alone, do, if there are two sizes of KV cache.

    Raises:
        AFDConfigError: neither is there.
    """
    fitting = [other for other in rows if alike(row, other)]
    for other in fitting:
        if other["connector"] == COLOCATED and {"fmha_ms", "dense_ms", "moe_ms"} <= other.keys():
            tokens = other["batch_per_rank"] * other["context"]
            return Attention(
                fmha_s=other["fmha_ms"] * 1e-3 / tokens,
                dense_s=other["dense_ms"] * 1e-3,
                source=f"colocated row, batch {other['batch_per_rank']}",
            )
    null = [other for other in fitting if other["connector"] == NULL and other["microbatches"] == 1]
    if not null:
        raise AFDConfigError(
            f"{where}: no null row of one microbatch for {row.get('model', 'this model')}, and no "
            "colocated row with fmha_ms, dense_ms and moe_ms; a prediction needs either"
        )
    points = [(o["batch_per_rank"] * o["context"], o["step_ms"] * 1e-3) for o in null]
    dense_s, fmha_s = fit.line(points, "FMHA from dense in the null rows")
    if dense_s < 0:
        raise AFDConfigError(
            f"{where}: null rows give a dense time of {dense_s * 1e3:.3g} ms; they are not usable"
        )
    return Attention(fmha_s=fmha_s, dense_s=dense_s, source=f"{len(points)} null rows")


def measured_step(rows: Sequence[Mapping[str, Any]], where: str) -> tuple[Decomposition, int, int]:
    """The first colocated step that is split: its parts, context and EP width.

    Raises:
        AFDConfigError: there is none.
    """
    for row in rows:
        if row["connector"] == COLOCATED and {"fmha_ms", "dense_ms", "moe_ms"} <= row.keys():
            parts = Decomposition(
                fmha_s=row["fmha_ms"] * 1e-3,
                dense_s=row["dense_ms"] * 1e-3,
                moe_s=row["moe_ms"] * 1e-3,
                batch=row["batch_per_rank"],
            )
            return parts, row["context"], row["attn_ranks"]
    raise AFDConfigError(
        f"{where} has no colocated row with fmha_ms, dense_ms and moe_ms; type the step with --step-ms"
    )
