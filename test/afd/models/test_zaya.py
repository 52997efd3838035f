"""Zaya's decode convolution with padding rows: real rows are as without them."""

from __future__ import annotations

import torch

from sglang.srt.disaggregation.afd.models import zaya as ours
from sglang.srt.models import zaya as upstream

CHANNELS, HIDDEN, SLOTS, WIDTH = 4, 6, 5, 2


def run(call, slots):
    generator = torch.Generator().manual_seed(0)
    conv_state = torch.randn(SLOTS, CHANNELS, WIDTH, generator=generator)
    before = torch.randn(SLOTS, HIDDEN, 1, generator=generator)
    convolution = torch.nn.Conv1d(CHANNELS, CHANNELS, WIDTH + 1)
    torch.nn.init.ones_(convolution.weight)
    rows = len(slots)
    out = call(
        torch.arange(rows * CHANNELS).view(rows, CHANNELS).float(),
        torch.arange(rows * HIDDEN).view(rows, HIDDEN).float(),
        convolution.requires_grad_(False),
        conv_state,
        before,
        torch.tensor(slots),
    )
    return [part - (convolution.bias if i == 0 else 0) for i, part in enumerate(out)], (
        conv_state,
        before,
    )


def test_padding_rows_touch_no_slot_of_a_request():
    orig = getattr(upstream.cca_decode, "__wrapped__", upstream.cca_decode)

    def padded(*args):
        return ours.cca_decode(orig, *args)

    want, states = run(orig, [3, 1])
    found, states_after = run(padded, [3, 1, -1, -1])
    for part, expected in zip(found, want, strict=True):
        torch.testing.assert_close(part[:2], expected)
    for state, expected in zip(states_after, states, strict=True):
        torch.testing.assert_close(state[1:], expected[1:])
