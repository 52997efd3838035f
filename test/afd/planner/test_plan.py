"""The answer: which layout, why, and when not."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from planner.harness import cost

from sglang.srt.disaggregation.afd import config
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import command, plan, report
from sglang.srt.disaggregation.afd.planner.plan import Request

BIG, SMALL = "Qwen3-235B-A22B-FP8", "Qwen3-30B-A3B-FP8"
# About what FastAFD's own kernels do: fitted by nobody, chosen to be fast.
FAST = {"nccl.round_trip_us": 9, "nccl.rank_us": 1, "nccl.link_share": 0.6}


def make(model=BIG, machine="gb200-nvl72", overrides=None, **request) -> plan.Plan:
    wanted = {"gpus": 72, "context": 16384, "connectors": ("nccl",), **request}
    return plan.make(cost(model, machine, **(overrides or {})), Request(**wanted))


def test_afd_is_advised_where_it_wins():
    made = make(overrides=FAST)
    assert made.reasons == ()
    assert made.best.throughput > made.colocated.throughput
    assert made.speedup == pytest.approx(made.best.throughput / made.colocated.throughput)
    text = report.plan_text(made, "Qwen/Q")
    assert "verdict: run AFD" in text
    ranks = f"--afd-attn-ranks {made.best.attn_ranks} --afd-ffn-ranks {made.best.ffn_ranks}"
    assert ranks in text
    assert "--model-path Qwen/Q" in text


@pytest.mark.pain(77)
def test_dont_when_colocated_wins():
    made = make(machine="h200", gpus=8, context=8192)
    text = report.plan_text(made, "m")
    assert "verdict: don't run AFD here" in text
    assert f"colocated {made.colocated.name} is predicted at" in made.reasons[0]
    assert made.colocated.throughput >= made.best.throughput
    # What to run instead comes first.
    assert text.index("--moe-a2a-backend deepep") < text.index("--disaggregation-mode afd")


@pytest.mark.pain(77)
def test_dont_when_the_model_fits_one_gpu():
    """Even with a link that costs nothing."""
    free = {"nccl.round_trip_us": 0, "nccl.rank_us": 0, "nccl.link_share": 1}
    made = make(SMALL, "h200", free, gpus=8, context=8192)
    assert "the model fits one GPU: " in made.reasons[0]
    assert "run one copy per GPU" in made.reasons[0]


def test_a_model_that_leaves_no_room_does_not_fit_one_gpu():
    """Qwen3-235B FP8 loads on a 288 GB GPU, but a fifth of the requests fits beside it."""
    made = make(machine="rubin-nvl72", overrides=FAST)
    assert not any("fits one GPU" in reason for reason in made.reasons)


def test_speedup_is_the_product_of_the_printed_terms():
    made = make()
    text = report.plan_text(made, "m")
    terms = re.search(r"T_colo/T_afd = ([\d.]+) x ([\d.]+) x ([\d.]+) = ([\d.]+)", text)
    batch, share, time, product = map(float, terms.groups())
    assert batch * share * time == pytest.approx(product, rel=2e-3)
    assert product == pytest.approx(made.speedup, rel=2e-3)


def test_printed_step_adds_up():
    text = report.plan_text(make(), "m")
    one, period, times, step = map(
        float, re.search(r"= ([\d.]+) us \+ ([\d.]+) us x (\d+) = ([\d.]+) ms", text).groups()
    )
    assert (one + period * times) / 1e3 == pytest.approx(step, rel=2e-3)


def test_no_other_layout_is_better():
    known = cost(BIG, "gb200-nvl72", **FAST)
    request = Request(gpus=72, context=16384, connectors=("nccl", "deepep"))
    made = plan.make(known, request)
    assert made.best.throughput == max(o.throughput for o in plan.afd_layouts(known, request))
    assert made.others[0] == made.best
    rates = [option.throughput for option in made.others]
    assert rates == sorted(rates, reverse=True)


def test_two_microbatches_only_when_they_pay():
    """Latency-bound stages: splitting a small batch reads every weight twice."""
    small = make(machine="h200", gpus=8, context=65536, overrides=FAST)
    one = make(machine="h200", gpus=8, context=65536, overrides=FAST, microbatches=(1,))
    two = make(machine="h200", gpus=8, context=65536, overrides=FAST, microbatches=(2,))
    assert small.best.throughput == max(one.best.throughput, two.best.throughput)


def test_a_tighter_limit_takes_a_smaller_batch():
    known = cost(BIG, "gb200-nvl72")
    free = plan.make(known, Request(gpus=72, context=8192, connectors=("nccl",)))
    tight = plan.make(known, Request(gpus=72, context=8192, connectors=("nccl",), slo_s=0.020))
    assert tight.best.step_s <= 0.020 < free.best.step_s
    assert tight.best.batch < free.best.batch
    assert (tight.best.limited_by, free.best.limited_by) == ("SLO", "memory")
    # The batch is the largest that keeps the limit.
    wire = known.estimates.link(tight.best.connector, known.hardware)
    more = known.stage(
        tight.best.batch + 2,
        8192,
        tight.best.attn_ranks,
        tight.best.ffn_ranks,
        tight.best.microbatches,
        wire,
    )
    assert more.step_s > 0.020


def test_hosts_serve_one_role_each():
    for m, n in plan.pairs(cost(BIG, "gb200-nvl72"), Request(gpus=72, context=8192)):
        assert m + n <= 72
        assert m + n <= 4 or (m % 4, n % 4) == (0, 0)


def test_given_ranks_are_kept():
    made = make(gpus=32, attn_ranks=28, ffn_ranks=4)
    assert [(o.attn_ranks, o.ffn_ranks) for o in made.others] == [(28, 4)]


def test_one_host_is_one_command_and_several_are_two():
    made = make(machine="h200", gpus=8, context=8192)
    (single,) = command.launch(made.best, made.cost.hardware, "m")
    assert "--afd-role" not in single
    assert "--afd-bootstrap-addr" not in single
    attn, ffn = command.launch(make(overrides=FAST).best, made.cost.hardware, "m")
    assert "--afd-role attn --afd-bootstrap-addr HOST0:20000" in attn
    assert "--afd-role ffn --afd-bootstrap-addr HOST0:20000" in ffn


@pytest.mark.pain(71)
def test_memory_fraction_holds_weights_and_kv():
    made = make(machine="h200", gpus=8, context=8192)
    (text,) = command.launch(made.best, made.cost.hardware, "m")
    fraction = float(re.search(r"--mem-fraction-static ([\d.]+)", text)[1])
    room, memory = made.best.room, made.cost.hardware.memory_bytes
    assert fraction == pytest.approx((room.weights + room.kv) / memory, abs=0.006)
    total = int(re.search(r"--max-running-requests (\d+)", text)[1])
    assert total == made.best.batch * made.best.attn_ranks


def test_every_flag_of_a_command_exists():
    """Ours in config.py, the others in the installed SGLang's server arguments."""
    ours = {flag.name for flag in config.FLAGS}
    origin = Path(find_spec("sglang.srt.server_args").origin)
    upstream = origin.read_text(encoding="utf-8")
    plans = [make(overrides=FAST), make(machine="h200", gpus=8, context=8192)]
    text = "\n".join(report.plan_text(made, "m") for made in plans)
    found = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]+(?= )", text.split("verdict", 1)[1]))
    assert len(found) > 12
    for flag in found - ours - {"--slo-ms", "--step-ms"}:
        name = flag[2:].replace("-", "_")
        assert re.search(rf"^    {name}: A\[", upstream, re.M), flag


