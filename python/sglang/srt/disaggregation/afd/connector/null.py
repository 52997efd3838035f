"""No transport at all, for benchmarks: each role runs alone, as if its peers answered at once.

The attention side gets its own hidden states back, so the period of its steps is what attention
costs without FFN ranks. On the FFN side every arrival is preset, so its steps are what the experts
cost without a wait. Answers are meaningless; a server refuses this connector unless it is told that
it is part of a benchmark (`config.build`).

What reaches the experts decides their time: `Arrivals` says which rows, by default a router that
spreads tokens evenly at random, or what a file recorded (`SGLANG_AFD_NULL_ARRIVALS`).

Shape letters as in `base`; A, most rows that all attention ranks may send together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.srt.disaggregation.afd import envs
from sglang.srt.disaggregation.afd.connector.base import (
    BLOCK_ROWS,
    AttnConnector,
    DispatchHandle,
    ExpertMajorBatch,
    FFNConnector,
    LinkSpec,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.checks import check_dispatch, limits
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackHub
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.errors import AFDConfigError

ROWS, EXPERT_MAJOR = "rows", "expert-major"
_GROUP = 128  # values of a row that share a scale
_FP8_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class _NullHandle(DispatchHandle):
    hidden_TH: torch.Tensor


class NullAttn(AttnConnector):
    """Attention rank `attn_rank`, which talks to nobody."""

    def __init__(self, spec: LinkSpec, attn_rank: int) -> None:
        self._spec = spec
        self._attn_rank = attn_rank
        self._name = spec.topology.rank_name(attn_rank)

    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        """Checks what every connector checks, and keeps the tensor itself: a copy would be timed."""
        most = limits(self._spec, max_rows)[self._attn_rank]
        check_dispatch(
            self._spec, self._name, transfer, hidden_TH, topk_ids_TK, topk_weights_TK, most
        )
        return _NullHandle(transfer=transfer, num_tokens=hidden_TH.shape[0], hidden_TH=hidden_TH)

    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        """The tensor that was dispatched."""
        assert isinstance(handle, _NullHandle)
        return handle.hidden_TH

    def close(self) -> None:
        pass


class Arrivals:
    """What each MoE layer's router said about the A rows that arrive: made on CPU, once per layer.

    With `path`, a .safetensors file that holds `ids` [layers, rows, K], global expert ids, and
    `weights` of the same shape. Rows are taken from the start, again if there are too few.
    """

    def __init__(self, spec: LinkSpec, path: Path | None = None) -> None:
        self._spec = spec
        self._num_rows = spec.topology.attn_ranks * spec.capacity
        self._recorded: dict[str, torch.Tensor] | None = None
        if path is not None:
            from safetensors.torch import load_file

            self._recorded = load_file(path)
            found = {name: tuple(each.shape) for name, each in self._recorded.items()}
            shapes = {found.get("ids"), found.get("weights")}
            shape = found.get("ids", ())
            if len(shapes) != 1 or len(shape) != 3 or shape[2] != spec.topk or 0 in shape:
                raise AFDConfigError(
                    f"{envs.NULL_ARRIVALS}={path} holds {found}; record ids and weights of shape "
                    f"[layers, rows, {spec.topk}]"
                )

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Global ids [A, K] int64 and weights [A, K] float32 of MoE layer `layer`."""
        if self._recorded is not None:
            ids_LRK, weights_LRK = self._recorded["ids"], self._recorded["weights"]
            rows_A = torch.arange(self._num_rows) % ids_LRK.shape[1]
            layer %= len(ids_LRK)
            return ids_LRK[layer, rows_A].long(), weights_LRK[layer, rows_A].float()
        spec = self._spec
        generator = torch.Generator().manual_seed(layer)
        scores_AE = torch.rand(self._num_rows, spec.topology.num_experts, generator=generator)
        weights_AK, ids_AK = scores_AE.topk(spec.topk, dim=1)
        return ids_AK, weights_AK / weights_AK.sum(dim=1, keepdim=True)


