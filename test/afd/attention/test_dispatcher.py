"""The dispatcher over a real loopback link: rounds, microbatches, padding, and wrong use."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from sglang.srt.disaggregation.afd.attention import runtime as runtime_module
from sglang.srt.disaggregation.afd.attention.dispatcher import RemoteDispatcher
from sglang.srt.disaggregation.afd.connector.base import LinkSpec
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackAttn, LoopbackFFN, LoopbackHub
from sglang.srt.disaggregation.afd.errors import AFDConfigError, PlanMismatch
from sglang.srt.disaggregation.afd.ffn.loop import FFNLoop
from sglang.srt.disaggregation.afd.ffn.pace import Pace
from sglang.srt.disaggregation.afd.messages import Stop
from sglang.srt.disaggregation.afd.plan import make_plan
from sglang.srt.disaggregation.afd.topology import Topology

HIDDEN, TOPK, EXPERTS, CAPACITY, LAYERS = 16, 2, 4, 8, 2


class Control:
    """Hands the FFN loop its plans; stands for the ZMQ channel."""

    def __init__(self, plans):
        self._plans = [*plans, Stop(reason="done")]
        self.counted = []

    def recv_plan(self):
        return self._plans.pop(0)

    def count(self, steps, rows):
        self.counted.append((steps, rows))


def scale_experts(layer):
    """Expert e of this layer multiplies its rows by e + 1 + layer; weights are applied here."""

    def run(batch):
        factor = (batch.topk_ids_RK + 1 + layer) * batch.topk_weights_RK
        return batch.hidden_RH * factor.where(batch.topk_ids_RK >= 0, 0).sum(1, keepdim=True)

    return run


@pytest.fixture
def rig(monkeypatch):
    """`rig(tokens, microbatches)`: dispatchers of all layers, and a finish that joins the loop."""
    spec = LinkSpec(
        topology=Topology(1, 1, EXPERTS),
        hidden_size=HIDDEN,
        topk=TOPK,
        dtype=torch.float32,
        capacity=CAPACITY,
        timeout_s=10,
    )
    threads = []

    def build(tokens: int, microbatches: int = 1):
        hub = LoopbackHub(spec)
        plan = make_plan(0, "extend", (tokens,), CAPACITY, microbatches, 0)
        counted = []
        fake = types.SimpleNamespace(
            plan=plan,
            capacity=CAPACITY,
            spec=spec,
            device=torch.device("cpu"),
            connector=LoopbackAttn(hub, 0),
            add_layer=lambda dispatcher: None,
            count_tokens=lambda ids: counted.append(int((ids >= 0).any(1).sum())),
        )
        monkeypatch.setattr(runtime_module, "_runtime", fake)
        dispatchers = []
        for layer in range(LAYERS):
            dispatcher = RemoteDispatcher(
                types.SimpleNamespace(layer_id=layer, apply_router_weight_on_input=False)
            )
            dispatcher.layer = layer
            dispatchers.append(dispatcher)
        control = Control([plan])
        layers = [scale_experts(layer) for layer in range(LAYERS)]
        cpu = torch.device("cpu")
        loop = FFNLoop(control, LoopbackFFN(hub, 0), layers, CAPACITY, Pace("ffn 0", cpu, 10), cpu)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        threads.append(thread)

        def finish():
            thread.join(10)
            assert not thread.is_alive()
            return control.counted, counted

        return dispatchers, finish

    return build


def topk(num_tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    weights = torch.rand(num_tokens, TOPK, generator=generator)
    return types.SimpleNamespace(topk_ids=ids, topk_weights=weights)


def expected(hidden, routed, layer):
    factor = (routed.topk_ids + 1 + layer) * routed.topk_weights
    return hidden * factor.sum(1, keepdim=True)


@pytest.mark.pain(13)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 33])
def test_tokens_beyond_the_capacity_go_in_rounds(rig, tokens):
    dispatchers, finish = rig(tokens)
    hidden = torch.randn(tokens, HIDDEN)
    for layer, dispatcher in enumerate(dispatchers):
        routed = topk(tokens, layer)
        sent = dispatcher.dispatch(hidden, routed)
        torch.testing.assert_close(dispatcher.combine(sent), expected(hidden, routed, layer))
    ffn_counted, attn_counted = finish()
    assert ffn_counted == [(1, tokens)]
    assert attn_counted == [tokens]


@pytest.mark.pain(7, 15)
@pytest.mark.parametrize("split", [0, 1, 5, 11])
def test_two_microbatches_interleave(rig, split):
    dispatchers, finish = rig(11, microbatches=2)
    hidden = torch.randn(11, HIDDEN)
    halves = (hidden[:split], hidden[split:])
    for layer, dispatcher in enumerate(dispatchers):
        routed = [topk(len(half), 10 * layer + i) for i, half in enumerate(halves)]
        for i in (0, 1):
            dispatcher.dispatch_a(halves[i], routed[i], tbo_subbatch_index=i)
        for i in (0, 1):
            dispatcher.combine_a(dispatcher.dispatch_b(tbo_subbatch_index=i), tbo_subbatch_index=i)
            got = dispatcher.combine_b(tbo_subbatch_index=i)
            torch.testing.assert_close(got, expected(halves[i], routed[i], layer))
    assert finish()[0] == [(1, 11)]


@pytest.mark.pain(21)
def test_padded_hidden_states_without_routing_are_masked(rig):
    """An idle microbatch under two-batch overlap: hidden states padded, no top-k rows."""
    dispatchers, finish = rig(5)
    hidden = torch.randn(5, HIDDEN)
    for dispatcher in dispatchers:
        got = dispatcher.combine(dispatcher.dispatch(hidden, topk(3)))
        assert got.shape == hidden.shape
        assert got[3:].eq(0).all()
    assert finish() == ([(1, 3)], [3])


def test_dispatch_twice_without_combine_is_refused(rig):
    dispatchers, _ = rig(2)
    hidden = torch.randn(2, HIDDEN)
    dispatchers[0].dispatch_a(hidden, topk(2))
    with pytest.raises(PlanMismatch, match="layer 0, microbatch 0: dispatched twice"):
        dispatchers[0].dispatch_a(hidden, topk(2))


def test_rank_without_tokens_takes_part_with_no_rows(rig):
    dispatchers, finish = rig(0, microbatches=2)
    for dispatcher in dispatchers:
        for microbatch in (0, 1):
            dispatcher.send_nothing(microbatch)
    assert finish() == ([(1, 0)], [0, 0])


def test_weight_on_the_input_is_applied_before_the_row_leaves(monkeypatch):
    sent = []
    fake = types.SimpleNamespace(
        plan=make_plan(0, "decode", (5,), CAPACITY, 1, 0),
        capacity=CAPACITY,
        connector=types.SimpleNamespace(dispatch=lambda *args: sent.append(args)),
        add_layer=lambda dispatcher: None,
        count_tokens=lambda ids: None,
    )
    monkeypatch.setattr(runtime_module, "_runtime", fake)
    dispatcher = RemoteDispatcher(
        types.SimpleNamespace(layer_id=0, apply_router_weight_on_input=True, top_k=1)
    )
    hidden, weights = torch.randn(5, HIDDEN), torch.rand(5, 1)
    dispatcher.dispatch(
        hidden, types.SimpleNamespace(topk_ids=torch.zeros(5, 1), topk_weights=weights)
    )
    _, sent_hidden, _, sent_weights, _ = sent[0]
    torch.testing.assert_close(sent_hidden, hidden * weights)
    assert sent_weights.eq(1).all()


def test_weights_on_inputs_of_several_experts_are_refused(rig):
    rig(1)
    config = types.SimpleNamespace(layer_id=3, apply_router_weight_on_input=True, top_k=2)
    with pytest.raises(AFDConfigError, match="MoE layer 3 weighs its input once for each of its 2"):
        RemoteDispatcher(config)
