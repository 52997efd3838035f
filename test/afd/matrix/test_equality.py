"""AFD answers as the colocated engine of the same wheel, in every topology and pattern, in FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from matrix.cases import Case, Plan, Reference, plans, run_patterns, start
from matrix.compare import FP32_TOLERANCE, compare
from matrix.jobs import Answer
from matrix.patterns import PATTERNS, without_generation

# Every value of a feature meets a small and a large topology in `make test`; `make test-long` adds
# the other pairs.
CASES = (
    Case(1, 1, 2, chunk=24),
    Case(2, 1, 1, chunk=24),
    Case(1, 2, 1, num_experts=7),  # neither M nor N divides the experts
    Case(1, 2, 2),
    Case(3, 2, 2, chunk=24),
)
LONG = (
    Case(1, 1, 1),
    Case(2, 1, 2),
    Case(2, 2, 1, num_experts=7),
    Case(2, 2, 2, num_experts=7),
    Case(3, 2, 1),
)


@dataclass
class Outcome:
    case: Case
    reference: Reference
    answers: dict[str, list[Answer]]
    scores: list[Answer]
    state: list[dict[str, Any]]
    plans: list[Plan]


@pytest.fixture(
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)],
    ids=str,
    scope="module",
)
def outcome(request, zygote, model, reference, matrix_folder):
    """One engine, all patterns, then the colocated engine's own sequences."""
    case: Case = request.param
    expected = reference(case.num_experts)
    log = matrix_folder / f"{case}.log"
    with start(zygote, model(case.num_experts), log, **case.arguments()) as engine:
        answers = run_patterns(engine)
        scores = without_generation(engine.run(expected.teacher))
        state = engine.state()
    return Outcome(case, expected, answers, scores, state, plans(log))


@pytest.mark.pain(7, 66)
def test_scores_of_given_sequences_are_equal(outcome):
    result = compare(outcome.reference.scores, outcome.scores, FP32_TOLERANCE)
    print(f"{result.num_positions} positions, largest difference {result.largest:.1e}")
    result.check()


@pytest.mark.pain(1, 2, 7, 14, 15, 16, 17, 21, 25, 66, 74)
@pytest.mark.parametrize("name", PATTERNS)
def test_generated_tokens_are_equal(outcome, name):
    compare(outcome.reference.answers[name], outcome.answers[name], FP32_TOLERANCE).check()


def test_repeated_prefix_comes_from_the_cache(outcome):
    assert all(answer.cached_tokens >= 64 for answer in outcome.answers["prefix"][1:])


@pytest.mark.pain(8, 46)
def test_every_rank_worked_and_counters_agree(outcome):
    attn, ffn = outcome.state, outcome.state[0]["ffn"]
    sent = sum(rank["tokens"] for rank in attn)
    processed = sum(rank["tokens"] for rank in ffn)
    assert all(rank["tokens"] > 0 for rank in (*attn, *ffn))
    # A token is a row on every FFN rank that holds one of its two experts.
    assert processed == sent if len(ffn) == 1 else sent <= processed <= 2 * sent
    assert len({rank["steps"] for rank in (*attn, *ffn)}) == 1


def test_the_case_is_what_it_claims(outcome):
    """The steps that the patterns are there for did happen."""
    case, seen = outcome.case, outcome.plans
    assert max(plan.rounds for plan in seen) > 1
    assert max(plan.microbatches for plan in seen) == case.microbatches
    assert {plan.mode for plan in seen} >= {"extend", "decode"}
    if case.chunk is not None:
        assert max(max(plan.tokens) for plan in seen) <= case.chunk
    if case.attn_ranks > 1:
        assert any(0 in plan.tokens and max(plan.tokens) > 0 for plan in seen), "no idle rank"
        assert any(len(set(plan.tokens)) > 1 and 0 not in plan.tokens for plan in seen)


@pytest.mark.pain(23)
def test_decodes_go_on_beside_the_chunks_of_a_long_prefill(outcome):
    """A rank prefills at most a chunk in one step, and in the same step others decode."""
    case = outcome.case
    if case.chunk is None or case.attn_ranks == 1:
        pytest.skip("no chunks, or nobody beside them")
    full = [plan for plan in outcome.plans if case.chunk in plan.tokens]
    assert len(full) > 3
    assert any(0 < min(plan.tokens) <= 3 for plan in full), "no rank decoded beside a full chunk"
