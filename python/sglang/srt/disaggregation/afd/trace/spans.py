"""The spans that one rank keeps while a trace is being taken, and the file it leaves."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.afd.connector.base import Transfer
from sglang.srt.disaggregation.afd.messages import Role, StepPlan
from sglang.srt.disaggregation.afd.metrics.steps import Phase

logger = logging.getLogger(__name__)

MOST_SPANS = 500_000  # of one rank: minutes of decoding, about 100 MB


class SpanLog:
    """Written by the thread that runs the steps. Times are of CLOCK_MONOTONIC."""

    def __init__(self, role: Role, rank: int) -> None:
        self._role = role
        self._rank = rank
        self._steps: list[tuple[int, str, int]] = []
        self._spans: list[tuple[Any, ...]] = []

    def begin(self, plan: StepPlan) -> None:
        self._steps.append((plan.step_id, plan.mode, time.monotonic_ns()))

    def note(self, phase: Phase, transfer: Transfer, began_ns: int, ended_ns: int) -> None:
        if len(self._spans) < MOST_SPANS:
            self._spans.append((phase, *transfer, began_ns, ended_ns))

    def write(self, folder: Path) -> None:
        """Leave a file in `folder`, complete as soon as it is there."""
        if len(self._spans) == MOST_SPANS:
            logger.warning("AFD trace: %d spans are the most; the rest is missing", MOST_SPANS)
        content = {
            "role": self._role,
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            # The monotonic clocks of two hosts have nothing in common but this.
            "wall_ns": time.time_ns() - time.monotonic_ns(),
            "steps": self._steps,
            "spans": self._spans,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(self._role, self._rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.replace(path)


def file_name(role: Role, rank: int) -> str:
    return f"{role}-{rank}.json"
