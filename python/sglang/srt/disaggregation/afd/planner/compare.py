"""Tables of predicted against measured, one row per measured point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import hardware, link, report, results
from sglang.srt.disaggregation.afd.planner.estimate import Estimates
from sglang.srt.disaggregation.afd.planner.hardware import Hardware

# What the reference post reports while the FFN side is hidden, and what we start with.
GOAL, FIRST_GOAL = 0.02, 0.05


def machine(result: Mapping[str, Any], given: str | None) -> Hardware:
    """The hardware of a results file: what was typed, or what its GPUs call themselves.

    Raises:
        AFDConfigError: neither is known.
    """
    if given is not None:
        return hardware.load(given)
    gpus = result.get("gpus") or [""]
    found = hardware.by_device_name(str(gpus[0]))
    if found is None:
        raise AFDConfigError(f"the results are from {gpus[0]!r}, which is unknown; give --hardware")
    return found


def decode(result: Mapping[str, Any], where: str) -> list[str]:
    """Decode steps of AFD rows against the hidden-FFN predictor.

    The predictor knows the attention side only. A row with one microbatch hides nothing, so its
    prediction is a lower bound and is not counted; a row that is slower than predicted is either
    exposed or mispredicted, and the column `over` says by how much per MoE layer.

    Raises:
        AFDConfigError: see `results`.
    """
    rows = results.decode_rows(result, where)
    afd = [row for row in rows if row["connector"] not in (results.COLOCATED, results.NULL)]
    if not afd:
        raise AFDConfigError(f"{where} has no AFD row to compare, only colocated and null ones")
    table = [
        [
            "model",
            "M:N",
            "m",
            "B",
            "context",
            "measured ms",
            "predicted ms",
            "error %",
            "over us/layer",
        ]
    ]
    counted = []
    for row in afd:
        side = results.attention(rows, row, where)
        predicted = side.fmha_s * row["batch_per_rank"] * row["context"]
        predicted += row["microbatches"] * side.dense_s
        measured = row["step_ms"] * 1e-3
        error = predicted / measured - 1
        if row["microbatches"] > 1:
            counted.append(abs(error))
        over = (measured - predicted) / row["layers"] * 1e6 if row.get("layers") else None
        table.append(
            [
                str(row.get("model", "")),
                f"{row['attn_ranks']}:{row.get('ffn_ranks', 0)}",
                str(row["microbatches"]),
                str(row["batch_per_rank"]),
                str(row["context"]),
                f"{measured * 1e3:.3f}",
                f"{predicted * 1e3:.3f}",
                f"{error * 100:+.1f}" + ("" if row["microbatches"] > 1 else " (bound)"),
                "" if over is None else f"{over:.1f}",
            ]
        )
    return [*report.columns(table), _summary(counted)]


def links(result: Mapping[str, Any], where: str, machine: Hardware, known: Estimates) -> list[str]:
    """Link rows of one microbatch against the packaged line of their connector.

    Raises:
        AFDConfigError: no usable row.
    """
    table = [["connector", "hidden", "tokens", "measured us", "predicted us", "error %"]]
    for row in result["rows"]:
        if row.get("gate") == "fail" or row.get("microbatches") != 1 or "us" not in row:
            continue
        if row["connector"] not in known.links:
            continue
        wire = known.link(row["connector"], machine)
        if row.get("wire") == "fp8":
            wire = wire.with_dispatch_bytes(link.FP8_BYTES)
        moved = link.transfer(
            wire,
            row["hidden"],
            row["experts"],
            row["topk"],
            row["tokens"],
            row["attn_ranks"],
            row["ffn_ranks"],
        )
        predicted = (moved.dispatch_s + moved.combine_s) * 1e6
        table.append(
            [
                row["connector"],
                str(row["hidden"]),
                str(row["tokens"]),
                f"{row['us']:.1f}",
                f"{predicted:.1f}",
                f"{(predicted / row['us'] - 1) * 100:+.1f}",
            ]
        )
    if len(table) == 1:
        raise AFDConfigError(
            f"{where} has no link row of one microbatch for {', '.join(known.links)}"
        )
    return report.columns(table)


def _summary(errors: list[float]) -> str:
    if not errors:
        return "no row with two microbatches, so nothing is hidden and nothing is counted"
    near = sum(error <= FIRST_GOAL for error in errors)
    close = sum(error <= GOAL for error in errors)
    return (
        f"rows with overlap: {len(errors)}; within {FIRST_GOAL:.0%}: {near}; within {GOAL:.0%}: "
        f"{close} (the goal while the FFN side is hidden)"
    )
