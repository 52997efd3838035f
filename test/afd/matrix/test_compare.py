"""What counts as a difference between two engines, and what as a near-tie of the two best tokens."""

from __future__ import annotations

import pytest
from matrix.compare import FP32_TOLERANCE, compare
from matrix.jobs import Answer

TIE, CLEAR = FP32_TOLERANCE / 2, 0.5


def answer(ids, gap=CLEAR, logprob=-1.0):
    count = len(ids)
    return Answer(ids=ids, logprobs=[logprob] * count, gaps=[gap] * count, finish="length")


def check(expected, found):
    result = compare([expected] * 100, [found] + [expected] * 99, FP32_TOLERANCE)
    result.check()
    return result


@pytest.mark.pain(72)
def test_another_token_after_a_near_tie_is_counted_and_not_an_error():
    result = check(answer([5, 6, 7], gap=TIE), answer([5, 9, 1]))
    assert (len(result.ties), result.wrong) == (1, [])


@pytest.mark.pain(72)
def test_many_ties_are_an_error():
    with pytest.raises(AssertionError, match="after a gap of"):
        compare([answer([5, 6], gap=TIE)], [answer([5, 9])], FP32_TOLERANCE).check()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (answer([5, 9, 1]), "token 1 of 3 is"),
        (answer([5, 6]), "token 2 of 3 is"),
        (answer([5, 6, 7], logprob=-1.1), "log probability -1.1 instead of -1.0"),
        (answer([5, 6, 7], logprob=float("nan")), "log probability nan"),
    ],
    ids=["another token", "too few", "another score", "nan"],
)
def test_everything_else_is_an_error(found, text):
    with pytest.raises(AssertionError, match=text):
        check(answer([5, 6, 7]), found)
