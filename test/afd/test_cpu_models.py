"""What single models lack on a CPU: each replacement against its formula, written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.disaggregation.afd import cpu, cpu_models

EXPERTS, HIDDEN, INNER = 3, 4, 5
PLAIN = {
    "activation": "silu",
    "is_gated": True,
    "apply_router_weight_on_input": False,
    "swiglu_limit": None,
    "gemm1_clamp_limit": None,
    "gemm1_alpha": None,
    "gate_up_interleaved": True,
}


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# Of a gate and an up projection, as upstream's Triton runner documents them.
FORMULAS = {
    "silu": ({}, lambda g, u: silu(g) * u),
    "gelu": ({"activation": "gelu"}, lambda g, u: 0.5 * g * (1 + math.erf(g / 2**0.5)) * u),
    "gpt-oss": (
        {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 0.8},
        lambda g, u: min(g, 0.8) / (1 + math.exp(-1.7 * min(g, 0.8))) * (clamp(u, -0.8, 0.8) + 1),
    ),
    "limit": ({"gemm1_clamp_limit": 0.5}, lambda g, u: min(silu(g), 0.5) * clamp(u, -0.5, 0.5)),
    "swiglu limit": (
        {"swiglu_limit": 0.5},
        lambda g, u: silu(min(g, 0.5)) * clamp(u, -0.5, 0.5),
    ),
    "situ": (
        {"activation": "situ", "gemm1_alpha": 2.0, "gemm1_clamp_limit": 3.0},
        lambda g, u: 2 * math.tanh(g / 2) / (1 + math.exp(-g)) * 3 * math.tanh(u / 3),
    ),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(6)


def layer(inner: int, biased: bool) -> SimpleNamespace:
    weights = {
        "w13_weight": torch.randn(EXPERTS, inner, HIDDEN),
        "w2_weight": torch.randn(EXPERTS, HIDDEN, INNER),
    }
    if biased:
        weights["w13_weight_bias"] = torch.randn(EXPERTS, inner)
        weights["w2_weight_bias"] = torch.randn(EXPERTS, HIDDEN)
    return SimpleNamespace(**weights)


def naive(module, x, ids, weights, act, on_input=False):
    """Token by token, expert by expert; `act` turns a projection into what goes down."""
    out = torch.zeros_like(x)
    for t, e in ((t, e) for t in range(len(x)) for e in range(ids.shape[1])):
        expert, weight = int(ids[t, e]), float(weights[t, e])
        if expert < 0:
            continue
        row = x[t] * weight if on_input else x[t]
        up = module.w13_weight[expert] @ row
        if hasattr(module, "w13_weight_bias"):
            up = up + module.w13_weight_bias[expert]
        down = module.w2_weight[expert] @ act(up)
        if hasattr(module, "w2_weight_bias"):
            down = down + module.w2_weight_bias[expert]
        out[t] += down * (1 if on_input else weight)
    return out


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("biased", [False, True])
def test_gated_experts(name, biased):
    changes, formula = FORMULAS[name]
    config = SimpleNamespace(**{**PLAIN, **changes})
    module = layer(2 * INNER, biased)
    x, weights = torch.randn(6, HIDDEN), torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [2, 0], [1, 1], [-1, 2], [0, 2], [-1, -1]])  # masked and twice, too

    def act(up: torch.Tensor) -> torch.Tensor:
        pairs = (up[0::2], up[1::2]) if name == "gpt-oss" else up.chunk(2)
        return torch.tensor([formula(float(g), float(u)) for g, u in zip(*pairs, strict=True)])

    found = cpu_models.experts_by_formula(module, config, x, ids, weights)
    torch.testing.assert_close(found, naive(module, x, ids, weights, act), atol=1e-5, rtol=1e-5)


def test_experts_without_a_gate_and_with_weighted_input():
    module, x = layer(INNER, biased=False), torch.randn(4, HIDDEN)
    ids, weights = torch.tensor([[0], [2], [1], [0]]), torch.rand(4, 1)
    config = SimpleNamespace(**{**PLAIN, "activation": "relu2", "is_gated": False})
    found = cpu_models.experts_by_formula(module, config, x, ids, weights)
    expected = naive(module, x, ids, weights, lambda up: up.clamp(min=0) ** 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    config.apply_router_weight_on_input = True
    found = cpu_models.experts_by_formula(module, config, x, ids, weights)
    expected = naive(module, x, ids, weights, lambda up: up.clamp(min=0) ** 2, on_input=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_unknown_activation_is_an_error():
    config = SimpleNamespace(**{**PLAIN, "activation": "mystery"})
    with pytest.raises(ValueError, match="'mystery' with a gate"):
        cpu_models.activate(torch.zeros(1, 4), config)


def test_plain_experts_stay_with_upstream():
    method = SimpleNamespace(moe_runner_config=SimpleNamespace(**PLAIN))
    module = layer(2 * INNER, biased=False)

    def dispatched(ids):
        output = (torch.rand(len(ids), 2), ids, None)
        return SimpleNamespace(hidden_states=torch.randn(len(ids), HIDDEN), topk_output=output)

    def upstreams(*_args):
        return "upstream's"

    plain = dispatched(torch.tensor([[0, 1]]))
    assert cpu_models.experts(upstreams, method, module, plain) == "upstream's"
    for ids in ([[0, -1]], [[1, 1]]):
        found = cpu_models.experts(upstreams, method, module, dispatched(torch.tensor(ids)))
        assert found != "upstream's"


def test_minimax_norm_over_all_ranks():
    x1, x2, w1, w2 = torch.randn(3, 8), torch.randn(3, 4), torch.randn(8), torch.randn(4)
    sums = cpu_models.sum_of_squares(x1, x2)
    out1, out2 = cpu_models.apply_rms(x1, x2, w1, w2, sums * 2, tp_world=2, eps=1e-5)
    for x, w, out in ((x1, w1, out1), (x2, w2, out2)):
        rows = [row / math.sqrt(float((row * row).mean()) + 1e-5) * w for row in x]
        torch.testing.assert_close(out, torch.stack(rows))


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gated_norm(activation):
    norm = SimpleNamespace(eps=1e-5, activation=activation, weight=torch.randn(6), bias=None)
    x, z = torch.randn(4, 6), torch.randn(4, 6)
    gate = torch.sigmoid(z) if activation == "sigmoid" else z * torch.sigmoid(z)
    rows = torch.stack([row / math.sqrt(float((row * row).mean()) + 1e-5) for row in x])
    found = cpu_models.gated_norm(None, norm, x, z)
    torch.testing.assert_close(found, rows * norm.weight * gate)
    norm.group_size = 3
    assert cpu_models.gated_norm(lambda *_args: "upstream's", norm, x, z) == "upstream's"


def test_rope_for_models_without_scaling_is_the_general_one():
    seen = []
    cpu_models.rope(lambda *args, **kwargs: seen.append(kwargs["device"]), 1, device="cpu")
    yarn = {"rope_type": "deepseek_yarn"}
    cpu_models.rope(
        lambda *args, **kwargs: seen.append(kwargs["device"]), 1, device="cpu", rope_scaling=yarn
    )
    assert seen == [None, "cpu"]


def test_product_with_an_output_dtype():
    a, b = torch.randn(3, 4).bfloat16(), torch.randn(4, 2).bfloat16()
    found = torch.mm(a, b, out_dtype=torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, a.float() @ b.float())
    torch.testing.assert_close(cpu._mm_with_dtype(a, b, torch.float32), a.float() @ b.float())


def test_stream_and_flat_output():
    assert cpu_models.stream(None, None, "alt") is not None
    attention = SimpleNamespace(tp_q_head_num=2, v_head_dim=3)
    by_head = torch.randn(8, 3)
    assert cpu_models.flat_output(by_head, None, 0, 0, 0, attention).shape == (4, 6)
