"""Nothing overlaps, everything is aligned, flags add up and wrap around."""

from __future__ import annotations

import ctypes

import host
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_afd_kernel import abi

CREDITS = 1024  # kCredits
FLAG_STRIDE = 32  # kFlagStride


@st.composite
def shapes(draw):
    ffn_ranks = draw(st.integers(1, 64))
    return abi.Shape(
        attn_ranks=draw(st.integers(1, 64)),
        ffn_ranks=ffn_ranks,
        num_experts=draw(st.integers(ffn_ranks, 512)),
        hidden=128 * draw(st.integers(1, 64)),
        topk=draw(st.integers(1, 16)),
        capacity=draw(st.integers(1, 4096)),
        microbatches=draw(st.integers(1, 2)),
        fp8=draw(st.integers(0, 1)),
    )


def regions(shape: abi.Shape, at: abi.Layout) -> dict[str, tuple[int, int]]:
    """Start and size of what each role keeps in its buffer."""
    rows = shape.attn_ranks * shape.capacity
    return {
        "rows": (at.rows, rows * shape.hidden * (1 if shape.fp8 else 2)),
        "scales": (at.scales, rows * shape.hidden // 128 * 4 if shape.fp8 else 0),
        "ids": (at.ids, rows * shape.topk * 4),
        "weights": (at.weights, rows * shape.topk * 4),
    }


@settings(max_examples=200, deadline=None)
@given(shapes())
def test_regions_of_an_ffn_rank_do_not_overlap(shape):
    at = host.layout(shape)
    end = at.flags + FLAG_STRIDE * 64
    for name, (start, size) in regions(shape, at).items():
        assert start >= end, name
        assert start % 256 == 0, name
        end = start + size
    assert end <= at.bytes
    assert at.bytes % 256 == 0  # the next microbatch is aligned too


@settings(max_examples=200, deadline=None)
@given(shapes())
def test_rows_of_an_attention_rank_fit(shape):
    at = host.layout(shape)
    assert at.back >= at.flags + FLAG_STRIDE * 64
    assert at.back % 256 == 0
    assert at.back + shape.ffn_ranks * shape.capacity * shape.hidden * 2 <= at.bytes


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 32, 132, 264, 1000, 1024])
def test_shares_of_all_blocks_are_all_credits(blocks):
    shares = [host.layout_library().shim_share(block, blocks) for block in range(blocks)]
    assert sum(shares) == CREDITS
    assert min(shares) >= 1  # or a block's writes would not be waited for


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_reached_survives_the_wrap(expected, ahead):
    reached = host.layout_library().shim_reached
    assert reached((expected + ahead) % 2**32, expected)
    assert not reached((expected - 1 - ahead) % 2**32, expected) or ahead == 2**31 - 1


@settings(max_examples=200, deadline=None)
@given(shapes())
def test_experts_belong_to_whom_the_topology_says(shape):
    from sglang.srt.disaggregation.afd.topology import Topology

    topology = Topology(shape.attn_ranks, shape.ffn_ranks, shape.num_experts)
    library = host.layout_library()
    for expert in range(shape.num_experts):
        assert library.shim_owner_of(ctypes.byref(shape), expert) == topology.owner_of[expert]
    for rank in range(shape.ffn_ranks):
        first = library.shim_first_expert(ctypes.byref(shape), rank)
        assert first == topology.expert_range(rank).start
