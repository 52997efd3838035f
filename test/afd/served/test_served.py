"""A server in AFD mode answers exactly as upstream's colocated server of the same wheel."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import safe_open
from served.conftest import AFD
from served.record import NUM_PROMPTS

pytestmark = pytest.mark.timeout(1200)  # a fixture may start two servers

CASES = {
    "demo-1A1F": ("demo", *AFD),
    "demo-2A1F": ("demo", *AFD, "--afd-attn-ranks", "2"),
    # Odd sizes, two microbatches, and a capacity that makes most prefills go in rounds.
    "tiny-1A1F": ("tiny", *AFD, "--afd-microbatches", "2", "--afd-max-tokens-per-rank", "16"),
    "tiny-2A3F": (
        *("tiny", *AFD, "--afd-attn-ranks", "2", "--afd-ffn-ranks", "3"),
        *("--afd-microbatches", "2", "--afd-max-tokens-per-rank", "16"),
        *("--chunked-prefill-size", "64"),
    ),
}


class TensorSize(NamedTuple):
    """Number of elements, and bytes in the checkpoint."""

    numel: int
    stored: int


def tensor_sizes(folder: Path) -> dict[str, TensorSize]:
    sizes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():
                tensor = shard.get_tensor(name)
                sizes[name] = TensorSize(tensor.numel(), tensor.numel() * tensor.element_size())
    return sizes


LONG = ("demo-2A1F", "tiny-2A3F")  # as matrix/test_equality without servers; in `make test-long`


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES],
    scope="session",
)
def pair(request, record_of):
    """(colocated, afd) records of one case."""
    case = CASES[request.param]
    return record_of(case[0]), record_of(*case)


@pytest.mark.pain(63)
def test_completions_are_equal(pair):
    colocated, afd = pair
    assert len(afd.completions) == NUM_PROMPTS
    assert afd.completions == colocated.completions


def test_streams_are_equal(pair):
    colocated, afd = pair
    assert afd.streamed == colocated.streamed
    assert afd.streamed == afd.completions[: len(afd.streamed)]


def test_chats_are_equal(pair):
    colocated, afd = pair
    assert afd.chats == colocated.chats
    assert afd.streamed_chats == afd.chats


def test_answers_are_not_trivial(pair):
    _, afd = pair
    assert len(set(afd.completions)) > NUM_PROMPTS // 2


@pytest.mark.pain(62)
def test_each_role_read_and_holds_only_its_tensors(pair, request, model_path):
    _, afd = pair
    case = request.node.callspec.params["pair"]
    sizes = tensor_sizes(model_path(CASES[case][0]))
    experts = {name: size for name, size in sizes.items() if ".experts." in name}
    others = {name: size for name, size in sizes.items() if name not in experts}
    ffn = afd.info[0]["ffn"]
    for rank in afd.info:
        assert rank["tensors_read"] == len(others)
        assert rank["tensors_skipped"] == len(experts)
        assert rank["checkpoint_bytes"] == sum(size.stored for size in others.values())
        # Served in FP32; beside parameters a rank holds small buffers such as rotary tables.
        assert rank["param_bytes"] < 4 * sum(size.numel for size in others.values()) + 2**20
    assert sum(rank["tensors_read"] for rank in ffn) == len(experts)
    assert sum(rank["checkpoint_bytes"] for rank in ffn) == sum(s.stored for s in experts.values())
    for rank in ffn:
        assert rank["tensors_skipped"] == len(sizes) - rank["tensors_read"]
        # Experts and nothing else; a rank with a smaller share has room for the largest one.
        largest = max(rank["tensors_read"] for rank in ffn)
        assert rank["param_bytes"] == 4 * largest * next(iter(experts.values())).numel


@pytest.mark.pain(8, 46)
def test_every_rank_worked_and_counters_agree(pair):
    _, afd = pair
    ffn = afd.info[0]["ffn"]
    sent = sum(rank["tokens"] for rank in afd.info)
    assert all(rank["tokens"] > 0 for rank in [*afd.info, *ffn])
    if len(ffn) == 1:
        assert ffn[0]["tokens"] == sent
    else:
        # A token is a row on every FFN rank that holds one of its experts: 1 to top-k ranks.
        assert sent <= sum(rank["tokens"] for rank in ffn) <= 2 * sent
    assert len({rank["steps"] for rank in [*afd.info, *ffn]}) == 1
