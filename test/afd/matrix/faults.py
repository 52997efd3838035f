"""Faults that the equality tests must notice.

Each function patches our own classes in the process of an engine, before its ranks are forked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from sglang.srt.disaggregation.afd.connector.base import ReceivedBatch
from sglang.srt.disaggregation.afd.connector.gloo import GlooFFN
from sglang.srt.disaggregation.afd.ffn.experts import LocalExperts
from sglang.srt.disaggregation.afd.models import weights

_CALLS_BEFORE_OUT_OF_MEMORY = 90  # 3 layers; the warm-up takes about ten steps
_STEPS_BEFORE_ATTENTION_FAILS = 30  # the warm-up takes about ten

Compute = Callable[[LocalExperts, ReceivedBatch], torch.Tensor]


def output_zeroed() -> None:
    """FFN ranks return zeros."""
    compute: Compute = LocalExperts.__call__
    _replace_compute(lambda self, batch: torch.zeros_like(compute(self, batch)))


def experts_swapped() -> None:
    """Rows for expert 0 go to expert 1, and the reverse."""
    compute: Compute = LocalExperts.__call__

    def swapped(self: LocalExperts, batch: ReceivedBatch) -> torch.Tensor:
        ids = batch.topk_ids_RK
        other = torch.where(ids == 0, 1, torch.where(ids == 1, 0, ids))
        return compute(self, replace(batch, topk_ids_RK=other.to(ids.dtype)))

    _replace_compute(swapped)


def topk_weights_ignored() -> None:
    """Every expert of a row counts the same."""
    compute: Compute = LocalExperts.__call__

    def equal(self: LocalExperts, batch: ReceivedBatch) -> torch.Tensor:
        flat = torch.full_like(batch.topk_weights_RK, 1 / batch.topk_weights_RK.shape[1])
        return compute(self, replace(batch, topk_weights_RK=flat))

    _replace_compute(equal)


def layer_not_loaded() -> None:
    """The expert weights of the second layer stay what they were before loading."""
    read = weights.read_tensors

    def without_one(
        files: Iterable[str], wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(files, wanted):
            if not (weights.is_expert(name) and ".layers.1." in name):
                yield name, tensor

    weights.read_tensors = without_one


def microbatch_rows_exchanged() -> None:
    """Results of the second microbatch come back in the reverse order."""
    send: Any = GlooFFN.send

    def reversed_rows(self: GlooFFN, batch: ReceivedBatch, out_RH: torch.Tensor) -> None:
        send(self, batch, out_RH.flip(0) if batch.transfer.microbatch == 1 else out_RH)

    GlooFFN.send = reversed_rows  # type: ignore[method-assign]


def out_of_memory_after_warmup() -> None:
    """An allocation on FFN ranks fails with the first request that decodes for long."""
    compute: Compute = LocalExperts.__call__
    calls = iter(range(_CALLS_BEFORE_OUT_OF_MEMORY))

    def failing(self: LocalExperts, batch: ReceivedBatch) -> torch.Tensor:
        if next(calls, None) is None:
            raise torch.OutOfMemoryError("this is a test")
        return compute(self, batch)

    _replace_compute(failing)


def attention_raises_after_warmup() -> None:
    """The scheduler of the last attention rank fails outside of AFD, with a request that decodes
    for long."""
    from sglang.srt.disaggregation.afd.attention.runtime import AttentionRuntime

    begin_step: Any = AttentionRuntime.begin_step
    steps = iter(range(_STEPS_BEFORE_ATTENTION_FAILS))

    def failing(self: AttentionRuntime, *args: Any, **kwargs: Any) -> None:
        if self.attn_rank == self.settings.attn_ranks - 1 and next(steps, None) is None:
            raise RuntimeError("this is a test of attention")
        begin_step(self, *args, **kwargs)

    AttentionRuntime.begin_step = failing  # type: ignore[method-assign]


def _replace_compute(function: Compute) -> None:
    LocalExperts.__call__ = function  # type: ignore[method-assign]
