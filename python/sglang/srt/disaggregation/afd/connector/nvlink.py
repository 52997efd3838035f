"""Our own kernels (`sgl-kernel/`): one-sided writes into symmetric memory over NVLink.

An attention rank writes a token once to each FFN rank that owns one of its experts, and each of
those writes one BF16 row back. Nothing is asked for and nothing is confirmed: flags count what has
arrived, and epochs in device memory say what to wait for, so a captured graph holds no constant
that ages.

With FP8 on the wire the rows are handed on by expert, as a masked grouped GEMM takes them, and the
weighted sum of a token's experts is taken where it is sent back. With BF16 they stay where they
arrived, and the experts' kernel takes the sum.

A wait that runs out ends its kernel and all that follow on this rank, and leaves its reason in host
memory: `failure`. In a graph that is after `LinkSpec.timeout_s`; outside of one, where a peer may
be compiling a kernel, after the rendezvous's, unless the peer's silence ends the rank before.

Shape letters as in `base`.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
from torch.distributed import PrefixStore

from sglang.srt.disaggregation.afd import envs
from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    DispatchHandle,
    ExpertMajorBatch,
    FFNConnector,
    LinkSpec,
    ReceivedBatch,
    TellsFailure,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.checks import check_dispatch, check_output, limits
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackHub
from sglang.srt.disaggregation.afd.connector.meeting import Meeting
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.store import join_store
from sglang.srt.disaggregation.afd.errors import (
    AFDConfigError,
    AFDError,
    DeadlineExceeded,
    PeerLost,
)

logger = logging.getLogger(__name__)

GROUP = 128  # values that share a scale; H is a multiple
MAX_TOPK = 16
MAX_RANKS = 64  # of each role
# Most blocks of a kernel per SM. A decode step takes far fewer, as many as it has work for; and both
# microbatches share one stream, so that there is nobody to leave SMs to.
ATTN_BLOCKS_PER_SM = 1
FFN_BLOCKS_PER_SM = 2
_FAREWELL_S = 5.0

_links = itertools.count()  # torch wants a name per group and process


def check_spec(spec: LinkSpec) -> None:
    """Refuse what the kernels cannot do.

    Raises:
        AFDConfigError: names the flag.
    """
    topology = spec.topology
    other = "choose --afd-connector nccl"
    if spec.dtype != torch.bfloat16:
        raise AFDConfigError(
            f"--afd-connector nvlink moves bfloat16 and the model runs in {spec.dtype}; "
            f"set --dtype bfloat16, or {other}"
        )
    if spec.hidden_size % GROUP:
        raise AFDConfigError(
            f"--afd-connector nvlink takes hidden sizes that are multiples of {GROUP}; the model of "
            f"--model-path has {spec.hidden_size}; {other}"
        )
    if spec.topk > MAX_TOPK:
        raise AFDConfigError(
            f"--afd-connector nvlink routes a token to at most {MAX_TOPK} experts; the model of "
            f"--model-path has top-{spec.topk}; {other}"
        )
    if max(topology.attn_ranks, topology.ffn_ranks) > MAX_RANKS:
        raise AFDConfigError(
            f"--afd-attn-ranks {topology.attn_ranks} and --afd-ffn-ranks {topology.ffn_ranks}: "
            f"--afd-connector nvlink joins at most {MAX_RANKS} of each; {other}"
        )


class _Where(msgspec.Struct, frozen=True):
    """Where a rank runs."""

    host: str
    boot: str
    bytes: int


class _Link:
    """This rank's buffer in the symmetric memory of all ranks, and the others' as it sees them."""

    def __init__(self, spec: LinkSpec, world_rank: int, rendezvous: Rendezvous) -> None:
        check_spec(spec)
        self.spec = spec
        topology = spec.topology
        self.name = topology.rank_name(world_rank)
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Outside of graphs a peer may be compiling a kernel, as it may while it loads. If it is lost,
        # its silence ends this rank sooner.
        self.eager_timeout_s = max(spec.timeout_s, rendezvous.timeout_s)
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.ends = _ends()
        self.shape = self.ends.Shape(
            attn_ranks=topology.attn_ranks,
            ffn_ranks=topology.ffn_ranks,
            num_experts=topology.num_experts,
            hidden=spec.hidden_size,
            topk=spec.topk,
            capacity=spec.capacity,
            microbatches=spec.microbatches,
            fp8=spec.fp8,
        )
        try:
            num_bytes = self.ends.buffer_bytes(self.shape, self.device)
        except RuntimeError as exc:
            raise AFDConfigError(
                f"--afd-connector nvlink has no kernels for this GPU: {exc}. Or choose "
                "--afd-connector nccl"
            ) from exc
        self.meeting = Meeting(topology, world_rank, rendezvous, "nvlink")
        self._check_host(world_rank, num_bytes)
        envs.set_default("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not used, and not everywhere
        group = f"afd-nvlink-{next(_links)}"
        store = PrefixStore(f"{rendezvous.namespace}/nvlink-memory", join_store(rendezvous))
        # A group without a backend: its ranks meet through the store and exchange nothing else.
        self._group = ProcessGroup(store, world_rank, topology.world_size)
        _register_process_group(group, self._group)
        with torch.inference_mode(False):
            self.buffer = _SymmetricMemory.empty_strided_p2p(
                (num_bytes,), (1,), torch.uint8, self.device, group
            )
            self.buffer.zero_()
        self.meeting.finish_device()
        try:
            self._memory = _SymmetricMemory.rendezvous(self.buffer, group)
        except RuntimeError as exc:
            raise PeerLost(
                f"{self.name} could not map the memory of its peers over NVLink: {exc}. Look at the "
                "logs of the other ranks; --afd-connector nccl needs no such mapping"
            ) from exc
        self.addresses: list[int] = list(self._memory.buffer_ptrs)
        self.meeting.gather(b"mapped")  # and zeroed: from here on a peer may write
        logger.info(
            "%s: connector nvlink joins %d ranks; its buffer takes %.1f MiB of device memory",
            self.name,
            topology.world_size,
            num_bytes / 2**20,
        )

    def _check_host(self, world_rank: int, num_bytes: int) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        here = _Where(host=socket.gethostname(), boot=boot, bytes=num_bytes)
        found = [
            msgspec.msgpack.decode(each, type=_Where)
            for each in self.meeting.gather(msgspec.msgpack.encode(here))
        ]
        for rank, there in enumerate(found):
            if there.boot != here.boot:
                raise AFDConfigError(
                    f"--afd-connector nvlink joins ranks of one host, and {self.name} runs on "
                    f"{here.host}, {self.spec.topology.rank_name(rank)} on {there.host}; choose "
                    "--afd-connector deepep or nccl"
                )
            if there.bytes != here.bytes:
                raise AFDConfigError(
                    f"--afd-connector nvlink: {self.name} needs a buffer of {here.bytes} bytes and "
                    f"{self.spec.topology.rank_name(rank)} one of {there.bytes}: their versions of "
                    "sglang-afd-kernel differ; install the same everywhere"
                )

    def failure_of(self, end: Any) -> AFDError | None:
        found = end.failure
        if found is None:
            return None
        peer = self.spec.topology.rank_name(found.peer)
        return DeadlineExceeded(
            f"{self.name} gave up waiting on its GPU for {peer} at MoE layer {found.layer}, "
            f"microbatch {found.microbatch}, {found.operation} of epoch {found.epoch}: expected "
            f"{found.expected} credits, seen {found.seen}. Look at the log of {peer}; if "
            "it is only slow, raise --afd-peer-timeout"
        )

    def close(self) -> None:
        """Leave together, so that nobody writes into memory that is gone."""
        try:
            self.meeting.finish_device(_FAREWELL_S)
            self.meeting.gather(b"idle", _FAREWELL_S)
        except DeadlineExceeded as error:
            logger.warning(
                "%s leaves its symmetric memory to the end of the process: %s", self.name, error
            )


class _Side(TellsFailure):
    """What both sides do with their link."""

    def __init__(self, link: _Link, end: Any) -> None:
        self._link: _Link | None = link
        self._end = end

    def failure(self) -> AFDError | None:
        return None if self._link is None else self._link.failure_of(self._end)

    def _usable(self) -> _Link:
        """The link.

        Raises:
            DeadlineExceeded: an earlier wait of this rank ran out.
        """
        if self._link is None:
            raise AFDError("a rank used its nvlink connector after close()")
        error = self._link.failure_of(self._end)
        if error is not None:
            raise error
        return self._link

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


@dataclass(frozen=True, kw_only=True)
class _NvlinkHandle(DispatchHandle):
    topk_ids_TK: torch.Tensor


class NvlinkAttn(_Side, AttnConnector):
    """Attention rank `attn_rank`."""

    def __init__(self, spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous) -> None:
        self._spec = spec
        self._attn_rank = attn_rank
        link = _Link(spec, attn_rank, rendezvous)
        self._name = link.name
        end = link.ends.AttnEnd(
            link.shape,
            attn_rank,
            link.buffer,
            link.addresses[spec.topology.attn_ranks :],
            timeout_s=spec.timeout_s,
            eager_timeout_s=link.eager_timeout_s,
            most_blocks=envs.integer(envs.NVLINK_BLOCKS) or ATTN_BLOCKS_PER_SM * link.num_sms,
        )
        super().__init__(link, end)

    @torch.no_grad()
    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        spec = self._spec
        self._usable()
        rows = limits(spec, max_rows)
        check_dispatch(
            spec,
            self._name,
            transfer,
            hidden_TH,
            topk_ids_TK,
            topk_weights_TK,
            rows[self._attn_rank],
        )
        if topk_ids_TK.dtype not in (torch.int32, torch.int64):
            topk_ids_TK = topk_ids_TK.to(torch.int32)
        ids_TK = topk_ids_TK.contiguous()
        self._end.dispatch(
            transfer.microbatch,
            hidden_TH.contiguous(),
            ids_TK,
            topk_weights_TK.contiguous(),
            max_rows=rows,
            layer=transfer.layer,
        )
        return _NvlinkHandle(transfer=transfer, num_tokens=hidden_TH.shape[0], topk_ids_TK=ids_TK)

    @torch.no_grad()
    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        assert isinstance(handle, _NvlinkHandle)
        link = self._usable()
        out_TH = torch.empty(
            handle.num_tokens, self._spec.hidden_size, dtype=self._spec.dtype, device=link.device
        )
        transfer = handle.transfer
        self._end.combine(transfer.microbatch, handle.topk_ids_TK, out_TH, layer=transfer.layer)
        return out_TH


@dataclass(frozen=True, kw_only=True)
class _NvlinkExpertBatch(ExpertMajorBatch):
    rows_per_rank: tuple[int, ...]


class NvlinkFFN(_Side, FFNConnector[ReceivedBatch | ExpertMajorBatch]):
    """FFN rank `ffn_rank`. A batch lives in memory that the microbatch's next one overwrites."""

    def __init__(self, spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous) -> None:
        topology = spec.topology
        self._spec = spec
        link = _Link(spec, topology.ffn_world_rank(ffn_rank), rendezvous)
        end = link.ends.FFNEnd(
            link.shape,
            ffn_rank,
            link.buffer,
            link.addresses[: topology.attn_ranks],
            timeout_s=spec.timeout_s,
            eager_timeout_s=link.eager_timeout_s,
            most_blocks=FFN_BLOCKS_PER_SM * link.num_sms,
            by_expert=spec.fp8,
        )
        super().__init__(link, end)

    @torch.no_grad()
    def receive(
        self, transfer: Transfer, max_rows: tuple[int, ...] | None = None
    ) -> ReceivedBatch | ExpertMajorBatch:
        self._usable()
        rows_per_rank = limits(self._spec, max_rows)
        num_rows, layer = sum(rows_per_rank), transfer.layer
        if not self._spec.fp8:
            rows = self._end.receive(transfer.microbatch, num_rows, layer=layer)
            return ReceivedBatch(
                transfer=transfer,
                hidden_RH=rows.hidden_RH,
                topk_ids_RK=rows.topk_ids_RK,
                topk_weights_RK=rows.topk_weights_RK,
                rows_per_rank=rows_per_rank,
            )
        batch = self._end.receive_by_expert(transfer.microbatch, num_rows, layer=layer)
        entries = num_rows * self._spec.topk
        return _NvlinkExpertBatch(
            transfer=transfer,
            hidden_ELH=batch.hidden_ELH,
            scales_ELG=batch.scales_ELG,
            rows_per_expert_E=batch.rows_per_expert_E,
            expected_rows=max(1, -(-entries // self._spec.topology.num_experts)),
            rows_per_rank=rows_per_rank,
        )

    @torch.no_grad()
    def send(self, batch: ReceivedBatch | ExpertMajorBatch, out: torch.Tensor) -> None:
        self._usable()
        if isinstance(batch, ReceivedBatch):
            check_output(self._spec, batch, out)
        else:
            assert isinstance(batch, _NvlinkExpertBatch)
            assert out.shape == batch.hidden_ELH.shape, (out.shape, batch.hidden_ELH.shape)
            assert out.dtype == self._spec.dtype, out.dtype
        self._end.send(
            batch.transfer.microbatch,
            out.contiguous(),
            max_rows=batch.rows_per_rank,
            layer=batch.transfer.layer,
        )


def _ends() -> Any:
    """`sglang_afd_kernel.ends`.

    Raises:
        AFDConfigError: not installed.
    """
    try:
        return importlib.import_module("sglang_afd_kernel.ends")
    except ImportError as exc:
        raise AFDConfigError(
            f"--afd-connector nvlink cannot import sglang_afd_kernel: {exc}. Install "
            "sglang-afd-kernel from sgl-kernel/, or choose --afd-connector nccl"
        ) from exc


def create_attn(
    spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> AttnConnector:
    return NvlinkAttn(spec, attn_rank, _address(rendezvous))


def create_ffn(spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub) -> FFNConnector:
    return NvlinkFFN(spec, ffn_rank, _address(rendezvous))


def _address(rendezvous: Rendezvous | LoopbackHub) -> Rendezvous:
    assert isinstance(rendezvous, Rendezvous), "nvlink needs the address of a store"
    return rendezvous
