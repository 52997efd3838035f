"""Plans for what upstream's CUDA graph runner does: warm-up forwards, captures, replays.

Hooks on the graph backend, the one place that every capture and replay passes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace as replaced
from typing import Any

import torch

from sglang.srt.disaggregation.afd.attention import runtime
from sglang.srt.disaggregation.afd.errors import AFDError
from sglang.srt.disaggregation.afd.messages import Mode

# Label of the graphs that run a batch in one piece, beside upstream's own with two microbatches.
WHOLE = "afd-whole"


def capture_one(
    orig: Any, self: Any, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `FullCudaGraphBackend.capture_one`: each forward in it is a step of its own."""
    if not runtime.is_active():
        return orig(self, shape_key, forward_fn, *args, **kwargs)
    settings = runtime.current().settings
    result = _capture(orig, self, shape_key, settings.microbatches, forward_fn, *args, **kwargs)
    if settings.measured:
        key = replaced(shape_key, variant_label=WHOLE)
        with _in_one_piece(forward_fn):
            _capture(orig, self, key, 1, forward_fn, *args, **kwargs)
    return result


def _capture(
    orig: Any,
    backend: Any,
    shape_key: Any,
    microbatches: int,
    forward_fn: Callable[[], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    current = runtime.current()

    def forward_with_plan() -> Any:
        capturing = torch.cuda.is_current_stream_capturing()
        mode: Mode = "capture" if capturing else "warmup"
        current.begin_graph_step(mode, shape_key.size, microbatches)
        return forward_fn()

    began, before = time.monotonic(), _reserved()
    result = orig(backend, shape_key, forward_with_plan, *args, **kwargs)
    current.captured(microbatches, time.monotonic() - began, _reserved() - before)
    return result


def _reserved() -> int:
    """Bytes that this process holds of the device; graphs get theirs from the same allocator."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


@contextmanager
def _in_one_piece(forward_fn: Callable[[], Any]) -> Iterator[None]:
    """Within it, the batch of upstream's capture looks as if it could not be split."""
    batch = inspect.getclosurevars(forward_fn).nonlocals.get("forward_batch")
    if batch is None or batch.tbo_split_seq_index is None:
        raise AFDError(
            "upstream's capture does not hold its batch where it used to; use --afd-microbatches 2"
        )
    split, batch.tbo_split_seq_index = batch.tbo_split_seq_index, None
    try:
        yield
    finally:
        batch.tbo_split_seq_index = split


def replay(orig: Any, self: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `FullCudaGraphBackend.replay`: the FFN ranks replay the same bucket."""
    if not runtime.is_active():
        return orig(self, shape_key, *args, **kwargs)
    current = runtime.current()
    if current.choice is None:
        current.begin_graph_step("decode", shape_key.size, current.settings.microbatches)
        return orig(self, shape_key, *args, **kwargs)
    with current.choice.replay(shape_key.size) as microbatches:
        if microbatches == 1:
            shape_key = replaced(shape_key, variant_label=WHOLE)
        current.begin_graph_step("decode", shape_key.size, microbatches)
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
