"""An FFN rank whose GPU stands still ends with an error instead of waiting; the events are fakes."""

from __future__ import annotations

import time

import pytest
import torch

from sglang.srt.disaggregation.afd.errors import DeadlineExceeded
from sglang.srt.disaggregation.afd.ffn.pace import Pace

TIMEOUT_S = 0.2


@pytest.fixture
def finish(monkeypatch):
    """`finish(True)` lets the GPU finish every step from now on."""
    done = [False]

    class Event:
        def record(self):
            pass

        def query(self):
            return done[0]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return lambda value: done.__setitem__(0, value)


@pytest.mark.pain(36)
def test_a_gpu_that_waits_for_ever_ends_the_rank(finish):
    pace = Pace("ffn 1", torch.device("cuda"), TIMEOUT_S)
    pace.finished(7)
    pace.finished(8)  # as far as the host may run ahead
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="ffn 1: the GPU did not finish step 7 in 0.2 s"):
        pace.finished(9)
    assert TIMEOUT_S <= time.monotonic() - began < 5


def test_steps_that_finish_are_not_waited_for(finish):
    finish(True)
    pace = Pace("ffn 1", torch.device("cuda"), TIMEOUT_S)
    for step in range(100):
        pace.finished(step)
