"""DeepEP's low-latency kernels, over NVLink or RDMA, in one expert-parallel world of all ranks.

DeepEP wants every rank to own the same number of experts, so attention ranks own slots that the
router never selects. Ids travel as slots (`Topology.slot_of`). All ranks take both parts of every
transfer: FFN ranks dispatch and combine no token of their own, attention ranks receive none.

Neither part can be left out where it moves nothing. Each kernel clears the signals of the next
one, and only having waited for all ranks proves that none of them is about to be cleared: an
attention rank that skipped its receive, or an FFN rank its combine, could lose a peer's signal and
wait for ever. What can be chosen is when: an attention rank receives as late as in `combine`, so
that its attention kernels run while the FFN ranks work.

Why nothing deadlocks: a microbatch has a buffer of its own, an attention rank's `dispatch` waits for
nobody, and its `combine` waits only for what the FFN ranks do in the same transfer. This needs
microbatches to be combined in the order in which they were dispatched.

Written for DeepEP 1.2.1. Shape letters as in `base`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sglang.srt.disaggregation.afd import envs
from sglang.srt.disaggregation.afd.connector.base import (
    BLOCK_ROWS,
    AttnConnector,
    DispatchHandle,
    ExpertMajorBatch,
    FFNConnector,
    LinkSpec,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.checks import check_dispatch, limits
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackHub
from sglang.srt.disaggregation.afd.connector.meeting import Meeting
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.errors import AFDConfigError, AFDError, DeadlineExceeded

logger = logging.getLogger(__name__)

HIDDEN_SIZES = (2048, 2560, 4096, 5120, 6144, 7168, 8192)  # DeepEP compiles one kernel for each
MAX_TOPK = 11
MAX_CAPACITY = 1024  # it counts a rank's tokens for one expert in ten bits
_ROW_ALIGNMENT = 4  # rows of one expert, for bulk copies
_SLOTS_PER_SM = 14
_RANKS_PER_HOST = 8
_FAREWELL_S = 5.0


def check_spec(spec: LinkSpec, num_sms: int) -> None:
    """Refuse what DeepEP's kernels cannot do; they would end the process instead.

    Args:
        num_sms: streaming multiprocessors of the GPU.
    Raises:
        AFDConfigError: names the flag.
    """
    topology = spec.topology
    world, slots = topology.world_size, topology.world_size * topology.slots_per_rank
    other = "or choose --afd-connector nccl"
    if spec.dtype != torch.bfloat16:
        raise AFDConfigError(
            f"--afd-connector deepep moves bfloat16 and the model runs in {spec.dtype}; "
            f"set --dtype bfloat16, {other}"
        )
    if spec.hidden_size not in HIDDEN_SIZES:
        sizes = ", ".join(map(str, HIDDEN_SIZES))
        raise AFDConfigError(
            f"--afd-connector deepep has kernels for hidden sizes {sizes}; the model of "
            f"--model-path has {spec.hidden_size}; choose --afd-connector nccl"
        )
    if spec.topk > MAX_TOPK:
        raise AFDConfigError(
            f"--afd-connector deepep routes a token to at most {MAX_TOPK} experts; the model of "
            f"--model-path has top-{spec.topk}; choose --afd-connector nccl"
        )
    if spec.capacity > MAX_CAPACITY:
        raise AFDConfigError(
            f"--afd-max-tokens-per-rank {spec.capacity} is more than the {MAX_CAPACITY} of "
            f"--afd-connector deepep; lower it, {other}"
        )
    ranks = f"--afd-attn-ranks {topology.attn_ranks} and --afd-ffn-ranks {topology.ffn_ranks}"
    if world >= _RANKS_PER_HOST and world % _RANKS_PER_HOST:
        raise AFDConfigError(
            f"{ranks} make {world} ranks; --afd-connector deepep takes fewer than "
            f"{_RANKS_PER_HOST}, or a multiple of it; change one of them, {other}"
        )
    if world > _RANKS_PER_HOST and spec.microbatches > 1:
        raise AFDConfigError(
            f"{ranks} make {world} ranks; above {_RANKS_PER_HOST} DeepEP has one buffer per "
            f"process, so --afd-connector deepep needs --afd-microbatches 1; set it, {other}"
        )
    if slots > _SLOTS_PER_SM * num_sms:
        raise AFDConfigError(
            f"{ranks} make {slots} expert slots; --afd-connector deepep serves "
            f"{_SLOTS_PER_SM * num_sms} on this GPU; raise --afd-ffn-ranks, {other}"
        )


class _Ranks:
    """All ranks of the link, in the shape of the MPI communicator that DeepEP accepts."""

    def __init__(self, meeting: Meeting, world_rank: int, world_size: int) -> None:
        self._meeting = meeting
        self._rank = world_rank
        self._size = world_size

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, value: int | bytearray | None) -> list[int | bytearray | None]:
        """Device numbers, memory handles and ids: nothing but numbers and bytes."""
        found = [
            msgspec.msgpack.decode(data, type=int | bytes | None)
            for data in self._meeting.gather(msgspec.msgpack.encode(value))
        ]
        return [bytearray(each) if isinstance(each, bytes) else each for each in found]


class _Link:
    """The buffers of one rank, by microbatch, and the sizes that all ranks share."""

    def __init__(self, spec: LinkSpec, world_rank: int, rendezvous: Rendezvous) -> None:
        self.spec = spec
        self.name = spec.topology.rank_name(world_rank)
        self.device = torch.device("cuda", torch.cuda.current_device())
        check_spec(spec, torch.cuda.get_device_properties(self.device).multi_processor_count)
        buffer_type = _buffer_type()
        world = spec.topology.world_size
        self.num_slots = world * spec.topology.slots_per_rank
        # The room of a slot, over all ranks, is a multiple of what a GEMM writes at once.
        unit = max(_ROW_ALIGNMENT, BLOCK_ROWS // math.gcd(world, BLOCK_ROWS))
        self.rows_per_rank = -(-spec.capacity // unit) * unit
        self.rows_per_slot = world * self.rows_per_rank
        self.meeting = Meeting(spec.topology, world_rank, rendezvous, "deepep")
        num_bytes = buffer_type.get_low_latency_rdma_size_hint(
            self.rows_per_rank, spec.hidden_size, world, self.num_slots
        )
        received = spec.topology.slots_per_rank * self.rows_per_slot * spec.hidden_size * 2
        logger.info(
            "%s: connector deepep takes %.0f MiB of device memory per microbatch, and %.0f MiB "
            "while a batch is received; a smaller --afd-max-tokens-per-rank makes both smaller",
            self.name,
            num_bytes / 2**20,
            received / 2**20,
        )
        if not os.path.isdir("/sys/class/infiniband") or not os.listdir("/sys/class/infiniband"):
            envs.set_default("NVSHMEM_REMOTE_TRANSPORT", "none")
        ranks = _Ranks(self.meeting, world_rank, world)
        self.buffers: list[Any] = [
            buffer_type(
                None,
                num_rdma_bytes=num_bytes,
                low_latency_mode=True,
                num_qps_per_rank=spec.topology.slots_per_rank,
                explicitly_destroy=True,
                comm=ranks,
            )
            for _ in range(spec.microbatches)
        ]

    def dispatch(
        self, microbatch: int, hidden_TH: torch.Tensor, slots_TK: torch.Tensor, send_only: bool
    ) -> tuple[Any, torch.Tensor, tuple[Any, ...], Callable[[], None] | None]:
        """Received rows (with scales, if FP8), rows per slot, what `combine` needs, and, if
        `send_only`, the call that receives."""
        received, rows_per_slot_E, layout, _, receive = self.buffers[
            microbatch
        ].low_latency_dispatch(
            hidden_TH,
            slots_TK,
            self.rows_per_rank,
            self.num_slots,
            use_fp8=self.spec.fp8,
            return_recv_hook=send_only,
        )
        return received, rows_per_slot_E, layout, receive

    def combine(
        self,
        microbatch: int,
        rows_ELH: torch.Tensor,
        slots_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        layout: tuple[Any, ...],
    ) -> torch.Tensor:
        """Return the rows of all ranks to where they came from; [T, H] of this rank's tokens."""
        combined_TH, _, _ = self.buffers[microbatch].low_latency_combine(
            rows_ELH, slots_TK, weights_TK, layout
        )
        return combined_TH

    def close(self) -> None:
        """Free the buffers if all ranks do, none of them with a kernel that still waits.

        It is a joint act that would wait for ever for a lost rank; then they stay until the
        process ends.
        """
        buffers, self.buffers = self.buffers, []
        if not buffers:
            return
        try:
            self.meeting.finish_device(_FAREWELL_S)
            self.meeting.gather(b"idle", _FAREWELL_S)
        except DeadlineExceeded as error:
            logger.warning(
                "%s leaves its DeepEP buffers to the end of the process: %s", self.name, error
            )
            return
        for buffer in buffers:
            buffer.destroy()


