"""The contract of a connector as a script that every rank of a link plays, and its reference.

Inputs are a function of (case, transfer, attention rank), so that each rank knows what every
other one sent. The reference goes from the top-k ids straight to the result, without `routing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    FFNConnector,
    LinkSpec,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.errors import CapacityExceeded
from sglang.srt.disaggregation.afd.topology import Topology

CAPACITY = 6
TOPK = 3
HIDDEN = 18


class Tokens(NamedTuple):
    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step. `num_tokens` and `mask` say what attention rank i puts into each transfer."""

    name: str
    num_tokens: Callable[[int], int] = lambda rank: (3 * rank + 2) % (CAPACITY + 1)
    mask: Callable[[torch.Tensor], torch.Tensor] = lambda ids_TK: ids_TK
    num_rounds: int = 1
    num_microbatches: int = 1
    over_capacity: bool = False
    ids_dtype: torch.dtype = torch.int64


def _one_expert(ids_TK: torch.Tensor) -> torch.Tensor:
    ids_TK[:, 0] = 1
    ids_TK[:, 1:] = -1
    return ids_TK


def _some_entries(ids_TK: torch.Tensor) -> torch.Tensor:
    entry = torch.arange(ids_TK.numel()).view_as(ids_TK)
    return ids_TK.masked_fill(entry % 4 == 1, -1)


def _first_token(ids_TK: torch.Tensor) -> torch.Tensor:
    ids_TK[:1] = -1
    return ids_TK


CASES = (
    Case(name="uneven tokens"),
    Case(name="no tokens on even ranks", num_tokens=lambda rank: 4 * (rank % 2)),
    Case(name="no tokens on odd ranks", num_tokens=lambda rank: 4 * ((rank + 1) % 2)),
    Case(name="no tokens at all", num_tokens=lambda rank: 0),
    Case(name="one token each", num_tokens=lambda rank: 1),
    Case(name="all tokens to one expert", mask=_one_expert),
    Case(name="masked entries", mask=_some_entries, ids_dtype=torch.int32),
    Case(name="masked token", mask=_first_token),
    Case(name="all tokens masked", mask=lambda ids_TK: torch.full_like(ids_TK, -1)),
    Case(name="capacity full", num_tokens=lambda rank: CAPACITY),
    Case(name="capacity exceeded on one rank", over_capacity=True),
    Case(name="two microbatches", num_microbatches=2, num_rounds=3),
    Case(name="several rounds", num_rounds=3),
)


def make_spec(num_attn: int, num_ffn: int, dtype: torch.dtype, timeout_s: float = 60) -> LinkSpec:
    """A link whose number of experts N does not divide, except for N = 1."""
    return LinkSpec(
        topology=Topology(num_attn, num_ffn, num_experts=num_ffn + 3 + (num_ffn == 3)),
        hidden_size=HIDDEN,
        topk=TOPK,
        dtype=dtype,
        capacity=CAPACITY,
        timeout_s=timeout_s,
    )


def replace_capacity(spec: LinkSpec, capacity: int) -> LinkSpec:
    return replace(spec, capacity=capacity)


def make_tokens(spec: LinkSpec, case: Case, transfer: Transfer, rank: int) -> Tokens:
    num_tokens = case.num_tokens(rank)
    return random_tokens(spec, num_tokens, hash((*transfer, rank)), case.mask, case.ids_dtype)


def random_tokens(
    spec: LinkSpec,
    num_tokens: int,
    seed: int,
    mask: Callable[[torch.Tensor], torch.Tensor] = lambda ids_TK: ids_TK,
    ids_dtype: torch.dtype = torch.int64,
) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(num_tokens, spec.topology.num_experts, generator=generator)
    hidden_TH = torch.randn(num_tokens, spec.hidden_size, generator=generator).to(spec.dtype)
    weights_TK = torch.rand(num_tokens, spec.topk, generator=generator)
    ids_TK = mask(scores_TE.topk(spec.topk, dim=1).indices)
    return Tokens(hidden_TH, ids_TK.to(ids_dtype), weights_TK)


