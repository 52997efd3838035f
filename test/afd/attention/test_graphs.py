"""The plans behind upstream's graph captures and replays, and what an FFN rank makes of them."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from sglang.srt.disaggregation.afd.attention import graphs
from sglang.srt.disaggregation.afd.attention import runtime as runtime_module
from sglang.srt.disaggregation.afd.attention.runtime import AttentionRuntime
from sglang.srt.disaggregation.afd.ffn.graph import StepGraphs
from sglang.srt.disaggregation.afd.messages import decode, encode

BATCH, MICROBATCHES = 8, 2


class Leader:
    """Keeps the plans as they are on the wire."""

    def __init__(self):
        self.sent = []

    def check(self):
        pass

    def publish(self, plan):
        self.sent.append(encode(plan))

    def plans(self):
        return [decode(data) for data in self.sent]


@pytest.fixture
def leader(monkeypatch):
    """Of attention rank 0 of two, whose runtime is the one in force."""
    settings = types.SimpleNamespace(attn_ranks=2, microbatches=MICROBATCHES, capacity=64)
    monkeypatch.setattr(runtime_module.afd_config, "build", lambda args: settings)
    runtime = AttentionRuntime(types.SimpleNamespace(device="cpu"), None, attn_rank=0)
    made = Leader()
    monkeypatch.setattr(runtime, "_leader", made)
    monkeypatch.setattr(runtime_module, "_runtime", runtime)
    return made


@pytest.fixture
def capture(monkeypatch):
    """Upstream's capture of one shape: two forwards, and a third that is recorded."""
    is_capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])

    def capture_one(backend, shape_key, forward_fn):
        for _ in range(2):
            forward_fn()
        is_capturing[0] = True
        forward_fn()
        is_capturing[0] = False

    shape = types.SimpleNamespace(size=BATCH)
    return lambda: graphs.capture_one(capture_one, None, shape, lambda: None)


def replay(times):
    shape = types.SimpleNamespace(size=BATCH)
    for _ in range(times):
        graphs.replay(lambda backend, key: None, None, shape)


@pytest.mark.pain(9)
def test_a_plan_is_sent_for_every_warmup_capture_and_replay(leader, capture):
    capture()
    replay(3)
    plans = leader.plans()
    assert [p.mode for p in plans] == ["warmup", "warmup", "capture", "decode", "decode", "decode"]
    assert [p.step_id for p in plans] == list(range(6))
    assert {(p.bucket, p.microbatches, p.tokens) for p in plans} == {(4, MICROBATCHES, (8, 8))}


@pytest.mark.pain(31)
def test_ffn_ranks_run_a_shape_before_they_capture_it(leader, capture, monkeypatch):
    """So that a transport which sets itself up at its first use does so outside of a capture."""
    log = []

    class Graph:
        def pool(self):
            return "pool"

        def replay(self):
            log.append("replay")

    @contextlib.contextmanager
    def recording(graph, pool=None):
        log.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    capture()
    replay(1)
    steps = StepGraphs(lambda plan: log.append("run"))
    for plan in leader.plans():
        steps.run(plan)
    assert log == ["run", "run", "capture", "run", "replay"]
    assert (steps.eager_steps, steps.replays) == (2, 1)
