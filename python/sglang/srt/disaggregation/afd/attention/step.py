"""From upstream's forward batch to the step plan; the hooks that sit inside a step."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.disaggregation.afd.attention import runtime
from sglang.srt.disaggregation.afd.messages import Mode


def plan_mode(forward_batch: Any) -> Mode:
    """The plan's word for what the pool does: a rank that prefills beats ranks that decode."""
    if forward_batch.forward_mode.is_mixed():
        return "mixed"
    return "extend" if forward_batch.is_extend_in_batch else "decode"


def after_prepare_eager(result: Any, model_runner: Any, forward_batch: Any) -> None:
    """AFTER `ModelRunner._prepare_eager_forward_batch`: token counts are final, nothing ran yet."""
    if not runtime.is_active() or model_runner.is_draft_worker:
        return
    counts = forward_batch.global_num_tokens_cpu
    if counts is None:
        counts = [forward_batch.input_ids.shape[0]]
    runtime.current().begin_step(
        mode=plan_mode(forward_batch),
        tokens=tuple(int(count) for count in counts),
        microbatches=2 if forward_batch.can_run_tbo else 1,
    )


def overlap_strategy(orig: Any, layers: Any, forward_mode: Any) -> Any:
    """AROUND `OperationsStrategy.init_new_tbo`.

    The prefill strategies size DeepGEMM's share of the SMs beside DeepEP's kernels. Neither runs
    on an attention rank, and the decode strategy holds the same operations.
    """
    if runtime.is_active() and forward_mode is not None and forward_mode.name == "EXTEND":
        forward_mode = type(forward_mode).DECODE
    return orig(layers, forward_mode)


def fallback_tensor(result: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """AFTER `MLPSyncBatchInfo._get_fallback_tensor`.

    Upstream expands this tensor over the ranks and calls `contiguous()`, which copies nothing for
    one rank, so that it gathers into the very tensor it reads. A strided one is always copied.
    """
    return result.repeat_interleave(2)[::2]
