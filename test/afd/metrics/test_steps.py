"""What a step clock and the wrapped connectors note, and that a rank without metrics has neither."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from sglang.srt.disaggregation.afd.connector.base import LinkSpec, TellsWaits, Transfer
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackAttn, LoopbackFFN, LoopbackHub
from sglang.srt.disaggregation.afd.ffn.loop import FFNLoop
from sglang.srt.disaggregation.afd.ffn.pace import Pace
from sglang.srt.disaggregation.afd.messages import Stop
from sglang.srt.disaggregation.afd.metrics.meter import AttnMeter, FFNMeter, Link
from sglang.srt.disaggregation.afd.metrics.steps import StepClock
from sglang.srt.disaggregation.afd.metrics.timed import TimedAttn, TimedFFN
from sglang.srt.disaggregation.afd.plan import make_plan, max_rows, round_slices
from sglang.srt.disaggregation.afd.topology import Topology

LAYERS, HIDDEN, TOPK, EXPERTS, CAPACITY = 2, 8, 2, 4, 8
CPU = torch.device("cpu")
SPEC = LinkSpec(
    topology=Topology(1, 1, EXPERTS),
    hidden_size=HIDDEN,
    topk=TOPK,
    dtype=torch.float32,
    capacity=CAPACITY,
    timeout_s=10,
)


def link(rank: int = 0) -> Link:
    return Link(rank, SPEC, LAYERS, "loopback", CPU, lambda: {"attn 0": 1.5})


def plan(step_id: int, tokens: int = 4):
    return make_plan(step_id, "decode", (tokens,), CAPACITY, 1, 0)


class Control:
    def __init__(self, plans):
        self._plans = [*plans, Stop(reason="done")]
        self.counters = (0, 0)

    def recv_plan(self):
        return self._plans.pop(0)

    def count(self, steps, rows):
        self.counters = (steps, rows)


def serve_steps(hub, plans, meter=None):
    """An FFN loop over loopback in a thread; experts return their input."""
    control = Control(plans)
    layers = [lambda batch: batch.hidden_RH] * LAYERS
    loop = FFNLoop(
        control, LoopbackFFN(hub, 0), layers, CAPACITY, Pace("ffn 0", CPU, 10), CPU, meter
    )
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    return thread, control, loop


def attend(connector, step, ids):
    for layer in range(LAYERS):
        for round_idx, rows in enumerate(round_slices(len(ids), CAPACITY, step.rounds)):
            handle = connector.dispatch(
                Transfer(step.step_id, layer, 0, round_idx),
                torch.ones(len(ids), HIDDEN)[rows],
                ids[rows],
                torch.ones(len(ids), TOPK)[rows],
                max_rows(step, CAPACITY, round_idx),
            )
            connector.combine(handle)


def value(meter, name, **labels):
    own = {"role": meter.instruments.role, "rank": "0"}
    return meter.instruments.registry.get_sample_value(f"sglang:afd_{name}", {**own, **labels})


def test_both_roles_measure_the_same_steps():
    hub = LoopbackHub(SPEC)
    plans = [plan(0), plan(1, tokens=12), plan(2)]
    counted = torch.zeros((), dtype=torch.int64)
    attn = AttnMeter(link(), counted)
    control = Control([])
    ffn = FFNMeter(link(), lambda: control.counters[1])
    thread, control, _ = serve_steps(hub, plans, ffn)
    connector = attn.wrap(LoopbackAttn(hub, 0))
    for step in plans:
        attn.begin(step)
        # Expert 0 of every token, expert 3 of the first one only.
        ids = torch.tensor([[0, 3]] + [[0, -1]] * (step.tokens[0] - 1))
        attend(connector, step, ids)
        counted += len(ids)
    thread.join(10)
    for meter in (attn, ffn):
        meter.close()
        labels = {"mode": "decode", "graph": "miss", "reason": "disabled"}
        assert value(meter, "steps_total", **labels) == 3
        assert value(meter, "rounds_total") == 4
        assert value(meter, "step_seconds_count", mode="decode") == 3
        assert value(meter, "peer_heartbeat_age_seconds", peer="attn 0") == 1.5
    assert value(attn, "tokens_total") == 20
    assert value(attn, "capacity_use_count") == 3
    assert value(attn, "capacity_use_sum") == pytest.approx(4 / 8 + 1 + 4 / 8)
    assert value(ffn, "rows_total") == 20
    assert value(ffn, "expert_rows_total", expert="0") == LAYERS * 20
    assert value(ffn, "expert_rows_total", expert="3") == LAYERS * 3
    assert value(ffn, "expert_imbalance", layer="1") == pytest.approx(4 * 20 / 23)
    for name in ("dispatch", "combine_wait"):
        assert value(attn, f"{name}_seconds_count", mode="decode") == 3
    for name in ("dispatch_wait", "expert", "send"):
        assert value(ffn, f"{name}_seconds_count", mode="decode") == 3
    # Within a step the phases do not overlap.
    phases = sum(
        value(attn, f"{n}_seconds_sum", mode="decode") for n in ("dispatch", "combine_wait")
    )
    assert phases <= value(attn, "step_seconds_sum", mode="decode")


def test_a_rank_without_metrics_calls_nothing_of_them(monkeypatch):
    """Not a time is read: the connector is the bare one, and no clock exists."""

    def fail(*_args, **_kwargs):
        raise AssertionError("a rank without metrics noted something")

    for owner, name in (
        (StepClock, "__init__"), (StepClock, "begin"), (StepClock, "note"),
        (TimedAttn, "__init__"), (TimedFFN, "__init__"), (FFNMeter, "__init__"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, fail)
    hub = LoopbackHub(SPEC)
    thread, control, loop = serve_steps(hub, [plan(0)])
    assert isinstance(loop._connector, LoopbackFFN)
    attend(LoopbackAttn(hub, 0), plan(0), torch.zeros(4, TOPK, dtype=torch.int64))
    thread.join(10)
    assert control.counters == (1, 4)


def test_a_step_is_given_out_once_and_only_when_done():
    clock = StepClock(LAYERS)
    clock.begin(plan(0))
    clock.note("dispatch", Transfer(0, 0, 0), 1, 2)
    clock.note("combine", Transfer(0, 0, 0), 2, 5)
    assert clock.drain() == []
    clock.note("combine", Transfer(0, 1, 0), 6, 7)
    (step,) = clock.drain()
    assert (step.plan.step_id, step.phase_ns) == (0, {"dispatch": 1, "combine": 4})
    assert clock.drain() == []
    # A graph's replay notes nothing; the next step ends it.
    clock.begin(plan(1))
    assert clock.drain() == []
    clock.begin(plan(2))
    assert [step.plan.step_id for step in clock.drain()] == [1]


def test_waits_are_asked_of_connectors_that_tell_them():
    class Telling(TellsWaits, types.SimpleNamespace):
        def set_on_wait(self, on_wait):
            self.on_wait = on_wait

    connector = Telling()
    meter = AttnMeter(link(), torch.zeros((), dtype=torch.int64))
    meter.wrap(connector)
    meter.begin(plan(0))
    connector.on_wait(1, 0.25)
    connector.on_wait(1, 0.25)
    meter.clock.note("combine", Transfer(0, 0, 0), 0, 1)
    meter.begin(plan(1))
    meter.close()
    assert value(meter, "peer_wait_seconds_total", peer="ffn 0") == pytest.approx(0.5)
