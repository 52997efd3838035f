"""CUDA graphs of whole FFN steps, one per bucket and number of microbatches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from sglang.srt.disaggregation.afd.errors import PlanMismatch
from sglang.srt.disaggregation.afd.messages import StepPlan

logger = logging.getLogger(__name__)


class StepGraphs:
    """Runs a step as its plan says: eagerly, as a capture, or as a replay.

    The attention side captures each bucket once; the plan of that capture makes this side capture
    the same step. Nothing moves during a capture, so neither side waits for the other.
    """

    def __init__(self, run_step: Callable[[StepPlan], None]) -> None:
        self._run_step = run_step
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: object | None = None
        self._cost: dict[int, tuple[float, float]] = {}  # seconds and MiB by microbatches
        self.replays = 0
        self.eager_steps = 0

    def run(self, plan: StepPlan) -> None:
        """Enqueue the step on the current stream.

        Raises:
            PlanMismatch: a replay of a bucket that was never captured.
        """
        if plan.mode == "capture":
            self._capture(plan)
        elif plan.bucket and plan.mode != "warmup":
            self._replay(plan)
        else:
            self.eager_steps += 1
            self._run_step(plan)

    def _capture(self, plan: StepPlan) -> None:
        began = time.monotonic()
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run_step(plan)
        self._pool = self._pool or graph.pool()
        self._graphs[plan.bucket, plan.microbatches] = graph
        seconds, mib = self._cost.get(plan.microbatches, (0.0, 0.0))
        seconds += time.monotonic() - began
        mib += (torch.cuda.memory_reserved() - before) / 2**20
        self._cost[plan.microbatches] = seconds, mib
        logger.info(
            "captured bucket %d, %d microbatch(es) in %.2f s; these graphs: %d, %.2f s, %.1f MiB",
            plan.bucket,
            plan.microbatches,
            time.monotonic() - began,
            sum(width == plan.microbatches for _, width in self._graphs),
            seconds,
            mib,
        )

    def _replay(self, plan: StepPlan) -> None:
        graph = self._graphs.get((plan.bucket, plan.microbatches))
        if graph is None:
            captured = sorted(bucket for bucket, _ in self._graphs)
            raise PlanMismatch(
                f"step {plan.step_id} replays bucket {plan.bucket} with {plan.microbatches} "
                f"microbatch(es), which this FFN rank never captured (captured: {captured})"
            )
        self.replays += 1
        graph.replay()
