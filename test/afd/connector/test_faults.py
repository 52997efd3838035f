"""A rank that stalls, closes, dies or runs another plan: who says what, and how soon."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from connector import contract, faults, harness

from sglang.srt.disaggregation.afd.connector.base import Transfer
from sglang.srt.disaggregation.afd.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    PeerLost,
    PlanMismatch,
)

NAMES = pytest.mark.parametrize("name", ["loopback", "gloo"])
SOON_S = 20  # on a busy machine; far below the 60 s of the deadline


def _spec(num_attn: int = 1, num_ffn: int = 1, timeout_s: float = 60):
    return contract.make_spec(num_attn, num_ffn, torch.float32, timeout_s)


@pytest.mark.pain(33, 59)
@NAMES
def test_attn_names_a_stalled_ffn_rank(run_link, name):
    attn, _ = run_link(name, _spec(timeout_s=1.5), faults.timed(faults.round_trip), faults.stall)
    error, seconds = attn
    assert isinstance(error, DeadlineExceeded)
    for word in ("attn 0", "ffn 0", "layer 5", "microbatch 1", "step 41", "seen nothing"):
        assert word in str(error)
    assert "--afd-peer-timeout" in str(error)
    assert 1.4 < seconds < SOON_S


@pytest.mark.pain(33, 59)
@NAMES
def test_ffn_names_a_stalled_attn_rank(run_link, name):
    spec = _spec(num_attn=2, timeout_s=1.5)
    seconds, _, (error, _) = run_link(
        name, spec, faults.dispatch_only, faults.stall, faults.timed(faults.receive_only)
    )
    assert seconds < 1, "dispatch waited for a peer"
    assert isinstance(error, DeadlineExceeded)
    for word in ("ffn 0", "attn 1", "layer 5", "microbatch 1", "step 41", "expected"):
        assert word in str(error)


@pytest.mark.pain(59)
@NAMES
def test_attn_notices_a_closed_ffn_rank(run_link, name):
    (error, seconds), _ = run_link(name, _spec(), faults.timed(faults.round_trip), faults.leave)
    assert isinstance(error, PeerLost)
    assert "attn 0 lost ffn 0 at step 41, MoE layer 5, microbatch 1" in str(error)
    assert seconds < SOON_S


@pytest.mark.pain(59)
@NAMES
def test_ffn_notices_a_closed_attn_rank(run_link, name):
    _, (error, seconds) = run_link(name, _spec(), faults.leave, faults.timed(faults.serve))
    assert isinstance(error, PeerLost)
    assert "ffn 0 lost attn 0 at step 41" in str(error)
    assert seconds < SOON_S


@pytest.mark.pain(59)
@NAMES
def test_a_failure_reaches_ranks_that_wait_for_somebody_else(run_link, name):
    """attn 0 waits for ffn 0, which waits for attn 1, which has left."""
    (error, seconds), _, _ = run_link(
        name, _spec(num_attn=2), faults.timed(faults.round_trip), faults.leave, faults.serve
    )
    assert isinstance(error, PeerLost)
    assert seconds < SOON_S


@NAMES
def test_what_was_sent_before_a_close_arrives(run_link, name):
    harness.raise_first(run_link(name, _spec(2, 2), *[faults.round_trip] * 2, *[faults.serve] * 2))


@pytest.mark.pain(22)
@NAMES
@pytest.mark.parametrize(
    "stale",
    [
        faults.TRANSFER._replace(step_id=40),
        faults.TRANSFER._replace(layer=4),
        faults.TRANSFER._replace(round_idx=1),
    ],
)
def test_another_plan_is_refused(run_link, name, stale: Transfer):
    attn, ffn = run_link(
        name, _spec(), faults.timed(partial(faults.round_trip, transfer=stale)), faults.serve
    )
    assert isinstance(ffn, PlanMismatch)
    assert "ffn 0" in str(ffn)
    assert "attn 0" in str(ffn)
    assert str(stale) in str(ffn)
    assert str(faults.TRANSFER) in str(ffn)
    error, seconds = attn
    assert isinstance(error, PeerLost)
    assert seconds < SOON_S


@pytest.mark.pain(59)
@pytest.mark.parametrize("victim", [0, 1], ids=["attn", "ffn"])
def test_gloo_notices_a_killed_peer(victim):
    pool = harness.ProcessPool(num_ranks=2)
    try:
        spec = _spec()
        rendezvous = harness.new_rendezvous()
        survivor = faults.timed([faults.serve, faults.round_trip][victim])
        scripts = [survivor, survivor]
        scripts[victim] = faults.die
        for rank, script in enumerate(scripts):
            pool.start(rank, contract.run_rank, "gloo", spec, rank, rendezvous, script)
        results = pool.results(2)
        assert isinstance(results[victim], EOFError)
        error, seconds = results[1 - victim]
        assert isinstance(error, PeerLost)
        assert f"lost {spec.topology.rank_name(victim)}" in str(error)
        assert seconds < 0.2 + 2
    finally:
        pool.close()


def test_gloo_failure_is_final(run_link):
    _, errors = run_link("gloo", _spec(), faults.leave, faults.error_twice)
    assert len(errors) == 2
    assert errors[0] == errors[1]


@pytest.mark.pain(40)
def test_gloo_ffn_refuses_more_rows_than_agreed(pool):
    """An attention rank with another idea of the capacity cannot make an FFN rank allocate."""
    rendezvous = harness.new_rendezvous()
    large = _spec()
    small = contract.replace_capacity(large, 1)
    run = contract.run_rank
    pool.start(0, run, "gloo", large, 0, rendezvous, faults.timed(faults.round_trip))
    pool.start(1, run, "gloo", small, 1, rendezvous, faults.serve)
    (lost, _), refused = pool.results(2)
    assert isinstance(refused, CapacityExceeded)
    assert "sent 2 rows by attn 0" in str(refused)
    assert isinstance(lost, PeerLost)


@pytest.mark.pain(41)
@pytest.mark.parametrize("missing", [0, 1], ids=["attn", "ffn"])
def test_gloo_names_the_address_when_a_rank_never_comes(pool, missing):
    rendezvous = harness.new_rendezvous(timeout_s=1)
    # The pool answers in rank order, so the only rank that comes runs in its first process.
    pool.start(0, contract.run_rank, "gloo", _spec(), 1 - missing, rendezvous)
    (error,) = pool.results(1)
    assert isinstance(error, DeadlineExceeded)
    assert f"127.0.0.1:{rendezvous.store_port}" in str(error)
    assert "--afd-bootstrap-addr" in str(error)