class NullFFN(FFNConnector[ReceivedBatch | ExpertMajorBatch]):
    """FFN rank `ffn_rank`, to which everything has arrived already, and which answers nobody.

    Args:
        routing: ids and weights by layer, see `Arrivals`.
        form: `ROWS`, what `nccl` delivers, or `EXPERT_MAJOR`, what `deepep` delivers.
    """

    def __init__(
        self,
        spec: LinkSpec,
        ffn_rank: int,
        routing: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
        form: str = ROWS,
    ) -> None:
        topology = spec.topology
        self._spec, self._routing, self._device = spec, routing, device
        self._expert_major = form == EXPERT_MAJOR
        local = [
            index if owner == ffn_rank else -1
            for owner, index in zip(topology.owner_of, topology.local_of, strict=True)
        ]
        self._local_E = torch.tensor([*local, -1], dtype=torch.int32)
        shape: tuple[int, ...] = (topology.attn_ranks * spec.capacity, spec.hidden_size)
        if self._expert_major:
            room = topology.world_size * spec.capacity  # as DeepEP has it, in whole blocks
            room = -(-room // BLOCK_ROWS) * BLOCK_ROWS
            shape = (topology.slots_per_rank, room, spec.hidden_size)
        # One set of values for all layers: only the number of rows matters to the time.
        self._scales: torch.Tensor | None = None
        with torch.inference_mode(False):
            generator = torch.Generator(device).manual_seed(0)
            self._hidden = torch.empty(shape, dtype=spec.dtype, device=device)
            self._hidden.normal_(generator=generator)
            if spec.fp8:
                assert self._expert_major, "rows travel in the model's dtype"
                self._hidden, self._scales = _to_fp8(self._hidden)
        self._preset: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def receive(
        self, transfer: Transfer, max_rows: tuple[int, ...] | None = None
    ) -> ReceivedBatch | ExpertMajorBatch:
        """A layer's first call, in a warm-up and never in a capture, puts its routing on the device."""
        spec, rows_per_rank = self._spec, limits(self._spec, max_rows)
        num_rows = sum(rows_per_rank)
        key = (transfer.layer, num_rows)
        if key not in self._preset:
            self._preset[key] = self._arrived(*key)
        first, second = self._preset[key]
        if self._expert_major:
            entries = num_rows * spec.topk
            return ExpertMajorBatch(
                transfer=transfer,
                hidden_ELH=self._hidden,
                scales_ELG=self._scales,
                rows_per_expert_E=first,
                expected_rows=max(1, -(-entries // spec.topology.num_experts)),
            )
        return ReceivedBatch(
            transfer=transfer,
            hidden_RH=self._hidden[:num_rows],
            topk_ids_RK=first,
            topk_weights_RK=second,
            rows_per_rank=rows_per_rank,
        )

    def _arrived(self, layer: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids within this rank and weights [R, K]; if expert-major, rows per slot [E], and weights."""
        ids_AK, weights_AK = self._routing(layer)
        ids_RK = self._local_E[ids_AK[:num_rows]]
        weights_RK = weights_AK[:num_rows].masked_fill(ids_RK < 0, 0.0)
        if self._expert_major:
            slots = self._spec.topology.slots_per_rank
            ids_RK = torch.bincount(ids_RK[ids_RK >= 0], minlength=slots).int()
        with torch.inference_mode(False):
            return ids_RK.to(self._device), weights_RK.to(self._device)

    def send(self, batch: ReceivedBatch | ExpertMajorBatch, out: torch.Tensor) -> None:
        """Checks the shape and drops it."""
        hidden = batch.hidden_ELH if isinstance(batch, ExpertMajorBatch) else batch.hidden_RH
        assert out.shape == hidden.shape, (out.shape, hidden.shape)
        assert out.dtype == self._spec.dtype, out.dtype

    def close(self) -> None:
        self._preset.clear()


def _to_fp8(hidden_ELH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values, and scales [E, L, G] that are column-major in L and G."""
    slots, length, hidden = hidden_ELH.shape
    groups = hidden_ELH.float().view(slots, length, hidden // _GROUP, _GROUP)
    scales_ELG = groups.abs().amax(dim=3) / _FP8_MAX
    values = (groups / scales_ELG[..., None]).to(torch.float8_e4m3fn)
    return values.view(slots, length, hidden), scales_ELG.transpose(1, 2).contiguous().mT


def create_attn(
    spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> AttnConnector:
    return NullAttn(spec, attn_rank)


def create_ffn(spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub) -> FFNConnector:
    form = envs.text(envs.NULL_FORM) or ROWS
    if form not in (ROWS, EXPERT_MAJOR):
        raise AFDConfigError(f"{envs.NULL_FORM}={form} is unknown; use {ROWS} or {EXPERT_MAJOR}")
    if spec.fp8:
        form = EXPERT_MAJOR  # as every connector delivers FP8
    path = envs.text(envs.NULL_ARRIVALS)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return NullFFN(spec, ffn_rank, Arrivals(spec, Path(path) if path else None), device, form)
