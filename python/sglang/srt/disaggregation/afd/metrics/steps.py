"""The plans of a rank's steps and the host times within them, from the hot path to the reporter.

The thread that runs steps only reads a clock and appends; everything that costs more happens on
the reporter's thread (`reporter`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sglang.srt.disaggregation.afd.connector.base import Transfer
from sglang.srt.disaggregation.afd.messages import StepPlan

Phase = Literal["dispatch", "combine", "receive", "experts", "send"]

# Steps that wait for the reporter; it drains every second, so they overflow only if it hangs.
_MOST_STEPS = 1 << 16


class Notes(Protocol):
    """Who is told of each phase; times are of CLOCK_MONOTONIC, which a host's processes share."""

    def note(self, phase: Phase, transfer: Transfer, began_ns: int, ended_ns: int) -> None: ...


@dataclass
class StepTimes:
    """One step on one rank.

    Attributes:
        plan: of the step.
        began_ns: when its plan was known.
        ended_ns: when its last transfer so far ended.
        phase_ns: in each phase, over all transfers.
        waits_ns: for each peer, by world rank.
        done: nothing will be added any more.
    """

    plan: StepPlan
    began_ns: int
    ended_ns: int
    transfers_left: int
    phase_ns: dict[Phase, int] = field(default_factory=dict)
    waits_ns: dict[int, int] = field(default_factory=dict)
    done: bool = False


class StepClock:
    """Written by the one thread that runs the steps, drained by one other.

    Args:
        moe_layers: transfers of a plan with one microbatch and one round.
    """

    def __init__(self, moe_layers: int) -> None:
        self._moe_layers = moe_layers
        self._steps: deque[StepTimes] = deque(maxlen=_MOST_STEPS)
        self._step: StepTimes | None = None

    def begin(self, plan: StepPlan) -> None:
        """The step of `plan` starts, and so the one before has ended."""
        if self._step is not None:
            self._step.done = True
        now = time.monotonic_ns()
        left = self._moe_layers * plan.microbatches * plan.rounds
        self._step = StepTimes(plan, now, now, left)
        self._steps.append(self._step)

    def note(self, phase: Phase, transfer: Transfer, began_ns: int, ended_ns: int) -> None:
        step = self._step
        if step is None:
            return
        step.phase_ns[phase] = step.phase_ns.get(phase, 0) + ended_ns - began_ns
        step.ended_ns = ended_ns
        if phase in ("combine", "send"):  # the last one of a transfer on its side
            step.transfers_left -= 1
            step.done = step.transfers_left <= 0

    def waited(self, peer: int, seconds: float) -> None:
        """The step waited for the peer of this world rank."""
        if self._step is not None:
            waits = self._step.waits_ns
            waits[peer] = waits.get(peer, 0) + int(seconds * 1e9)

    def drain(self) -> list[StepTimes]:
        """The steps that are done, in order; each is given out once."""
        done = []
        while self._steps and self._steps[0].done:
            done.append(self._steps.popleft())
        return done
