"""Random weights with which a model computes something.

Upstream's dummy weights lie within 0.001 of 0: in FP8 nearly all of them become exactly 0, and with
norms of 0.001 a router cannot tell its experts apart. Zeros also draw less power, so a GPU clocks
higher on them. Here activations keep unit size from layer to layer, and a router of random rows
spreads random tokens as independent choices would: `routing` natural, without a trained router's
skew. A weight depends on its name and size only, so roles and layouts route alike.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

_SPREAD = 32.0  # of FP8 codes, whose largest is 448
_CHUNK = 1 << 26  # values made at a time
_ONE_E8M0 = 127  # exponent bias: 2 ** 0


def fill(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """In the place of upstream's `initialize_dummy_weights`; fills before weights are processed."""
    for name, tensor in model.state_dict().items():
        _fill(name, tensor.data)


def _fill(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        return
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
    last = name.rsplit(".", 1)[-1]
    is_scale = "scale" in last
    if tensor.dtype == torch.uint8:  # two FP4 codes, or the exponent of a block of them
        if is_scale:
            tensor.fill_(_ONE_E8M0 - 6)
        else:
            tensor.random_(0, 256, generator=generator)
    elif not tensor.is_floating_point() or last in ("inv_freq", "cos_sin_cache"):
        return
    elif is_scale:
        tensor.fill_(1 / (_SPREAD * 64) if "weight" in last else 1.0)
    elif tensor.dim() < 2:
        # Norms are 1 and biases 0; so are the corrections that some routers add to their scores.
        tensor.fill_(1.0 if last == "weight" else 0.0)
    elif tensor.element_size() == 1:
        _normal(tensor, _SPREAD, generator)
    else:
        spread = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
        _normal(tensor, spread, generator)


def _normal(tensor: torch.Tensor, spread: float, generator: torch.Generator) -> None:
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        if part.element_size() == 1:
            made = torch.empty(part.shape, dtype=torch.float16, device=part.device)
            part.copy_(made.normal_(0, spread, generator=generator).clamp_(-448, 448))
        else:
            part.normal_(0, spread, generator=generator)
