"""What every rank of a GPU link plays, and what must come out: to the last bit.

Inputs are a function of (case, transfer, attention rank), so that every rank knows what the others
sent. Their values are chosen so that FP32 sums are exact in any order: expert outputs and weights
are small multiples of powers of two, and a result is rounded once per rank that sums (DeepEP: the
attention rank; others: each FFN rank and the attention rank).
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from sglang.srt.disaggregation.afd import sharing
from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    DispatchHandle,
    ExpertMajorBatch,
    FFNConnector,
    LinkSpec,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.errors import CapacityExceeded
from sglang.srt.disaggregation.afd.topology import Topology

CAPACITY = 64
TOPK = 8
HIDDEN = 2048
EXPERTS = 30  # two FFN ranks share them evenly, four do not
LAYERS = 8
REPLAYS = 20
DEVICE_TIMEOUT_S = 60


class Tokens(NamedTuple):
    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


def _keep(ids_TK: torch.Tensor) -> torch.Tensor:
    return ids_TK


def _one_expert(ids_TK: torch.Tensor) -> torch.Tensor:
    ids_TK[:, 0] = 1
    ids_TK[:, 1:] = -1
    return ids_TK


def _some_entries(ids_TK: torch.Tensor) -> torch.Tensor:
    entry = torch.arange(ids_TK.numel(), device=ids_TK.device).view_as(ids_TK)
    return ids_TK.masked_fill(entry % 3 == 1, -1)


def _every_other_token(ids_TK: torch.Tensor) -> torch.Tensor:
    ids_TK[::2] = -1
    return ids_TK


@dataclass(frozen=True, kw_only=True)
class Case:
    """One eager step of two layers.

    Attributes:
        num_tokens: of attention rank i.
        max_rows: of attention rank i; None leaves it to the connector.
    """

    name: str
    num_tokens: Callable[[int], int]
    max_rows: Callable[[int], int] | None = None
    mask: Callable[[torch.Tensor], torch.Tensor] = _keep
    microbatches: int = 1
    ids_dtype: torch.dtype = torch.int64
    over_capacity: bool = False


CASES = (
    Case(name="some tokens", num_tokens=lambda rank: 40 + rank),
    Case(name="int32 ids", num_tokens=lambda rank: 40 + rank, ids_dtype=torch.int32),
    Case(name="one token", num_tokens=lambda rank: 1),
    Case(name="no tokens", num_tokens=lambda rank: 0),
    Case(name="no tokens, no rows", num_tokens=lambda rank: 0, max_rows=lambda rank: 0),
    Case(name="tokens on even ranks only", num_tokens=lambda rank: 9 * ((rank + 1) % 2)),
    Case(name="masked entries", num_tokens=lambda rank: 33, mask=_some_entries),
    Case(name="masked tokens", num_tokens=lambda rank: 33, mask=_every_other_token),
    Case(
        name="everything masked",
        num_tokens=lambda rank: 5,
        mask=lambda ids_TK: torch.full_like(ids_TK, -1),
    ),
    Case(name="all tokens to one expert", num_tokens=lambda rank: 50, mask=_one_expert),
    Case(name="capacity full", num_tokens=lambda rank: CAPACITY),
    Case(
        name="capacity full, all to one expert", num_tokens=lambda rank: CAPACITY, mask=_one_expert
    ),
    Case(name="one over the capacity", num_tokens=lambda rank: 7, over_capacity=True),
    Case(
        name="max_rows below the capacity, tokens fill them",
        num_tokens=lambda rank: 12 + rank,
        max_rows=lambda rank: 12 + rank,
    ),
    Case(
        name="max_rows below the capacity, tokens below them",
        num_tokens=lambda rank: 10,
        max_rows=lambda rank: 16,
    ),
    Case(name="two microbatches", num_tokens=lambda rank: 31, microbatches=2),
    Case(
        name="two microbatches, uneven",
        num_tokens=lambda rank: CAPACITY if rank % 2 == 0 else 0,
        microbatches=2,
        mask=_some_entries,
    ),
)


def make_spec(num_attn: int, num_ffn: int, fp8: bool = False) -> LinkSpec:
    return LinkSpec(
        topology=Topology(num_attn, num_ffn, EXPERTS),
        hidden_size=HIDDEN,
        topk=TOPK,
        dtype=torch.bfloat16,
        capacity=CAPACITY,
        timeout_s=60,
        fp8=fp8,
    )


def make_tokens(spec: LinkSpec, case: Case, transfer: Transfer, rank: int) -> Tokens:
    """The same on every rank, because every GPU is of the same kind and draws the same numbers."""
    seed = hash((transfer.layer, transfer.microbatch, rank, len(case.name)))
    tokens = random_tokens(spec, case.num_tokens(rank), seed)
    ids_TK = case.mask(tokens.topk_ids_TK).to(case.ids_dtype)
    return tokens._replace(topk_ids_TK=ids_TK)


def random_tokens(spec: LinkSpec, num_tokens: int, seed: int) -> Tokens:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(seed & 0x7FFFFFFF)
    draw = partial(torch.randint, generator=generator, device=device)
    # Integers below 16 fit FP8 with a scale of 1, which the 448 in each group of 128 makes sure of.
    hidden_TH = draw(-15, 16, (num_tokens, spec.hidden_size)).to(spec.dtype)
    hidden_TH[:, ::128] = 448
    num_experts = spec.topology.num_experts
    scores_TE = torch.rand(num_tokens, num_experts, generator=generator, device=device)
    weights_TK = draw(1, 64, (num_tokens, spec.topk)).float() / 64
    return Tokens(hidden_TH, scores_TE.topk(spec.topk, dim=1).indices, weights_TK)


def expert_scale(global_ids: torch.Tensor) -> torch.Tensor:
    """Expert e multiplies by 1, 2, 4 or 8; a masked entry (-1) by 0. FP32."""
    return torch.exp2((global_ids % 4).float()) * (global_ids >= 0)


def answer(spec: LinkSpec, ffn_rank: int, batch: ReceivedBatch | ExpertMajorBatch) -> torch.Tensor:
    """What FFN rank `ffn_rank` returns for `batch`. Works in a captured graph."""
    first = spec.topology.expert_range(ffn_rank).start
    if isinstance(batch, ExpertMajorBatch):
        slots = torch.arange(batch.hidden_ELH.shape[0], device="cuda")
        hidden_ELH = batch.hidden_ELH.float()
        if batch.scales_ELG is not None:
            hidden_ELH = hidden_ELH * _per_value(batch.scales_ELG)
        return (hidden_ELH * expert_scale(slots + first).view(-1, 1, 1)).to(spec.dtype)
    ids_RK = torch.where(batch.topk_ids_RK >= 0, batch.topk_ids_RK + first, -1)
    factor_R1 = (batch.topk_weights_RK * expert_scale(ids_RK)).sum(dim=1, keepdim=True)
    return (batch.hidden_RH.float() * factor_R1).to(spec.dtype)


def _per_value(scales: torch.Tensor) -> torch.Tensor:
    """One scale per value, from one per 128."""
    return scales.unsqueeze(-1).expand(*scales.shape, 128).flatten(-2)


def expected_result(name: str, spec: LinkSpec, tokens: Tokens) -> torch.Tensor:
    """[T, H]: one partial sum per rank that sums, each rounded once."""
    hidden_TH, ids_TK, weights_TK = tokens
    ranges = [spec.topology.expert_range(j) for j in range(spec.topology.ffn_ranks)]
    if name == "deepep":
        ranges = [range(spec.topology.num_experts)]
    total_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
    for experts in ranges:
        own_TK = (ids_TK >= experts.start) & (ids_TK < experts.stop)
        factor_TK = weights_TK * expert_scale(ids_TK) * own_TK
        partial_TH = hidden_TH.float() * factor_TK.sum(dim=1, keepdim=True)
        total_TH += partial_TH.to(spec.dtype).float()
    return total_TH.to(spec.dtype)


def assert_same(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    wrong = (got != expected).nonzero()
    if len(wrong) > 0:
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} values differ, the first at {first}: "
            f"got {got[first].item()!r}, expected {expected[first].item()!r}"
        )


def finish_device(what: str) -> None:
    """Wait for the GPU, but not for ever."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + DEVICE_TIMEOUT_S
    while not done.query():
        assert time.monotonic() < deadline, f"{what}: the GPU still waits for a peer"
        time.sleep(1e-4)


