"""Estimated times against steps that others measured, and against a trace of ours."""

from __future__ import annotations

import pytest
from planner.harness import PUBLISHED, cost, near

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import estimate, fit, hardware
from sglang.srt.disaggregation.afd.planner.step import Decomposition, Stage

SWEEP = PUBLISHED["ratio_sweep"]
LAYERS = 94
EP_RUNS = PUBLISHED["wide_ep"]["steps"]
# The run that `rank_us` was fitted on, up to this width.
FITTED_RUN, FITTED_EP = 0, 32


def steps(context: int) -> dict[int, float]:
    """Measured seconds by attention trays."""
    return {int(t): ms / 1e3 for t, ms in SWEEP["contexts"][str(context)]["step_ms"].items()}


def tokens(context: int, trays: int) -> float:
    """Tokens of all attention ranks in one microbatch."""
    return trays * SWEEP["ranks_per_tray"] * SWEEP["contexts"][str(context)]["batch"] / 2


def predict(context: int, trays: int, level_s: float, experts: fit.Line) -> Stage:
    """A stage whose attention gives the flat level, and whose experts take a line in tokens.

    The link is in that line: FastAFD's expert kernel sends and receives itself.
    """
    return Stage(
        attn_s=level_s / (2 * LAYERS),
        expert_s=experts.start + experts.slope * tokens(context, trays),
        link_s=0,
        layers=LAYERS,
        microbatches=2,
    )


def experts_line() -> fit.Line:
    """T_e against tokens from two points at 16K, 8:1 and 16:1, where the experts bind."""
    measured = steps(16384)
    points = [(tokens(16384, t), measured[t] / (2 * LAYERS)) for t in (8, 16)]
    return fit.line(points, "weights from rows")


@pytest.mark.parametrize("trays", [5, 6, 7, 9, 10, 11, 12, 13, 14, 15])
def test_held_out_ratios_at_16k(trays):
    """Third-party sweep (linsj20/FastAFD): three of 13 points are used, ten are predicted.

    Neighbours of the sweep differ by up to 3 % from a smooth curve; 13:1 is low by that.
    """
    measured = steps(16384)
    found = predict(16384, trays, measured[4], experts_line())
    assert near(found.step_s, measured[trays], 0.055)


def test_regions_at_16k():
    """Same sweep: flat up to 5:1, bent from 6:1 on; the predicted bend lies between them."""
    measured, experts = steps(16384), experts_line()
    assert predict(16384, 5, measured[4], experts).regime == "hidden"
    assert near(measured[5], measured[4], 0.01)
    assert predict(16384, 6, measured[4], experts).regime == "exposed"
    assert measured[6] > measured[5] * 1.03
    for trays in range(7, 17):
        assert measured[trays] > measured[trays - 1]


@pytest.mark.parametrize(
    ("context", "hidden_until", "tolerance"),
    [(32768, 7, 0.10), (65536, 7, 0.12), (131072, 16, 0.13)],
)
def test_held_out_contexts(context, hidden_until, tolerance):
    """Same sweep at 32K, 64K and 128K, from the line of 16K and each one's own level at 3:1.

    With fewer tokens per step the bend is later and weaker, and at 128K there is none. Measured
    steps creep up by a tenth before any bend, so the prediction is low, never high: it does not
    know that the slowest of M ranks sets the pace.
    """
    measured, experts = steps(context), experts_line()
    for trays, seconds in measured.items():
        found = predict(context, trays, measured[3], experts)
        assert near(found.step_s, seconds, tolerance), trays
        assert found.step_s < seconds * 1.01, trays
        assert (found.regime == "hidden") == (trays <= hidden_until), trays


def test_the_line_starts_where_the_weights_say():
    """Held out: with no tokens T_e is the time to read a rank's experts; estimate against sweep."""
    known = cost(SWEEP["model"], "gb200-nvl72", experts_us=0)
    read = known.model.expert_params * known.model.expert_bytes * 128 / SWEEP["ffn_ranks"]
    read /= known.hardware.memory_rate * known.estimates.weight_read
    assert near(read, experts_line().start, 0.08)


@pytest.mark.parametrize(
    "index", range(len(EP_RUNS)), ids=[f"{r['model']}-{r['context']}" for r in EP_RUNS]
)
def test_wide_ep_steps(index):
    """Held out (linsj20/FastAFD): vLLM's steps on GB200 at EP4 to EP64, four workloads.

    `kv_read` is from the first one's EP4 step, `rank_us` from its steps up to EP32; the other 16
    of 20 points, and both models' sizes, are predicted.
    """
    run = EP_RUNS[index]
    known = cost(run["model"], "gb200-nvl72")
    wire = known.estimates.link("deepep", known.hardware)
    errors = []
    for ep, (batch, rate) in run["ep"].items():
        found = known.colocated(batch, run["context"], int(ep), wire).total_s
        errors.append(found / (batch / rate) - 1)
    assert max(map(abs, errors)) < 0.20, errors
    assert sum(map(abs, errors)) / len(errors) < 0.08, errors


