"""The life of an FFN rank after loading: take a plan, serve its transfers, take the next."""

from __future__ import annotations

import logging

from sglang.srt.disaggregation.afd.connector.base import FFNConnector, Transfer
from sglang.srt.disaggregation.afd.control import MemberControl
from sglang.srt.disaggregation.afd.ffn.experts import LocalExperts
from sglang.srt.disaggregation.afd.messages import StepPlan, Stop
from sglang.srt.disaggregation.afd.plan import max_rows, transfers

logger = logging.getLogger(__name__)


class FFNLoop:
    """Runs steps in plan order; knows nothing of requests, positions or modes."""

    def __init__(
        self,
        control: MemberControl,
        connector: FFNConnector,
        layers: list[LocalExperts],
        capacity: int,
    ) -> None:
        self._capacity = capacity
        self._control = control
        self._connector = connector
        self._layers = layers
        self._steps = 0
        self._tokens = 0

    def run(self) -> str:
        """Serve until told to stop; returns the reason.

        Raises:
            PeerLost, DeadlineExceeded, PlanMismatch: the link is broken and the rank must end.
        """
        while True:
            message = self._control.recv_plan()
            if isinstance(message, Stop):
                return message.reason
            self._step(message)

    def _step(self, plan: StepPlan) -> None:
        for layer, microbatch, round_idx in transfers(plan, len(self._layers)):
            batch = self._connector.receive(
                Transfer(plan.step_id, layer, microbatch, round_idx),
                max_rows(plan, self._capacity, round_idx),
            )
            if layer == 0:
                self._tokens += batch.hidden_RH.shape[0]
            self._connector.send(batch, self._layers[layer](batch))
        self._steps += 1
        self._control.count(self._steps, self._tokens)