def play(
    name: str, connector: AttnConnector | FFNConnector, spec: LinkSpec, world_rank: int
) -> Iterator[str]:
    """All cases as seen by one rank; yields the name of each one that passed."""
    is_attn = isinstance(connector, AttnConnector)
    for case in CASES:
        with torch.inference_mode():
            if is_attn:
                _eager_attn(name, connector, spec, world_rank, case)
            else:
                _eager_ffn(connector, spec, world_rank - spec.topology.attn_ranks, case)
        finish_device(case.name)
        yield case.name
    # Several graphs, replayed in turn, as a server does for its batch sizes.
    shapes = [(bucket, microbatches) for bucket in (CAPACITY, 24) for microbatches in (1, 2)]
    role = _GraphAttn if is_attn else _GraphFFN
    graphs = [role(name, connector, spec, world_rank, *shape) for shape in shapes]
    for replay in range(REPLAYS):
        for graph in graphs:
            graph.replay(replay)
    for bucket, microbatches in shapes:
        yield f"{REPLAYS} replays of a graph, bucket {bucket}, {microbatches} microbatches"
    with torch.inference_mode():  # eager steps between graphs, as a prefill is
        for case in CASES[:1]:
            if is_attn:
                _eager_attn(name, connector, spec, world_rank, case)
            else:
                _eager_ffn(connector, spec, world_rank - spec.topology.attn_ranks, case)
    finish_device("eager step after graphs")
    yield "eager step after graphs"


