"""Plans: rounds, slices and the order of transfers, as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.afd.errors import CapacityExceeded
from sglang.srt.disaggregation.afd.messages import MODES, StepPlan, decode, encode
from sglang.srt.disaggregation.afd.plan import make_plan, max_rows, round_slices, transfers

token_lists = st.lists(st.integers(0, 5000), min_size=1, max_size=40)
capacities = st.integers(1, 600)
microbatch_counts = st.sampled_from((1, 2))


@given(token_lists, capacities, microbatch_counts, st.sampled_from(MODES), st.data())
def test_rounds_suffice_for_any_split_of_any_rank(tokens, capacity, microbatches, mode, data):
    plan = make_plan(3, mode, tokens, capacity, microbatches, bucket=0)
    assert decode(encode(plan)) == plan
    assert plan.tokens == tuple(tokens)
    assert plan.rounds >= 1
    assert (plan.rounds - 1) * capacity < max(1, max(tokens)), "no more rounds than needed"
    for num_tokens in tokens:
        cut = data.draw(st.integers(0, num_tokens)) if microbatches == 2 else num_tokens
        for part in (cut, num_tokens - cut):
            assert len(round_slices(part, capacity, plan.rounds)) == plan.rounds


@given(st.integers(0, 5000), capacities, st.integers(0, 3))
def test_slices_partition_the_rows(num_tokens, capacity, spare):
    rounds = max(1, -(-num_tokens // capacity)) + spare
    slices = round_slices(num_tokens, capacity, rounds)
    rows = [row for part in slices for row in range(num_tokens)[part]]
    assert rows == list(range(num_tokens))
    assert all(0 <= part.stop - part.start <= capacity for part in slices)
    sizes = [part.stop - part.start for part in slices]
    assert sizes == sorted(sizes, reverse=True), "only later rounds may be short or empty"


@pytest.mark.pain(40)
@given(capacities, st.integers(1, 20), st.integers(1, 1000))
def test_slices_never_truncate(capacity, rounds, excess):
    with pytest.raises(CapacityExceeded, match="too few rounds"):
        round_slices(capacity * rounds + excess, capacity, rounds)


@given(microbatch_counts, st.integers(1, 6), st.integers(0, 8))
def test_transfers_cover_each_triple_once_in_order(microbatches, rounds, moe_layers):
    plan = StepPlan(
        step_id=0, mode="extend", microbatches=microbatches, bucket=0, tokens=(9,), rounds=rounds
    )
    order = list(transfers(plan, moe_layers))
    assert order == sorted(set(order))
    assert len(order) == moe_layers * microbatches * rounds
    assert all(m < microbatches and r < rounds and layer < moe_layers for layer, m, r in order)


def test_graph_step_has_one_round():
    plan = make_plan(0, "decode", (128, 3), capacity=64, microbatches=2, bucket=64)
    assert (plan.rounds, plan.bucket) == (1, 64)


@pytest.mark.pain(30)
@pytest.mark.parametrize(
    ("tokens", "bucket", "words"),
    [
        ((1, 2), 128, "bucket 128 exceeds the capacity of 64"),
        ((1, 129), 64, "attn 1 has 129 tokens, its graph has room for 2 x 64"),
    ],
)
def test_graph_step_that_does_not_fit(tokens, bucket, words):
    with pytest.raises(CapacityExceeded, match=words):
        make_plan(0, "decode", tokens, capacity=64, microbatches=2, bucket=bucket)


@pytest.mark.parametrize(
    ("tokens", "capacity", "words"), [((1,), 0, "capacity is 0"), ((), 8, "tokens is ()")]
)
def test_plan_out_of_range(tokens, capacity, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        make_plan(0, "decode", tokens, capacity, microbatches=1, bucket=0)


def test_idle_plan_still_has_a_round():
    assert make_plan(0, "idle", (0, 0), 64, 1, 0).rounds == 1


@pytest.mark.pain(1)
@given(
    tokens=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    capacity=st.integers(1, 64),
    microbatches=st.sampled_from((1, 2)),
)
def test_max_rows_bounds_every_slice_and_sums_to_the_tokens(tokens, capacity, microbatches):
    plan = make_plan(0, "extend", tokens, capacity, microbatches, 0)
    per_round = [max_rows(plan, capacity, r) for r in range(plan.rounds)]
    for rank, count in enumerate(tokens):
        slices = round_slices(count, capacity, plan.rounds)
        assert [rows[rank] for rows in per_round] == [s.stop - s.start for s in slices]


def test_max_rows_of_a_graph_step_is_the_bucket():
    plan = make_plan(0, "decode", [3, 0, 8], 64, 2, 4)
    assert max_rows(plan, 64, 0) == (4, 4, 4)
