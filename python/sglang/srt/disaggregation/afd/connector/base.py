"""The contract of a connector: moves the tokens of one MoE layer to the FFN ranks and back.

Called on attention ranks: `AttnConnector`. Called on FFN ranks: `FFNConnector`. Rules for all:

- every attention rank takes part in every transfer of every step, with zero tokens too;
- movement is bitwise; the only arithmetic is the sum over FFN ranks, in FP32, in rank order;
- every wait ends within `LinkSpec.timeout_s` with an error that names peer and transfer;
- more tokens than `LinkSpec.capacity` is `CapacityExceeded` before anything is sent;
- a microbatch has one open dispatch at a time, and `combine` ends it;
- `max_rows`, given on both sides from the same plan, bounds the tokens of each attention rank in
  this transfer. A connector of fixed shapes moves exactly that many rows, the others what there is;
- on a GPU nothing waits on the host: calls enqueue work on the current stream, may be captured in
  a CUDA graph (then `Transfer.step_id` means nothing and never travels), and every microbatch is
  combined in the order in which it was dispatched, which is the order of the FFN ranks.

Shape letters: T tokens of this attention rank, H hidden size, K top-k, R rows that reached one
FFN rank (a token is one row per FFN rank, however many of its experts live there).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from sglang.srt.disaggregation.afd.errors import AFDError
from sglang.srt.disaggregation.afd.topology import Topology

# A masked GEMM writes whole blocks of this many rows, also behind the last row of an expert.
BLOCK_ROWS = 128


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
        microbatches: 1 or 2, how many may be in flight.
        fp8: send tokens as FP8 (E4M3) with one FP32 scale per 128 values; results stay in `dtype`.
    """

    topology: Topology
    hidden_size: int
    topk: int
    dtype: torch.dtype
    capacity: int
    timeout_s: float
    microbatches: int = 2
    fp8: bool = False


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """Everything that undoes one dispatch. Made by `dispatch`, consumed once by `combine`."""

    transfer: Transfer
    num_tokens: int  # T


@dataclass(frozen=True, kw_only=True)
class ReceivedBatch:
    """The rows of all attention ranks for one transfer, in attention-rank order.

    A connector of fixed shapes also delivers rows that have no expert here: padding, and tokens
    of other FFN ranks. All their ids are -1, and the rows returned for them must be zeros.

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


@dataclass(frozen=True, kw_only=True)
class ExpertMajorBatch:
    """The rows of all attention ranks for one transfer, sorted by expert: a row per (token, expert).

    Expert e of this FFN rank has its rows at `[e, :rows_per_expert_E[e]]`; what follows them is
    undefined. E counts slots (`Topology.slots_per_rank`): a rank with a smaller share of experts
    has empty slots at the end. Weights stay on the attention side, which applies them.

    Attributes:
        transfer: which dispatch this is.
        hidden_ELH: `LinkSpec.dtype`, or FP8 (E4M3). L is the room for rows of one expert; if it is
            no multiple of `BLOCK_ROWS`, the experts have to copy everything into more room.
        scales_ELG: float32, one per G = H / 128 groups, column-major in its last two dimensions;
            None unless the rows are FP8.
        rows_per_expert_E: int32, on the device.
        expected_rows: rows per expert if the router is even, at least 1; picks kernel shapes.
    """

    transfer: Transfer
    hidden_ELH: torch.Tensor
    scales_ELG: torch.Tensor | None
    rows_per_expert_E: torch.Tensor
    expected_rows: int


BatchT = TypeVar("BatchT", bound=ReceivedBatch | ExpertMajorBatch)


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
            topk_weights_TK: float32, applied on the FFN side, or in `combine` if that gets one row
                per expert. Like the ids, to be left alone until `combine`.
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


class TellsWaits(ABC):
    """A power of connectors, of either side, that wait on the host for one peer at a time."""

    @abstractmethod
    def set_on_wait(self, on_wait: Callable[[int, float], None]) -> None:
        """`on_wait(world_rank, seconds)` runs after each wait for a message of that rank."""


class TellsFailure(ABC):
    """A power of connectors, of either side, whose kernels give up on a peer by themselves."""

    @abstractmethod
    def failure(self) -> AFDError | None:
        """Why this rank's kernels gave up, None while they did not. Does not wait for the GPU."""


class FFNConnector(ABC, Generic[BatchT]):
    """FFN side. What it receives is the connector's choice, and decides which kernels may follow."""

    @abstractmethod
    def receive(self, transfer: Transfer, max_rows: tuple[int, ...] | None = None) -> BatchT:
        """Wait for the rows of all attention ranks of exactly this transfer.

        Args:
            max_rows: by attention rank; the capacity for all if None.
        Raises:
            DeadlineExceeded, PeerLost, PlanMismatch
        """

    @abstractmethod
    def send(self, batch: BatchT, out: torch.Tensor) -> None:
        """Return one row per received row, in the same place, `LinkSpec.dtype`: [R, H] or [E, L, H].

        `out` may be reused by the caller as soon as this returns.
        """

    @abstractmethod
    def close(self) -> None:
        """Release sockets and buffers. Safe to call twice."""
