"""How the ranks of a GPU connector meet, and what DeepEP is refused for. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from connector import harness

from sglang.srt.disaggregation.afd.connector import deepep
from sglang.srt.disaggregation.afd.connector.base import LinkSpec
from sglang.srt.disaggregation.afd.connector.meeting import Meeting
from sglang.srt.disaggregation.afd.errors import AFDConfigError, DeadlineExceeded
from sglang.srt.disaggregation.afd.topology import Topology

TOPOLOGY = Topology(2, 1, num_experts=4)
H200_SMS = 132


def _meet(rendezvous, rank):
    meeting = Meeting(TOPOLOGY, rank, rendezvous, "test")
    first = meeting.gather(b"rank %d" % rank)
    return first, meeting.gather(bytes([0, rank]))


def test_all_ranks_get_all_values():
    rendezvous = harness.new_rendezvous()
    results = harness.run_threads([partial(_meet, rendezvous, rank) for rank in range(3)])
    harness.raise_first(results)
    assert results == [([b"rank 0", b"rank 1", b"rank 2"], [b"\0\0", b"\0\1", b"\0\2"])] * 3


@pytest.mark.pain(33)
def test_a_missing_rank_is_named():
    rendezvous = harness.new_rendezvous(timeout_s=1)
    results = harness.run_threads([partial(_meet, rendezvous, rank) for rank in (0, 1)])
    for rank, result in enumerate(results):
        assert isinstance(result, DeadlineExceeded)
        assert str(result).startswith(f"attn {rank} waited 1 s for ffn 0 at test, call 0: ")


def test_numbers_and_bytes_come_back_as_deepep_sent_them():
    rendezvous = harness.new_rendezvous()
    values = (7, bytearray(b"\0handle"), None)

    def exchange(rank):
        ranks = deepep._Ranks(Meeting(TOPOLOGY, rank, rendezvous, "test"), rank, 3)
        return ranks.allgather(values[rank])

    results = harness.run_threads([partial(exchange, rank) for rank in range(3)])
    harness.raise_first(results)
    for result in results:
        assert result == list(values)
        assert isinstance(result[1], bytearray)


SPEC = LinkSpec(
    topology=Topology(1, 1, num_experts=128),
    hidden_size=2048,
    topk=8,
    dtype=torch.bfloat16,
    capacity=128,
    timeout_s=1,
)


@pytest.mark.pain(30)
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dtype": torch.float16}, "--dtype bfloat16"),
        ({"hidden_size": 3072}, "--model-path has 3072"),
        ({"topk": 12}, "top-12"),
        ({"capacity": 1025}, "--afd-max-tokens-per-rank 1025"),
        ({"topology": Topology(6, 3, 126)}, "--afd-attn-ranks 6 and --afd-ffn-ranks 3 make 9"),
        ({"topology": Topology(12, 4, 128)}, "--afd-microbatches 1"),
        ({"topology": Topology(6, 1, 384)}, "2688 expert slots"),
    ],
)
def test_deepep_refuses_by_flag(changes, complaint):
    with pytest.raises(AFDConfigError, match=complaint) as refusal:
        deepep.check_spec(replace(SPEC, **changes), H200_SMS)
    assert "--afd-connector nccl" in str(refusal.value)


def test_deepep_takes_the_usual():
    deepep.check_spec(SPEC, H200_SMS)
    deepep.check_spec(replace(SPEC, topology=Topology(6, 2, 256), capacity=1024), H200_SMS)
    deepep.check_spec(replace(SPEC, topology=Topology(12, 4, 256), microbatches=1), H200_SMS)


def test_deepep_that_is_not_installed_is_named(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(deepep.importlib, "import_module", missing)
    with pytest.raises(AFDConfigError, match="cannot import deep_ep: No module named 'deep_ep'"):
        deepep._buffer_type()
