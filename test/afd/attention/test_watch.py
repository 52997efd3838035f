"""A GPU that stands still ends the attention rank, with the names of its peers; events are fakes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from sglang.srt.disaggregation.afd.attention import watch as watch_module
from sglang.srt.disaggregation.afd.attention.watch import StepWatch
from sglang.srt.disaggregation.afd.errors import AFDError

TIMEOUT_S = 0.3


@pytest.fixture
def gpu(monkeypatch):
    """Ids of finished steps, in the order in which they were enqueued."""
    finished: set[int] = set()
    count = iter(range(1000))

    class Event:
        def record(self):
            self.step = next(count)

        def query(self):
            return self.step in finished

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(watch_module, "_POLL_S", 0.02)
    return finished


@pytest.fixture
def watch(gpu):
    """(watch, errors, event that is set by the first error)"""
    errors: list[str] = []
    stuck = threading.Event()

    def on_stuck(error):
        errors.append(str(error))
        stuck.set()

    made = StepWatch("attn 0", TIMEOUT_S, 2.0, lambda: {"ffn 0": 4.25}, on_stuck)
    yield made, errors, stuck
    made.close()


@pytest.mark.pain(36)
def test_a_step_that_does_not_finish_is_reported_with_its_peers(watch, gpu):
    made, errors, stuck = watch
    gpu.add(0)
    made.enqueued(7)
    time.sleep(0.1)  # seen to be finished
    made.enqueued(8)
    began = time.monotonic()
    assert stuck.wait(5)
    assert time.monotonic() - began >= TIMEOUT_S - 0.05
    assert "attn 0: the GPU did not finish step 8 in 0." in errors[0]
    assert "last heard of: ffn 0 4.2 s ago" in errors[0]


def test_kernels_of_the_first_step_may_be_compiled(watch, gpu):
    made, _, stuck = watch
    made.enqueued(0)
    assert not stuck.wait(3 * TIMEOUT_S)
    assert stuck.wait(5)


def test_a_long_queue_is_not_a_stuck_gpu(watch, gpu):
    made, errors, _ = watch
    for step in range(8):
        made.enqueued(step)
    for step in range(8):
        time.sleep(TIMEOUT_S / 2)
        gpu.add(step)
    time.sleep(2 * TIMEOUT_S)
    assert not errors


def test_nothing_to_do_is_not_a_stuck_gpu(watch, gpu):
    made, errors, _ = watch
    gpu.add(0)
    made.enqueued(0)
    time.sleep(3 * TIMEOUT_S)
    gpu.add(1)
    made.enqueued(1)
    time.sleep(0.1)
    assert not errors


def test_what_the_connector_knows_of_its_kernels_ends_the_rank(gpu):
    errors = []
    known = AFDError("attn 0: a kernel gave up on ffn 1")
    made = StepWatch("attn 0", 60, 60, dict, errors.append, lambda: known)
    time.sleep(0.2)
    made.close()
    assert errors == [known]