def _max_rows(spec: LinkSpec, case: Case) -> tuple[int, ...] | None:
    if case.max_rows is None:
        return None
    return tuple(case.max_rows(rank) for rank in range(spec.topology.attn_ranks))


def _eager_attn(name: str, connector: AttnConnector, spec: LinkSpec, rank: int, case: Case) -> None:
    for layer in range(2):
        sent: list[tuple[DispatchHandle, Tokens]] = []
        for microbatch in range(case.microbatches):
            transfer = Transfer(1, layer, microbatch)
            if case.over_capacity and rank == spec.topology.attn_ranks - 1:
                _exceed_capacity(connector, spec, transfer)
            tokens = make_tokens(spec, case, transfer, rank)
            hidden_TH = tokens.hidden_TH.clone()
            handle = connector.dispatch(transfer, hidden_TH, *tokens[1:], _max_rows(spec, case))
            hidden_TH.fill_(torch.nan)  # the caller may reuse it
            sent.append((handle, tokens))
        for handle, tokens in sent:
            assert handle.num_tokens == len(tokens.hidden_TH)
            got_TH = connector.combine(handle)
            finish_device(f"{case.name}, {handle.transfer}")
            what = f"{case.name}: result of attn {rank} at {handle.transfer}"
            assert_same(what, got_TH, expected_result(name, spec, tokens))


def _exceed_capacity(connector: AttnConnector, spec: LinkSpec, transfer: Transfer) -> None:
    tokens = random_tokens(spec, spec.capacity + 1, seed=0)
    try:
        connector.dispatch(transfer, *tokens)
    except CapacityExceeded as error:
        assert "--afd-max-tokens-per-rank" in str(error), error
    else:
        raise AssertionError("one token over the capacity was accepted")


def _eager_ffn(connector: FFNConnector, spec: LinkSpec, rank: int, case: Case) -> None:
    max_rows = _max_rows(spec, case)
    for layer in range(2):
        for microbatch in range(case.microbatches):
            transfer = Transfer(1, layer, microbatch)
            batch = connector.receive(transfer, max_rows)
            finish_device(f"{case.name}, {transfer}")
            assert batch.transfer == transfer
            sent = [
                make_tokens(spec, case, transfer, attn_rank)
                for attn_rank in range(spec.topology.attn_ranks)
            ]
            what = f"{case.name}: ffn {rank} at {transfer}"
            if isinstance(batch, ExpertMajorBatch):
                _check_expert_major(what, spec, rank, batch, sent)
            else:
                _check_rows(what, spec, rank, batch, sent)
            out = answer(spec, rank, batch)
            connector.send(batch, out)
            out.fill_(torch.nan)  # the caller may reuse it


