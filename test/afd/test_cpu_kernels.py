"""The plain torch kernels for linear attention against loops over tokens, heads and channels."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.disaggregation.afd import cpu_kernels as kernels

HEADS_K, HEADS_V, DIM_K, DIM_V = 2, 4, 3, 5
LENGTHS = (1, 6, 3)
BOUNDS = torch.tensor([0, 1, 7, 10])
SLOTS = torch.tensor([4, 0, 2])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(6)


def naive_delta_rule(q, k, v, g, beta, state):
    """One head, one token at a time: state[value][key]."""
    out = torch.zeros(v.shape)
    for t in range(v.shape[0]):
        for h in range(HEADS_V):
            key, query = k[t, h * HEADS_K // HEADS_V], q[t, h * HEADS_K // HEADS_V]
            key = key / math.sqrt(float(key @ key) + 1e-6)
            query = query / math.sqrt(float(query @ query) + 1e-6) / math.sqrt(DIM_K)
            for a in range(DIM_V):
                for b in range(DIM_K):
                    decay = g[t, h] if g.dim() == 2 else g[t, h, b]
                    state[h, a, b] *= math.exp(decay)
                seen = sum(float(state[h, a, b] * key[b]) for b in range(DIM_K))
                for b in range(DIM_K):
                    state[h, a, b] += key[b] * beta[t, h] * (v[t, h, a] - seen)
                out[t, h, a] = sum(float(state[h, a, b] * query[b]) for b in range(DIM_K))
    return out


def inputs(per_channel: bool):
    total = sum(LENGTHS)
    gate = (total, HEADS_V, DIM_K) if per_channel else (total, HEADS_V)
    return (
        torch.randn(1, total, HEADS_K, DIM_K),
        torch.randn(1, total, HEADS_K, DIM_K),
        torch.randn(1, total, HEADS_V, DIM_V),
        -torch.rand(1, *gate),
        torch.rand(1, total, HEADS_V),
    )


@pytest.mark.parametrize("per_channel", [False, True])
def test_gated_delta_rule(per_channel):
    q, k, v, g, beta = inputs(per_channel)
    states = torch.randn(5, HEADS_V, DIM_V, DIM_K)
    expected_states = states.clone()
    expected = torch.cat(
        [
            naive_delta_rule(*(x[0, a:b] for x in (q, k, v, g, beta)), expected_states[slot])
            for a, b, slot in zip(BOUNDS[:-1], BOUNDS[1:], SLOTS, strict=True)
        ]
    )
    out, _, _ = kernels.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, states, BOUNDS, initial_state_indices=SLOTS
    )
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)


def test_padded_sequences_leave_states_alone():
    q, k, v, g, beta = inputs(per_channel=False)
    states = torch.randn(5, HEADS_V, DIM_V, DIM_K)
    before = states.clone()
    kernels.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, states, BOUNDS, initial_state_indices=torch.tensor([-1, -1, -1])
    )
    assert torch.equal(states, before)


@pytest.mark.parametrize("is_kda", [False, True])
def test_decode_step_is_the_rule_with_its_gates(is_kda):
    batch = 3
    q, k = torch.randn(1, batch, HEADS_K, DIM_K), torch.randn(1, batch, HEADS_K, DIM_K)
    v, b = torch.randn(1, batch, HEADS_V, DIM_V), torch.randn(batch, HEADS_V)
    width = DIM_K if is_kda else 1
    a, dt_bias = torch.randn(batch, HEADS_V * width), torch.randn(HEADS_V * width)
    A_log = torch.randn(HEADS_V)
    rate = torch.exp(A_log)[:, None]
    x = (a + dt_bias).view(batch, HEADS_V, width)
    g = -rate * torch.log1p(torch.exp(x))
    states = torch.randn(5, HEADS_V, DIM_V, DIM_K)
    expected_states = states.clone()
    steps = torch.arange(batch + 1)
    expected, _, _ = kernels.chunk_gated_delta_rule_cpu(
        q, k, v, (g if is_kda else g[..., 0])[None], torch.sigmoid(b)[None], expected_states,
        steps, initial_state_indices=SLOTS,
    )  # fmt: skip
    out = kernels.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log, dt_bias, q, k, v, a, b, states, SLOTS, steps, is_kda=is_kda
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)


def test_kda_gate_with_a_lower_bound():
    a, A_log, bias = (
        torch.randn(2, HEADS_V, DIM_K),
        torch.randn(HEADS_V),
        torch.randn(HEADS_V, DIM_K),
    )
    gate = kernels.kda_gate(a, A_log, bias, -5.0)
    expected = -5.0 * torch.sigmoid(torch.exp(A_log)[:, None] * (a + bias))
    torch.testing.assert_close(gate, expected)


@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_in_pieces_is_convolution_of_the_whole(activation):
    channels, width, length = 3, 4, 9
    x, weight, bias = (
        torch.randn(channels, length),
        torch.randn(channels, width),
        torch.randn(channels),
    )
    padded = torch.cat((torch.zeros(channels, width - 1), x), dim=1)
    expected = torch.stack(
        [(padded[:, t : t + width] * weight).sum(1) + bias for t in range(length)], dim=1
    )
    if activation:
        expected = expected * torch.sigmoid(expected)
    states = torch.full((3, channels, width - 1), 7.0)
    slot = torch.tensor([1])
    parts = []
    for first, last, old in ((0, 2, False), (2, 6, True)):
        parts.append(
            kernels.causal_conv1d_fn_cpu(
                x[:, first:last], weight, bias, activation, states, torch.tensor([old]), slot,
                torch.tensor([0, last - first]),
            )
        )  # fmt: skip
    for t in range(6, length):
        row = kernels.causal_conv1d_update_cpu(
            x[:, t][None], states, weight, bias, activation, slot
        )
        parts.append(row.T)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    assert torch.equal(states[1], x[:, -3:])
    assert states[0].eq(7).all()
    assert states[2].eq(7).all()


def test_gates_norms_and_splits():
    x, z, weight = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    scale = torch.stack([1 / torch.sqrt((row * row).mean() + 1e-5) for row in x])[:, None]
    expected = x * scale * weight * z * torch.sigmoid(z)
    torch.testing.assert_close(kernels.fused_rmsnorm_gated_cpu(x, weight, z, 1e-5), expected)
    q, k = kernels.fused_qk_gemma_rmsnorm_cpu(x, z, weight, weight, 1e-5, 6)
    torch.testing.assert_close(q, x * scale * (1 + weight))
    assert k.shape == z.shape
    both = torch.cat((x.view(4, 2, 3), z.view(4, 2, 3)), dim=-1)  # each head, then its gate
    q, _, gate = kernels.fused_qk_gemma_rmsnorm_with_gate_cpu(
        both, z, weight[:3], weight[:3], 1e-5, 3, 2
    )
    assert torch.equal(gate.view(4, 6), z)
    assert q.shape == (8, 3)
    assert torch.equal(kernels.fused_sigmoid_mul_cpu(x, z), x * torch.sigmoid(z))
    qkvz, ba = torch.arange(2 * 14.0).view(2, 14), torch.arange(2 * 4.0).view(2, 4)
    qkv, gate, b, a = kernels.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 1, 2, 3, 2)
    assert torch.equal(qkv, qkvz[:, :10])
    assert torch.equal(gate, qkvz[:, 10:].view(2, 2, 2))
    assert torch.equal(torch.cat((b, a), 1), ba)
    decay, beta = kernels.fused_gdn_gating_cpu(weight[:2], ba[:, :2], ba[:, 2:], weight[2:4])
    expected = -torch.exp(weight[:2]) * torch.log(1 + torch.exp(ba[:, :2] + weight[2:4]))
    torch.testing.assert_close(decay[0], expected)
    torch.testing.assert_close(beta[0], torch.sigmoid(ba[:, 2:]))