@dataclass(frozen=True, kw_only=True)
class _DeepEPHandle(DispatchHandle):
    slots_TK: torch.Tensor
    weights_TK: torch.Tensor
    layout: tuple[Any, ...]
    receive: Callable[[], None]


class DeepEPAttn(AttnConnector):
    """Attention rank `attn_rank`."""

    def __init__(self, spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous) -> None:
        self._spec = spec
        self._attn_rank = attn_rank
        self._link = link = _Link(spec, attn_rank, rendezvous)
        # `combine` wants rows of this rank's slots and reads none: any memory of that size will do.
        shape = (spec.topology.slots_per_rank, link.rows_per_slot, spec.hidden_size)
        self._no_rows = [
            buffer.get_local_buffer_tensor(
                torch.bfloat16, size=torch.Size(shape), use_rdma_buffer=True
            )
            for buffer in link.buffers
        ]
        with torch.inference_mode(False):
            # One entry more than experts: a masked id of -1 indexes the last one.
            self._slot_E = torch.tensor(
                [*spec.topology.slot_of, -1], dtype=torch.int64, device=link.device
            )
            hidden_TH = torch.empty(0, spec.hidden_size, dtype=spec.dtype, device=link.device)
            ids_TK = torch.empty(0, spec.topk, dtype=torch.int64, device=link.device)
        for microbatch in range(spec.microbatches):  # loads kernels, which a capture could not
            handle = self.dispatch(Transfer(0, 0, microbatch), hidden_TH, ids_TK, ids_TK.float())
            self.combine(handle)
        link.meeting.finish_device()

    @torch.no_grad()
    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        spec, link = self._spec, _usable(self._link)
        most = limits(spec, max_rows)[self._attn_rank]
        check_dispatch(spec, link.name, transfer, hidden_TH, topk_ids_TK, topk_weights_TK, most)
        slots_TK = self._slot_E[topk_ids_TK.long()]
        _, _, layout, receive = link.dispatch(
            transfer.microbatch, hidden_TH.contiguous(), slots_TK, send_only=True
        )
        assert receive is not None
        return _DeepEPHandle(
            transfer=transfer,
            num_tokens=hidden_TH.shape[0],
            slots_TK=slots_TK,
            weights_TK=topk_weights_TK.contiguous(),
            layout=layout,
            receive=receive,
        )

    @torch.no_grad()
    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        assert isinstance(handle, _DeepEPHandle)
        link, microbatch = _usable(self._link), handle.transfer.microbatch
        handle.receive()
        return link.combine(
            microbatch,
            self._no_rows[microbatch],
            handle.slots_TK,
            handle.weights_TK,
            handle.layout,
        )

    def close(self) -> None:
        self._no_rows.clear()
        self._link.close()