def _check_expert_major(
    what: str, spec: LinkSpec, rank: int, batch: ExpertMajorBatch, sent: list[Tokens]
) -> None:
    ids = torch.cat([tokens.topk_ids_TK.flatten() for tokens in sent]).tolist()
    experts = list(spec.topology.expert_range(rank))
    counts = [ids.count(expert) for expert in experts]
    counts += [0] * (spec.topology.slots_per_rank - len(experts))
    assert batch.rows_per_expert_E.tolist() == counts, what
    assert batch.expected_rows >= 1, what
    # The last expert's rows, in any order: their sum over the row is enough to tell them apart.
    used = max(range(len(counts)), key=lambda slot: counts[slot])
    if counts[used] == 0:
        return
    rows = batch.hidden_ELH[used, : counts[used]].float()
    if batch.scales_ELG is not None:
        rows = rows * _per_value(batch.scales_ELG[used, : counts[used]])
    expected = torch.cat(
        [t.hidden_TH[(t.topk_ids_TK == experts[used]).any(dim=1)].float() for t in sent]
    )
    column = torch.arange(1, spec.hidden_size + 1, device="cuda", dtype=torch.float64)
    order = (rows.round().double() @ column).argsort(), (expected.double() @ column).argsort()
    assert_same(f"{what}: rows", rows.round()[order[0]], expected[order[1]])


def _check_rows(
    what: str, spec: LinkSpec, rank: int, batch: ReceivedBatch, sent: list[Tokens]
) -> None:
    experts = spec.topology.expert_range(rank)
    assert len(batch.rows_per_rank) == len(sent), what
    assert sum(batch.rows_per_rank) == len(batch.hidden_RH), what
    start = 0
    for tokens, num_rows in zip(sent, batch.rows_per_rank, strict=True):
        end = start + len(tokens.hidden_TH)
        ids_TK = tokens.topk_ids_TK.int()
        own_TK = (ids_TK >= experts.start) & (ids_TK < experts.stop)
        local_TK = torch.where(own_TK, ids_TK - experts.start, -1)
        # What the row of a token without an expert here holds is the connector's business.
        here_T = own_TK.any(dim=1)
        got_TH = batch.hidden_RH[start:end][here_T]
        assert_same(f"{what}: hidden", got_TH, tokens.hidden_TH[here_T])
        assert_same(f"{what}: ids", batch.topk_ids_RK[start:end], local_TK)
        weights_TK = tokens.topk_weights_TK * own_TK
        assert_same(f"{what}: weights", batch.topk_weights_RK[start:end], weights_TK)
        start += num_rows
        assert bool((batch.topk_ids_RK[end:start] == -1).all()), f"{what}: padding has experts"
        assert bool((batch.topk_weights_RK[end:start] == 0).all()), f"{what}: padding has weight"


def layer_ids(spec: LinkSpec, ids_TK: torch.Tensor, layer: int) -> torch.Tensor:
    """The routing of one layer of a graph, made of its static input on the device."""
    rolled_TK = (ids_TK + layer) % spec.topology.num_experts
    return torch.where(ids_TK >= 0, rolled_TK, -1)


