"""The life of an FFN rank after loading: take a plan, serve its transfers, take the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    ExpertMajorBatch,
    FFNConnector,
    ReceivedBatch,
    TellsFailure,
    Transfer,
)
from sglang.srt.disaggregation.afd.control import MemberControl
from sglang.srt.disaggregation.afd.ffn.experts import LocalExperts
from sglang.srt.disaggregation.afd.ffn.graph import StepGraphs
from sglang.srt.disaggregation.afd.ffn.pace import Pace
from sglang.srt.disaggregation.afd.messages import StepPlan, Stop
from sglang.srt.disaggregation.afd.metrics.meter import FFNMeter
from sglang.srt.disaggregation.afd.metrics.timed import TimedFFN
from sglang.srt.disaggregation.afd.plan import max_rows, transfers
from sglang.srt.disaggregation.afd.trace.spans import SpanLog

logger = logging.getLogger(__name__)


class FFNLoop:
    """Runs steps in plan order; knows nothing of requests or positions."""

    def __init__(
        self,
        control: MemberControl,
        connector: FFNConnector[Any],
        layers: list[LocalExperts],
        capacity: int,
        pace: Pace,
        device: torch.device,
        meter: FFNMeter | None = None,
    ) -> None:
        self._control = control
        self._meter = meter
        self._connector = connector if meter is None else meter.wrap(connector)
        self._gave_up = connector if isinstance(connector, TellsFailure) else None
        self._on_plan: list[Callable[[StepPlan], None]] = [] if meter is None else [meter.begin]
        self._layers = layers
        self._capacity = capacity
        self._pace = pace
        self._graphs = StepGraphs(self._run)
        self._steps = 0
        # Counted on the device and copied behind each step, so that no step waits for a count.
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._tokens_on_host = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")

    def run(self) -> str:
        """Serve until told to stop; returns the reason.

        Raises:
            PeerLost, DeadlineExceeded, PlanMismatch: the link is broken and the rank must end.
        """
        while True:
            message = self._control.recv_plan()
            if isinstance(message, Stop):
                logger.info("%d graph replays, %d eager steps", *self._counts())
                return message.reason
            for on_plan in self._on_plan:
                on_plan(message)
            self._graphs.run(message)
            if self._meter is not None:
                self._meter.step_enqueued()
            self._tokens_on_host.copy_(self._tokens, non_blocking=True)
            self._pace.finished(message.step_id)
            self._check_kernels()
            self._steps += 1
            self._control.count(self._steps, int(self._tokens_on_host))

    def start_trace(self, spans: SpanLog) -> None:
        """Note the spans from now on. From another thread, as is `stop_trace`."""
        self._untraced = self._connector
        self._connector = TimedFFN(self._connector, spans)
        self._on_plan = [*self._on_plan, spans.begin]

    def stop_trace(self, spans: SpanLog) -> None:
        self._connector = self._untraced
        self._on_plan = [call for call in self._on_plan if call != spans.begin]

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> None:
        for layer, microbatch, round_idx in transfers(plan, len(self._layers)):
            batch = self._connector.receive(
                Transfer(plan.step_id, layer, microbatch, round_idx),
                max_rows(plan, self._capacity, round_idx),
            )
            if layer == 0:
                self._count(batch)
            self._connector.send(batch, self._layers[layer](batch))

    def _count(self, batch: ReceivedBatch | ExpertMajorBatch) -> None:
        """Rows with an expert here; an expert-major batch has a row per (token, expert)."""
        if isinstance(batch, ExpertMajorBatch):
            self._tokens += batch.rows_per_expert_E.sum()
        else:
            self._tokens += (batch.topk_ids_RK >= 0).any(dim=1).sum()

    def _check_kernels(self) -> None:
        """A replayed graph calls no connector, which could raise what its kernels gave up for."""
        error = None if self._gave_up is None else self._gave_up.failure()
        if error is not None:
            raise error

    def _counts(self) -> tuple[int, int]:
        return self._graphs.replays, self._graphs.eager_steps
