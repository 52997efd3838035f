"""What a transfer must give, in plain torch. Shape letters as in `sglang_afd_kernel.ends`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang_afd_kernel.abi import GROUP
from sglang_afd_kernel.ends import Shape


class Tokens(NamedTuple):
    hidden_TH: torch.Tensor  # BF16
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


def draw(
    shape: Shape, num_tokens: int, seed: int, *, masked: float = 0.1, ids=torch.int32
) -> Tokens:
    """Random tokens with distinct experts each; a share `masked` of the entries is -1."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, device="cuda")

    spread = torch.exp(4 * rand(num_tokens, shape.hidden // GROUP) - 2)
    hidden_TH = (rand(num_tokens, shape.hidden) - 0.5) * spread.repeat_interleave(GROUP, dim=1)
    ids_TK = rand(num_tokens, shape.num_experts).topk(shape.topk, dim=1).indices
    ids_TK[rand(num_tokens, shape.topk) < masked] = -1
    return Tokens(hidden_TH.bfloat16(), ids_TK.to(ids), rand(num_tokens, shape.topk))


def experts_of(shape: Shape, ffn_rank: int) -> range:
    first = ffn_rank * shape.num_experts // shape.ffn_ranks
    return range(first, (ffn_rank + 1) * shape.num_experts // shape.ffn_ranks)


def expert_factor(ids: torch.Tensor) -> torch.Tensor:
    """Expert e multiplies by 1 + e / 8, which takes no more bits than BF16 has to spare."""
    return 1 + (ids % 8).float() / 8


def dequantized(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """FP32 values of rows, [..., H]."""
    if scales is None:
        return values.float()
    return values.float() * scales.repeat_interleave(GROUP, dim=-1)


def result(shape: Shape, tokens: Tokens, wire_TH: torch.Tensor) -> torch.Tensor:
    """[T, H] in FP64 but for the roundings to BF16 that are part of the contract.

    Args:
        wire_TH: the hidden states as an expert sees them, FP32.
    """
    total_TH = torch.zeros(wire_TH.shape, dtype=torch.float64, device=wire_TH.device)
    for ffn_rank in range(shape.ffn_ranks):
        experts = experts_of(shape, ffn_rank)
        part_TH = torch.zeros_like(total_TH)
        for k in range(shape.topk):
            ids_T = tokens.ids_TK[:, k].long()
            is_here_T = (ids_T >= experts.start) & (ids_T < experts.stop)
            out_TH = (wire_TH * expert_factor(ids_T)[:, None]).bfloat16().double()
            part_TH += out_TH * (tokens.weights_TK[:, k].double() * is_here_T)[:, None]
        total_TH += part_TH.bfloat16().double()
    return total_TH
