"""The GPU connectors, one process per rank. Ranks share GPUs where there are fewer.

python -m pytest test/afd/connector/test_gpu.py -m gpu -q -x -s
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait

import pytest
import torch
import torch.multiprocessing
from connector import gpu_cases, harness

from sglang.srt.disaggregation.afd import sharing
from sglang.srt.disaggregation.afd.connector.base import LinkSpec
from sglang.srt.disaggregation.afd.errors import PeerLost

TIMEOUT_S = 240

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _play_everywhere(name: str, *specs: LinkSpec) -> None:
    """Play the cases on every rank; the first error ends all ranks, and so does the deadline.

    A kernel that waits for a lost peer holds its GPU until its process is killed.
    """
    sharing.share_if_fewer(specs[0].topology.world_size)
    context = torch.multiprocessing.get_context("spawn")
    first = harness.new_rendezvous(timeout_s=90)
    rendezvous = [replace(first, namespace=f"{name}-{i}") for i in range(len(specs))]
    ranks: list[tuple[torch.multiprocessing.Process, Connection]] = []
    try:
        for world_rank in range(specs[0].topology.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=gpu_cases.run_rank,
                args=(name, list(specs), world_rank, rendezvous, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        _collect(name, specs[0], [pipe for _, pipe in ranks])
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join(10)


def _collect(name: str, spec: LinkSpec, pipes: list[Connection]) -> None:
    """Print what passes where, until every rank is done."""
    topology = spec.topology
    size = f"{topology.attn_ranks}A{topology.ffn_ranks}F"
    last = ["start"] * len(pipes)
    deadline = time.monotonic() + TIMEOUT_S
    open_pipes = list(pipes)
    while open_pipes:
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        assert ready, f"{name} {size} hangs; each rank last passed: {last}"
        for pipe in ready:
            rank = pipes.index(pipe)
            who = topology.rank_name(rank)
            try:
                message = pipe.recv()
            except EOFError:
                raise PeerLost(f"{name} {size}: {who} died after {last[rank]!r}") from None
            if message is True:
                open_pipes.remove(pipe)
            elif isinstance(message, Exception):
                raise AssertionError(f"{name} {size}: {who} failed after {last[rank]!r}: {message}")
            else:
                last[rank] = message
                print(f"{name} {size} {who}: {message}", flush=True)


SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]


@pytest.mark.pain(35, 40)
@pytest.mark.parametrize(("num_attn", "num_ffn"), SIZES, ids=[f"{m}A{n}F" for m, n in SIZES])
def test_nccl(num_attn, num_ffn):
    _play_everywhere("nccl", gpu_cases.make_spec(num_attn, num_ffn))


@pytest.mark.pain(35, 40)
@pytest.mark.parametrize(("num_attn", "num_ffn"), SIZES, ids=[f"{m}A{n}F" for m, n in SIZES])
def test_deepep(num_attn, num_ffn):
    """BF16 and then FP8 in the same processes, so it also builds a link twice."""
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("needs deep_ep")
    _play_everywhere(
        "deepep",
        gpu_cases.make_spec(num_attn, num_ffn),
        gpu_cases.make_spec(num_attn, num_ffn, fp8=True),
    )


@pytest.mark.pain(35, 40)
@pytest.mark.parametrize(("num_attn", "num_ffn"), SIZES, ids=[f"{m}A{n}F" for m, n in SIZES])
def test_nvlink(num_attn, num_ffn):
    """BF16 and then FP8 in the same processes, so it also builds a link twice."""
    _play_everywhere(
        "nvlink",
        gpu_cases.make_spec(num_attn, num_ffn),
        gpu_cases.make_spec(num_attn, num_ffn, fp8=True),
    )
