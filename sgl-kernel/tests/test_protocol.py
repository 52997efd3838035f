"""Every interleaving of small worlds: nothing is read too early or overwritten too early, and nobody
waits for ever. And the same search finds what is wrong in rules that are."""

from __future__ import annotations

import host
import protocol
import pytest
from protocol import COMBINE, RECEIVE, World, explore

CREDITS = 4  # of the small world
SIZES = [(1, 1, 3), (2, 1, 2), (1, 2, 2), (2, 2, 1), (3, 1, 1)]


def share(block: int, blocks: int) -> int:
    """The kernels' rule, scaled to few credits."""
    return CREDITS * (block + 1) // blocks - CREDITS * block // blocks


def make(attn: int, ffn: int, blocks: int, **rules) -> World:
    settings = {
        "attn_ranks": attn,
        "ffn_ranks": ffn,
        "blocks": blocks,
        "epochs": 3,
        "share": share,
        "credits": CREDITS,
        "modulus": 4 * CREDITS,  # wraps after four epochs; two are never apart
    }
    return World(**{**settings, **rules})


def test_the_share_is_that_of_the_kernels():
    library = host.layout_library()
    for blocks in (1, 2, 3, 5):
        for block in range(blocks):
            exact = 1024 * (block + 1) // blocks - 1024 * block // blocks
            assert library.shim_share(block, blocks) == exact


@pytest.mark.parametrize("moving_rows", [False, True])
@pytest.mark.parametrize(("attn", "ffn", "blocks"), SIZES)
def test_one_buffer_per_microbatch_is_enough(attn, ffn, blocks, moving_rows):
    states, error = explore(make(attn, ffn, blocks, moving_rows=moving_rows))
    assert error is None
    assert states > 50


def test_flags_wrap_around():
    """Eight epochs, so that every flag passes zero twice."""
    _, error = explore(make(1, 1, 2, epochs=8))
    assert error is None


BROKEN = {
    "attention ranks do not wait": {"waits": lambda kernel, rank: kernel != COMBINE},
    "FFN ranks do not wait": {"waits": lambda kernel, rank: kernel != RECEIVE},
    "an idle attention rank does not wait": {
        "waits": lambda kernel, rank: not (kernel == COMBINE and rank == 1)
    },
    "credits before writes": {"writes_first": False},
    "receive waits for the last epoch": {"expected_receive": lambda epoch: epoch},
    "combine waits for the last epoch": {"expected_combine": lambda epoch: epoch},
    "receive waits for the next epoch": {"expected_receive": lambda epoch: epoch + 2},
    "combine waits for a constant": {"expected_combine": lambda epoch: 1},
    "a block adds nothing": {"share": lambda block, blocks: share(block, blocks) if block else 0},
    "flags wrap too early": {"modulus": CREDITS},
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_search_finds_what_is_broken(name):
    _, error = explore(make(2, 1, 2, **BROKEN[name]))
    assert error is not None


def test_reached_is_that_of_the_kernels():
    library = host.layout_library()
    world = make(1, 1, 1)
    scale = 2**32 // world.modulus
    for seen in range(world.modulus):
        for expected in range(world.modulus):
            real = bool(library.shim_reached(seen * scale, expected * scale))
            assert real == world.reached(seen, expected)


def test_a_world_that_is_too_large_is_an_error():
    with pytest.raises(AssertionError, match="more than 10 states"):
        protocol.explore(make(2, 1, 2), most=10)