def test_the_reader_is_told_about_a_lead_within_the_error():
    made = make(overrides=FAST)
    assert 1 < made.speedup < plan.MARGIN
    assert any("within the error of the estimate" in note for note in made.notes)


def test_a_domain_that_is_too_small_is_noted():
    made = make(machine="h200", gpus=32, attn_ranks=24, ffn_ranks=8, context=8192)
    assert any("exceed one link domain of 8" in note for note in made.notes)


def test_a_context_beyond_the_model_is_noted():
    made = make(context=65536)
    assert any("exceeds the model's 40960 tokens" in note for note in made.notes)


BAD = [
    ({"gpus": 0}, "--gpus is 0"),
    ({"gpus": -8}, "--gpus is -8"),
    ({"context": 0}, "--context is 0"),
    ({"slo_s": 0}, "--slo-ms is 0"),
    ({"slo_s": -1}, "--slo-ms is -1000"),
    ({"slo_s": float("nan")}, "--slo-ms is nan"),
    ({"microbatches": (3,)}, "--microbatches 3: this version runs 1 or 2"),
    ({"attn_ranks": 0}, "--attn-ranks is 0"),
    ({"slo_s": 1e-5}, "no layout decodes a step in --slo-ms 0.01"),
    ({"context": 10**7}, "lower --context, or take larger GPUs"),
    ({"connectors": ("smoke",)}, "--connector smoke: the planner has no numbers"),
]


@pytest.mark.parametrize(("request_", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_requests(request_, text):
    with pytest.raises(AFDConfigError) as caught:
        make(**request_)
    assert text in str(caught.value)


def test_too_few_gpus_says_how_many():
    with pytest.raises(AFDConfigError) as caught:
        make("DeepSeek-V3", "h100", gpus=4, context=4096)
    assert "654 GB of routed experts need 10 FFN ranks of h100, and --gpus is 4" in str(
        caught.value
    )


def test_a_single_gpu_has_no_afd():
    made = make(SMALL, "h200", gpus=1, context=4096)
    assert made.best is None
    assert made.reasons[0].startswith("no AFD layout fits")
    assert "one GPU" in report.plan_text(made, "m")
