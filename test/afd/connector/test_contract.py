"""Every connector keeps the contract, for all shapes of the two pools."""

from __future__ import annotations

import pytest
import torch
from connector import contract, harness

from sglang.srt.disaggregation.afd.connector.base import ReceivedBatch, Transfer
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackAttn, LoopbackFFN, LoopbackHub

SIZES = (1, 2, 3, 4, 8)


@pytest.mark.pain(1, 2, 14, 40, 66, 74)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ffn", SIZES)
@pytest.mark.parametrize("num_attn", SIZES)
@pytest.mark.parametrize("name", ["loopback", "gloo"])
def test_contract(run_link, name, num_attn, num_ffn, dtype):
    spec = contract.make_spec(num_attn, num_ffn, dtype)
    harness.raise_first(run_link(name, spec, contract.play))


def _replace(batch: ReceivedBatch, **changes: object) -> ReceivedBatch:
    return ReceivedBatch(**{**vars(batch), **changes})


class _SwapsRows(LoopbackFFN):
    def receive(self, transfer: Transfer) -> ReceivedBatch:
        batch = super().receive(transfer)
        order = torch.arange(len(batch.hidden_RH))
        order[:2] = order[:2].flip(0)
        return _replace(batch, hidden_RH=batch.hidden_RH[order])


class _IgnoresWeights(LoopbackFFN):
    def receive(self, transfer: Transfer) -> ReceivedBatch:
        batch = super().receive(transfer)
        return _replace(batch, topk_weights_RK=(batch.topk_ids_RK >= 0).float())


class _DropsLastRow(LoopbackFFN):
    def receive(self, transfer: Transfer) -> ReceivedBatch:
        batch = super().receive(transfer)
        return _replace(
            batch,
            hidden_RH=batch.hidden_RH[:-1],
            topk_ids_RK=batch.topk_ids_RK[:-1],
            topk_weights_RK=batch.topk_weights_RK[:-1],
        )


class _GlobalIds(LoopbackFFN):
    def receive(self, transfer: Transfer) -> ReceivedBatch:
        batch = super().receive(transfer)
        return _replace(batch, topk_ids_RK=batch.topk_ids_RK + 1)


class _KeepsCallersTensor(LoopbackFFN):
    def send(self, batch: ReceivedBatch, out_RH: torch.Tensor) -> None:
        class Alias(torch.Tensor):
            def clone(self, **_):
                return self

        super().send(batch, out_RH.as_subclass(Alias))


class _ShiftsResult(LoopbackAttn):
    def combine(self, handle):
        result_TH = super().combine(handle)
        return result_TH.roll(1, dims=0)


class _Truncates(LoopbackAttn):
    def dispatch(self, transfer, hidden_TH, topk_ids_TK, topk_weights_TK):
        capacity = self._spec.capacity
        return super().dispatch(
            transfer, hidden_TH[:capacity], topk_ids_TK[:capacity], topk_weights_TK[:capacity]
        )


@pytest.mark.pain(40)
@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (_SwapsRows, "hidden: .* values differ"),
        (_IgnoresWeights, "weights: .* values differ"),
        (_DropsLastRow, "hidden: shape"),
        (_GlobalIds, "ids: .* values differ"),
        (_KeepsCallersTensor, "result of attn .* values differ"),
        (_ShiftsResult, "result of attn .* values differ"),
        (_Truncates, "over the capacity was accepted"),
    ],
)
def test_a_broken_connector_fails(broken, complaint):
    """The contract notices each of these, so that passing it means something."""
    spec = contract.make_spec(2, 2, torch.float32, timeout_s=10)
    hub = LoopbackHub(spec)
    attn = broken if issubclass(broken, LoopbackAttn) else LoopbackAttn
    ffn = broken if issubclass(broken, LoopbackFFN) else LoopbackFFN

    def rank(connector, world_rank):
        try:
            contract.play(connector, spec, world_rank)
        finally:
            connector.close()

    results = harness.run_threads(
        [lambda i=i: rank(attn(hub, i), i) for i in range(2)]
        + [lambda j=j: rank(ffn(hub, j), 2 + j) for j in range(2)]
    )
    with pytest.raises(AssertionError, match=complaint):
        harness.raise_first(results)


def test_first_difference_is_named():
    got, expected = torch.zeros(3, 4), torch.zeros(3, 4)
    got[1, 2] = 5
    with pytest.raises(AssertionError, match=r"first at \(1, 2\): got 5.0, expected 0.0"):
        contract.assert_same("rows", got, expected)
