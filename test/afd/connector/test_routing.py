"""Routing against a loop over tokens, and the sum of partial results."""

from __future__ import annotations

import pytest
import torch
from connector import contract

from sglang.srt.disaggregation.afd.connector.routing import Router, sum_partials


@pytest.mark.parametrize("num_ffn", [1, 2, 3, 8])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_split(num_ffn, ids_dtype, num_tokens):
    spec = contract.make_spec(1, num_ffn, torch.float32)
    tokens = contract.random_tokens(spec, num_tokens, 3, contract._some_entries, ids_dtype)
    before = [tensor.clone() for tensor in tokens]
    routes = Router(spec.topology).split(*tokens[1:])
    assert len(routes) == num_ffn
    for ffn_rank, route in enumerate(routes):
        expected = contract.expected_batch(spec, ffn_rank, [tokens])
        contract.assert_same("hidden", tokens.hidden_TH[route.token_idx_R], expected.hidden_RH)
        contract.assert_same("ids", route.topk_ids_RK, expected.topk_ids_RK)
        contract.assert_same("weights", route.topk_weights_RK, expected.topk_weights_RK)
    for tensor, old in zip(tokens, before, strict=True):
        contract.assert_same("input", tensor, old)


def test_split_of_a_weights_view_leaves_it_alone():
    spec = contract.make_spec(1, 2, torch.float32)
    tokens = contract.random_tokens(spec, 4, seed=1)
    wide = torch.cat([tokens.topk_weights_TK, tokens.topk_weights_TK], dim=1)
    Router(spec.topology).split(tokens.topk_ids_TK, wide[:, : spec.topk])
    contract.assert_same("weights", wide[:, : spec.topk], tokens.topk_weights_TK)


def test_partials_are_added_in_fp32_and_cast_once():
    idx = torch.tensor([0])
    rows = [torch.tensor([[value]], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    total = sum_partials(2, 1, torch.bfloat16, [(idx, row) for row in rows])
    # In BF16 each of the two ones would be lost: 256 + 1 rounds to 256.
    contract.assert_same("sum", total, torch.tensor([[258.0], [0.0]], dtype=torch.bfloat16))
