"""Plans for what upstream's CUDA graph runner does: warm-up forwards, captures, replays.

Hooks on the graph backend, the one place that every capture and replay passes.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.disaggregation.afd.attention import runtime


def capture_one(
    orig: Any, self: Any, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `FullCudaGraphBackend.capture_one`: each forward in it is a step of its own."""
    if not runtime.is_active():
        return orig(self, shape_key, forward_fn, *args, **kwargs)

    def forward_with_plan() -> Any:
        capturing = torch.cuda.is_current_stream_capturing()
        runtime.current().begin_graph_step("capture" if capturing else "warmup", shape_key.size)
        return forward_fn()

    return orig(self, shape_key, forward_with_plan, *args, **kwargs)


def replay(orig: Any, self: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `FullCudaGraphBackend.replay`: the FFN ranks replay the same bucket."""
    if runtime.is_active():
        runtime.current().begin_graph_step("decode", shape_key.size)
    return orig(self, shape_key, *args, **kwargs)


def dummy_run(orig: Any, self: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
    """AROUND `BaseRunner._dummy_run`: kernel autotuning runs the model outside any batch."""
    if runtime.is_active():
        width = runtime.current().settings.attn_ranks
        runtime.current().begin_step("warmup", (batch_size,) * width, microbatches=1)
    return orig(self, batch_size, *args, **kwargs)


def mask_padding(orig: Any) -> bool:
    """AROUND `enable_num_token_non_padded`: rows that pad a graph's bucket reach no expert."""
    return True if runtime.is_active() else bool(orig())
