"""AFD scores given sequences in BF16 as the colocated BF16 engine does, on the trained demo model.

A random model says nothing here: its logits are large, so that the last bit of one is 1/16, and its
router is on the verge all the time. The LM head runs in FP32 in both engines, for the same reason.

With one rank of each role every bit is the same. With more, batches are composed differently, and
each FFN rank rounds its part of a token's sum to BF16 once more, as any expert parallelism does. That
is within the bound too, until a router somewhere takes another expert, which moves all later positions
of its sequence. Colocated BF16 has such positions against FP32; AFD may have fewer of them, and no more
than 2 %.
"""

from __future__ import annotations

from statistics import median

import pytest
from matrix.cases import Case, Reference, collect, start
from matrix.compare import BF16_TOLERANCE, compare, distances, mean_distance
from matrix.jobs import Answer
from matrix.patterns import PATTERNS, without_generation
from served.models import demo_model

pytestmark = pytest.mark.timeout(1200)  # the model may have to be trained first

CASES = (Case(2, 1, 2, dtype="bfloat16"),)
LONG = tuple(Case(*ranks, dtype="bfloat16") for ranks in ((3, 2, 1), (1, 1, 1), (1, 2, 2)))
MOST_BEYOND = 0.02  # share of positions
SLACK = 1.25  # of the colocated engine's mean distance to FP32
HEAD = {"enable_fp32_lm_head": True}


@pytest.fixture(scope="module")
def expected(zygote, matrix_folder) -> Reference:
    log = matrix_folder / "bfloat16_reference.log"
    with start(zygote, demo_model(), log, dtype="float32") as engine:
        return collect(engine)


@pytest.fixture(scope="module")
def colocated(zygote, matrix_folder, expected) -> list[Answer]:
    log = matrix_folder / "bfloat16_colocated.log"
    with start(zygote, demo_model(), log, dtype="bfloat16", **HEAD) as engine:
        return without_generation(engine.run(expected.teacher))


@pytest.fixture(scope="module")
def score(zygote, matrix_folder, expected):
    def get(case: Case, *faults: str) -> list[Answer]:
        log = matrix_folder / f"{case}{'_'.join(faults)}.log"
        arguments = {**case.arguments(), **HEAD}
        with start(zygote, demo_model(), log, faults, **arguments) as engine:
            scores = without_generation(engine.run(expected.teacher))
            generated = engine.run(PATTERNS["batch_16"][0])
            assert all(answer.finish == "length" for answer in generated)
            return scores

    return get


def beyond(found: list[float]) -> float:
    return sum(not distance <= BF16_TOLERANCE for distance in found) / len(found)


def check(case: Case, reference: list[Answer], colocated: list[Answer], ours: list[Answer]) -> None:
    found = distances(colocated, ours)
    print(f"{len(found)} positions, largest {max(found):.1e}, {beyond(found):.2%} beyond the bound")
    if (case.attn_ranks, case.ffn_ranks) == (1, 1):
        compare(colocated, ours, BF16_TOLERANCE).check()
        return
    theirs = distances(reference, colocated)
    assert beyond(found) <= min(MOST_BEYOND, beyond(theirs))
    assert median(found) <= BF16_TOLERANCE / 4
    assert mean_distance(reference, ours) <= SLACK * mean_distance(reference, colocated)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_scores_of_given_sequences_are_within_the_bound(case, score, expected, colocated):
    check(case, expected.scores, colocated, score(case))


@pytest.mark.long
def test_one_of_each_is_the_same_to_the_last_bit(score, colocated):
    assert max(distances(colocated, score(Case(1, 1, 1, dtype="bfloat16")))) == 0


@pytest.mark.long
@pytest.mark.parametrize("fault", ["experts_swapped", "topk_weights_ignored", "layer_not_loaded"])
@pytest.mark.parametrize("case", [*CASES, LONG[0]], ids=str)
def test_fault_exceeds_the_bound(case, fault, score, expected, colocated):
    ours = score(case, fault)
    with pytest.raises(AssertionError):
        check(case, expected.scores, colocated, ours)
