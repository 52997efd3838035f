"""The CPU kernels of `sgl_kernel` that upstream's linear-attention models call, in plain torch.

Upstream's PyPI wheel has them for GPUs only. Each function takes the arguments of the kernel whose
name it bears and follows the recurrence of upstream's Triton kernel for the same operation, in
FP32, one token after the other: made for small models on machines without a GPU.

Shapes: T tokens, B sequences, H key heads, G value heads, K and V head dimensions, D channels,
W width of a convolution, S state slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

_PAD_SLOT = -1
_L2_EPS = 1e-6


def _activated(x: torch.Tensor, activation: Any) -> torch.Tensor:
    return F.silu(x) if activation in ("silu", "swish", True) else x


def causal_conv1d_fn_cpu(
    x_DT: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    activation: Any,
    conv_states: torch.Tensor,  # [S, D, W - 1]
    has_initial_state: torch.Tensor | None,
    cache_indices: torch.Tensor | None,
    query_start_loc: torch.Tensor,  # [B + 1]
    seq_lens_cpu: Any = None,
) -> torch.Tensor:
    """Depthwise convolution over each sequence's own past; leaves its last inputs in its slot."""
    out = torch.empty_like(x_DT)
    bounds = query_start_loc.tolist()
    width = weight_DW.shape[1] - 1
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        slot = i if cache_indices is None else int(cache_indices[i])
        if slot == _PAD_SLOT or first == last:
            continue
        state = conv_states[slot]
        fresh = has_initial_state is None or not bool(has_initial_state[i])
        past = torch.zeros_like(state[:, :width]) if fresh else state[:, :width]
        line = torch.cat((past.to(x_DT.dtype), x_DT[:, first:last]), dim=1)
        out[:, first:last] = _activated(_convolve(line, weight_DW, bias_D), activation)
        state[:, :width] = line[:, line.shape[1] - width :]
    return out


def causal_conv1d_update_cpu(
    x_BD: torch.Tensor,
    conv_states: torch.Tensor,  # [S, D, W - 1]
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    activation: Any = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One more token for each sequence; its slot moves on by one."""
    out = x_BD.clone()
    width = weight_DW.shape[1] - 1
    for i in range(x_BD.shape[0]):
        slot = i if conv_state_indices is None else int(conv_state_indices[i])
        if slot == _PAD_SLOT:
            continue
        state = conv_states[slot]
        line = torch.cat((state[:, :width].to(x_BD.dtype), x_BD[i][:, None]), dim=1)
        out[i] = _activated(_convolve(line, weight_DW, bias_D), activation)[:, 0]
        state[:, :width] = line[:, 1:]
    return out


def _convolve(line: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[D, L + W - 1] -> [D, L]."""
    out = F.conv1d(line[None], weight[:, None].to(line.dtype), bias, groups=len(weight))
    return out[0]


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and step size, both [1, T, G] in FP32, from a and b [T, G]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), threshold=20.0)
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,  # [1, T, H, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [1, T, G, V]
    g: torch.Tensor,  # [1, T, G] or [1, T, G, K]: log decay
    beta: torch.Tensor,  # [1, T, G]
    initial_state: torch.Tensor,  # [S, G, V, K], updated in place
    cu_seqlens: torch.Tensor,  # [B + 1]
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    initial_state_indices: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Outputs [1, T, G, V], the states, and no intermediate states."""
    assert not head_first, "only the token-major layout is written down here"
    out = torch.zeros(v.shape, dtype=v.dtype)
    bounds = cu_seqlens.tolist()
    for i, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        slot = i if initial_state_indices is None else int(initial_state_indices[i])
        if first == last:
            continue
        rows = slice(first, last)
        state = (
            torch.zeros_like(initial_state[0]) if slot == _PAD_SLOT else initial_state[slot]
        ).float()
        out[0, rows], state = delta_rule(
            q[0, rows], k[0, rows], v[0, rows], g[0, rows], beta[0, rows], state,
            normalise=use_qk_l2norm_in_kernel, scale=scale,
        )  # fmt: skip
        if slot != _PAD_SLOT:
            initial_state[slot] = state.to(initial_state.dtype)
    return out, initial_state, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,  # [G]
    dt_bias: torch.Tensor,  # [G] or [G * K]
    q: torch.Tensor,  # [1, T, H, K]
    k: torch.Tensor,  # [1, T, H, K]
    v: torch.Tensor,  # [1, T, G, V]
    a: torch.Tensor,
    b: torch.Tensor,  # [T, G]
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,  # [B]
    cu_seqlens: torch.Tensor,  # [B + 1]
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """A decode step, gates included: a is [T, G] (one decay per head) or [T, G * K] (KDA)."""
    assert softplus_beta == 1.0, softplus_beta
    assert softplus_threshold == 20.0, softplus_threshold
    heads = v.shape[2]
    decay = kda_gate if is_kda else _gdn_gate
    g = decay(a.reshape(v.shape[1], heads, -1), A_log, dt_bias, lower_bound)
    beta = b.reshape(1, v.shape[1], heads).float().sigmoid()
    return chunk_gated_delta_rule_cpu(
        q, k, v, g[None], beta, initial_state_source, cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        initial_state_indices=initial_state_indices,
    )[0]  # fmt: skip


def chunk_kda_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,  # [1, T, G, K]: before the gate if A_log is given, else the log decay
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
) -> torch.Tensor:
    """Kimi delta attention over whole sequences: outputs [1, T, G, V]."""
    assert not output_intermediate_states, "no intermediate states are kept here"
    decay = g.reshape(v.shape[1], v.shape[2], -1)
    if A_log is not None:
        assert dt_bias is not None
        decay = kda_gate(decay, A_log, dt_bias, lower_bound)
    return chunk_gated_delta_rule_cpu(
        q, k, v, decay[None], beta, initial_state, cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        initial_state_indices=initial_state_indices,
    )[0]  # fmt: skip


def _gdn_gate(
    a_TG1: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, _lower_bound: float | None
) -> torch.Tensor:
    return fused_gdn_gating_cpu(A_log, a_TG1[..., 0], a_TG1[..., 0], dt_bias)[0][0]


def kda_gate(
    a_TGK: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Log decay [T, G, K] of Kimi delta attention, which has one per channel."""
    heads, dim = a_TGK.shape[1:]
    rate = A_log.float().reshape(heads, 1).exp()
    x = a_TGK.float() + dt_bias.float().reshape(heads, dim)
    if lower_bound is not None:
        return lower_bound * (rate * x).sigmoid()
    return -rate * F.softplus(x, threshold=20.0)


