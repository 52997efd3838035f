"""The equality tests are able to fail: each fault on the way turns them red."""

from __future__ import annotations

import pytest
from matrix import test_live
from matrix.cases import FAULTS, Case, start
from matrix.compare import FP32_TOLERANCE, Comparison, compare
from matrix.patterns import PATTERNS

CASE = Case(1, 1, 2)


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


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_live_traffic_red(fault, zygote, model, matrix_folder):
    """The comparison of test_live, on its topology; the second microbatch needs one."""
    log = matrix_folder / f"live_{fault}.log"
    job = test_live.JOBS["tail"]
    with start(zygote, model(8), matrix_folder / "live_plain.log", dtype="float32") as engine:
        expected = engine.run(test_live.traffic.undisturbed(job))
    case = test_live.CASE._replace(microbatches=2) if "microbatch" in fault else test_live.CASE
    with start(zygote, model(8), log, (fault,), **case.arguments()) as engine:
        answers = engine.run(job)
    assert all(answer.finish == "length" for answer in answers), "it broke, instead of erring"
    with pytest.raises(AssertionError, match=r"request \d"):
        compare(expected, answers, FP32_TOLERANCE).check()
