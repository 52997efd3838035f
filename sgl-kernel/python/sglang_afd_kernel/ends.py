"""The two ends of a link, on buffers that all of its ranks can write.

Knows neither how the buffers came about nor who waits on the host: `connector/nvlink.py` of
SGLang-AFD puts them into symmetric memory of several processes, the tests into one process.
Every call enqueues one kernel on the current stream, allocates nothing and waits for nothing, so
it may be captured in a CUDA graph.

Shape letters: M attention ranks, N FFN ranks, T tokens of this attention rank, H hidden size,
K top-k, R rows of a transfer, E experts of one FFN rank, L room for rows of one expert, G = H / 128.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from sglang_afd_kernel import abi, build

_ALIGNED_ROWS = 128  # grouped GEMMs store whole blocks of rows, and must not reach the next expert


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a link; equal on all ranks.

    Attributes:
        attn_ranks, ffn_ranks: M, N.
        num_experts: routed experts of all FFN ranks; rank j owns [j E / N, (j + 1) E / N).
        hidden: H, a multiple of 128.
        topk: K, at most 16.
        capacity: most tokens of one attention rank in one dispatch.
        microbatches: transfers that may be open at a time, each with a buffer of its own.
        fp8: rows go out as E4M3 with a float scale per 128 values, else as BF16.
    """

    attn_ranks: int
    ffn_ranks: int
    num_experts: int
    hidden: int
    topk: int
    capacity: int
    microbatches: int = 2
    fp8: bool = True

    def __post_init__(self) -> None:
        for name, least, most in (
            ("attn_ranks", 1, abi.MAX_ATTN_RANKS),
            ("ffn_ranks", 1, abi.MAX_FFN_RANKS),
            ("num_experts", self.ffn_ranks, abi.MAX_EXPERTS),
            ("topk", 1, abi.MAX_TOPK),
            ("capacity", 1, 1 << 16),
            ("microbatches", 1, 2),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}, not in {least}..{most}")
        if self.hidden < abi.GROUP or self.hidden % abi.GROUP:
            raise ValueError(f"hidden is {self.hidden}, not a multiple of {abi.GROUP}")

    @property
    def struct(self) -> abi.Shape:
        return abi.Shape(*(int(getattr(self, name)) for name, _ in abi.Shape._fields_))

    @property
    def slots(self) -> int:
        """Experts of the FFN rank that owns most."""
        return -(-self.num_experts // self.ffn_ranks)


class Failure(NamedTuple):
    """The first wait of a rank that ran out. Ranks are world ranks: attention, then FFN."""

    operation: str  # "receive" or "combine"
    rank: int
    peer: int
    layer: int
    microbatch: int
    epoch: int
    expected: int
    seen: int

    def __str__(self) -> str:
        return (
            f"world rank {self.rank} waited in vain for world rank {self.peer} to {self._deed} at "
            f"MoE layer {self.layer}, microbatch {self.microbatch}, epoch {self.epoch}: "
            f"expected {self.expected} credits, seen {self.seen}"
        )

    @property
    def _deed(self) -> str:
        return "dispatch" if self.operation == "receive" else "send"


class Rows(NamedTuple):
    """What arrived, where the attention ranks put it."""

    hidden_RH: torch.Tensor  # BF16, or E4M3
    scales_RG: torch.Tensor | None
    topk_ids_RK: torch.Tensor  # int32, within this rank, -1 elsewhere
    topk_weights_RK: torch.Tensor  # float32, 0 where the id is -1


class RowsByExpert(NamedTuple):
    """What arrived, a row per (token, expert), as a masked grouped GEMM takes it."""

    hidden_ELH: torch.Tensor
    scales_ELG: torch.Tensor | None  # column-major in its last two dimensions
    rows_per_expert_E: torch.Tensor  # int32; `send` clears it


def layout(shape: Shape, library: ctypes.CDLL) -> abi.Layout:
    found = abi.Layout()
    library.afd_layout(ctypes.byref(shape.struct), ctypes.byref(found))
    return found


def library_for(device: torch.device) -> ctypes.CDLL:
    """The kernels for the GPU `device`.

    Raises:
        sglang_afd_kernel.build.BuildError
    """
    major, minor = torch.cuda.get_device_capability(device)
    return build.library(f"{major}{minor}a")


def buffer_bytes(shape: Shape, device: torch.device) -> int:
    """Size of the buffer that every rank of the link needs, zeroed, before any rank's first call."""
    return int(layout(shape, library_for(device)).bytes) * shape.microbatches


class _End:
    """One rank's side: its structs by microbatch, its epochs, its report of a failure."""

    def __init__(
        self,
        shape: Shape,
        index: int,
        own: torch.Tensor,
        peers: Sequence[int],
        timeout_s: float,
        eager_timeout_s: float | None,
        most_blocks: int,
    ) -> None:
        self.shape = shape
        self.index = index
        self.device = own.device
        self._library = library_for(own.device)
        self._most_blocks = most_blocks
        eager_timeout_s = timeout_s if eager_timeout_s is None else eager_timeout_s
        self._timeout_ns = [int(limit * 1e9) for limit in (eager_timeout_s, timeout_s)]
        self._layout = layout(shape, self._library)
        self._own = own
        with torch.inference_mode(False):
            self._state = torch.zeros(shape.microbatches, 2, dtype=torch.int32, device=own.device)
            size = ctypes.sizeof(abi.Failure)
            self._failure = torch.zeros(size, dtype=torch.uint8).pin_memory()
        self._report = abi.Failure.from_address(self._failure.data_ptr())
        self._ranks = [
            abi.Rank(
                shape=shape.struct,
                index=index,
                microbatch=microbatch,
                own=own.data_ptr() + microbatch * self._layout.bytes,
                state=self._state[microbatch].data_ptr(),
                failure=self._failure.data_ptr(),
            )
            for microbatch in range(shape.microbatches)
        ]
        self._peers = [
            [peer + microbatch * self._layout.bytes for peer in peers]
            for microbatch in range(shape.microbatches)
        ]

    @property
    def failure(self) -> Failure | None:
        """Read from host memory; does not touch the GPU."""
        report = self._report
        if not report.full:
            return None
        operation = ("receive", "combine")[report.operation]
        return Failure(operation, *(getattr(report, name) for name in Failure._fields[1:]))

    def _launch(self, name: str, params: ctypes.Structure) -> None:
        params.rank.timeout_ns = self._timeout_ns[torch.cuda.is_current_stream_capturing()]
        code = getattr(self._library, name)(
            ctypes.byref(params),
            self._most_blocks,
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        if code != 0:
            raise RuntimeError(f"{name} was not launched: {self._library.afd_error(code).decode()}")


class AttnEnd(_End):
    """Attention rank `index`.

    Args:
        own: this rank's buffer, uint8, `buffer_bytes` of zeros.
        peers: addresses of the buffers of all FFN ranks, as this GPU sees them.
        timeout_s: longest wait of a kernel for a peer.
        eager_timeout_s: the same of a kernel outside of a graph, whose peer may still compile what
            it runs before; `timeout_s` if None.
        most_blocks: blocks, and so about SMs, that a kernel may take.
    """

    def __init__(
        self,
        shape: Shape,
        index: int,
        own: torch.Tensor,
        peers: Sequence[int],
        *,
        timeout_s: float,
        eager_timeout_s: float | None = None,
        most_blocks: int,
    ) -> None:
        assert len(peers) == shape.ffn_ranks, len(peers)
        super().__init__(shape, index, own, peers, timeout_s, eager_timeout_s, most_blocks)
        self._dispatch = [abi.Dispatch(rank=rank) for rank in self._ranks]
        self._combine = [abi.Combine(rank=rank) for rank in self._ranks]
        for params, addresses in zip(self._dispatch, self._peers, strict=True):
            params.peers[: len(addresses)] = addresses

    def dispatch(
        self,
        microbatch: int,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        max_rows: Sequence[int],
        layer: int = 0,
    ) -> None:
        """Write every token to the FFN ranks that own its experts.

        Args:
            hidden_TH: BF16, contiguous, T <= max_rows[index].
            topk_ids_TK: int32 or int64, contiguous, global ids, -1 masks an entry.
            topk_weights_TK: float32, contiguous.
            max_rows: rows of each attention rank in this transfer, the same on every rank.
        """
        params = self._dispatch[microbatch]
        params.rank.layer = layer
        params.hidden = hidden_TH.data_ptr()
        params.ids = topk_ids_TK.data_ptr()
        params.weights = topk_weights_TK.data_ptr()
        params.wide_ids = topk_ids_TK.dtype == torch.int64
        params.tokens = hidden_TH.shape[0]
        params.max_rows = max_rows[self.index]
        params.first_row = sum(max_rows[: self.index])
        self._launch("afd_dispatch", params)

    def combine(
        self,
        microbatch: int,
        topk_ids_TK: torch.Tensor,
        out_TH: torch.Tensor,
        *,
        shared_TH: torch.Tensor | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Wait for all FFN ranks and add their rows into `out_TH`, BF16; then `shared_TH`, if any.

        Args:
            topk_ids_TK: as given to `dispatch`.
        """
        params = self._combine[microbatch]
        params.rank.layer = layer
        params.ids = topk_ids_TK.data_ptr()
        params.wide_ids = topk_ids_TK.dtype == torch.int64
        params.shared = None if shared_TH is None else shared_TH.data_ptr()
        params.out = out_TH.data_ptr()
        params.tokens = out_TH.shape[0]
        self._launch("afd_combine", params)
        return out_TH


class FFNEnd(_End):
    """FFN rank `index`. Arguments as of `AttnEnd`, with the attention ranks as peers.

    Args:
        by_expert: allocate the room of `receive_by_expert`.
    """

    def __init__(
        self,
        shape: Shape,
        index: int,
        own: torch.Tensor,
        peers: Sequence[int],
        *,
        timeout_s: float,
        eager_timeout_s: float | None = None,
        most_blocks: int,
        by_expert: bool,
    ) -> None:
        assert len(peers) == shape.attn_ranks, len(peers)
        super().__init__(shape, index, own, peers, timeout_s, eager_timeout_s, most_blocks)
        most_rows = shape.attn_ranks * shape.capacity
        self._rows = [self._inbox(microbatch, most_rows) for microbatch in range(len(self._ranks))]
        self._by_expert: list[_Room] = []
        if by_expert:
            self._by_expert = [_Room(shape, most_rows, own.device) for _ in self._ranks]
        self._receive = [abi.Receive(rank=rank) for rank in self._ranks]
        self._send = [abi.Send(rank=rank) for rank in self._ranks]
        for params, addresses in zip(self._send, self._peers, strict=True):
            params.peers[: len(addresses)] = addresses

    def receive(self, microbatch: int, num_rows: int, *, layer: int = 0) -> Rows:
        """Wait for all attention ranks; the rows are read where they are.

        Rows are valid until `send`, and in the order of attention ranks.
        """
        params = self._receive[microbatch]
        params.rank.layer = layer
        params.num_rows = num_rows
        params.by_expert = None
        self._launch("afd_receive", params)
        hidden, scales, ids, weights = self._rows[microbatch]
        return Rows(
            hidden[:num_rows],
            None if scales is None else scales[:num_rows],
            ids[:num_rows],
            weights[:num_rows],
        )

    def receive_by_expert(self, microbatch: int, num_rows: int, *, layer: int = 0) -> RowsByExpert:
        """Wait for all attention ranks and give each (row, expert) a row of its own."""
        room = self._by_expert[microbatch]
        batch = room.batch(num_rows)
        params = self._receive[microbatch]
        params.rank.layer = layer
        params.num_rows = num_rows
        params.room = batch.hidden_ELH.shape[1]
        params.by_expert = room.hidden.data_ptr()
        params.scales = None if room.scales is None else room.scales.data_ptr()
        params.rows_per_expert = room.rows_per_expert_E.data_ptr()
        params.places = room.places_RK.data_ptr()
        self._launch("afd_receive", params)
        return batch

    def send(
        self, microbatch: int, out: torch.Tensor, *, max_rows: Sequence[int], layer: int = 0
    ) -> None:
        """Write one BF16 row per row that has an expert here to its owner.

        Args:
            out: [R, H], weighted and summed already, if the rows came from `receive`; [E, L, H],
                weighted and summed here, if they came from `receive_by_expert`.
            max_rows: as given to every `dispatch` of the transfer.
        """
        params = self._send[microbatch]
        params.rank.layer = layer
        params.out = out.data_ptr()
        by_expert = out.dim() == 3
        params.places = self._by_expert[microbatch].places_RK.data_ptr() if by_expert else None
        params.rows_per_expert = (
            self._by_expert[microbatch].rows_per_expert_E.data_ptr() if by_expert else None
        )
        params.num_experts = self.shape.slots
        params.num_rows = sum(max_rows)
        params.first_rows[: len(max_rows) + 1] = [0, *accumulate(max_rows)]
        self._launch("afd_send", params)

    def _inbox(
        self, microbatch: int, most_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        shape, at = self.shape, self._layout
        start = microbatch * at.bytes

        def view(offset: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
            size = most_rows * columns * dtype.itemsize
            return self._own[start + offset :][:size].view(dtype).view(most_rows, columns)

        return (
            view(at.rows, shape.hidden, torch.float8_e4m3fn if shape.fp8 else torch.bfloat16),
            view(at.scales, shape.hidden // abi.GROUP, torch.float32) if shape.fp8 else None,
            view(at.ids, shape.topk, torch.int32),
            view(at.weights, shape.topk, torch.float32),
        )


class _Room:
    """Where one microbatch's rows lie by expert. Smaller transfers use the front of it, packed."""

    def __init__(self, shape: Shape, most_rows: int, device: torch.device) -> None:
        self._shape = shape
        room = _aligned(most_rows)
        dtype = torch.float8_e4m3fn if shape.fp8 else torch.bfloat16
        groups = shape.hidden // abi.GROUP
        with torch.inference_mode(False):
            self.hidden = torch.zeros(shape.slots * room * shape.hidden, dtype=dtype, device=device)
            self.scales = (
                torch.zeros(shape.slots * groups * room, dtype=torch.float32, device=device)
                if shape.fp8
                else None
            )
            self.rows_per_expert_E = torch.zeros(shape.slots, dtype=torch.int32, device=device)
            self.places_RK = torch.zeros(most_rows, shape.topk, dtype=torch.int32, device=device)

    def batch(self, num_rows: int) -> RowsByExpert:
        shape, room = self._shape, _aligned(num_rows)
        groups = shape.hidden // abi.GROUP
        scales = None
        if self.scales is not None:
            scales_EGL = self.scales[: shape.slots * groups * room].view(shape.slots, groups, room)
            scales = scales_EGL.transpose(1, 2)
        hidden = self.hidden[: shape.slots * room * shape.hidden]
        return RowsByExpert(
            hidden.view(shape.slots, room, shape.hidden), scales, self.rows_per_expert_E
        )


def _aligned(rows: int) -> int:
    return max(1, -(-rows // _ALIGNED_ROWS)) * _ALIGNED_ROWS