def run_experts(
    spec: LinkSpec, ids_RK: torch.Tensor, weights_RK: torch.Tensor, hidden_RH: torch.Tensor
) -> torch.Tensor:
    """Expert e shifts a row by e and scales it, so that no two experts agree. Ids are global."""
    out_RH = torch.zeros(hidden_RH.shape, dtype=torch.float32)
    column_H = torch.arange(spec.hidden_size)
    for k in range(spec.topk):
        expert_R1 = ids_RK[:, k : k + 1].long()
        shifted_RH = hidden_RH.float().gather(1, (column_H - expert_R1) % spec.hidden_size)
        term_RH = weights_RK[:, k : k + 1] * (1 + expert_R1 / 8) * shifted_RH
        out_RH += torch.where(expert_R1 >= 0, term_RH, 0.0)
    return out_RH.to(spec.dtype)


def expected_batch(spec: LinkSpec, ffn_rank: int, sent: list[Tokens]) -> ReceivedBatch:
    """What FFN rank `ffn_rank` must receive, token by token."""
    experts = spec.topology.expert_range(ffn_rank)
    hidden, ids, weights, rows_per_rank = [], [], [], []
    for tokens in sent:
        rows = [t for t, row in enumerate(tokens.topk_ids_TK.tolist()) if set(row) & set(experts)]
        rows_per_rank.append(len(rows))
        for t in rows:
            entries = tokens.topk_ids_TK[t].tolist()
            hidden.append(tokens.hidden_TH[t])
            ids.append([e - experts.start if e in experts else -1 for e in entries])
            weights.append(
                [
                    w if e in experts else 0.0
                    for e, w in zip(entries, tokens.topk_weights_TK[t].tolist(), strict=True)
                ]
            )
    num_rows = sum(rows_per_rank)
    return ReceivedBatch(
        transfer=Transfer(0, 0, 0),
        hidden_RH=torch.stack(hidden) if hidden else torch.empty(0, HIDDEN, dtype=spec.dtype),
        topk_ids_RK=torch.tensor(ids, dtype=torch.int32).view(num_rows, spec.topk),
        topk_weights_RK=torch.tensor(weights, dtype=torch.float32).view(num_rows, spec.topk),
        rows_per_rank=tuple(rows_per_rank),
    )


def expected_result(spec: LinkSpec, tokens: Tokens) -> torch.Tensor:
    """One partial sum per FFN rank in `dtype`, added in FP32 in rank order, cast once."""
    total_TH = torch.zeros(tokens.hidden_TH.shape, dtype=torch.float32)
    for ffn_rank in range(spec.topology.ffn_ranks):
        experts = spec.topology.expert_range(ffn_rank)
        ids_TK = tokens.topk_ids_TK
        foreign_TK = (ids_TK < experts.start) | (ids_TK >= experts.stop)
        own_ids_TK = ids_TK.masked_fill(foreign_TK, -1)
        total_TH += run_experts(spec, own_ids_TK, tokens.topk_weights_TK, tokens.hidden_TH).float()
    return total_TH.to(spec.dtype)


def assert_same(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise equal, or the first coordinate that differs."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    if got.numel() == 0:
        return
    width = got.dtype.itemsize
    differs = (got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).view(
        *got.shape, width
    )
    wrong = differs.any(dim=-1).nonzero()
    if len(wrong) > 0:
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} values differ, the first at {first}: "
            f"got {got[first].item()!r}, expected {expected[first].item()!r}"
        )


def transfers(step_id: int, case: Case, round_idx: int) -> list[Transfer]:
    return [Transfer(step_id, 7, mb, round_idx) for mb in range(case.num_microbatches)]


