"""The dispatcher over a real loopback link: rounds, microbatches, padding, and wrong use."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from sglang.srt.batch_overlap import operations
from sglang.srt.disaggregation.afd.attention import overlap
from sglang.srt.disaggregation.afd.attention import runtime as runtime_module
from sglang.srt.disaggregation.afd.attention.dispatcher import RemoteDispatcher
from sglang.srt.disaggregation.afd.connector.base import LinkSpec
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackAttn, LoopbackFFN, LoopbackHub
from sglang.srt.disaggregation.afd.errors import AFDConfigError, PlanMismatch
from sglang.srt.disaggregation.afd.ffn.loop import FFNLoop
from sglang.srt.disaggregation.afd.ffn.pace import Pace
from sglang.srt.disaggregation.afd.messages import Stop
from sglang.srt.disaggregation.afd.plan import make_plan, transfers
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


class OneLayer(torch.nn.Module):
    """A decoder layer that is its experts."""

    def __init__(self, dispatcher):
        super().__init__()
        self.dispatcher = dispatcher

    def forward(self, hidden_states, routed, batch):
        own = types.SimpleNamespace(**{n: v[batch.rows] for n, v in vars(routed).items()})
        return self.dispatcher.combine(self.dispatcher.dispatch(hidden_states, own))


def _refuse_what_would_hang(monkeypatch):
    """An FFN rank takes a step's transfers in their order, so none is answered before all that come
    before it are sent. This link has room for everything; others wait until a transfer is taken."""
    sent = set()
    dispatch, combine = LoopbackAttn.dispatch, LoopbackAttn.combine

    def noted(self, transfer, *args, **kwargs):
        sent.add(transfer[1:])
        return dispatch(self, transfer, *args, **kwargs)

    def checked(self, handle):
        for each in transfers(runtime_module.current().plan, LAYERS):
            assert each in sent, f"{handle.transfer} waits, and {each} is not sent"
            if each == handle.transfer[1:]:
                break
        return combine(self, handle)

    monkeypatch.setattr(LoopbackAttn, "dispatch", noted)
    monkeypatch.setattr(LoopbackAttn, "combine", checked)


@pytest.mark.pain(1, 7)
@pytest.mark.parametrize(
    "halves", [(20, 0), (0, 20), (3, 17), (17, 3), (1, 0), (0, 0)], ids=lambda h: f"{h[0]}+{h[1]}"
)
def test_halves_overlap_whatever_rounds_and_rows_they_have(rig, monkeypatch, halves):
    """A half without rows still has rounds, and none may wait for an answer that comes after what
    the other half has yet to send."""
    first, second = halves
    tokens = first + second
    _refuse_what_would_hang(monkeypatch)
    dispatchers, finish = rig(max(tokens, 1), microbatches=2)
    hidden, routed = torch.randn(tokens, HIDDEN), topk(tokens)
    children = [
        types.SimpleNamespace(
            tbo_parent_token_range=(start, end), tbo_padded_len=end - start, rows=slice(start, end)
        )
        for start, end in ((0, first), (first, tokens))
    ]
    batch = types.SimpleNamespace(
        tbo_children=children, can_run_tbo=True, input_ids=torch.zeros(tokens), rows=slice(None)
    )
    monkeypatch.setattr(operations, "_resolve_tbo_child_contexts", lambda: (None, None))
    monkeypatch.setattr(overlap.Step, "_in_context", lambda self, half, call, *args: call(*args))
    monkeypatch.setattr(overlap, "_step", None)
    modules = [OneLayer(dispatcher) for dispatcher in dispatchers]
    for index, module in enumerate(modules):
        overlap.Layer(module, index, is_last=index == LAYERS - 1)
    out, want = hidden, hidden
    for layer, module in enumerate(modules):
        out = module.forward(out, routed, batch)
        want = expected(want, routed, layer)
    torch.testing.assert_close(out, want)
    (counted, sent) = finish()
    assert counted == [(1, tokens)]
    assert sum(sent) == tokens
