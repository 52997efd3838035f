"""Rows of the results file: what identifies a point, and statistics of what was measured there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.configurations import Configuration


@dataclass
class Samples:
    """Steps of one configuration at one point, one list per repetition. Milliseconds."""

    step_ms: list[list[float]] = field(default_factory=list)
    wall_ms: list[list[float]] = field(default_factory=list)
    context: int = 0

    def add(self, step_ms: Sequence[Sequence[float]], wall_ms: Sequence[Sequence[float]]) -> None:
        """One repetition, as each rank saw it: a step takes as long as for the slowest."""
        self.step_ms.append([max(step) for step in zip(*step_ms, strict=True)])
        self.wall_ms.append([max(step) for step in zip(*wall_ms, strict=True)])

    def statistics(self) -> dict[str, Any]:
        """Median over repetitions of the median of each, and the quartiles' distance of those."""
        steps = [step for rep in self.step_ms for step in rep]
        medians = [statistics.median(rep) for rep in self.step_ms]
        walls = [statistics.fmean(rep) for rep in self.wall_ms]
        spread = statistics.quantiles(medians, n=4) if len(medians) > 1 else [medians[0]] * 3
        return {
            "step_ms": _round(statistics.median(medians)),
            "step_ms_mean": _round(statistics.fmean(steps)),
            "step_ms_p99": _round(_percentile(steps, 0.99)),
            "wall_step_ms": _round(statistics.median(walls)),
            "iqr": _round(spread[2] - spread[0]),
            "reps": len(medians),
            "samples": [_round(step) for step in steps],
        }


def _round(value: float) -> float:
    return round(value, 4)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(
    configuration: Configuration,
    samples: Samples,
    *,
    batch: int,
    context: int,
    part: str,
    common: dict[str, Any],
) -> dict[str, Any]:
    """One row. `part` is attn for a null row of the attention side, ffn for one of the FFN side,
    and all for a whole step."""
    measured = samples.statistics()
    ranks = 1 if configuration.batch_is_shared else configuration.attn_ranks
    found = {
        **common,
        "connector": "null" if part == "ffn" else configuration.connector,
        "layout": configuration.layout,
        "part": part,
        "a2a": configuration.a2a,
        "attn_ranks": configuration.attn_ranks,
        "ffn_ranks": configuration.ffn_ranks,
        "microbatches": configuration.microbatches,
        "graph": configuration.graph,
        "batch_per_rank": batch,
        "context": context,
        "context_mid": samples.context or None,
        "logical": False,
        "beyond_host": False,
        **measured,
    }
    if part == "all":
        seconds = measured["wall_step_ms"] * 1e-3
        found["tokens_per_s_per_gpu"] = round(batch * ranks / seconds / configuration.gpus, 1)
    return {key: value for key, value in found.items() if value is not None}
