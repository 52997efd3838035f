"""Who is named, when, and how often."""

from __future__ import annotations

import logging

import pytest

from sglang.srt.disaggregation.afd.metrics import straggler
from sglang.srt.disaggregation.afd.metrics.steps import StepTimes
from sglang.srt.disaggregation.afd.metrics.straggler import StragglerWatch
from sglang.srt.disaggregation.afd.plan import make_plan
from sglang.srt.disaggregation.afd.topology import Topology

TOPOLOGY = Topology(1, 2, 4)
USUAL = {1: 0.004, 2: 0.004}


def step(waits_s, mode="decode", tokens=4):
    plan = make_plan(7, mode, (tokens,), 1024, 1, 0)
    return StepTimes(plan, 0, 0, 0, waits_ns={p: int(s * 1e9) for p, s in waits_s.items()})


@pytest.fixture
def watch():
    made = StragglerWatch("attn 0", TOPOLOGY)
    for _ in range(32):
        assert made.judge(step(USUAL)) is None
    return made


def test_the_peer_of_a_long_wait_is_named(watch, caplog):
    with caplog.at_level(logging.WARNING):
        assert watch.judge(step({1: 0.004, 2: 0.2})) == "ffn 1"
    assert "attn 0 waited 200.0 ms for ffn 1 in step 7 (decode)" in caplog.text
    assert "usually waits 8.0 ms" in caplog.text
    assert watch.judge(step({1: 0.2, 2: 0.004})) == "ffn 0"


def test_what_is_not_unusual_names_nobody(watch):
    assert watch.judge(step({1: 0.012, 2: 0.012})) is None  # three times the median
    assert watch.judge(step({})) is None  # a step of a graph
    assert watch.judge(step({1: 2.0}, mode="extend", tokens=512)) is None  # of another kind


def test_short_waits_name_nobody():
    watch = StragglerWatch("attn 0", TOPOLOGY)
    for _ in range(32):
        watch.judge(step({1: 0.0001}))
    assert watch.judge(step({1: 0.009})) is None
    assert watch.judge(step({1: 0.011})) == "ffn 0"


def test_the_first_steps_name_nobody():
    watch = StragglerWatch("attn 0", TOPOLOGY)
    assert [watch.judge(step({1: s})) for s in (0.001, 9.0, 0.001)] == [None] * 3


def test_lines_are_rare_and_say_how_many_are_missing(watch, caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(straggler.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert watch.judge(step({1: 0.5})) == "ffn 0"
        assert len(caplog.records) == 1
        now[0] += straggler.LOG_EVERY_S
        watch.judge(step({1: 0.5}))
    assert len(caplog.records) == 2
    assert "4 more since the last such line" in caplog.records[1].getMessage()
