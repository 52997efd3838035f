"""The identity, the predictor and the pipeline, against figures that others published."""

from __future__ import annotations

import pytest
from planner.harness import PUBLISHED, near

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import step
from sglang.srt.disaggregation.afd.planner.step import Decomposition, Stage

FASTAFD = PUBLISHED["fastafd"]
WORKLOADS = FASTAFD["workloads"]
NAMES = [row["name"] for row in WORKLOADS]


def ranks(row: dict) -> tuple[int, int]:
    nodes = FASTAFD["gpus_per_node"]
    return step.ranks(row["attn_nodes"], nodes), step.ranks(row["ffn_nodes"], nodes)


def inverted(row: dict) -> Decomposition:
    # Ratios as the post gives them, two decimals.
    return step.invert(
        round(row["afd"] / row["colocated"], 2),
        row["projection"],
        row["afd_batch"] / row["colocated_batch"],
        *ranks(row),
        FASTAFD["microbatches"],
    )


def test_nodes_become_ranks():
    """FastAFD blog: 7:1 in trays of 4 is 28A4F."""
    assert (step.ranks(7, 4), step.ranks(1, 4)) == (28, 4)


@pytest.mark.parametrize(("nodes", "tax"), [((7, 1), 0.125), ((17, 1), 0.056)])
def test_ffn_tax(nodes, tax):
    """FastAFD blog: 12.5 % of the GPUs at 7:1, 5.6 % at 17:1."""
    assert step.ffn_tax(*(step.ranks(n, 4) for n in nodes)) == pytest.approx(tax, abs=5e-4)


def test_tax_counts_ranks_alike_in_nodes_and_in_ranks():
    assert step.ffn_tax(28, 4) == step.ffn_tax(7, 1)


@pytest.mark.parametrize("row", WORKLOADS, ids=NAMES)
def test_identity_holds_for_published_throughput(row):
    """FastAFD README: tokens/s/GPU of both sides give the steps that the identity needs."""
    m, n = ranks(row)
    afd_step = row["afd_batch"] * m / (m + n) / row["afd"]
    colocated_step = row["colocated_batch"] / row["colocated"]
    ratio = row["afd_batch"] / row["colocated_batch"]
    found = step.speedup(ratio, m, n, colocated_step / afd_step)
    assert found == pytest.approx(row["afd"] / row["colocated"], rel=1e-12)
    assert ratio == 1.5


@pytest.mark.parametrize("row", WORKLOADS, ids=NAMES)
def test_consistency_of_shares(row):
    """Consistency, not reproduction: the published pairs give the shares that others derived.

    The MoE share follows from the projection, which was recovered from it. What is checked is how
    the published speed-up splits the rest into FMHA and dense.
    """
    parts = inverted(row)
    assert [parts.fmha_s, parts.dense_s, parts.moe_s] == pytest.approx(row["shares"], abs=1.5e-3)
    assert parts.total_s == pytest.approx(1)


@pytest.mark.parametrize("row", WORKLOADS, ids=NAMES)
def test_inversion_solves_the_two_equations(row):
    """The shares put back into predictor and projection return the pair that they came from."""
    parts = inverted(row)
    m, n = ranks(row)
    ratio = row["afd_batch"] / row["colocated_batch"]
    back = step.speedup(ratio, m, n, parts.total_s / step.hidden_step_s(parts, ratio, 2))
    assert back == pytest.approx(round(row["afd"] / row["colocated"], 2))
    assert step.project(parts).moe_moved == pytest.approx(row["projection"])


@pytest.mark.parametrize("row", WORKLOADS, ids=NAMES)
def test_dense_moved_too_gives_above_two(row):
    """FastAFD blog: with dense moved as well, 1 / FMHA share is above 2 for all four."""
    assert step.project(inverted(row)).dense_moved_too > 2


