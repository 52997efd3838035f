"""Both roles in one process, one thread per rank: the executable specification of a connector.

Nothing here is tuned. Every other connector passes the same contract tests.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    DispatchHandle,
    FFNConnector,
    LinkSpec,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.checks import (
    Wait,
    check_dispatch,
    check_output,
    check_rows,
    limits,
)
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.routing import RankRoute, Router, sum_partials
from sglang.srt.disaggregation.afd.errors import AFDError


class _Message(NamedTuple):
    """Tokens on the way out (hidden states, ids, weights), or rows on the way back (one tensor)."""

    transfer: Transfer
    tensors: tuple[torch.Tensor, ...]


class LoopbackHub:
    """The mailboxes between all ranks of one link; one per (source, destination, microbatch)."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._changed = threading.Condition()
        self._boxes: defaultdict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self._closed: set[int] = set()

    def put(self, source: int, dest: int, message: _Message) -> None:
        with self._changed:
            if source in self._closed:
                name = self.spec.topology.rank_name(source)
                raise AFDError(f"{name} used its loopback connector after close()")
            self._boxes[source, dest, message.transfer.microbatch].append(message)
            self._changed.notify_all()

    def take(self, source: int, dest: int, transfer: Transfer, expected: str) -> _Message:
        """Wait for the next message of the microbatch, which must belong to `transfer`.

        What was sent before a close is still delivered.
        """
        name = self.spec.topology.rank_name
        wait = Wait(name(dest), name(source), transfer, expected)
        with self._changed:
            # Looked up under the lock: two threads that both miss it would make two boxes.
            box = self._boxes[source, dest, transfer.microbatch]
            arrived = self._changed.wait_for(
                lambda: box or {source, dest} & self._closed, timeout=self.spec.timeout_s
            )
            if dest in self._closed:
                raise AFDError(f"{wait.rank} used its loopback connector after close()")
            if not arrived:
                raise wait.deadline_exceeded(self.spec.timeout_s, "nothing")
            if not box:
                raise wait.peer_lost("its connector closed")
            message = box.popleft()
        if message.transfer != transfer:
            raise wait.plan_mismatch(message.transfer)
        return message

    def close(self, world_rank: int) -> None:
        with self._changed:
            self._closed.add(world_rank)
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True)
class _LoopbackHandle(DispatchHandle):
    routes: tuple[RankRoute, ...]  # one per FFN rank


class LoopbackAttn(AttnConnector):
    """Attention rank `attn_rank` of the hub's link."""

    def __init__(self, hub: LoopbackHub, attn_rank: int) -> None:
        self._hub, self._spec, self._world_rank = hub, hub.spec, attn_rank
        self._name = hub.spec.topology.rank_name(attn_rank)
        self._router = Router(hub.spec.topology)

    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        most = limits(self._spec, max_rows)[self._world_rank]
        check_dispatch(
            self._spec, self._name, transfer, hidden_TH, topk_ids_TK, topk_weights_TK, most
        )
        routes = self._router.split(topk_ids_TK, topk_weights_TK)
        for ffn_rank, route in enumerate(routes):
            rows_RH = hidden_TH[route.token_idx_R]
            message = _Message(transfer, (rows_RH, route.topk_ids_RK, route.topk_weights_RK))
            self._hub.put(self._world_rank, self._spec.topology.ffn_world_rank(ffn_rank), message)
        return _LoopbackHandle(transfer=transfer, num_tokens=hidden_TH.shape[0], routes=routes)

    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        assert isinstance(handle, _LoopbackHandle)
        partials = []
        for ffn_rank, route in enumerate(handle.routes):
            num_rows = len(route.token_idx_R)
            if num_rows == 0:
                continue
            (rows_RH,) = self._hub.take(
                self._spec.topology.ffn_world_rank(ffn_rank),
                self._world_rank,
                handle.transfer,
                f"{num_rows} result rows",
            ).tensors
            partials.append((route.token_idx_R, rows_RH))
        return sum_partials(handle.num_tokens, self._spec.hidden_size, self._spec.dtype, partials)

    def close(self) -> None:
        self._hub.close(self._world_rank)


class LoopbackFFN(FFNConnector):
    """FFN rank `ffn_rank` of the hub's link."""

    def __init__(self, hub: LoopbackHub, ffn_rank: int) -> None:
        self._hub, self._spec = hub, hub.spec
        self._world_rank = hub.spec.topology.ffn_world_rank(ffn_rank)

    def receive(self, transfer: Transfer, max_rows: tuple[int, ...] | None = None) -> ReceivedBatch:
        name = self._spec.topology.rank_name
        arrived = []
        for attn_rank, most in enumerate(limits(self._spec, max_rows)):
            message = self._hub.take(attn_rank, self._world_rank, transfer, "its tokens")
            num_rows = len(message.tensors[0])
            check_rows(name(self._world_rank), name(attn_rank), transfer, num_rows, most)
            arrived.append(message.tensors)
        hidden, topk_ids, topk_weights = zip(*arrived, strict=True)
        return ReceivedBatch(
            transfer=transfer,
            hidden_RH=torch.cat(hidden),
            topk_ids_RK=torch.cat(topk_ids),
            topk_weights_RK=torch.cat(topk_weights),
            rows_per_rank=tuple(len(rows_RH) for rows_RH in hidden),
        )

    def send(self, batch: ReceivedBatch, out_RH: torch.Tensor) -> None:
        check_output(self._spec, batch, out_RH)
        copy_RH = out_RH.clone()  # the caller may reuse its tensor at once
        for attn_rank, rows_RH in enumerate(copy_RH.split(batch.rows_per_rank)):
            if len(rows_RH) > 0:
                self._hub.put(self._world_rank, attn_rank, _Message(batch.transfer, (rows_RH,)))

    def close(self) -> None:
        self._hub.close(self._world_rank)


def create_attn(
    spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> AttnConnector:
    return LoopbackAttn(_hub(spec, rendezvous), attn_rank)


def create_ffn(spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub) -> FFNConnector:
    return LoopbackFFN(_hub(spec, rendezvous), ffn_rank)


def _hub(spec: LinkSpec, rendezvous: Rendezvous | LoopbackHub) -> LoopbackHub:
    assert isinstance(rendezvous, LoopbackHub), "loopback needs the hub that all its ranks share"
    assert rendezvous.spec == spec, (rendezvous.spec, spec)
    return rendezvous
