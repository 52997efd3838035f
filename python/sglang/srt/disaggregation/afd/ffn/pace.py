"""Keeps the host of an FFN rank close to its GPU, and notices a GPU that stands still."""

from __future__ import annotations

import time
from collections import deque

import torch

from sglang.srt.disaggregation.afd.errors import DeadlineExceeded

_RUN_AHEAD = 2  # steps enqueued and not finished; one is what the attention side is ahead
_POLL_S = 0.0002


class Pace:
    """Bounds the steps in flight on a CUDA device; on CPU a step is finished when it returns."""

    def __init__(self, name: str, device: torch.device, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._is_cuda = device.type == "cuda"
        self._steps: deque[tuple[int, torch.cuda.Event]] = deque()

    def finished(self, step_id: int) -> None:
        """Note that `step_id` is enqueued; wait until no more than the run-ahead is unfinished.

        Raises:
            DeadlineExceeded: the GPU did not finish a step within the timeout. A kernel waits for
                a peer that does not come; only the end of the process frees the device.
        """
        if not self._is_cuda:
            return
        event = torch.cuda.Event()
        event.record()
        self._steps.append((step_id, event))
        while len(self._steps) > _RUN_AHEAD:
            self._wait(*self._steps.popleft())

    def _wait(self, step_id: int, event: torch.cuda.Event) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not event.query():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._name}: the GPU did not finish step {step_id} in {self._timeout_s:g} s; "
                    "an attention rank stopped in the middle of it: look at its log"
                )
            time.sleep(_POLL_S)
