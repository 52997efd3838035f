"""What every connector checks before it sends, and the words of its errors.

Shape letters as in `base`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang.srt.disaggregation.afd.connector.base import LinkSpec, ReceivedBatch, Transfer
from sglang.srt.disaggregation.afd.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    PeerLost,
    PlanMismatch,
)


class Wait(NamedTuple):
    """One wait for one peer, in words: who waits, for whom, for what."""

    rank: str
    peer: str
    transfer: Transfer
    expected: str

    def deadline_exceeded(self, timeout_s: float, seen: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.rank} waited {timeout_s:g} s for {self.peer} at {self.transfer}: "
            f"expected {self.expected}, seen {seen}. Look at the log of {self.peer}; if it is "
            "only slow, raise --afd-peer-timeout"
        )

    def peer_lost(self, seen: str) -> PeerLost:
        return PeerLost(
            f"{self.rank} lost {self.peer} at {self.transfer}: expected {self.expected}, "
            f"seen {seen}. Look at the log of {self.peer} for why it ended"
        )

    def plan_mismatch(self, seen: object) -> PlanMismatch:
        return PlanMismatch(
            f"{self.rank} expected {self.transfer} from {self.peer}, which sent {seen}: "
            "the two do not run the same plan"
        )


def check_dispatch(
    spec: LinkSpec,
    rank: str,
    transfer: Transfer,
    hidden_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    most: int,
) -> None:
    """Refuse more than `most` tokens; assert shapes and dtypes of the rest.

    Raises:
        CapacityExceeded: T > most.
    """
    num_tokens = hidden_TH.shape[0]
    if num_tokens > most:
        raise CapacityExceeded(
            f"{rank} has {num_tokens} tokens at {transfer}, more than the {most} of this "
            "dispatch; raise --afd-max-tokens-per-rank, or send them in several rounds"
        )
    assert hidden_TH.shape == (num_tokens, spec.hidden_size), hidden_TH.shape
    assert hidden_TH.dtype == spec.dtype, hidden_TH.dtype
    assert topk_ids_TK.shape == (num_tokens, spec.topk), topk_ids_TK.shape
    assert not topk_ids_TK.is_floating_point(), topk_ids_TK.dtype
    assert topk_weights_TK.shape == (num_tokens, spec.topk), topk_weights_TK.shape
    assert topk_weights_TK.dtype == torch.float32, topk_weights_TK.dtype


def check_rows(rank: str, peer: str, transfer: Transfer, num_rows: int, most: int) -> None:
    """The FFN side of the same check, so that a broken peer cannot make it allocate at will.

    Raises:
        CapacityExceeded: more rows than the plan gives this peer, or a negative number.
    """
    if not 0 <= num_rows <= most:
        raise CapacityExceeded(
            f"{rank} was sent {num_rows} rows by {peer} at {transfer}; the plan allows 0..{most}"
        )


def limits(spec: LinkSpec, max_rows: tuple[int, ...] | None) -> tuple[int, ...]:
    """`max_rows` by attention rank, the capacity where the caller gave none."""
    if max_rows is None:
        return (spec.capacity,) * spec.topology.attn_ranks
    assert len(max_rows) == spec.topology.attn_ranks, max_rows
    return tuple(min(rows, spec.capacity) for rows in max_rows)


def check_output(spec: LinkSpec, batch: ReceivedBatch, out_RH: torch.Tensor) -> None:
    """Assert that the FFN side answers one row per received row."""
    assert out_RH.shape == batch.hidden_RH.shape, (out_RH.shape, batch.hidden_RH.shape)
    assert out_RH.dtype == spec.dtype, out_RH.dtype
