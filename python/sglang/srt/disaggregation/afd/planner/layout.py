"""One way to use GPUs, AFD or colocated, with what it costs and what limits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.disaggregation.afd.planner.capacity import Room, ffn_weight_bytes
from sglang.srt.disaggregation.afd.planner.estimate import Cost
from sglang.srt.disaggregation.afd.planner.link import Link
from sglang.srt.disaggregation.afd.planner.step import Decomposition, Stage


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A priced layout.

    Attributes:
        attn_ranks, ffn_ranks: M and N; a colocated layout has N = 0 and M ranks sharing experts.
        microbatches: m; 1 for colocated.
        connector: name of the link.
        batch: requests per attention rank.
        room: memory of an attention or colocated rank.
        step_s: one decode step.
        limited_by: what keeps the batch from growing, "memory" or "SLO".
        stage: of AFD. parts: of colocated.
    """

    attn_ranks: int
    ffn_ranks: int
    microbatches: int
    connector: str
    batch: int
    room: Room
    step_s: float
    limited_by: str
    stage: Stage | None = None
    parts: Decomposition | None = None

    @property
    def gpus(self) -> int:
        return self.attn_ranks + self.ffn_ranks

    @property
    def throughput(self) -> float:
        """Tokens per second and GPU, FFN ranks counted."""
        return self.batch * self.attn_ranks / self.gpus / self.step_s

    @property
    def name(self) -> str:
        if self.ffn_ranks:
            return f"{self.attn_ranks}A{self.ffn_ranks}F"
        return f"EP{self.attn_ranks}" if self.attn_ranks > 1 else "one GPU"


def afd(
    cost: Cost,
    context: int,
    attn_ranks: int,
    ffn_ranks: int,
    microbatches: int,
    wire: Link,
    slo_s: float | None,
) -> Layout | None:
    """The largest batch that memory and SLO allow; None if not one request per microbatch fits."""
    if ffn_ranks > cost.model.experts:
        return None
    limit = cost.estimates.ffn_share * cost.hardware.memory_bytes
    if ffn_weight_bytes(cost.model, ffn_ranks) > limit:
        return None

    def stage(batch: int) -> Stage:
        return cost.stage(batch, context, attn_ranks, ffn_ranks, microbatches, wire)

    room = cost.attn_room(context)
    batch = _largest(microbatches, room.batch, lambda b: stage(b).step_s, slo_s)
    if batch is None:
        return None
    return Layout(
        attn_ranks=attn_ranks,
        ffn_ranks=ffn_ranks,
        microbatches=microbatches,
        connector=wire.name,
        batch=batch,
        room=room,
        step_s=stage(batch).step_s,
        limited_by="memory" if batch == room.batch else "SLO",
        stage=stage(batch),
    )


def colocated(cost: Cost, context: int, ep: int, wire: Link, slo_s: float | None) -> Layout | None:
    """As `afd`, for `ep` ranks that hold attention and a share of the experts each."""
    if ep > cost.model.experts:
        return None
    room = cost.colocated_room(context, ep)
    batch = _largest(1, room.batch, lambda b: cost.colocated(b, context, ep, wire).total_s, slo_s)
    if batch is None:
        return None
    parts = cost.colocated(batch, context, ep, wire)
    return Layout(
        attn_ranks=ep,
        ffn_ranks=0,
        microbatches=1,
        connector=wire.name if ep > 1 else "none",
        batch=batch,
        room=room,
        step_s=parts.total_s,
        limited_by="memory" if batch == room.batch else "SLO",
        parts=parts,
    )


def _largest(
    low: int, high: int, step_s: Callable[[int], float], slo_s: float | None
) -> int | None:
    """Largest batch of [low, high] whose step is within the SLO; a step grows with its batch."""
    if high < low or (slo_s is not None and step_s(low) > slo_s):
        return None
    if slo_s is None or step_s(high) <= slo_s:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if step_s(middle) <= slo_s:
            low = middle
        else:
            high = middle
    return low