class _GraphAttn:
    """A whole step of `LAYERS` layers on one attention rank, captured once."""

    def __init__(self, name, connector, spec, world_rank, bucket, microbatches) -> None:
        self._name, self._connector, self._spec, self._rank = name, connector, spec, world_rank
        self._bucket, self._microbatches = bucket, microbatches
        self._inputs = [random_tokens(spec, bucket, seed=mb) for mb in range(microbatches)]
        shape = (LAYERS, bucket, spec.hidden_size)
        self._results = [
            torch.zeros(shape, dtype=spec.dtype, device="cuda") for _ in range(microbatches)
        ]
        self._graph = capture(self._step)

    def _step(self) -> None:
        """In the order of two-batch overlap: a microbatch is combined after the other one's
        dispatch, and dispatched again before the other one is combined."""
        handles: list[DispatchHandle | None] = [None] * self._microbatches
        for layer in range(LAYERS):
            for microbatch in range(self._microbatches):
                if handles[microbatch] is not None:
                    self._combine(handles, microbatch)
                handles[microbatch] = self._dispatch(layer, microbatch)
        for microbatch in range(self._microbatches):
            self._combine(handles, microbatch)

    def _dispatch(self, layer: int, microbatch: int) -> DispatchHandle:
        hidden_TH, ids_TK, weights_TK = self._inputs[microbatch]
        return self._connector.dispatch(
            Transfer(0, layer, microbatch),
            hidden_TH,
            layer_ids(self._spec, ids_TK, layer),
            weights_TK,
            (self._bucket,) * self._spec.topology.attn_ranks,
        )

    def _combine(self, handles: list[DispatchHandle | None], microbatch: int) -> None:
        handle, handles[microbatch] = handles[microbatch], None
        assert handle is not None
        result_TH = self._connector.combine(handle)
        self._results[microbatch][handle.transfer.layer].copy_(result_TH)

    def replay(self, replay: int) -> None:
        for microbatch, tokens in enumerate(self._inputs):
            seed = hash((replay, microbatch, self._rank, self._bucket))
            for static, fresh in zip(
                tokens, random_tokens(self._spec, self._bucket, seed), strict=True
            ):
                static.copy_(fresh)
            tokens.topk_ids_TK.copy_(_some_entries(tokens.topk_ids_TK))
        self._graph.replay()
        what = f"graph, bucket {self._bucket}, replay {replay}, attn {self._rank}"
        finish_device(what)
        for microbatch, tokens in enumerate(self._inputs):
            for layer in range(LAYERS):
                ids_TK = layer_ids(self._spec, tokens.topk_ids_TK, layer)
                expected_TH = expected_result(
                    self._name, self._spec, tokens._replace(topk_ids_TK=ids_TK)
                )
                got_TH = self._results[microbatch][layer]
                assert_same(f"{what}, layer {layer}, microbatch {microbatch}", got_TH, expected_TH)


class _GraphFFN:
    """The same step on one FFN rank."""

    def __init__(self, name, connector, spec, world_rank, bucket, microbatches) -> None:
        self._connector, self._spec = connector, spec
        self._rank = world_rank - spec.topology.attn_ranks
        self._bucket, self._microbatches = bucket, microbatches
        self._graph = capture(self._step)

    def _step(self) -> None:
        max_rows = (self._bucket,) * self._spec.topology.attn_ranks
        for layer in range(LAYERS):
            for microbatch in range(self._microbatches):
                batch = self._connector.receive(Transfer(0, layer, microbatch), max_rows)
                self._connector.send(batch, answer(self._spec, self._rank, batch))

    def replay(self, replay: int) -> None:
        self._graph.replay()
        finish_device(f"graph, bucket {self._bucket}, replay {replay}, ffn {self._rank}")


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run the step once, with all its peers, and then capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        finish_device("warm-up before a capture")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def run_rank(
    name: str,
    specs: list[LinkSpec],
    world_rank: int,
    rendezvous: list[Rendezvous],
    pipe: Connection,
) -> None:
    """Entry of a rank's process: build a link for each spec in turn and play all cases on it.

    Sends the name of every case that passed, and at last True, or the text of the error. Ends
    without the interpreter's clean-up, which would wait for a kernel that waits for a lost peer.
    """
    logging.basicConfig(level=logging.INFO, format=f"rank {world_rank}: %(message)s")
    code = 1
    try:
        sharing.enter()
        torch.cuda.set_device(sharing.device_of(world_rank))
        for spec, meeting_point in zip(specs, rendezvous, strict=True):
            num_attn = spec.topology.attn_ranks
            connector: AttnConnector | FFNConnector
            if world_rank < num_attn:
                connector = registry.create_attn(name, spec, world_rank, meeting_point)
            else:
                connector = registry.create_ffn(name, spec, world_rank - num_attn, meeting_point)
            wire = "fp8" if spec.fp8 else "bf16"
            pipe.send(f"{wire}: connected")
            for case in play(name, connector, spec, world_rank):
                pipe.send(f"{wire}: {case}")
            connector.close()
            connector.close()  # twice is allowed
            pipe.send(f"{wire}: closed")
        pipe.send(True)
        pipe.poll(DEVICE_TIMEOUT_S)  # a peer may still read this rank's memory; the parent hangs up
        code = 0
    except Exception:  # noqa: BLE001
        pipe.send(RuntimeError(traceback.format_exc()))
    os._exit(code)
