"""The plans behind upstream's graph captures and replays, and what an FFN rank makes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import pytest
import torch

from sglang.srt.disaggregation.afd.attention import graphs
from sglang.srt.disaggregation.afd.attention import runtime as runtime_module
from sglang.srt.disaggregation.afd.attention.runtime import AttentionRuntime
from sglang.srt.disaggregation.afd.errors import AFDError
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
    settings = types.SimpleNamespace(
        attn_ranks=2, microbatches=MICROBATCHES, capacity=64, measured=False
    )
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
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    capture()
    replay(1)
    steps = StepGraphs(lambda plan: log.append("run"))
    for plan in leader.plans():
        steps.run(plan)
    assert log == ["run", "run", "capture", "run", "replay"]
    assert (steps.eager_steps, steps.replays) == (2, 1)


@dataclasses.dataclass(frozen=True)
class Key:
    """Of upstream's `ShapeKey`."""

    size: int
    variant_label: str | None = None


@pytest.fixture
def measured(leader, monkeypatch):
    """Both kinds of graphs; the choice says one microbatch, then two."""

    class Choice:
        widths = iter((1, 2))

        @contextlib.contextmanager
        def replay(self, batch):
            yield next(self.widths)

    runtime = runtime_module.current()
    runtime.settings.measured = True
    monkeypatch.setattr(runtime, "choice", Choice())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return leader


def test_both_kinds_of_graphs_are_captured_and_replayed(measured):
    forward_batch = types.SimpleNamespace(tbo_split_seq_index=4)
    ran, captured = [], []

    def run_once():
        ran.append(forward_batch.tbo_split_seq_index)

    def capture_one(backend, shape_key, forward_fn):
        captured.append(shape_key)
        forward_fn()

    graphs.capture_one(capture_one, None, Key(BATCH), run_once)
    replayed = []
    for _ in range(2):
        graphs.replay(lambda backend, key: replayed.append(key), None, Key(BATCH))
    assert captured == [Key(BATCH), Key(BATCH, graphs.WHOLE)]
    assert ran == [4, None]
    assert forward_batch.tbo_split_seq_index == 4
    assert replayed == [Key(BATCH, graphs.WHOLE), Key(BATCH)]
    kinds = [(p.mode, p.bucket, p.microbatches) for p in measured.plans()]
    assert kinds == [("warmup", 4, 2), ("warmup", 8, 1), ("decode", 8, 1), ("decode", 4, 2)]


def test_the_batch_of_upstreams_capture_is_where_it_is_looked_for():
    """`_in_one_piece` finds it among the names of the function that upstream captures."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    code = DecodeCudaGraphRunner.capture_one_shape.__code__
    (run_once,) = [const for const in code.co_consts if getattr(const, "co_name", "") == "run_once"]
    assert "forward_batch" in run_once.co_freevars


def test_a_capture_that_hides_its_batch_is_refused(measured):
    with pytest.raises(AFDError, match="does not hold its batch where it used to"):
        graphs.capture_one(lambda backend, key, forward_fn: None, None, Key(BATCH), lambda: None)