def test_held_out_12a4f():
    """Held out: shares of 7:1 (28A4F) predict the published step of 3:1 (12A4F), Qwen3 8K."""
    row, other = WORKLOADS[0], FASTAFD["held_out_12a4f"]
    colocated_s = row["colocated_batch"] / row["colocated"]
    predicted_s = step.hidden_step_s(inverted(row), 1.5, 2) * colocated_s
    assert near(predicted_s * 1e3, other["step_ms"], 0.025)
    predicted = step.speedup(1.5, 12, 4, colocated_s / predicted_s)
    measured = step.speedup(1.5, 12, 4, colocated_s / (other["step_ms"] / 1e3))
    assert 1.205 < predicted < 1.235
    assert 1.205 < measured < 1.235


def test_held_out_12a4f_loses_without_overlap():
    """FastAFD blog: at 42.612 ms, overlap off, 12A4F falls below colocated."""
    row, other = WORKLOADS[0], FASTAFD["held_out_12a4f"]
    colocated_s = row["colocated_batch"] / row["colocated"]
    assert step.speedup(1.5, 12, 4, colocated_s / (other["step_ms_without_overlap"] / 1e3)) < 1


def test_identity_alone_on_910c():
    """vLLM afd-plugin on 910C: what M/(M+N) explains of 64A16F over 48A16F, and what it does not.

    Batches and steps are not published, so nothing is fitted and nothing is ranked against EP64.
    """
    explained = step.speedup(1, 64, 16, 1) / step.speedup(1, 48, 16, 1)
    assert explained == pytest.approx(1.067, abs=5e-4)
    for context, ratio in (("16K", 1.175), ("32K", 1.211)):
        row = PUBLISHED["ascend"][context]
        measured = row["64A16F"] / row["48A16F"]
        assert measured == pytest.approx(ratio, abs=1e-3)
        assert measured / explained > 1.09, "the rest needs B and T, which are missing"


def test_stage_budget_of_stepmesh():
    """StepMesh Introduction.md: 20 tokens/s over 61 layers is 819 us, a third of it 273 us."""
    row = PUBLISHED["stepmesh"]
    layer = step.stage_budget_s(row["tokens_per_s"], row["layers"], 1) * 1e6
    stage = step.stage_budget_s(row["tokens_per_s"], row["layers"], row["stages"]) * 1e6
    assert (int(layer), int(stage)) == (row["layer_us"], row["stage_us"])


def stage(attn: float, expert: float, link: float, m: int, layers: int = 10) -> Stage:
    return Stage(attn_s=attn, expert_s=expert, link_s=link, layers=layers, microbatches=m)


# T_a, T_e, T_c, m; then balanced, link shorter, enough microbatches.
CONDITIONS = [
    (1.0, 1.0, 0.49, 3, True, True, True),  # m = 3 suffices while T_c < T_f / 2
    (1.0, 1.0, 0.50, 3, True, True, True),
    (1.0, 1.0, 0.51, 3, True, True, False),  # above it, four are needed
    (1.0, 1.0, 0.99, 4, True, True, True),
    (1.0, 1.0, 1.01, 4, True, False, False),
    (1.0, 1.0, 0.01, 2, True, True, False),  # two never close the pipeline with a link
    (1.0, 1.0, 0.0, 2, True, True, True),
    (1.0, 0.5, 0.1, 3, False, True, True),
    (0.5, 1.0, 0.1, 3, False, True, True),
]


@pytest.mark.parametrize("row", CONDITIONS, ids=str)
def test_conditions_of_megascale_infer(row):
    """MegaScale-Infer, arXiv 2504.02263: T_a = T_e, T_c < T_f, m T_f >= 2 (T_f + T_c)."""
    found = step.conditions(stage(*row[:4]))
    assert (found.balanced, found.link_shorter, found.enough_microbatches) == row[4:]


@pytest.mark.parametrize("row", [r for r in CONDITIONS if r[5] and r[6]], ids=str)
def test_our_step_is_theirs_where_their_conditions_hold(row):
    """There (T_a + T_e + 2 T_c) + T_f (m L - 1) is exact."""
    one = stage(*row[:4])
    assert one.step_s == pytest.approx(step.conditions(one).step_s)


