"""The thread that turns the steps of a rank into metrics and names its stragglers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sglang.srt.disaggregation.afd.messages import StepPlan
from sglang.srt.disaggregation.afd.metrics.instruments import Instruments
from sglang.srt.disaggregation.afd.metrics.steps import Phase, StepClock, StepTimes
from sglang.srt.disaggregation.afd.metrics.straggler import StragglerWatch
from sglang.srt.disaggregation.afd.topology import Topology

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
_PHASE_METRIC: dict[Phase, str] = {
    "dispatch": "dispatch_seconds",
    "combine": "combine_wait_seconds",
    "receive": "dispatch_wait_seconds",
    "experts": "expert_seconds",
    "send": "send_seconds",
}

Source = Callable[[Instruments], None]


class Reporter:
    """Feeds `instruments` once a second, and whenever somebody calls `report`.

    Args:
        clock: where the rank notes its steps.
        capacity: tokens per dispatch, to which an attention rank's tokens are compared.
        sources: called with the instruments at each report, for what is counted elsewhere.
    """

    def __init__(
        self,
        instruments: Instruments,
        clock: StepClock,
        topology: Topology,
        capacity: int,
        sources: tuple[Source, ...] = (),
    ) -> None:
        self._instruments = instruments
        self._clock = clock
        self._topology = topology
        self._capacity = capacity
        self._sources = sources
        name = f"{instruments.role} {instruments.rank}"
        self._watch = StragglerWatch(name, topology)
        self._graphs = GraphUse()
        self._lock = threading.Lock()  # a scrape reports too
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"afd-metrics {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Report a last time. Safe to call twice."""
        if not self._stopped.is_set():
            self._stopped.set()
            self.report()

    def report(self) -> None:
        """Bring the instruments up to date."""
        with self._lock:
            for step in self._clock.drain():
                self._report_step(step)
            for source in self._sources:
                source(self._instruments)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.report()

    def _report_step(self, step: StepTimes) -> None:
        instruments, plan = self._instruments, step.plan
        instruments.add("steps_total", 1, plan.mode, *self._graphs.judge(plan))
        instruments.add("rounds_total", plan.rounds)
        if instruments.role == "attn":
            tokens = min(plan.tokens[instruments.rank], self._capacity * plan.microbatches)
            use = tokens / (self._capacity * plan.microbatches)
            instruments.observe("capacity_use", use)
        if not step.phase_ns:
            return
        instruments.observe("step_seconds", (step.ended_ns - step.began_ns) / 1e9, plan.mode)
        for phase, spent_ns in step.phase_ns.items():
            instruments.observe(_PHASE_METRIC[phase], spent_ns / 1e9, plan.mode)
        for peer, waited_ns in step.waits_ns.items():
            name = self._topology.rank_name(peer)
            instruments.add("peer_wait_seconds_total", waited_ns / 1e9, name)
        straggler = self._watch.judge(step)
        if straggler is not None:
            instruments.add("straggler_steps_total", 1, straggler)


class GraphUse:
    """Says of each plan, in order, whether a graph ran it, and if not why."""

    def __init__(self) -> None:
        self._largest = 0  # tokens per attention rank in the largest graph captured so far

    def judge(self, plan: StepPlan) -> tuple[str, str]:
        """("hit", "") or ("miss", reason)."""
        if plan.mode == "capture":
            self._largest = max(self._largest, plan.bucket * plan.microbatches)
            return "miss", "capture"
        if plan.mode == "warmup":
            return "miss", "warmup"
        if plan.bucket:
            return "hit", ""
        if plan.mode in ("extend", "mixed"):
            return "miss", "prefill"
        if self._largest == 0:
            return "miss", "disabled"
        return "miss", "too_large" if max(plan.tokens) > self._largest else "other"
