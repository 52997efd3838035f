"""Straight lines through measured points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang.srt.disaggregation.afd.errors import AFDConfigError


class Line(NamedTuple):
    """y = start + slope * x."""

    start: float
    slope: float


def line(points: Sequence[tuple[float, float]], what: str) -> Line:
    """Least squares through (x, y).

    Args:
        what: the two unknowns, for the error.
    Raises:
        AFDConfigError: one x only, or a slope that is not positive.
    """
    xs = [x for x, _ in points]
    if len(set(xs)) < 2:
        raise AFDConfigError(
            f"{len(points)} point(s) of {len(set(xs))} size(s): one point cannot separate {what}; "
            "measure at least two sizes"
        )
    mean_x, mean_y = sum(xs) / len(xs), sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope /= sum((x - mean_x) ** 2 for x in xs)
    if slope <= 0:
        raise AFDConfigError(f"larger sizes take no longer, so {what} cannot be told apart")
    return Line(mean_y - slope * mean_x, slope)
