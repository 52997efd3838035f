"""Which steps of an FFN rank are captured, replayed and run eagerly; the CUDA graphs are fakes."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from sglang.srt.disaggregation.afd.errors import PlanMismatch
from sglang.srt.disaggregation.afd.ffn.graph import StepGraphs
from sglang.srt.disaggregation.afd.plan import make_plan

CAPACITY = 64
BUCKETS = (1, 2, 4, 8)


class FakeGraph:
    """Notes its replays in `log` under what was captured into it."""

    capturing: FakeGraph | None = None
    log: list = []

    def pool(self):
        return "pool"

    def replay(self):
        self.log.append(("replay", self.captured))


@contextlib.contextmanager
def _capture(graph, pool=None):
    FakeGraph.capturing = graph
    yield
    FakeGraph.capturing = None


@pytest.fixture
def steps(monkeypatch):
    """(graphs, log): the log holds what ran eagerly, was captured and was replayed."""
    log: list = []
    monkeypatch.setattr(FakeGraph, "log", log)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", _capture)

    def run_step(plan):
        if FakeGraph.capturing is None:
            log.append(("eager", plan.tokens))
        else:
            FakeGraph.capturing.captured = plan.bucket, plan.microbatches

    return StepGraphs(run_step), log


def plan(mode, tokens, microbatches=1, bucket=0):
    return make_plan(0, mode, tokens, CAPACITY, microbatches, bucket)


def captured(graphs, bucket, microbatches):
    tokens = (bucket * microbatches,) * 2
    graphs.run(plan("capture", tokens, microbatches, bucket))


@pytest.mark.pain(3)
@pytest.mark.parametrize("mode", ["extend", "mixed", "decode", "idle"])
def test_an_eager_step_with_the_total_of_a_graph_is_not_replayed(steps, mode):
    graphs, log = steps
    captured(graphs, 4, 1)
    graphs.run(plan("decode", (4, 4), bucket=4))
    graphs.run(plan(mode, (7, 1)))
    assert log == [("replay", (4, 1)), ("eager", (7, 1))]
    assert (graphs.replays, graphs.eager_steps) == (1, 1)


@pytest.mark.pain(5)
def test_no_two_shapes_share_a_graph(steps):
    """Bucket 4 with two microbatches has as many tokens as bucket 8 with one."""
    graphs, log = steps
    shapes = list(itertools.product(BUCKETS, (1, 2)))
    for shape in shapes:
        captured(graphs, *shape)
    for bucket, microbatches in reversed(shapes):
        tokens = (bucket * microbatches,) * 2
        graphs.run(plan("decode", tokens, microbatches, bucket))
    assert log == [("replay", shape) for shape in reversed(shapes)]


@pytest.mark.pain(3)
def test_a_replay_of_what_was_never_captured_is_refused(steps):
    graphs, _ = steps
    captured(graphs, 4, 1)
    for bucket, microbatches in ((8, 1), (4, 2)):
        with pytest.raises(PlanMismatch, match=r"never captured \(captured: \[4\]\)"):
            graphs.run(plan("decode", (8, 8), microbatches, bucket))
