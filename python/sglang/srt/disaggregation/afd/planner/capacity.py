"""How many requests fit: weights of each role, KV cache of a request, and what must stay free."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.disaggregation.afd.planner.hardware import Hardware
from sglang.srt.disaggregation.afd.planner.models import ModelShape


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of one rank, bytes, and the requests that fit.

    Attributes:
        weights: what the rank loads.
        kv: what the KV cache may take; negative if not even the weights fit.
        reserve: what stays free for activations, graphs and buffers.
        request: KV cache of one request.
        batch: requests that fit, 0 if none.
    """

    weights: float
    kv: float
    reserve: float
    request: float
    batch: int


def room(memory: float, weights: float, request: float, kv_share: float) -> Room:
    """Share out one rank's memory: `kv_share` of what the weights leave is KV cache.

    Args:
        memory, weights, request: bytes.
        kv_share: between 0 and 1.
    """
    free = memory - weights
    kv = kv_share * free
    return Room(
        weights=weights,
        kv=kv,
        reserve=free - kv,
        request=request,
        batch=max(0, int(kv // request)),
    )


def attn_rank(model: ModelShape, hardware: Hardware, context: int, kv_share: float) -> Room:
    """An attention rank: no routed experts."""
    return room(
        hardware.memory_bytes, model.attn_weight_bytes, model.kv_request_bytes(context), kv_share
    )


def colocated_rank(
    model: ModelShape, hardware: Hardware, context: int, ep: int, kv_share: float
) -> Room:
    """A rank of a colocated layout: its share of the experts, everything else replicated."""
    weights = model.attn_weight_bytes + ffn_weight_bytes(model, ep)
    return room(hardware.memory_bytes, weights, model.kv_request_bytes(context), kv_share)


def ffn_weight_bytes(model: ModelShape, ranks: int) -> float:
    """Expert weights of the fullest of `ranks` ranks."""
    most = -(-model.experts // ranks)
    return model.moe_layers * most * model.expert_params * model.expert_bytes


def fewest_ffn_ranks(model: ModelShape, hardware: Hardware, ffn_share: float) -> int | None:
    """Smallest N whose ranks hold the experts in `ffn_share` of their memory; None if none does."""
    for ranks in range(1, model.experts + 1):
        if ffn_weight_bytes(model, ranks) <= ffn_share * hardware.memory_bytes:
            return ranks
    return None
