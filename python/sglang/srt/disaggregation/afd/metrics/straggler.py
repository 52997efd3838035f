"""Names the peer for which a step waited much longer than usual."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque

from sglang.srt.disaggregation.afd.metrics.steps import StepTimes
from sglang.srt.disaggregation.afd.topology import Topology

logger = logging.getLogger(__name__)

FACTOR = 5.0  # times the recent median
FLOOR_S = 0.01  # shorter waits are the scheduler of the operating system
WINDOW = 64  # steps of a kind that the median is taken over
_FEWEST = 16  # before there is a usual
LOG_EVERY_S = 10.0


class StragglerWatch:
    """Judges the steps of one rank in order. Steps are compared with those of like mode and size."""

    def __init__(self, name: str, topology: Topology) -> None:
        self._name = name
        self._topology = topology
        self._recent: dict[tuple[str, int], deque[float]] = {}
        self._log_after = 0.0
        self._unlogged = 0

    def judge(self, step: StepTimes) -> str | None:
        """The straggler's name, `ffn 1`, or None for a step that waited no longer than usual.

        Logs it, at most once in `LOG_EVERY_S` seconds.
        """
        if not step.waits_ns:
            return None
        wait_s = sum(step.waits_ns.values()) / 1e9
        kind = step.plan.mode, max(step.plan.tokens).bit_length()
        recent = self._recent.setdefault(kind, deque(maxlen=WINDOW))
        usual_s = statistics.median(recent) if len(recent) >= _FEWEST else None
        recent.append(wait_s)
        if usual_s is None or wait_s < max(FLOOR_S, FACTOR * usual_s):
            return None
        peer = max(step.waits_ns, key=step.waits_ns.__getitem__)
        peer_name = self._topology.rank_name(peer)
        self._log(step, peer_name, step.waits_ns[peer] / 1e9, usual_s)
        return peer_name

    def _log(self, step: StepTimes, peer: str, wait_s: float, usual_s: float) -> None:
        now = time.monotonic()
        if now < self._log_after:
            self._unlogged += 1
            return
        logger.warning(
            "AFD straggler: %s waited %.1f ms for %s in step %d (%s); a step like it usually waits "
            "%.1f ms; %d more since the last such line",
            self._name,
            wait_s * 1e3,
            peer,
            step.plan.step_id,
            step.plan.mode,
            usual_s * 1e3,
            self._unlogged,
        )
        self._log_after, self._unlogged = now + LOG_EVERY_S, 0
