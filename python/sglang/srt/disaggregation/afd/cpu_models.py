"""What single models of upstream lack on a CPU: the hooks of `patches.py` group "cpu" for them.

`cpu.py` makes the engine start on a machine without an accelerator. Here are the places where a
model, or the experts of a model, would call a CUDA-only function: each is the same formula in torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch
from torch.nn import functional as F


def rope(orig: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `get_rope_wrapper`: with device "cpu" it knows one kind of scaling and no plain RoPE."""
    scaling = kwargs.get("rope_scaling", args[5] if len(args) > 5 else None)
    if kwargs.get("device") == "cpu" and (scaling or {}).get("rope_type") != "deepseek_yarn":
        kwargs = {**kwargs, "device": None}
    return orig(*args, **kwargs)


def sum_of_squares(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """REPLACE `rms_sumsq_serial` of MiniMax-M2: [2 T] sums over the rows of both, in FP32."""
    return torch.cat((x1.float().square().sum(-1), x2.float().square().sum(-1)))


def apply_rms(
    x1: torch.Tensor,  # [T, D1]
    x2: torch.Tensor,  # [T, D2]
    w1: torch.Tensor,  # [D1]
    w2: torch.Tensor,  # [D2]
    sum_sq: torch.Tensor,  # [2 T]
    tp_world: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REPLACE `rms_apply_serial` of MiniMax-M2: norms from sums over all tensor-parallel ranks."""
    rows = x1.shape[0]
    scaled = []
    for x, w, total in ((x1, w1, sum_sq[:rows]), (x2, w2, sum_sq[rows : 2 * rows])):
        inverse = torch.rsqrt(total / (x.shape[1] * tp_world) + eps)[:, None]
        scaled.append((x.float() * inverse * w.float()).to(x.dtype))
    return scaled[0], scaled[1]


def stream(orig: Any, self: Any, name: str) -> Any:
    """AROUND `RuntimeContext.get_stream`: a CPU has one queue of work."""
    return orig(self, name) if torch.cuda.is_available() else torch.cpu.Stream()


def one_processor(_device: torch.device) -> int:
    """REPLACE `_get_sm_count`: a CPU has no streaming multiprocessors to spread rows over."""
    return 1


def flat_output(
    result: torch.Tensor, self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """AFTER `forward_extend` of the native attention: [T, heads * dim], whatever the query's shape."""
    return result.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def flat_output_decode(result: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """AFTER `forward_decode`, likewise."""
    return flat_output(result, *args, **kwargs)


def gated_norm(
    orig: Any, self: Any, x: torch.Tensor, z: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    """AROUND `forward` of the two gated RMS norms of linear attention, whose kernels are Triton."""
    plain = (
        x.device.type == "cpu"
        and not any(value is not None and value is not False for value in kwargs.values())
        and getattr(self, "group_size", None) is None
        and getattr(self, "norm_before_gate", True)
        and self.bias is None
    )
    if not plain or z is None:
        return orig(self, x, z, **kwargs)
    gate = torch.sigmoid if self.activation == "sigmoid" else F.silu
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + self.eps)
    if self.weight is not None:
        value = value * self.weight.float()
    return (value * gate(z.float())).to(x.dtype)


fused_gated_norm = gated_norm  # the hook of the second one; a hook's name stands in one row only


def kimi_delta_attention(module: types.ModuleType) -> None:
    """Called once upstream's KDA kernel module ran: it imports nothing on a CPU and still calls."""
    from sglang.srt.disaggregation.afd import cpu_kernels

    module.chunk_kda = cpu_kernels.chunk_kda_cpu  # type: ignore[attr-defined]
    module.fused_sigmoid_gating_delta_rule_update = (  # type: ignore[attr-defined]
        cpu_kernels.fused_sigmoid_gating_delta_rule_update_cpu
    )


def mamba_convolution(module: types.ModuleType) -> None:
    """Called once upstream's Mamba-2 module ran: it imports its convolutions on a GPU only."""
    from sglang.srt.disaggregation.afd import cpu_kernels

    for suffix in ("", "_triton"):
        setattr(module, f"causal_conv1d_fn{suffix}", cpu_kernels.causal_conv1d_fn_cpu)
        setattr(module, f"causal_conv1d_update{suffix}", cpu_kernels.causal_conv1d_update_cpu)


def lend_vllm(_module: types.ModuleType) -> None:
    """Called once upstream's model registry ran: import the models that need vLLM's AWQ kernel.

    They take it from there where there is no GPU, and nobody calls it without such a checkpoint. The
    name is lent for the time of the import only, since its presence means something elsewhere.
    """
    from sglang.srt.models.registry import ModelRegistry

    lent = {name: types.ModuleType(name) for name in ("vllm", "vllm._custom_ops")}
    lent["vllm._custom_ops"].awq_dequantize = None  # type: ignore[attr-defined]
    added = [name for name in lent if sys.modules.setdefault(name, lent[name]) is lent[name]]
    try:
        model = importlib.import_module("sglang.srt.models.bailing_moe_linear")
    finally:
        for name in added:
            del sys.modules[name]
    for entry in model.EntryClass:
        ModelRegistry.models.setdefault(entry.__name__, entry)


def experts(orig: Any, self: Any, layer: Any, dispatch_output: Any) -> Any:
    """AROUND `UnquantizedFusedMoEMethod.apply`: its CPU form knows SiLU experts, each one chosen."""
    config = self.moe_runner_config
    weights, ids = dispatch_output.topk_output[:2]
    plain = layer.w13_weight.device.type != "cpu" or (
        config.activation == "silu"
        and config.is_gated
        and not config.apply_router_weight_on_input
        and config.swiglu_limit is None
        and (config.gemm1_clamp_limit is None or config.gemm1_alpha is not None)
        and (config.gemm1_alpha is None or config.gate_up_interleaved)
        and _distinct(ids)
    )
    if plain:
        return orig(self, layer, dispatch_output)
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    hidden = experts_by_formula(layer, config, dispatch_output.hidden_states, ids, weights)
    return StandardCombineInput(hidden_states=hidden)


def _distinct(ids_TK: torch.Tensor) -> bool:
    """True if every entry is an expert, and none stands twice in a row."""
    ordered = ids_TK.sort(dim=-1).values
    return bool((ordered >= 0).all()) and bool((ordered.diff(dim=-1) > 0).all())


def experts_by_formula(
    layer: Any,
    config: Any,
    hidden_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """Sum over a token's experts, by the formulas of upstream's Triton runner, [T, H]."""
    total = torch.zeros(hidden_TH.shape, dtype=torch.float32)
    on_input = config.apply_router_weight_on_input
    w13_bias = getattr(layer, "w13_weight_bias", None)
    w2_bias = getattr(layer, "w2_weight_bias", None)
    for expert in ids_TK.unique().tolist():
        if expert < 0:
            continue
        row, entry = (ids_TK == expert).nonzero(as_tuple=True)
        weight = weights_TK[row, entry].float()[:, None]
        x = hidden_TH[row]
        if on_input:
            x = (x.float() * weight).to(x.dtype)
        up = F.linear(x, layer.w13_weight[expert])
        if w13_bias is not None:
            up = (up.float() + w13_bias[expert]).to(x.dtype)
        out = F.linear(activate(up, config), layer.w2_weight[expert])
        if w2_bias is not None:
            out = (out.float() + w2_bias[expert]).to(x.dtype)
        total.index_add_(0, row, out.float() if on_input else out.float() * weight)
    return total.to(hidden_TH.dtype)


def activate(x: torch.Tensor, config: Any) -> torch.Tensor:
    """Gate and up projection [P, 2 I] (or [P, I] without a gate) to [P, I].

    Raises:
        ValueError: an activation that upstream's Triton runner does not know either.
    """
    name, limit, alpha = config.activation, config.gemm1_clamp_limit, config.gemm1_alpha
    if not config.is_gated:
        if name == "relu2":
            return F.relu(x).square()
        if name in ("silu", "gelu"):
            return getattr(F, name)(x)
        raise ValueError(f"activation {name!r} without a gate")
    if alpha is not None and name == "silu" and config.gate_up_interleaved:
        gate, up = x[..., ::2], x[..., 1::2]
    else:
        gate, up = x.chunk(2, dim=-1)
    if name == "gelu":
        return F.gelu(gate) * up
    if name == "situ":
        beta = 4.0 if alpha is None else alpha
        gate, up = gate.float(), up.float()
        gate = beta * torch.tanh(gate / beta) * gate.sigmoid()
        up = up if limit is None else limit * torch.tanh(up / limit)
        return (gate * up).to(x.dtype)
    if name != "silu":
        raise ValueError(f"activation {name!r} with a gate")
    if alpha is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * alpha) * (up + 1)
    if limit is not None:
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if config.swiglu_limit is not None:
        bound = config.swiglu_limit
        return F.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
    return F.silu(gate) * up
