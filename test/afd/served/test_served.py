"""A server in AFD mode answers exactly as upstream's colocated server of the same wheel."""

from __future__ import annotations

import pytest
from served.conftest import AFD
from served.record import NUM_PROMPTS

pytestmark = pytest.mark.timeout(1200)  # a fixture may start two servers

CASES = {
    "demo-1A1F": ("demo", *AFD),
    "demo-2A1F": ("demo", *AFD, "--afd-attn-ranks", "2"),
    # Odd sizes, two microbatches, and a capacity that makes most prefills go in rounds.
    "tiny-1A1F": ("tiny", *AFD, "--afd-microbatches", "2", "--afd-max-tokens-per-rank", "16"),
    "tiny-2A3F": (
        *("tiny", *AFD, "--afd-attn-ranks", "2", "--afd-ffn-ranks", "3"),
        *("--afd-microbatches", "2", "--afd-max-tokens-per-rank", "16"),
        *("--chunked-prefill-size", "64"),
    ),
}


@pytest.fixture(params=CASES, scope="session")
def pair(request, record_of):
    """(colocated, afd) records of one case."""
    case = CASES[request.param]
    return record_of(case[0]), record_of(*case)


def test_completions_are_equal(pair):
    colocated, afd = pair
    assert len(afd.completions) == NUM_PROMPTS
    assert afd.completions == colocated.completions


def test_streams_are_equal(pair):
    colocated, afd = pair
    assert afd.streamed == colocated.streamed
    assert afd.streamed == afd.completions[: len(afd.streamed)]


def test_chats_are_equal(pair):
    colocated, afd = pair
    assert afd.chats == colocated.chats
    assert afd.streamed_chats == afd.chats


def test_answers_are_not_trivial(pair):
    _, afd = pair
    assert len(set(afd.completions)) > NUM_PROMPTS // 2


def test_each_role_read_and_holds_only_its_tensors(pair, request):
    _, afd = pair
    attn = afd.info
    ffn = attn[0]["ffn"]
    assert all(rank["tensors_read"] > 0 for rank in [*attn, *ffn])
    experts_held = sum(rank["param_bytes"] for rank in ffn)
    for rank in attn:
        # Served in FP32, stored in 2 or 4 bytes: no expert is among what was read or is held.
        assert rank["tensors_skipped"] == sum(r["tensors_read"] for r in ffn)
        assert rank["param_bytes"] < experts_held
    for rank in ffn:
        others = sum(r["tensors_read"] for r in ffn if r is not rank)
        assert rank["tensors_skipped"] == attn[0]["tensors_read"] + others


def test_every_rank_worked_and_counters_agree(pair):
    _, afd = pair
    ffn = afd.info[0]["ffn"]
    sent = sum(rank["tokens"] for rank in afd.info)
    assert all(rank["tokens"] > 0 for rank in [*afd.info, *ffn])
    if len(ffn) == 1:
        assert ffn[0]["tokens"] == sent
    else:
        # A token is a row on every FFN rank that holds one of its experts: 1 to top-k ranks.
        assert sent <= sum(rank["tokens"] for rank in ffn) <= 2 * sent
    assert len({rank["steps"] for rank in [*afd.info, *ffn]}) == 1