def simulate(one: Stage) -> float:
    """Independent check: attention, experts and both directions serve microbatches in order."""
    free = {"attn": 0.0, "out": 0.0, "expert": 0.0, "back": 0.0}
    ready = [0.0] * one.microbatches
    for _ in range(one.layers):
        for index in range(one.microbatches):
            now = ready[index]
            for place, takes in (
                ("attn", one.attn_s),
                ("out", one.link_s),
                ("expert", one.expert_s),
                ("back", one.link_s),
            ):
                now = max(now, free[place]) + takes
                free[place] = now
            ready[index] = now
    return max(ready)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("expert", [0.1, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("link", [0.0, 0.2, 1.4])
def test_step_against_a_simulated_pipeline(m, expert, link):
    """Hidden, exposed, expert-bound and link-bound alike."""
    one = stage(1.0, expert, link, m, layers=40)
    assert one.step_s == pytest.approx(simulate(one), rel=0.02)


def test_hidden_step_is_the_predictor_plus_the_last_trip():
    """(B_afd/B_colo) T_FMHA + m T_dense, and what is away after the last layer."""
    colo = Decomposition(fmha_s=0.010, dense_s=0.004, moe_s=0.010)
    layers, m, ratio = 50, 2, 1.5
    attn = (ratio * colo.fmha_s / m + colo.dense_s) / layers
    one = stage(attn, 0.5 * attn, 0.2 * attn, m, layers)
    assert one.regime == "hidden"
    assert one.step_s == pytest.approx(step.hidden_step_s(colo, ratio, m) + one.away_s)


def test_boundary_between_regimes():
    assert stage(1.0, 0.6, 0.2, 2).slack == pytest.approx(0)
    assert stage(1.0, 0.59, 0.2, 2).regime == "hidden"
    assert stage(1.0, 0.61, 0.2, 2).regime == "exposed"
    assert stage(1.0, 1.2, 0.2, 3).regime == "hidden"
    assert stage(1.0, 1e-6, 0.0, 1).regime == "exposed", "one microbatch hides nothing"


@pytest.mark.parametrize(
    ("times", "binds"),
    [
        ((1.0, 0.1, 0.1), "attention"),
        ((0.1, 1.0, 0.1), "experts"),
        ((0.1, 0.1, 1.0), "round trip"),
        ((1.0, 0.9, 0.1), "round trip"),
    ],
)
def test_what_binds(times, binds):
    assert stage(*times, 2).binds == binds


BAD = [
    (lambda: Decomposition(fmha_s=-1, dense_s=1, moe_s=1), "FMHA time"),
    (lambda: Decomposition(fmha_s=0, dense_s=0, moe_s=0), "takes no time"),
    (lambda: Decomposition(fmha_s=1e9, dense_s=0, moe_s=0), "FMHA time"),
    (lambda: Decomposition(fmha_s=float("nan"), dense_s=0, moe_s=1), "FMHA time"),
    (lambda: Decomposition(fmha_s=1, dense_s=1, moe_s=1, batch=0), "batch"),
    (lambda: step.ffn_tax(0, 1), "M, attention ranks is 0"),
    (lambda: step.ffn_tax(4, -1), "N, FFN ranks is -1"),
    (lambda: step.ranks(0, 4), "nodes is 0"),
    (lambda: step.speedup(0, 4, 4, 1), "B_afd/B_colo"),
    (lambda: step.speedup(1.5, 4, 4, 0), "T_colo/T_afd"),
    (lambda: step.invert(1.4, 0.9, 1.5, 28, 4, 2), "projection"),
    (lambda: step.invert(1.4, 1.75, 2.0, 28, 4, 2), "cannot separate"),
    (lambda: step.invert(9.0, 1.75, 1.5, 28, 4, 2), "contradict"),
    (lambda: step.project(Decomposition(fmha_s=0, dense_s=1, moe_s=1)), "FMHA takes no time"),
    (lambda: stage(0, 1, 1, 2), "T_a"),
    (lambda: stage(1, 1, 1, 0), "m, microbatches is 0"),
    (lambda: step.stage_budget_s(0, 61, 3), "tokens per second"),
]


@pytest.mark.parametrize(("call", "text"), BAD, ids=[text for _, text in BAD])
def test_zero_and_absurd_values(call, text):
    with pytest.raises(AFDConfigError) as caught:
        call()
    assert text in str(caught.value)
