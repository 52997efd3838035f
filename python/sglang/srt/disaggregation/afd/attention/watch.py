"""Notices a GPU that stands still: a kernel that waits for a peer cannot be asked for the time.

The host of an attention rank goes on while its GPU waits, and ends in a wait of upstream's that has
no limit. So a thread looks at an event behind each step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from sglang.srt.disaggregation.afd.errors import AFDError, DeadlineExceeded

_POLL_S = 0.25


class _Step(NamedTuple):
    step_id: int
    event: torch.cuda.Event
    enqueued: float  # time.monotonic()


class StepWatch:
    """Watches the steps that `enqueued` names, in their order, until `close`.

    No event may be looked at while a graph is captured, in whatever thread, so steps of warm-ups
    and captures are not named.

    Args:
        name: of this rank.
        timeout_s: longest time of one step on the GPU, seconds.
        first_timeout_s: of the first step, for which the FFN ranks may compile kernels.
        silences: seconds since the last sign of life of each peer, by name.
        on_stuck: called once, in the watching thread.
        failure: what a connector knows of its own kernels, see `TellsFailure`.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        first_timeout_s: float,
        silences: Callable[[], Mapping[str, float]],
        on_stuck: Callable[[AFDError], None],
        failure: Callable[[], AFDError | None] = lambda: None,
    ) -> None:
        self._name = name
        self._timeout_s, self._first_timeout_s = timeout_s, max(timeout_s, first_timeout_s)
        self._silences = silences
        self._on_stuck = on_stuck
        self._failure = failure
        self._steps: deque[_Step] = deque()  # one thread appends, the other one pops
        self._progress: float | None = None  # when a step was last seen to be finished
        self._closed = threading.Event()
        threading.Thread(target=self._loop, name="afd-step-watch", daemon=True).start()

    def enqueued(self, step_id: int) -> None:
        """All work of the step is on the current stream."""
        event = torch.cuda.Event()
        event.record()
        self._steps.append(_Step(step_id, event, time.monotonic()))

    def close(self) -> None:
        self._closed.set()

    def _loop(self) -> None:
        while not self._closed.wait(_POLL_S):
            error = self._failure() or self._look()
            if error is not None:
                self._on_stuck(error)
                return

    def _look(self) -> DeadlineExceeded | None:
        now = time.monotonic()
        while self._steps and self._steps[0].event.query():
            self._steps.popleft()
            self._progress = now
        if not self._steps:
            return None
        oldest = self._steps[0]
        limit_s = self._first_timeout_s if self._progress is None else self._timeout_s
        waited_s = now - max(oldest.enqueued, self._progress or 0.0)
        if waited_s <= limit_s:
            return None
        heard = ", ".join(f"{peer} {s:.1f} s ago" for peer, s in self._silences().items())
        return DeadlineExceeded(
            f"{self._name}: the GPU did not finish step {oldest.step_id} in {waited_s:.1f} s; it waits "
            f"for an FFN rank (last heard of: {heard or 'nobody'}). Look at the logs of these ranks; "
            "if one is only slow, raise --afd-peer-timeout"
        )
