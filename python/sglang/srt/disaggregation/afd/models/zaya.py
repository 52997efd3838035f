"""Zaya's convolution over cached tokens, where some ranks' batches are padded."""

from __future__ import annotations

from typing import Any

import torch


def cca_decode(
    orig: Any,
    qk: torch.Tensor,
    hidden_states: torch.Tensor,
    conv_qk: torch.nn.Module,
    conv_state: torch.Tensor,
    prev_hs_state: torch.Tensor,
    mamba_indices: torch.Tensor,
    total_padding: int | None = None,
) -> Any:
    """AROUND `zaya.cca_decode`: a padding row has slot -1, which plain PyTorch takes for an error.

    Slot 0 of upstream's pool belongs to nobody and is there to be written to by such rows.
    """
    slots = mamba_indices.clamp(min=0)
    return orig(qk, hidden_states, conv_qk, conv_state, prev_hs_state, slots, total_padding)
