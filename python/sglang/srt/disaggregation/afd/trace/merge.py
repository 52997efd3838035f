"""From the files of all ranks to one trace in Chrome's format, on one clock.

A process per rank, a lane per microbatch. In each lane: steps, in them transfers, in them phases.
Only steps that every rank saw whole are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]

_ROLES = ("attn", "ffn")


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The trace of what `spans.SpanLog.write` wrote on each rank.

    Raises:
        ValueError: no step was seen by all of them.
    """
    ranks = sorted(ranks, key=lambda rank: (_ROLES.index(rank["role"]), rank["rank"]))
    # The last step of each may have been cut off.
    seen = [{step_id for step_id, _, _ in rank["steps"][:-1]} for rank in ranks]
    common = set.intersection(*seen) if seen else set()
    if not common:
        raise ValueError("no step ran on all ranks while the trace was taken; send requests to it")
    shifts = [_shift_ns(rank, ranks[0]) for rank in ranks]
    first_ns = min(
        began + shift
        for rank, shift in zip(ranks, shifts, strict=True)
        for step_id, _, began in rank["steps"]
        if step_id in common
    )
    events: list[Event] = []
    for index, (rank, shift) in enumerate(zip(ranks, shifts, strict=True)):
        events += _names(index, rank)
        events += _rank_events(index, rank, common, first_ns - shift)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _shift_ns(rank: dict[str, Any], leader: dict[str, Any]) -> int:
    """What to add to a rank's times: nothing on the leader's host, where the clock is the same."""
    same = rank["host"] == leader["host"]
    return 0 if same else int(rank["wall_ns"] - leader["wall_ns"])


def _names(index: int, rank: dict[str, Any]) -> Iterator[Event]:
    name = f"{rank['role']} {rank['rank']} (pid {rank['pid']} on {rank['host']})"
    yield {"ph": "M", "name": "process_name", "pid": index, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": index, "args": {"sort_index": index}}
    for microbatch in sorted({span[3] for span in rank["spans"]} | {0}):
        label = {"name": f"microbatch {microbatch}"}
        yield {"ph": "M", "name": "thread_name", "pid": index, "tid": microbatch, "args": label}


def _rank_events(
    index: int, rank: dict[str, Any], common: set[int], zero_ns: int
) -> Iterator[Event]:
    def event(name: str, lane: int, began_ns: int, ended_ns: int, **more: int) -> Event:
        return {
            "ph": "X",
            "name": name,
            "pid": index,
            "tid": lane,
            "ts": (began_ns - zero_ns) / 1e3,
            "dur": (ended_ns - began_ns) / 1e3,
            "args": more,
        }

    transfers: defaultdict[tuple[int, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for phase, step_id, layer, microbatch, round_idx, began, ended in rank["spans"]:
        if step_id in common:
            transfers[step_id, microbatch, layer, round_idx].append((phase, began, ended))
    lanes: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for (step_id, microbatch, layer, round_idx), phases in transfers.items():
        name = f"layer {layer}" + (f", round {round_idx}" if round_idx else "")
        ids = {"step": step_id, "layer": layer, "microbatch": microbatch, "round": round_idx}
        began, ended = phases[0][1], phases[-1][2]
        yield event(name, microbatch, began, ended, **ids)
        for phase, phase_began, phase_ended in phases:
            yield event(phase, microbatch, phase_began, phase_ended, **ids)
        first, last = lanes[step_id].get(microbatch, (began, ended))
        lanes[step_id][microbatch] = min(first, began), max(last, ended)
    for step_id, mode, step_began in rank["steps"]:
        if step_id not in common:
            continue
        # A graph's replay has no transfers on the host; its step is the moment of its plan.
        for microbatch, (began, ended) in (lanes[step_id] or {0: (step_began, step_began)}).items():
            start = step_began if microbatch == 0 else began
            yield event(f"step {step_id} {mode}", microbatch, start, ended, step=step_id)
