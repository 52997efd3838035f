"""Live traffic on two attention ranks: nothing is lost, nothing hangs, the rest stays equal."""

from __future__ import annotations

import pytest
from matrix import traffic
from matrix.cases import Case, start
from matrix.compare import FP32_TOLERANCE, compare

CASE = Case(2, 1, 1)
JOBS = {"mixed": traffic.mixed(), "tail": traffic.tail(), "normal": traffic.normal()}


@pytest.fixture(scope="module")
def colocated(zygote, model, matrix_folder):
    log = matrix_folder / "colocated_live.log"
    with start(zygote, model(8), log, dtype="float32") as engine:
        return {name: engine.run(traffic.undisturbed(job)) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def engine(zygote, model, colocated, matrix_folder):
    with start(zygote, model(8), matrix_folder / "live.log", **CASE.arguments()) as running:
        yield running


@pytest.fixture
def run(engine, colocated):
    """Run a job and compare it; then a normal request works and the roles' counters agree."""

    def get(name: str):
        answers = engine.run(JOBS[name])
        compare(colocated[name], answers, FP32_TOLERANCE).check()
        check_health(engine, colocated)
        return answers

    return get


def check_health(engine, colocated) -> None:
    answers = engine.run(JOBS["normal"])
    compare(colocated["normal"], answers, FP32_TOLERANCE).check()
    attn = engine.state()
    (ffn,) = attn[0]["ffn"]
    assert ffn["tokens"] == sum(rank["tokens"] for rank in attn)
    assert {rank["steps"] for rank in attn} == {ffn["steps"]}


@pytest.mark.pain(8)
def test_mixed_traffic_with_aborts(run):
    answers = run("mixed")
    asked = [request.abort_after is not None for request in JOBS["mixed"].requests]
    aborted = [answer.finish == "abort" for answer in answers]
    assert sum(aborted) > traffic.ABORT_SHARE * traffic.NUM_REQUESTS / 2
    assert not [i for i in range(len(asked)) if aborted[i] and not asked[i]]


@pytest.mark.pain(29)
def test_tail_drains_beside_new_requests(run):
    assert all(answer.finish == "length" for answer in run("tail"))


@pytest.mark.pain(54)
def test_abort_storm_then_a_normal_request(engine, colocated):
    answers = engine.run(traffic.storm())
    assert {answer.finish for answer in answers} == {"abort"}
    check_health(engine, colocated)
