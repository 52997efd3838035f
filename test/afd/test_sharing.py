"""Ranks that share GPUs: which device each gets, and what its process sets before it meets others."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.disaggregation.afd import envs, sharing
from sglang.srt.disaggregation.afd.errors import AFDConfigError


@pytest.fixture
def host(monkeypatch):
    """`host(2)` has two GPUs; what is set of the environment is taken back."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(envs.SHARE_GPUS, None)

    def has(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return has


def test_each_rank_has_its_own_unless_told_otherwise(host):
    host(2)
    before = dict(os.environ)
    sharing.share_if_fewer(2)
    sharing.enter()
    assert os.environ == before
    assert [sharing.device_of(rank) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("gpus", "expected"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1])])
def test_ranks_take_the_gpus_in_turn(host, gpus, expected):
    host(gpus)
    sharing.share_if_fewer(4)
    assert [sharing.device_of(rank) for rank in range(4)] == expected


def test_without_a_gpu_nothing_is_shared(host):
    host(0)
    sharing.share_if_fewer(4)
    assert not sharing.wanted()


def test_every_process_is_a_host_of_its_own_to_nccl(host):
    host(1)
    sharing.share_if_fewer(2)
    os.environ["NCCL_HOSTID"] = "of the parent"
    sharing.enter()
    assert str(os.getpid()) in os.environ["NCCL_HOSTID"]


def test_a_typing_error_is_not_a_no(host):
    os.environ[envs.SHARE_GPUS] = "maybe"
    with pytest.raises(AFDConfigError, match=envs.SHARE_GPUS):
        sharing.wanted()


@pytest.mark.parametrize(("afd", "share", "device"), [(1, 1, 0), (1, 0, 3), (0, 1, 3)])
def test_a_scheduler_gets_the_device(host, afd, share, device):
    host(1)
    os.environ[envs.SHARE_GPUS] = str(share)
    changed: dict[str, object] = {}
    args = SimpleNamespace(afd_enabled=bool(afd), override=lambda _, **what: changed.update(what))
    seen = []
    sharing.init_scheduler(
        lambda *given, **named: seen.append((given, named)), "self", args, 5, 3, 7
    )
    assert seen == [(("self", args, 5, device, 7), {})]
    assert changed == ({"disable_custom_all_reduce": True} if device == 0 else {})
