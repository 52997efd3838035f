"""Sizes and times of steps: what travels between a rank and the driver, without SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Window:
    """Times of consecutive steps, each from the end of the step before it.

    Attributes:
        step_ms: between the ends of two steps on the device.
        wall_ms: the same as the host saw it.
        context: KV tokens of a request in the middle of the window.
    """

    step_ms: list[float]
    wall_ms: list[float]
    context: int


class BatchShape(NamedTuple):
    """A step as FFN ranks see it. `bucket`: tokens per attention rank and microbatch."""

    bucket: int
    microbatches: int
    graph: bool


def shape_of(batch: int, microbatches: int, graph: bool) -> BatchShape:
    """The shape of a step with `batch` tokens per attention rank."""
    return BatchShape(-(-batch // microbatches), microbatches, graph)
