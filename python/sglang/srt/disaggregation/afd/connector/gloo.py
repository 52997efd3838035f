"""CPU tensors over TCP, through gloo's point-to-point messages.

Per attention rank, FFN rank and transfer: one header (always), which carries the tokens too if
they are few, or is followed by one message with the tokens; and one message with their results
(if there were tokens). Everything travels as bytes, so any dtype does. Shape letters as in `base`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    DispatchHandle,
    FFNConnector,
    LinkSpec,
    ReceivedBatch,
    TellsWaits,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.checks import (
    check_dispatch,
    check_output,
    check_rows,
    limits,
)
from sglang.srt.disaggregation.afd.connector.gloo_link import (
    NUM_MICROBATCHES,
    GlooLink,
    Kind,
    Pending,
)
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackHub
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.routing import RankRoute, Router, sum_partials
from sglang.srt.disaggregation.afd.errors import AFDError

logger = logging.getLogger(__name__)

_MAGIC = 0x41464400_00000001  # "AFD", and the version of this wire format
_HEADER_FIELDS = 6  # magic, the four fields of a Transfer, number of rows
_HEADER_BYTES = 8 * _HEADER_FIELDS
# Longest header message with tokens in it. The receive for it is posted before anybody knows its
# length (gloo accepts a message shorter than the buffer), which saves a round trip at decode.
_INLINE_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class _GlooHandle(DispatchHandle):
    """One route per FFN rank; every message that was sent, and the results that are to come."""

    routes: tuple[RankRoute, ...]
    sends: tuple[Pending, ...]
    results: tuple[Pending | None, ...]  # per FFN rank; None where no row went


class GlooAttn(AttnConnector, TellsWaits):
    """Attention rank `attn_rank`."""

    def __init__(self, spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous) -> None:
        self._spec = spec
        self._attn_rank = attn_rank
        self._link = GlooLink(spec, attn_rank, rendezvous)
        self._router = Router(spec.topology)
        # By microbatch, from dispatch to combine. gloo drops an unsent message whose buffer goes,
        # so a caller that loses its handle must not take the buffers with it.
        self._open: dict[int, DispatchHandle] = {}

    @torch.no_grad()
    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        spec, link, microbatch = self._spec, self._link, transfer.microbatch
        most = limits(spec, max_rows)[self._attn_rank]
        check_dispatch(spec, link.name, transfer, hidden_TH, topk_ids_TK, topk_weights_TK, most)
        assert microbatch not in self._open, f"{transfer} starts before the last one is combined"
        routes = self._router.split(topk_ids_TK, topk_weights_TK)
        sends = []
        for ffn_rank, route in enumerate(routes):
            peer = spec.topology.ffn_world_rank(ffn_rank)
            data = _pack(spec, transfer, hidden_TH, route)
            if len(data) <= _INLINE_BYTES:
                sends.append(link.send(peer, Kind.HEADER, microbatch, data))
            else:
                header, tokens = data.tensor_split((_HEADER_BYTES,))
                sends.append(link.send(peer, Kind.HEADER, microbatch, header))
                sends.append(link.send(peer, Kind.TOKENS, microbatch, tokens))
        row_bytes = spec.hidden_size * spec.dtype.itemsize
        results = tuple(
            link.recv(
                spec.topology.ffn_world_rank(ffn_rank),
                Kind.RESULT,
                microbatch,
                len(route.token_idx_R) * row_bytes,
            )
            if len(route.token_idx_R) > 0
            else None
            for ffn_rank, route in enumerate(routes)
        )
        handle = self._open[microbatch] = _GlooHandle(
            transfer=transfer,
            num_tokens=hidden_TH.shape[0],
            routes=routes,
            sends=tuple(sends),
            results=results,
        )
        return handle

    @torch.no_grad()
    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        assert isinstance(handle, _GlooHandle)
        spec, link, transfer = self._spec, self._link, handle.transfer
        deadline = time.monotonic() + spec.timeout_s
        for send in handle.sends:
            link.wait(send, transfer, "that it takes its tokens", deadline)
        partials = []
        for route, result in zip(handle.routes, handle.results, strict=True):
            if result is not None:
                num_rows = len(route.token_idx_R)
                data = link.wait(result, transfer, f"{num_rows} result rows", deadline)
                rows_RH = data.view(spec.dtype).view(num_rows, spec.hidden_size)
                partials.append((route.token_idx_R, rows_RH))
        del self._open[transfer.microbatch]
        return sum_partials(handle.num_tokens, spec.hidden_size, spec.dtype, partials)

    def set_on_wait(self, on_wait: Callable[[int, float], None]) -> None:
        self._link.set_on_wait(on_wait)

    def close(self) -> None:
        self._open.clear()
        self._link.close()


class GlooFFN(FFNConnector, TellsWaits):
    """FFN rank `ffn_rank`."""

    def __init__(self, spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous) -> None:
        self._spec = spec
        self._link = GlooLink(spec, spec.topology.ffn_world_rank(ffn_rank), rendezvous)
        # Posted one transfer ahead: gloo sends a message only after its receive was posted.
        self._headers = [self._post_headers(mb) for mb in range(NUM_MICROBATCHES)]
        self._results: list[list[Pending]] = [[] for _ in range(NUM_MICROBATCHES)]
        self._last: list[Transfer | None] = [None] * NUM_MICROBATCHES

    @torch.no_grad()
    def receive(self, transfer: Transfer, max_rows: tuple[int, ...] | None = None) -> ReceivedBatch:
        spec, link, microbatch = self._spec, self._link, transfer.microbatch
        deadline = time.monotonic() + spec.timeout_s
        self._finish_results(microbatch, deadline)
        num_rows, tokens = [], []
        allowed = limits(spec, max_rows)
        for pending, most in zip(self._headers[microbatch], allowed, strict=True):
            data = link.wait(pending, transfer, "a header", deadline)
            header = data[:_HEADER_BYTES].view(torch.int64).tolist()
            num_rows.append(self._check_header(header, pending.peer, transfer, most))
            end = _HEADER_BYTES + num_rows[-1] * _token_bytes(spec)
            tokens.append(
                data[_HEADER_BYTES:end]
                if end <= _INLINE_BYTES
                else link.recv(pending.peer, Kind.TOKENS, microbatch, end - _HEADER_BYTES)
            )
        self._headers[microbatch] = self._post_headers(microbatch)
        parts = []
        for found, rows in zip(tokens, num_rows, strict=True):
            if isinstance(found, Pending):
                found = link.wait(found, transfer, f"{rows} tokens", deadline)
            parts.append(_views(spec, found, rows))
        hidden, topk_ids, topk_weights = zip(*parts, strict=True)
        return ReceivedBatch(
            transfer=transfer,
            hidden_RH=torch.cat(hidden),
            topk_ids_RK=torch.cat(topk_ids),
            topk_weights_RK=torch.cat(topk_weights),
            rows_per_rank=tuple(num_rows),
        )

    @torch.no_grad()
    def send(self, batch: ReceivedBatch, out_RH: torch.Tensor) -> None:
        check_output(self._spec, batch, out_RH)
        microbatch = batch.transfer.microbatch
        copy_RH = out_RH.clone(memory_format=torch.contiguous_format)  # it may be reused at once
        self._results[microbatch] = [
            self._link.send(attn_rank, Kind.RESULT, microbatch, rows_RH)
            for attn_rank, rows_RH in enumerate(copy_RH.split(batch.rows_per_rank))
            if len(rows_RH) > 0
        ]
        self._last[microbatch] = batch.transfer

    def set_on_wait(self, on_wait: Callable[[int, float], None]) -> None:
        self._link.set_on_wait(on_wait)

    def close(self) -> None:
        try:
            deadline = time.monotonic() + self._spec.timeout_s
            for microbatch in range(NUM_MICROBATCHES):
                self._finish_results(microbatch, deadline)
        except AFDError as error:
            logger.info(
                "%s closes its gloo connector with results unsent: %s", self._link.name, error
            )
        self._headers.clear()
        self._link.close()

    def _post_headers(self, microbatch: int) -> list[Pending]:
        return [
            self._link.recv(attn_rank, Kind.HEADER, microbatch, _INLINE_BYTES)
            for attn_rank in range(self._spec.topology.attn_ranks)
        ]

    def _finish_results(self, microbatch: int, deadline: float) -> None:
        """Wait until the last results have left; a peer that went on has taken them long ago."""
        last = self._last[microbatch]
        results, self._results[microbatch] = self._results[microbatch], []
        for pending in results:
            assert last is not None
            self._link.wait(pending, last, "that it takes its result rows", deadline)

    def _check_header(self, header: list[int], peer: int, transfer: Transfer, most: int) -> int:
        """Return the number of rows that `peer` announces.

        Raises:
            PlanMismatch, CapacityExceeded
        """
        link, (magic, *fields, num_rows) = self._link, header
        if magic != _MAGIC:
            wait = link.describe(peer, transfer, "a header")
            raise link.fail(wait.plan_mismatch(f"magic {magic:#x} instead of {_MAGIC:#x}"))
        if Transfer(*fields) != transfer:
            wait = link.describe(peer, transfer, "a header")
            raise link.fail(wait.plan_mismatch(Transfer(*fields)))
        peer_name = self._spec.topology.rank_name(peer)
        try:
            check_rows(link.name, peer_name, transfer, num_rows, most)
        except AFDError as error:
            raise link.fail(error) from None
        return num_rows


def _token_bytes(spec: LinkSpec) -> int:
    """Bytes of one token on the wire: K ids, K weights, H hidden values."""
    return 8 * spec.topk + spec.hidden_size * spec.dtype.itemsize


def _views(spec: LinkSpec, data: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Hidden states [R, H], ids [R, K] and weights [R, K] within one message of tokens.

    Ids and weights come first, because a view of 4-byte values must start on such a boundary.
    """
    entry_bytes = 4 * num_rows * spec.topk
    ids, weights, hidden = data.tensor_split((entry_bytes, 2 * entry_bytes))
    return (
        hidden.view(spec.dtype).view(num_rows, spec.hidden_size),
        ids.view(torch.int32).view(num_rows, spec.topk),
        weights.view(torch.float32).view(num_rows, spec.topk),
    )