def test_packaged_rank_us_is_the_line_of_its_source():
    """The wait per further rank in data/estimates.json is least squares on the rows it names."""
    run = EP_RUNS[FITTED_RUN]
    known = cost(run["model"], "gb200-nvl72", **{"deepep.rank_us": 0})
    wire = known.estimates.link("deepep", known.hardware)
    up = down = 0.0
    for ep, (batch, rate) in run["ep"].items():
        if int(ep) > FITTED_EP:
            continue
        rest = batch / rate - known.colocated(batch, run["context"], int(ep), wire).total_s
        waits = (int(ep) - 1) * known.model.moe_layers * 1e-6
        up, down = up + waits * rest, down + waits**2
    assert near(estimate.load().links["deepep"]["rank_us"], up / down, 0.03)


def test_best_width_is_in_the_middle():
    """Held out: EP16 is the best of vLLM's widths for all four; ours is EP8 to EP32."""
    for run in EP_RUNS:
        known = cost(run["model"], "gb200-nvl72")
        wire = known.estimates.link("deepep", known.hardware)
        rates = {}
        for ep, (batch, _) in run["ep"].items():
            rates[int(ep)] = batch / known.colocated(batch, run["context"], int(ep), wire).total_s
        assert max(rates, key=lambda ep: rates[ep]) in (8, 16, 32)
        measured = {int(ep): rate for ep, (_, rate) in run["ep"].items()}
        assert max(measured, key=lambda ep: measured[ep]) == 16


def test_trace_of_one_h200():
    """Trace, batch 64: what the estimates name as their source. Batch 32: held out."""
    trace = PUBLISHED["trace"]
    known = cost(trace["model"], "h200", kv_read=trace["kv_read"])
    layers = known.model.layers
    for batch, tolerance in ((64, 0.05), (32, 0.16)):
        row = trace["batch"][str(batch)]
        fmha = known.fmha_s(batch, trace["context"]) / layers * 1e6
        moe = known.experts_s(batch, 1) * 1e6
        dense = known.dense_s(batch) / layers * 1e6
        assert near(fmha, row["fmha"], tolerance)
        assert near(moe, row["moe"], tolerance)
        # The LM head is in no layer of the trace: 2 us of 48 layers each.
        assert near(dense, row["dense"], 0.20)


def test_calibration_reproduces_the_measured_step():
    known = cost("Qwen3-235B-A22B-FP8", "gb200-nvl72")
    wire = known.estimates.link("deepep", known.hardware)
    measured = Decomposition(fmha_s=0.0152, dense_s=0.0053, moe_s=0.0154, batch=64)
    again = known.calibrated(measured, 8192, 4, wire).colocated(64, 8192, 4, wire)
    assert again.fmha_s == pytest.approx(measured.fmha_s)
    assert again.dense_s == pytest.approx(measured.dense_s)
    assert again.moe_s == pytest.approx(measured.moe_s)


def test_calibrated_predictor_is_the_identitys():
    """With FMHA and dense measured, an AFD step's attention is r T_FMHA + m T_dense."""
    known = cost("Qwen3-235B-A22B-FP8", "gb200-nvl72")
    wire = known.estimates.link("deepep", known.hardware)
    measured = Decomposition(fmha_s=0.0152, dense_s=0.0053, moe_s=0.0154, batch=64)
    stage = known.calibrated(measured, 8192, 4, wire).stage(96, 8192, 28, 4, 2, wire)
    attention = stage.attn_s * stage.layers * stage.microbatches
    assert attention == pytest.approx(1.5 * measured.fmha_s + 2 * measured.dense_s)


def test_absurd_measurement_is_refused():
    """Seconds instead of milliseconds, for example."""
    known = cost("Qwen3-235B-A22B-FP8", "gb200-nvl72")
    wire = known.estimates.link("deepep", known.hardware)
    measured = Decomposition(fmha_s=15.2, dense_s=5.3, moe_s=15.4, batch=64)
    with pytest.raises(AFDConfigError, match="the fmha part is 15200 ms where sizes and hardware"):
        known.calibrated(measured, 8192, 4, wire)


def test_times_grow_with_their_causes():
    known = cost("Qwen3-235B-A22B-FP8", "h200")
    assert known.fmha_s(2, 8192) == pytest.approx(2 * known.fmha_s(1, 8192))
    assert known.fmha_s(1, 16384) == pytest.approx(2 * known.fmha_s(1, 8192))
    assert known.dense_s(1) == pytest.approx(known.dense_s(8), rel=0.02), "weights are read once"
    assert known.experts_s(4096, 2) > known.experts_s(512, 2) > known.experts_s(1, 2)
    assert known.experts_s(512, 1) > known.experts_s(512, 2) > known.experts_s(512, 8)


def test_latent_attention_is_bound_by_arithmetic():
    """DeepSeek-V3: 128 heads share one latent, so scores cost more than reading it."""
    known = cost("DeepSeek-V3", "h200")
    read = known.model.kv_request_bytes(8192) / known.hardware.memory_rate
    assert known.fmha_s(1, 8192) > 1.5 * read / known.estimates.kv_read


def test_estimates_have_sources():
    known = estimate.load()
    assert all(len(source) > 20 for source in known.sources.values())
    assert all(len(entry["source"]) > 20 for entry in known.links.values())
    assert hardware.names()
