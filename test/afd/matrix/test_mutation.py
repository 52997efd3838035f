"""The equality tests are able to fail: each fault on the way turns them red."""

from __future__ import annotations

import pytest
from matrix.cases import Case, start
from matrix.compare import FP32_TOLERANCE, Comparison, compare
from matrix.patterns import PATTERNS

CASE = Case(1, 1, 2)
# Functions of matrix.faults, by name: the module imports torch, which this process does without.
FAULTS = (
    "output_zeroed",
    "experts_swapped",
    "topk_weights_ignored",
    "layer_not_loaded",
    "microbatch_rows_exchanged",
)


@pytest.fixture
def answer_with(zygote, model, reference, matrix_folder):
    def get(*faults: str) -> Comparison:
        log = matrix_folder / f"fault_{'_'.join(faults)}.log"
        (job,) = PATTERNS["batch_5"]
        with start(zygote, model(8), log, faults, **CASE.arguments()) as engine:
            answers = engine.run(job)
        assert all(answer.finish == "length" for answer in answers), "it broke, instead of erring"
        return compare(reference(8).answers["batch_5"], answers, FP32_TOLERANCE)

    return get


def test_without_a_fault_it_is_green(answer_with):
    answer_with().check()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_it_red(answer_with, fault):
    with pytest.raises(AssertionError, match=r"request \d"):
        answer_with(fault).check()
