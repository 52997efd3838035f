"""The loop of an FFN rank around its steps; transfers are tested with real connectors elsewhere."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.disaggregation.afd.connector.base import FFNConnector, TellsFailure
from sglang.srt.disaggregation.afd.errors import DeadlineExceeded
from sglang.srt.disaggregation.afd.ffn.loop import FFNLoop
from sglang.srt.disaggregation.afd.ffn.pace import Pace
from sglang.srt.disaggregation.afd.messages import Stop
from sglang.srt.disaggregation.afd.plan import make_plan


class Control:
    """Plans of two decode steps, and then the end."""

    def __init__(self) -> None:
        self.steps = 0

    def recv_plan(self):
        if self.steps == 2:
            return Stop(reason="done")
        return make_plan(
            step_id=self.steps,
            mode="decode",
            tokens_per_rank=(1,),
            capacity=4,
            microbatches=1,
            bucket=0,
        )

    def count(self, steps: int, tokens: int) -> None:
        self.steps = steps


class Connector(TellsFailure, FFNConnector):
    """A model without MoE layers calls nothing of it but `failure`."""

    def __init__(self, fails_after: int) -> None:
        self._left = fails_after

    def failure(self):
        self._left -= 1
        return DeadlineExceeded("ffn 0 waited for attn 0") if self._left < 0 else None

    def receive(self, transfer, max_rows=None):
        raise NotImplementedError

    def send(self, batch, out):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def run(fails_after: int) -> tuple[Control, FFNLoop]:
    device = torch.device("cpu")
    control = Control()
    pace = Pace("ffn 0", device, 1.0)
    return control, FFNLoop(control, Connector(fails_after), [], 4, pace, device)


def test_every_plan_is_run_until_the_end():
    control, loop = run(fails_after=100)
    assert loop.run() == "done"
    assert control.steps == 2


@pytest.mark.pain(36)
def test_kernels_that_gave_up_end_the_rank_though_no_call_of_the_connector_raised():
    control, loop = run(fails_after=1)
    with pytest.raises(DeadlineExceeded, match="ffn 0 waited for attn 0"):
        loop.run()
    assert control.steps == 1  # the step that followed was not counted as served
