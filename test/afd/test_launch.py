"""The launcher's choices: its address, and which FFN ranks are its own."""

from __future__ import annotations

import os
import socket
import types

import pytest
import torch

from sglang.srt.disaggregation.afd import launch
from sglang.srt.disaggregation.afd.errors import AFDConfigError


def _args(**fields):
    args = types.SimpleNamespace(afd_role="all", afd_ffn_ranks=4, afd_bootstrap_addr=None)
    args.__dict__.update(fields)
    args.override = lambda source, **new: args.__dict__.update(new)
    args.afd_typed = lambda field: fields[field]
    return args


@pytest.mark.pain(47)
def test_chosen_address_stays_reserved_and_can_be_listened_on(monkeypatch):
    args = _args()
    launch.choose_address(args)
    host, _, port = args.afd_bootstrap_addr.rpartition(":")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((host, int(port)))
    with socket.create_server((host, int(port))):  # sets SO_REUSEADDR, as ZMQ does
        pass


def test_given_address_is_kept():
    args = _args(afd_bootstrap_addr="10.0.0.1:20000")
    launch.choose_address(args)
    assert args.afd_bootstrap_addr == "10.0.0.1:20000"


def test_ffn_ranks_are_split_over_nodes():
    assert launch.local_ffn_ranks(_args()) == range(4)
    shares = [
        launch.local_ffn_ranks(_args(afd_role="ffn", nnodes=2, node_rank=node)) for node in (0, 1)
    ]
    assert shares == [range(2), range(2, 4)]
    with pytest.raises(AFDConfigError, match="do not split evenly over --nnodes 3"):
        launch.local_ffn_ranks(_args(afd_role="ffn", nnodes=3, node_rank=0))


@pytest.mark.parametrize(
    ("fields", "count", "what"),
    [
        (
            {},
            4,
            "--afd-attn-ranks 1 and --afd-ffn-ranks 4 take GPUs 0 to 4 of this host, which has 4",
        ),
        ({"base_gpu_id": 2, "gpu_id_step": 2}, 10, "GPUs 2 to 10 of this host, which has 10"),
        (
            {"afd_role": "ffn", "nnodes": 2, "node_rank": 1},
            1,
            "^--afd-ffn-ranks 4 take GPUs 0 to 1",
        ),
        ({}, 5, ""),
        ({"afd_role": "attn"}, 0, ""),  # upstream's own business
        ({"device": "cpu"}, 0, ""),
        ({"share": "1"}, 1, ""),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_the_way_out(monkeypatch, fields, count, what):
    gpus = {"device": "cuda", "base_gpu_id": 0, "gpu_id_step": 1, "afd_attn_ranks": 1}
    monkeypatch.setenv("SGLANG_AFD_SHARE_GPUS", fields.get("share", "0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    args = _args(**{**gpus, **fields})
    if not what:
        launch.check_gpus(args)
        return
    with pytest.raises(AFDConfigError, match=what) as raised:
        launch.check_gpus(args)
    assert "SGLANG_AFD_SHARE_GPUS=1" in str(raised.value)


class EndedProcess:
    """One that has closed its sentinel and tells its exit code only to those who wait for it."""

    def __init__(self, code: int) -> None:
        self.name = "afd_ffn_0"
        self.exitcode: int | None = None
        self._code = code
        self.sentinel, other_end = os.pipe()
        os.close(other_end)

    def join(self, timeout: float) -> None:
        self.exitcode = self._code


@pytest.mark.pain(53)
@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((-9,), 1)])
def test_a_pool_whose_rank_failed_ends_with_an_error(monkeypatch, codes, expected):
    processes = [EndedProcess(code) for code in codes]
    monkeypatch.setattr(launch, "start_ffn_ranks", lambda *_: processes)
    monkeypatch.setattr(launch.shutdown, "kill_children", lambda: None)
    assert launch.run_ffn_pool(_args(afd_role="ffn", nnodes=1, node_rank=0)) == expected
    for process in processes:
        os.close(process.sentinel)