@dataclass(frozen=True, kw_only=True)
class _DeepEPBatch(ExpertMajorBatch):
    layout: tuple[Any, ...]


class DeepEPFFN(FFNConnector[ExpertMajorBatch]):
    """FFN rank `ffn_rank`."""

    def __init__(self, spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous) -> None:
        self._spec = spec
        self._link = link = _Link(spec, spec.topology.ffn_world_rank(ffn_rank), rendezvous)
        with torch.inference_mode(False):
            self._no_hidden = torch.empty(0, spec.hidden_size, dtype=spec.dtype, device=link.device)
            self._no_slots = torch.empty(0, spec.topk, dtype=torch.int64, device=link.device)
            self._no_weights = torch.empty(0, spec.topk, dtype=torch.float32, device=link.device)
        for microbatch in range(spec.microbatches):  # loads kernels, which a capture could not
            batch = self.receive(Transfer(0, 0, microbatch))
            self.send(batch, batch.hidden_ELH.to(spec.dtype))
        link.meeting.finish_device()

    @torch.no_grad()
    def receive(
        self, transfer: Transfer, max_rows: tuple[int, ...] | None = None
    ) -> ExpertMajorBatch:
        spec, link = self._spec, _usable(self._link)
        received, rows_per_slot_E, layout, _ = link.dispatch(
            transfer.microbatch, self._no_hidden, self._no_slots, send_only=False
        )
        hidden_ELH, scales_ELG = received if spec.fp8 else (received, None)
        entries = sum(limits(spec, max_rows)) * spec.topk
        return _DeepEPBatch(
            transfer=transfer,
            hidden_ELH=hidden_ELH,
            scales_ELG=scales_ELG,
            rows_per_expert_E=rows_per_slot_E,
            expected_rows=max(1, -(-entries // spec.topology.num_experts)),
            layout=layout,
        )

    @torch.no_grad()
    def send(self, batch: ExpertMajorBatch, out: torch.Tensor) -> None:
        assert isinstance(batch, _DeepEPBatch)
        assert out.shape == batch.hidden_ELH.shape, (out.shape, batch.hidden_ELH.shape)
        assert out.dtype == self._spec.dtype, out.dtype
        _usable(self._link).combine(
            batch.transfer.microbatch,
            out.contiguous(),
            self._no_slots,
            self._no_weights,
            batch.layout,
        )

    def close(self) -> None:
        self._link.close()


def _usable(link: _Link) -> _Link:
    if not link.buffers:
        raise AFDError(f"{link.name} used its deepep connector after close()")
    return link


def _buffer_type() -> Any:
    """DeepEP's `Buffer` class.

    Raises:
        AFDConfigError: not installed, or another DeepEP than we know.
    """
    try:
        buffer_type = importlib.import_module("deep_ep").Buffer
    except ImportError as exc:
        raise AFDConfigError(
            f"--afd-connector deepep cannot import deep_ep: {exc}. Install DeepEP 1.2.1, or choose "
            "--afd-connector nccl"
        ) from exc
    if "comm" not in inspect.signature(buffer_type.__init__).parameters:
        raise AFDConfigError(
            "--afd-connector deepep needs DeepEP 1.2.1, and the installed one is older; update it, "
            "or choose --afd-connector nccl"
        )
    return buffer_type


def create_attn(
    spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> AttnConnector:
    return DeepEPAttn(spec, attn_rank, _address(rendezvous))


def create_ffn(spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub) -> FFNConnector:
    return DeepEPFFN(spec, ffn_rank, _address(rendezvous))


def _address(rendezvous: Rendezvous | LoopbackHub) -> Rendezvous:
    assert isinstance(rendezvous, Rendezvous), "deepep needs the address of a store"
    return rendezvous