def delta_rule(
    q: torch.Tensor,  # [T, H, K]
    k: torch.Tensor,  # [T, H, K]
    v: torch.Tensor,  # [T, G, V]
    g: torch.Tensor,  # [T, G] or [T, G, K]
    beta: torch.Tensor,  # [T, G]
    state: torch.Tensor,  # [G, V, K], FP32
    *,
    normalise: bool,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule, one token after the other: outputs [T, G, V] and the last state."""
    query, key, value = q.float(), k.float(), v.float()
    if normalise:
        query = query / (query.square().sum(-1, keepdim=True) + _L2_EPS).sqrt()
        key = key / (key.square().sum(-1, keepdim=True) + _L2_EPS).sqrt()
    query = query * (q.shape[-1] ** -0.5 if scale is None else scale)
    share = v.shape[1] // q.shape[1]  # value heads per key head
    query, key = query.repeat_interleave(share, 1), key.repeat_interleave(share, 1)
    decay = g.float().exp()
    decay = decay[..., None, None] if g.dim() == 2 else decay[:, :, None, :]
    out = torch.empty_like(value)
    for t in range(v.shape[0]):
        state = state * decay[t]
        seen = torch.einsum("gvk,gk->gv", state, key[t])
        change = (value[t] - seen) * beta[t].float()[:, None]
        state = state + change[..., None] * key[t][:, None, :]
        out[t] = torch.einsum("gvk,gk->gv", state, query[t])
    return out.to(v.dtype), state


def fused_rmsnorm_gated_cpu(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm, then times silu of the gate."""
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    value = value if weight is None else value * weight.float()
    return (value * F.silu(gate.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(
    x: torch.Tensor, gate: torch.Tensor, inplace: bool = False
) -> torch.Tensor:
    """x times sigmoid of the gate."""
    value = x * gate.reshape(x.shape).sigmoid()
    return x.copy_(value) if inplace else value


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,  # [T, heads * head_dim]
    k: torch.Tensor,  # [T, heads * head_dim]
    q_weight: torch.Tensor,  # [head_dim]
    k_weight: torch.Tensor,  # [head_dim]
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, head by head, with norms whose weight counts from 1."""
    return (
        _gemma_norm(q.reshape(-1, head_dim), q_weight, eps),
        _gemma_norm(k.reshape(-1, head_dim), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,  # [T, heads * 2 * head_dim]
    k: torch.Tensor,  # [T, heads * head_dim]
    q_weight: torch.Tensor,  # [head_dim]
    k_weight: torch.Tensor,  # [head_dim]
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for queries that come with a gate of their size behind each head."""
    query, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    q, k = fused_qk_gemma_rmsnorm_cpu(query, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * (1.0 + weight.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, heads_k: int, heads_v: int, dim_k: int, dim_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut [all q | all k | all v | all z] and [all b | all a] into qkv, z by head, b and a."""
    qkv, z = qkvz.split([2 * heads_k * dim_k + heads_v * dim_v, heads_v * dim_v], dim=-1)
    b, a = ba.split([heads_v, heads_v], dim=-1)
    return qkv.contiguous(), z.reshape(-1, heads_v, dim_v), b.contiguous(), a.contiguous()


KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        causal_conv1d_fn_cpu,
        causal_conv1d_update_cpu,
        chunk_gated_delta_rule_cpu,
        fused_gdn_gating_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_rmsnorm_gated_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
    )
}