def _pack(
    spec: LinkSpec, transfer: Transfer, hidden_TH: torch.Tensor, route: RankRoute
) -> torch.Tensor:
    """Header and tokens in one buffer."""
    num_rows = len(route.token_idx_R)
    data = torch.empty(_HEADER_BYTES + num_rows * _token_bytes(spec), dtype=torch.uint8)
    data[:_HEADER_BYTES].view(torch.int64).copy_(torch.tensor([_MAGIC, *transfer, num_rows]))
    hidden_RH, topk_ids_RK, topk_weights_RK = _views(spec, data[_HEADER_BYTES:], num_rows)
    torch.index_select(hidden_TH, 0, route.token_idx_R, out=hidden_RH)
    topk_ids_RK.copy_(route.topk_ids_RK)
    topk_weights_RK.copy_(route.topk_weights_RK)
    return data


def create_attn(
    spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> AttnConnector:
    return GlooAttn(spec, attn_rank, _address(rendezvous))


def create_ffn(spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub) -> FFNConnector:
    return GlooFFN(spec, ffn_rank, _address(rendezvous))


def _address(rendezvous: Rendezvous | LoopbackHub) -> Rendezvous:
    assert isinstance(rendezvous, Rendezvous), "gloo needs the address of a store"
    return rendezvous