def play_attn(connector: AttnConnector, spec: LinkSpec, rank: int) -> None:
    for step_id, case in enumerate(CASES):
        for round_idx in range(case.num_rounds):
            handles = []
            for transfer in transfers(step_id, case, round_idx):
                if case.over_capacity and rank == spec.topology.attn_ranks - 1:
                    _exceed_capacity(connector, spec, transfer)
                tokens = make_tokens(spec, case, transfer, rank)
                hidden_TH = tokens.hidden_TH.clone()
                handle = connector.dispatch(transfer, hidden_TH, *tokens[1:])
                assert handle.transfer == transfer
                assert handle.num_tokens == len(hidden_TH)
                hidden_TH.fill_(torch.nan)  # the caller may reuse it
                handles.append((handle, tokens))
            if round_idx == 1:
                handles.reverse()
            for handle, tokens in handles:
                got_TH = connector.combine(handle)
                what = f"{case.name}: result of attn {rank} at {handle.transfer}"
                assert_same(what, got_TH, expected_result(spec, tokens))


def _exceed_capacity(connector: AttnConnector, spec: LinkSpec, transfer: Transfer) -> None:
    tokens = random_tokens(spec, spec.capacity + 1, seed=0)
    try:
        connector.dispatch(transfer, *tokens)
    except CapacityExceeded as error:
        assert f"{spec.capacity + 1} tokens" in str(error), error
        assert "--afd-max-tokens-per-rank" in str(error), error
    else:
        raise AssertionError("one token over the capacity was accepted")


def play_ffn(connector: FFNConnector, spec: LinkSpec, rank: int) -> None:
    for step_id, case in enumerate(CASES):
        for round_idx in range(case.num_rounds):
            order = transfers(step_id, case, round_idx)
            if round_idx == 2:
                order.reverse()  # a microbatch must not wait behind the other one
            for transfer in order:
                batch = connector.receive(transfer)
                sent = [
                    make_tokens(spec, case, transfer, attn_rank)
                    for attn_rank in range(spec.topology.attn_ranks)
                ]
                expected = expected_batch(spec, rank, sent)
                what = f"{case.name}: ffn {rank} at {transfer}"
                assert batch.transfer == transfer, what
                assert batch.rows_per_rank == expected.rows_per_rank, (
                    f"{what}: rows {batch.rows_per_rank}, expected {expected.rows_per_rank}"
                )
                assert_same(f"{what}: hidden", batch.hidden_RH, expected.hidden_RH)
                assert_same(f"{what}: ids", batch.topk_ids_RK, expected.topk_ids_RK)
                assert_same(f"{what}: weights", batch.topk_weights_RK, expected.topk_weights_RK)
                out_RH = answer(spec, rank, batch)
                connector.send(batch, out_RH)
                out_RH.fill_(torch.nan)  # the caller may reuse it


def answer(spec: LinkSpec, ffn_rank: int, batch: ReceivedBatch) -> torch.Tensor:
    """The rows that FFN rank `ffn_rank` returns for `batch`."""
    first = spec.topology.expert_range(ffn_rank).start
    ids_RK = torch.where(batch.topk_ids_RK >= 0, batch.topk_ids_RK + first, -1)
    return run_experts(spec, ids_RK, batch.topk_weights_RK, batch.hidden_RH)


def connect(name, spec, world_rank, rendezvous) -> AttnConnector | FFNConnector:
    """The connector of a world rank, attention ranks first."""
    num_attn = spec.topology.attn_ranks
    if world_rank < num_attn:
        return registry.create_attn(name, spec, world_rank, rendezvous)
    return registry.create_ffn(name, spec, world_rank - num_attn, rendezvous)


def play(connector: AttnConnector | FFNConnector, spec: LinkSpec, world_rank: int) -> None:
    """The contract, as seen by one rank."""
    if isinstance(connector, AttnConnector):
        play_attn(connector, spec, world_rank)
    else:
        play_ffn(connector, spec, world_rank - spec.topology.attn_ranks)


def run_rank(name, spec, world_rank, rendezvous, script=play):
    """Connect, run the script, close; whatever happens, the peers see the link closed."""
    torch.set_num_threads(1)
    connector = connect(name, spec, world_rank, rendezvous)
    try:
        return script(connector, spec, world_rank)
    finally:
        connector.close()
        connector.close()  # twice is allowed
