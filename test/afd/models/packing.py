"""Turns a tiny checkpoint's weights into the tensors of a published format.

Each function takes a tensor's name and its FP32 values and returns what the checkpoint holds instead.
Rounding is to nearest; what matters is that both sides of a comparison read the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Tensors = dict[str, Any]
Packer = Callable[[str, Any], Tensors]

GROUP = 128  # inputs that share a scale in AWQ and GPTQ
_FP8_LARGEST = 448.0
_BLOCK = 128
_MX_GROUP = 32
_MX_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of FP4 E2M1, by code
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PROJECTION = re.compile(r"\.(self_attn|experts\.\d+)\.\w+_proj\.weight$")


def bf16(name: str, values: Any) -> Tensors:
    """BF16, but for what upstream keeps in FP32 itself."""
    import torch

    return {name: values if name.endswith("correction_bias") else values.to(torch.bfloat16)}


def fp16(name: str, values: Any) -> Tensors:
    import torch

    return {name: values.to(torch.float16)}


def projections(pack: Packer, rest: Packer) -> Packer:
    """`pack` for projections of attention and of routed experts, `rest` for all other tensors."""
    return lambda name, values: (pack if _PROJECTION.search(name) else rest)(name, values)


def fp8_blocks(name: str, values: Any) -> Tensors:
    import torch

    rows, columns = (size // _BLOCK for size in values.shape)
    blocks = values.view(rows, _BLOCK, columns, _BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / _FP8_LARGEST
    packed = (blocks / scale).view_as(values).to(torch.float8_e4m3fn)
    return {name: packed, f"{name}_scale_inv": scale.view(rows, columns)}


def fp8_channels(name: str, values: Any) -> Tensors:
    import torch

    scale = values.abs().amax(1, keepdim=True) / _FP8_LARGEST
    return {name: (values / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def int8_channels(name: str, values: Any) -> Tensors:
    import torch

    scale = values.abs().amax(1, keepdim=True) / 127
    return {name: (values / scale).round().to(torch.int8), f"{name}_scale": scale}


def awq(name: str, values: Any) -> Tensors:
    """4 bits, groups along the input, eight outputs in an integer; every zero point is 8."""
    codes, scale = _four_bits(values)
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": _into_integers(codes, _AWQ_ORDER),
        f"{stem}qzeros": _into_integers(codes.new_full(scale.shape, 8), _AWQ_ORDER),
        f"{stem}scales": scale.half(),
    }


def gptq(name: str, values: Any) -> Tensors:
    """4 bits, groups along the input, eight inputs in an integer; symmetric, stored as 8 - 1."""
    import torch

    codes, scale = _four_bits(values)
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": _into_integers(codes.T.contiguous(), range(8)).T.contiguous(),
        f"{stem}qzeros": _into_integers(codes.new_full(scale.shape, 7), range(8)),
        f"{stem}scales": scale.half(),
        f"{stem}g_idx": torch.arange(len(codes), dtype=torch.int32) // GROUP,
    }


def mxfp4_experts(name: str, values: Any) -> Tensors:
    """Expert tensors [E, in, out] of gpt-oss as [E, out, groups, 16] codes and a scale per group."""
    import torch

    if not name.endswith(("gate_up_proj", "down_proj")) or ".experts." not in name:
        return bf16(name, values)
    groups = values.transpose(1, 2).unflatten(2, (-1, _MX_GROUP))
    exponent = (groups.abs().amax(-1, keepdim=True) / _MX_VALUES[-1]).log2().ceil()
    scaled = groups / exponent.exp2()
    table = torch.tensor(_MX_VALUES)
    code = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return {
        f"{name}_blocks": (low + 16 * high).to(torch.uint8),
        f"{name}_scales": (exponent.squeeze(-1) + 127).to(torch.uint8),
    }


def _four_bits(values: Any) -> tuple[Any, Any]:
    """Codes 0 to 15 as [in, out], and the scale of each group of inputs, [groups, out]."""
    groups = values.T.unflatten(0, (-1, GROUP))
    scale = groups.abs().amax(1) / 7
    codes = (groups / scale[:, None]).round().clamp(-8, 7) + 8
    return codes.flatten(0, 1).int(), scale


def _into_integers(codes: Any, order: Any) -> Any:
    """Eight codes of a row into one integer, the first of `order` into its lowest bits."""
    import torch

    total = torch.zeros((codes.shape[0], codes.shape[1] // 8), dtype=torch.int64)
    for place, column in enumerate(order):
        total |= codes[:, column::8].long() << (4 * place)
    return total.to(torch.int32)
