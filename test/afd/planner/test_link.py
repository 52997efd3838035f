"""Copies, bytes and time of dispatch and combine."""

from __future__ import annotations

import itertools
import json

import pytest
from planner.harness import PUBLISHED, ROOT, cost, near

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import estimate, fit, hardware, link
from sglang.srt.disaggregation.afd.planner.link import Link

RESULTS = ROOT / "benchmark/afd/results"
FILES = {
    "nccl": "link_2xh200.json",
    "deepep": "link_2xh200.json",
    "nvlink": "link_fp8_2xh200.json",
}


def wire(copies: str, **extra) -> Link:
    return Link(name="t", copies=copies, round_trip_s=0, rank_s=0, rate=1e9, source="t", **extra)


@pytest.mark.parametrize(("experts", "topk", "ranks"), [(6, 2, 3), (8, 3, 2), (8, 3, 4), (4, 4, 2)])
def test_ranks_hit_against_every_choice(experts, topk, ranks):
    """All sets of `topk` experts are as likely; count the ranks of each."""
    each = experts // ranks
    hit = [
        len({expert // each for expert in chosen})
        for chosen in itertools.combinations(range(experts), topk)
    ]
    assert link.ranks_hit(experts, topk, ranks) == pytest.approx(sum(hit) / len(hit))


def test_one_row_per_rank_is_never_more_than_deepeps_copies():
    for ranks in (1, 2, 4, 8, 64, 128):
        rows = link.ranks_hit(128, 8, ranks)
        assert 1 <= rows <= 8 + 1e-9
    assert link.ranks_hit(128, 8, 1) == 1
    assert link.ranks_hit(128, 8, 128) == pytest.approx(8)


def test_deepep_sends_one_copy_per_expert():
    rank = link.transfer(wire("rank"), 4096, 128, 8, 64, 1, 1)
    expert = link.transfer(wire("expert"), 4096, 128, 8, 64, 1, 1)
    assert (rank.copies, expert.copies) == (1, 8)
    assert expert.combine_bytes == 8 * rank.combine_bytes


def test_the_busier_end_sets_the_time():
    """With M > N the FFN rank receives the rows of M ranks; with M < N the attention rank sends."""
    more_attn = link.transfer(wire("expert"), 4096, 128, 8, 64, 8, 2)
    even = link.transfer(wire("expert"), 4096, 128, 8, 64, 2, 2)
    more_ffn = link.transfer(wire("expert"), 4096, 128, 8, 64, 2, 8)
    assert more_attn.combine_bytes == 4 * even.combine_bytes
    assert more_ffn.combine_bytes == even.combine_bytes


def test_bytes_of_stepmesh():
    """StepMesh Introduction.md: 896 KiB FP8 out per attention rank, 1.75 MiB BF16 back, 161 Gbit/s."""
    row = PUBLISHED["stepmesh"]
    one = link.transfer(wire("rank", dispatch_bytes=1), row["hidden"], 64, 1, row["batch"], 1, 1)
    hidden_only = one.dispatch_bytes - row["batch"] * 8
    assert hidden_only == row["out_kib"] * 2**10
    assert one.combine_bytes == row["back_mib"] * 2**20
    from_two = 2 * hidden_only * 8 / (row["out_us"] * 1e-6) / 1e9
    assert near(from_two, row["gbit_per_s"], 0.01)


@pytest.mark.parametrize("file", sorted(set(FILES.values())))
def test_bytes_as_the_link_benchmark_counts_them(file):
    """`bytes` of a row, for every connector."""
    known = estimate.load()
    for row in json.loads((RESULTS / file).read_text())["rows"]:
        size = link.FP8_BYTES if row.get("wire") == "fp8" else 2.0
        one = link.transfer(
            known.link(row["connector"], hardware.load("h200")).with_dispatch_bytes(size),
            row["hidden"],
            row["experts"],
            row["topk"],
            row["tokens"],
            1,
            1,
        )
        assert one.dispatch_bytes + one.combine_bytes == pytest.approx(row["bytes"])


def rows_of(connector: str, hidden: set[int]) -> list[tuple[float, float]]:
    return [
        (row["bytes"], row["us"] * 1e-6)
        for row in json.loads((RESULTS / FILES[connector]).read_text())["rows"]
        if row["connector"] == connector
        and row["microbatches"] == 1
        and row["hidden"] in hidden
        and row["gate"] == "pass"
    ]


@pytest.mark.parametrize("connector", FILES)
def test_packaged_link_is_the_line_of_its_source(connector):
    """The numbers in data/estimates.json are what least squares gives on the rows they name."""
    found = fit.line(rows_of(connector, {7168}), "latency from bandwidth")
    packaged = estimate.load().link(connector, hardware.load("h200"))
    assert near(packaged.round_trip_s, found.start, 0.01)
    assert near(packaged.rate, 1 / found.slope, 0.01)


@pytest.mark.parametrize("connector", ["nccl", "deepep"])
def test_held_out_hidden_sizes(connector):
    """Held out: hidden 2048 and 4096, 64 tokens and more, predicted from hidden 7168 alone."""
    found = fit.line(rows_of(connector, {7168}), "latency from bandwidth")
    held_out = [(size, time) for size, time in rows_of(connector, {2048, 4096}) if size > 4e5]
    assert len(held_out) == 4
    for size, time in held_out:
        assert near(found.start + size * found.slope, time, 0.12)


@pytest.mark.pain(73)
def test_one_point_cannot_give_a_line():
    for points in ([(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)], []):
        with pytest.raises(AFDConfigError, match="one point cannot separate latency"):
            fit.line(points, "latency from bandwidth")
    with pytest.raises(AFDConfigError, match="larger sizes take no longer"):
        fit.line([(1.0, 2.0), (2.0, 1.0)], "latency from bandwidth")


def test_further_ranks_cost_time():
    known = cost("Qwen3-235B-A22B-FP8", "gb200-nvl72")
    deepep = known.estimates.link("deepep", known.hardware)
    pair = link.transfer(deepep, 4096, 128, 8, 64, 1, 1).one_way_s
    more = link.transfer(deepep, 4096, 128, 8, 64, 32, 32).one_way_s
    assert more - pair == pytest.approx(31 * deepep.rank_s / 2)


BAD = [
    ({"gloo.rank_us": 1}, "unknown key 'gloo.rank_us'"),
    ({"deepep.speed": 1}, "unknown key 'deepep.speed'"),
    ({"kv_reed": 1}, "unknown key 'kv_reed'"),
    ({"kv_read": 0}, "--set kv_read is 0"),
    ({"kv_read": 1.2}, "--set kv_read is 1.2"),
    ({"kv_share": float("inf")}, "--set kv_share is inf"),
]


@pytest.mark.parametrize(("overrides", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_overrides(overrides, text):
    with pytest.raises(AFDConfigError) as caught:
        estimate.load(overrides)
    assert text in str(caught.value)


def test_bad_link_override_is_named_when_used():
    known = estimate.load({"deepep.link_share": 7})
    with pytest.raises(AFDConfigError, match=r"links.deepep.link_share is 7"):
        known.link("deepep", hardware.load("h200"))


def test_connector_without_numbers():
    with pytest.raises(AFDConfigError, match="--connector gloo: the planner has no numbers"):
        estimate.load().link("gloo", hardware.load("h200"))
