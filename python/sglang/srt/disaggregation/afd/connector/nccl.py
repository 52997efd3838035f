"""GPU tensors, point to point through NCCL; any network that NCCL knows.

Every transfer moves exactly `max_rows` rows of each attention rank to every FFN rank, so that
both sides know all shapes without looking at data. Padding and tokens of other ranks carry the id
-1. Per pair of ranks there are two messages out (hidden states; ids and weights), which land where
the experts read them, and one back. All messages of a call are one NCCL group, one kernel launch.

Why nothing deadlocks: each microbatch has a communicator per direction, and an attention rank sends
on a stream of the microbatch's own. So a send waits only for the FFN rank to reach that transfer,
and never stands in front of a receive that the FFN rank needs to get there.

Shape letters as in `base`; C = 2 K, the ids and weights of one row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    DispatchHandle,
    FFNConnector,
    LinkSpec,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.checks import check_dispatch, check_output, limits
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackHub
from sglang.srt.disaggregation.afd.connector.meeting import Meeting
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.errors import AFDConfigError, PeerLost
from sglang.srt.distributed.device_communicators.pynccl_wrapper import (
    NCCLLibrary,
    buffer_type,
    cudaStream_t,
    ncclDataTypeEnum,
    ncclUniqueId,
)

logger = logging.getLogger(__name__)


class _Channel:
    """One communicator of all ranks, used in one direction for one microbatch."""

    def __init__(self, name: str, meeting: Meeting, world_size: int, world_rank: int) -> None:
        self._name = name
        self._nccl = NCCLLibrary()
        own = bytes(self._nccl.ncclGetUniqueId()) if world_rank == 0 else b"-"
        unique_id = ncclUniqueId.from_buffer_copy(meeting.gather(own)[0])
        try:
            self._comm = self._nccl.ncclCommInitRank(world_size, unique_id, world_rank)
        except RuntimeError as exc:
            raise PeerLost(
                f"{name} could not build its NCCL communicator: {exc}. Look at the logs of the "
                "other ranks; NCCL_DEBUG=INFO says more"
            ) from exc

    @contextmanager
    def group(self) -> Iterator[None]:
        """All sends and receives inside are one launch."""
        self._nccl.ncclGroupStart()
        try:
            yield
        finally:
            self._nccl.ncclGroupEnd()

    def send(self, data: torch.Tensor, dest: int, stream: torch.cuda.Stream) -> None:
        """Enqueue `data`, contiguous, of any dtype."""
        assert data.is_contiguous()
        self._nccl.ncclSend(
            buffer_type(data.data_ptr()),
            data.numel() * data.element_size(),
            ncclDataTypeEnum.ncclUint8,
            dest,
            self._comm,
            cudaStream_t(stream.cuda_stream),
        )

    def recv(self, data: torch.Tensor, source: int, stream: torch.cuda.Stream) -> None:
        """Enqueue the receipt of exactly `data`, contiguous."""
        assert data.is_contiguous()
        self._nccl.ncclRecv(
            buffer_type(data.data_ptr()),
            data.numel() * data.element_size(),
            ncclDataTypeEnum.ncclUint8,
            source,
            self._comm,
            cudaStream_t(stream.cuda_stream),
        )


class _Link:
    """The communicators of one rank: `out` and `back`, by microbatch. All connections exist."""

    def __init__(self, spec: LinkSpec, world_rank: int, rendezvous: Rendezvous) -> None:
        if spec.fp8:
            raise AFDConfigError(
                "--afd-connector nccl sends hidden states in the model's dtype, not FP8; "
                "set --afd-wire-dtype bf16, or choose another connector"
            )
        topology = spec.topology
        self.spec = spec
        self.name = topology.rank_name(world_rank)
        self.device = torch.device("cuda", torch.cuda.current_device())
        free_before, _ = torch.cuda.mem_get_info(self.device)
        meeting = Meeting(topology, world_rank, rendezvous, "nccl")
        self.out, self.back = (
            [
                _Channel(self.name, meeting, topology.world_size, world_rank)
                for _ in range(spec.microbatches)
            ]
            for _ in range(2)
        )
        attn = range(topology.attn_ranks)
        ffn = range(topology.attn_ranks, topology.world_size)
        # NCCL connects a pair when it first talks, which must not happen while a graph is captured.
        byte = torch.zeros(topology.world_size, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream()
        for channels, sources, dests in ((self.out, attn, ffn), (self.back, ffn, attn)):
            for channel in channels:
                with channel.group():
                    for peer in dests if world_rank in sources else ():
                        channel.send(byte[world_rank : world_rank + 1], peer, stream)
                    for peer in sources if world_rank in dests else ():
                        channel.recv(byte[peer : peer + 1], peer, stream)
        meeting.finish_device()
        free_after, _ = torch.cuda.mem_get_info(self.device)
        logger.info(
            "%s: connector nccl (NCCL %s) connects %d ranks with %d communicators; "
            "they take %.0f MiB of device memory",
            self.name,
            NCCLLibrary().ncclGetVersion(),
            topology.world_size,
            2 * spec.microbatches,
            (free_before - free_after) / 2**20,
        )


@dataclass(frozen=True, kw_only=True)
class _NcclHandle(DispatchHandle):
    num_rows: int  # on the wire, padding included


class NcclAttn(AttnConnector):
    """Attention rank `attn_rank`."""

    def __init__(self, spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous) -> None:
        self._spec = spec
        self._attn_rank = attn_rank
        self._link: _Link | None = _Link(spec, attn_rank, rendezvous)
        self._name, device = self._link.name, self._link.device
        self._streams = [torch.cuda.Stream(device) for _ in range(spec.microbatches)]
        with torch.inference_mode(False):
            self._hidden = [
                torch.zeros(spec.capacity, spec.hidden_size, dtype=spec.dtype, device=device)
                for _ in range(spec.microbatches)
            ]
            self._meta = [
                torch.full((spec.capacity, 2 * spec.topk), -1, dtype=torch.int32, device=device)
                for _ in range(spec.microbatches)
            ]

    @torch.no_grad()
    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        spec, microbatch = self._spec, transfer.microbatch
        num_rows = limits(spec, max_rows)[self._attn_rank]
        check_dispatch(
            spec, self._name, transfer, hidden_TH, topk_ids_TK, topk_weights_TK, num_rows
        )
        num_tokens = hidden_TH.shape[0]
        handle = _NcclHandle(transfer=transfer, num_tokens=num_tokens, num_rows=num_rows)
        if num_rows == 0:
            return handle
        # `combine` of the last transfer waited for its sends, so the buffers are free.
        hidden_RH, meta_RC = self._hidden[microbatch][:num_rows], self._meta[microbatch][:num_rows]
        hidden_RH[:num_tokens].copy_(hidden_TH)
        meta_RC[:num_tokens, : spec.topk].copy_(topk_ids_TK)
        meta_RC[:num_tokens, spec.topk :].copy_(topk_weights_TK.view(torch.int32))
        meta_RC[num_tokens:, : spec.topk].fill_(-1)
        stream = self._streams[microbatch]
        stream.wait_stream(torch.cuda.current_stream())
        channel = self._usable().out[microbatch]
        with channel.group():
            for ffn_rank in range(spec.topology.ffn_ranks):
                peer = spec.topology.ffn_world_rank(ffn_rank)
                channel.send(hidden_RH, peer, stream)
                channel.send(meta_RC, peer, stream)
        return handle

    @torch.no_grad()
    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        assert isinstance(handle, _NcclHandle)
        spec, microbatch = self._spec, handle.transfer.microbatch
        parts_NRH = torch.empty(
            spec.topology.ffn_ranks,
            handle.num_rows,
            spec.hidden_size,
            dtype=spec.dtype,
            device=self._hidden[microbatch].device,
        )
        if handle.num_rows == 0:
            return parts_NRH[0]
        current = torch.cuda.current_stream()
        channel = self._usable().back[microbatch]
        with channel.group():
            for ffn_rank in range(spec.topology.ffn_ranks):
                peer = spec.topology.ffn_world_rank(ffn_rank)
                channel.recv(parts_NRH[ffn_rank], peer, current)
        current.wait_stream(self._streams[microbatch])
        parts_NTH = parts_NRH[:, : handle.num_tokens]
        if spec.topology.ffn_ranks == 1:
            return parts_NTH[0]
        total_TH = parts_NTH[0].float()
        for part_TH in parts_NTH[1:]:
            total_TH += part_TH
        return total_TH.to(spec.dtype)

    def close(self) -> None:
        self._link = None  # NCCL keeps its communicators: see `_usable`

    def _usable(self) -> _Link:
        """The link. Communicators live as long as the process: destroying one waits for every
        graph that was captured with it, and for the other ranks, which may be gone."""
        assert self._link is not None, f"{self._name} used its nccl connector after close()"
        return self._link


class NcclFFN(FFNConnector[ReceivedBatch]):
    """FFN rank `ffn_rank`. A batch lives in buffers that the microbatch's next one overwrites."""

    def __init__(self, spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous) -> None:
        topology = spec.topology
        self._spec = spec
        self._link: _Link | None = _Link(spec, topology.ffn_world_rank(ffn_rank), rendezvous)
        self._name, device = self._link.name, self._link.device
        most_rows = topology.attn_ranks * spec.capacity
        local = [
            index if owner == ffn_rank else -1
            for owner, index in zip(topology.owner_of, topology.local_of, strict=True)
        ]
        with torch.inference_mode(False):
            # One entry more than experts: a masked id of -1 indexes the last one.
            self._local_E = torch.tensor([*local, -1], dtype=torch.int32, device=device)
            self._no_weight = torch.zeros((), dtype=torch.float32, device=device)
            self._hidden = [
                torch.zeros(most_rows, spec.hidden_size, dtype=spec.dtype, device=device)
                for _ in range(spec.microbatches)
            ]
            self._meta = [
                torch.full((most_rows, 2 * spec.topk), -1, dtype=torch.int32, device=device)
                for _ in range(spec.microbatches)
            ]

    @torch.no_grad()
    def receive(self, transfer: Transfer, max_rows: tuple[int, ...] | None = None) -> ReceivedBatch:
        spec, microbatch = self._spec, transfer.microbatch
        rows_per_rank = limits(spec, max_rows)
        num_rows = sum(rows_per_rank)
        hidden_RH, meta_RC = self._hidden[microbatch][:num_rows], self._meta[microbatch][:num_rows]
        if num_rows > 0:
            current = torch.cuda.current_stream()
            channel = self._usable().out[microbatch]
            parts = zip(hidden_RH.split(rows_per_rank), meta_RC.split(rows_per_rank), strict=True)
            with channel.group():
                for attn_rank, (part_RH, part_RC) in enumerate(parts):
                    if len(part_RH) > 0:
                        channel.recv(part_RH, attn_rank, current)
                        channel.recv(part_RC, attn_rank, current)
        ids_RK = self._local_E[meta_RC[:, : spec.topk].long()]
        weights_RK = meta_RC[:, spec.topk :].view(torch.float32)
        return ReceivedBatch(
            transfer=transfer,
            hidden_RH=hidden_RH,
            topk_ids_RK=ids_RK,
            topk_weights_RK=torch.where(ids_RK >= 0, weights_RK, self._no_weight),
            rows_per_rank=rows_per_rank,
        )

    @torch.no_grad()
    def send(self, batch: ReceivedBatch, out: torch.Tensor) -> None:
        check_output(self._spec, batch, out)
        if len(out) == 0:
            return
        current = torch.cuda.current_stream()
        channel = self._usable().back[batch.transfer.microbatch]
        out_RH = out.contiguous()
        with channel.group():
            for attn_rank, part_RH in enumerate(out_RH.split(batch.rows_per_rank)):
                if len(part_RH) > 0:
                    channel.send(part_RH, attn_rank, current)

    def close(self) -> None:
        self._link = None  # as in `NcclAttn`

    def _usable(self) -> _Link:
        assert self._link is not None, f"{self._name} used its nccl connector after close()"
        return self._link


def create_attn(
    spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> AttnConnector:
    return NcclAttn(spec, attn_rank, _address(rendezvous))


def create_ffn(spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub) -> FFNConnector:
    return NcclFFN(spec, ffn_rank, _address(rendezvous))


def _address(rendezvous: Rendezvous | LoopbackHub) -> Rendezvous:
    assert isinstance(rendezvous, Rendezvous), "nccl needs the address of a store"
    return rendezvous
