"""The contract of a connector: moves the tokens of one MoE layer to the FFN ranks and back.

Called on attention ranks: `AttnConnector`. Called on FFN ranks: `FFNConnector`. Rules for all:

- every attention rank takes part in every transfer of every step, with zero tokens too;
- movement is bitwise; the only arithmetic is the sum over FFN ranks, in FP32, in rank order;
- every wait ends within `LinkSpec.timeout_s` with an error that names peer and transfer;
- more tokens than `LinkSpec.capacity` is `CapacityExceeded` before anything is sent;
- a microbatch has one open dispatch at a time, and `combine` ends it;
- `max_rows`, given on both sides from the same plan, bounds the tokens of each attention rank in
  this transfer. A connector of fixed shapes moves exactly that many rows, the others what there is.

Shape letters: T tokens of this attention rank, H hidden size, K top-k, R rows that reached one
FFN rank (a token is one row per FFN rank, however many of its experts live there).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang.srt.disaggregation.afd.topology import Topology


class Transfer(NamedTuple):
    """Names one dispatch and its combine. Equal on both sides, or `PlanMismatch`."""

    step_id: int
    layer: int  # index among the MoE layers, from 0
    microbatch: int  # 0 or 1
    round_idx: int = 0  # a prefill larger than the capacity goes in several rounds

    def __str__(self) -> str:
        return (
            f"step {self.step_id}, MoE layer {self.layer}, "
            f"microbatch {self.microbatch}, round {self.round_idx}"
        )


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """What both sides agreed on in the handshake.

    Attributes:
        topology: ranks and expert owners.
        hidden_size: H.
        topk: K, entries per token in `topk_ids`.
        dtype: of hidden states, out and back.
        capacity: most tokens that one attention rank may put into one dispatch.
        timeout_s: longest wait for a peer, seconds.
    """

    topology: Topology
    hidden_size: int
    topk: int
    dtype: torch.dtype
    capacity: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """Everything that undoes one dispatch. Made by `dispatch`, consumed once by `combine`."""

    transfer: Transfer
    num_tokens: int  # T


@dataclass(frozen=True, kw_only=True)
class ReceivedBatch:
    """The rows of all attention ranks for one transfer, in attention-rank order.

    Attributes:
        transfer: which dispatch this is.
        hidden_RH: hidden states, `LinkSpec.dtype`.
        topk_ids_RK: int32, expert index WITHIN this FFN rank, -1 where the entry is masked or
            belongs to another rank.
        topk_weights_RK: float32, 0 where the id is -1.
        rows_per_rank: rows from each attention rank, length M, sum R.
    """

    transfer: Transfer
    hidden_RH: torch.Tensor
    topk_ids_RK: torch.Tensor
    topk_weights_RK: torch.Tensor
    rows_per_rank: tuple[int, ...]


class AttnConnector(ABC):
    """Attention side."""

    @abstractmethod
    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        """Send every token to the FFN ranks that own its experts; does not wait for them.

        Args:
            hidden_TH: `LinkSpec.dtype`; may be reused by the caller as soon as this returns.
            topk_ids_TK: integer, global expert ids; -1 masks an entry.
            topk_weights_TK: float32, applied on the FFN side.
            max_rows: by attention rank; the capacity for all if None.
        Raises:
            CapacityExceeded: T > capacity; nothing was sent.
        """

    @abstractmethod
    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        """Wait for the FFN ranks and return the summed expert outputs [T, H], `LinkSpec.dtype`.

        A token whose entries are all masked gets zeros.
        Raises:
            DeadlineExceeded, PeerLost
        """

    @abstractmethod
    def close(self) -> None:
        """Release sockets and buffers. Safe to call twice."""


class FFNConnector(ABC):
    """FFN side."""

    @abstractmethod
    def receive(self, transfer: Transfer, max_rows: tuple[int, ...] | None = None) -> ReceivedBatch:
        """Wait for the rows of all attention ranks of exactly this transfer.

        Args:
            max_rows: by attention rank; the capacity for all if None.
        Raises:
            DeadlineExceeded, PeerLost, PlanMismatch
        """

    @abstractmethod
    def send(self, batch: ReceivedBatch, out_RH: torch.Tensor) -> None:
        """Return one row per received row, in the same order, `LinkSpec.dtype`.

        `out_RH` may be reused by the caller as soon as this returns.
        """

    @abstractmethod
    def close(self) -> None:
        """Release sockets and buffers. Safe to call twice."""
