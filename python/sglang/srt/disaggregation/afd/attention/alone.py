"""Runs a model as if its attention rank were alone in the world.

For models whose attention knows no DP ranks, or whose expert-parallel branch is not what their
usual branch computes. The rank's model holds everything but the experts, nothing sharded, and never
meets another rank; the scheduler around it still knows all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang.srt.disaggregation.afd.attention import runtime

_SIZES = ("tp", "attn_tp", "attn_dp", "moe_ep", "moe_dp", "moe_tp")
# What upstream calls on a model from outside, and where it may ask for sizes and ranks.
_CALLS = ("load_weights", "post_load_weights")
_STATE = "mamba2_cache_params"

_depth = 0


@contextmanager
def world_of_one() -> Iterator[None]:
    """Within it, upstream's contexts say that this rank is the only one, and has its experts."""
    global _depth
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_flags, get_parallel

    sizes = {f"{name}_size": 1 for name in _SIZES}
    ranks = {f"{name}_rank": 0 for name in _SIZES}
    _depth += 1
    try:
        with (
            get_parallel().override(**sizes, **ranks),
            get_flags().moe.override(a2a_backend=MoeA2ABackend.NONE),
        ):
            yield
    finally:
        _depth -= 1


def build(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`make(...)`, a model, in a world of one, where it stays for its life."""
    with world_of_one():
        model = make(*args, **kwargs)
    _own_state(type(model.config))
    for name in _CALLS:
        if hasattr(model, name):
            setattr(model, name, _within(getattr(model, name)))
    model.forward = _within(_skip_idle(model.forward, model))
    return model


def _own_state(config: type) -> None:
    """Have a configuration class say the sizes of recurrent state for a model that is not sharded;
    upstream asks it when it makes the memory pools."""
    sizes = getattr(config, _STATE, None)
    if isinstance(sizes, property) and sizes.fget and not hasattr(sizes.fget, "__wrapped__"):
        setattr(config, _STATE, property(_within(sizes.fget)))


def _within(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with world_of_one():
            return call(*args, **kwargs)

    return alone


def _skip_idle(forward: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """A rank without requests takes part in the transfers of the step and computes nothing, since
    models that know no DP ranks cannot take a batch without rows."""

    @functools.wraps(forward)
    def skipping(*args: Any, **kwargs: Any) -> Any:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        if not batch.forward_mode.is_idle():
            return forward(*args, **kwargs)
        runtime.current().idle_step()
        return _nothing(batch, model)

    return skipping


def _nothing(batch: Any, model: Any) -> Any:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    logits = torch.zeros(
        (batch.input_ids.shape[0], model.config.get_text_config().vocab_size),
        dtype=torch.float32,
        device=batch.input_ids.device,
    )
    return LogitsProcessorOutput(next_token_logits=logits)


def all_reduce(orig: Any, input_: torch.Tensor) -> torch.Tensor:
    """AROUND `tensor_model_parallel_all_reduce`, which some models call whatever the size is."""
    return input_ if _depth else orig(input_)
