"""Tables of docs/benchmarks.md for files of `bench_decode.py`, for `scripts/gen_benchmarks.py`; and
how a row's configuration is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def tables(name: str, result: dict[str, Any]) -> list[str]:
    """A section per file: steps by configuration and point, then what each configuration costs."""
    rows = [row for row in result["rows"] if row["gate"] in ("pass", "none")]
    if not rows:
        return []
    first = rows[0]
    ungated = any(row["gate"] == "none" and _is_afd(row) for row in rows)
    lines = [
        f"## Decode: {first['model']}, {first['layers']} layers, {len(result['gpus'])} x "
        f"{result['gpus'][0] if result['gpus'] else 'CPU'}",
        "",
        f"Milliseconds of a decode step, median over {first['reps']} interleaved windows, the distance "
        "of the quartiles in brackets. Random weights "
        f"({first['quant']}), KV cache in {first['kv_dtype']}, attention on "
        f"{first['attention_backend']}. `B` counts requests per rank that holds KV cache, so compare "
        "tokens/s/GPU, not steps, between different numbers of GPUs. T_a is an attention rank whose "
        "experts return their input, T_e an FFN rank with every arrival preset. "
        f"File: `{name}`, commit `{result['commit'][:10]}`.",
    ]
    if ungated:
        lines += ["", "AFD rows marked * were timed without the correctness gate."]
    points = sorted({_point(row) for row in rows})
    lines += ["", *_table("", points, rows, _step)]
    lines += ["", "Tokens/s/GPU, from the wall clock:", ""]
    whole = [row for row in rows if row.get("part", "all") == "all"]
    lines += _table("", points, whole, lambda row: f"{row['tokens_per_s_per_gpu']:.0f}")
    goal = _goal(points, rows)
    if goal:
        lines += ["", "Step over max(T_a, T_e):", "", *goal]
    lines += ["", *_costs(rows)]
    lines += _classes(rows)
    return lines


def _layout(layout: str) -> str:
    if layout == "1":
        return "colocated, 1 GPU"
    return "colocated, " + layout.upper().replace("EP", "/EP")


def title(row: Row) -> str:
    """A configuration's name in a table."""
    microbatches = f"mb={row['microbatches']}"
    extra = "" if row["graph"] else ", eager"
    extra += ", host waits" if row.get("ahead", 1) == 0 else ""
    part = row.get("part", "all")
    if part == "attn":
        return f"T_a, {microbatches}{extra}"
    runner = f", {row['moe_runner_backend']}" if "moe_runner_backend" in row else ""
    if part == "ffn":
        return f"T_e, {microbatches}{extra}{runner}"
    if row["connector"] == "colocated":
        a2a = "" if row.get("a2a", "none") == "none" else f" ({row['a2a']})"
        return _layout(row["layout"]) + a2a + extra + runner
    mark = "*" if row["gate"] == "none" else ""
    ranks = f"{row['attn_ranks']}A{row['ffn_ranks']}F"
    return f"AFD {ranks} {row['connector']}, {microbatches}{extra}{runner}{mark}"


def _is_afd(row: Row) -> bool:
    return row["connector"] not in ("colocated", "null")


def _titles(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(title(row) for row in rows))


def _table(
    corner: str, points: Sequence[tuple[int, int]], rows: Sequence[Row], cell: Any
) -> list[str]:
    found = {(title(row), *_point(row)): cell(row) for row in rows}
    heads = [
        f"{f'B={batch}' if batch else 'resident'}, {context} tokens" for context, batch in points
    ]
    lines = [f"| {corner} | " + " | ".join(heads) + " |", "|---" * (len(points) + 1) + "|"]
    for name in _titles(rows):
        cells = [str(found.get((name, *point), "")) for point in points]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _point(row: Row) -> tuple[int, int]:
    """Context and batch; 0 for the batch if each layout has what its memory holds."""
    return row["context"], 0 if row.get("resident") else row["batch_per_rank"]


def _step(row: Row) -> str:
    own = f", B={row['batch_per_rank']}" if row.get("resident") else ""
    return f"{row['step_ms']:.2f} ({row['iqr']:.2f}){own}"


def _goal(points: Sequence[tuple[int, int]], rows: Sequence[Row]) -> list[str]:
    """AFD steps over the longer of the two sides with as many microbatches."""
    attn: dict[tuple[Any, ...], float] = {}
    ffn: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row.get("part") == "attn" and row["graph"]:
            attn[_at(row)] = row["step_ms"]
        elif row.get("part") == "ffn" and row["graph"]:
            ffn[(*_at(row), row.get("moe_runner_backend"))] = row["step_ms"]

    def ratio(row: Row) -> str:
        key = _at(row)
        t_a, t_e = attn.get(key), ffn.get((*key, row.get("moe_runner_backend")))
        return "" if t_a is None or t_e is None else f"{row['step_ms'] / max(t_a, t_e):.2f}"

    afd = [row for row in rows if _is_afd(row) and ratio(row)]
    return _table("", points, afd, ratio) if afd else []


def _at(row: Row) -> tuple[int, int, int]:
    return row["context"], row["batch_per_rank"], row["microbatches"]


def _costs(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Time to ready is that of configurations that start side by side. `KV room`: tokens that fit "
        "into 0.85 of what weights leave of the GPU that holds the cache.",
        "",
        "| | ready s | capture s | graphs MiB | weights MiB | FFN weights MiB | KV room |",
        "|---|---|---|---|---|---|---|",
    ]
    shown: set[str] = set()
    for row in rows:
        name = title(row)
        if name in shown or row.get("part", "all") == "ffn":
            continue
        shown.add(name)
        keys = ("ready_s", "capture_s", "graph_mib", "weight_mib", "ffn_weight_mib", "kv_tokens")
        lines.append(f"| {name} | " + " | ".join(str(row.get(key, "")) for key in keys) + " |")
    return lines


def _classes(rows: Sequence[Row]) -> list[str]:
    traced = [row for row in rows if "fmha_ms" in row]
    if not traced:
        return []
    lines = [
        "",
        "Milliseconds of kernels in one traced step, by class; waits of connectors count as "
        "communication. The last two columns: what the FFN rank computes in that step, and which share "
        "of it lies under what the attention rank computes. With one microbatch the two take turns, so "
        "that anything but 0 there is an error of the clocks.",
        "",
        "| | B | context | FMHA | dense | MoE | communication | FFN busy | under attention |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in traced:
        cells = [f"{row[key]:.2f}" for key in ("fmha_ms", "dense_ms", "moe_ms", "comm_ms")]
        has_ffn = "ffn_busy_ms" in row
        cells.append(f"{row['ffn_busy_ms']:.2f}" if has_ffn else "")
        cells.append(f"{row['under_attention']:.2f}" if has_ffn else "")
        lines.append(
            f"| {title(row)} | {row['batch_per_rank']} | {row['context']} | "
            + " | ".join(cells)
            + " |"
        )
    return lines
