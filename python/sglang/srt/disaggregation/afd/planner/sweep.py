"""The same question for many ratios: throughput and step against M:N, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import layout
from sglang.srt.disaggregation.afd.planner.estimate import Cost
from sglang.srt.disaggregation.afd.planner.layout import Layout
from sglang.srt.disaggregation.afd.planner.link import Link


class Point(NamedTuple):
    """One ratio; `layout` is None if it does not fit."""

    attn_ranks: int
    ffn_ranks: int
    layout: Layout | None

    @property
    def ratio(self) -> float:
        return self.attn_ranks / self.ffn_ranks


def sweep(
    cost: Cost,
    context: int,
    pairs: Sequence[tuple[int, int]],
    microbatches: int,
    wire: Link,
    slo_s: float | None,
) -> list[Point]:
    """Price each (M, N), in order of M / N.

    Raises:
        AFDConfigError: there is nothing to sweep, or none of it fits.
    """
    if not pairs:
        raise AFDConfigError("no ratio to sweep; give --attn-ranks and --ffn-ranks")
    points = [
        Point(m, n, layout.afd(cost, context, m, n, microbatches, wire, slo_s)) for m, n in pairs
    ]
    if all(point.layout is None for point in points):
        raise AFDConfigError(
            f"none of the {len(points)} ratios fits {cost.hardware.name} with {cost.model.name}; "
            "raise --ffn-ranks, lower --context or raise --slo-ms"
        )
    return sorted(points, key=lambda point: (point.ratio, point.attn_ranks))


def table(points: Sequence[Point]) -> list[list[str]]:
    """A header and one row per ratio, ready for `report.columns`."""
    rows = [["M:N", "M", "N", "batch", "step ms", "tok/s/GPU", "regime", "binds", "slack %"]]
    for point in points:
        head = [f"{point.ratio:.3g}", str(point.attn_ranks), str(point.ffn_ranks)]
        if point.layout is None or point.layout.stage is None:
            rows.append([*head, "-", "-", "-", "does not fit", "", ""])
            continue
        stage = point.layout.stage
        rows.append(
            [
                *head,
                str(point.layout.batch),
                f"{point.layout.step_s * 1e3:.2f}",
                f"{point.layout.throughput:.0f}",
                stage.regime,
                stage.binds,
                f"{stage.slack * 100:+.0f}",
            ]
        )
    return rows
