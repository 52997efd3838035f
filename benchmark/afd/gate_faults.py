"""Faults that the gate must notice, put into the ranks of a server by `gate_server.py`.

Each works for every connector, eagerly and in graphs. None is in the product.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_AFD = "sglang.srt.disaggregation.afd"


def output_zeroed(experts: ModuleType) -> None:
    """FFN ranks return zeros."""
    compute = experts.LocalExperts.__call__
    experts.LocalExperts.__call__ = lambda self, batch: torch.zeros_like(compute(self, batch))


def experts_swapped(model_runner: ModuleType) -> None:
    """In each layer the first two experts have each other's weights."""

    def swap(layers: list[Any]) -> None:
        for parameter in _parameters(layers):
            first = parameter[0].clone()
            parameter[0].copy_(parameter[1])
            parameter[1].copy_(first)

    _after_load(model_runner, swap)


def layer_stale(model_runner: ModuleType) -> None:
    """The second layer has the weights of the first."""

    def copy(layers: list[Any]) -> None:
        for target, source in zip(_parameters(layers[1:2]), _parameters(layers[:1]), strict=True):
            target.copy_(source)

    _after_load(model_runner, copy)


def topk_weights_ignored(dispatcher: ModuleType) -> None:
    """Every expert of a token counts the same."""
    dispatch = dispatcher.RemoteDispatcher.dispatch_a

    def flat(
        self: Any, hidden_states: torch.Tensor, topk_output: Any, *args: Any, **kwargs: Any
    ) -> None:
        weights = topk_output.topk_weights
        equal = torch.full_like(weights, 1 / weights.shape[1])
        dispatch(self, hidden_states, topk_output._replace(topk_weights=equal), *args, **kwargs)

    dispatcher.RemoteDispatcher.dispatch_a = flat


def microbatch_rows_exchanged(dispatcher: ModuleType) -> None:
    """Results of the second microbatch come back in the reverse order."""
    combine = dispatcher.RemoteDispatcher.combine_b

    def reversed_rows(self: Any, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        rows = combine(self, tbo_subbatch_index)
        return rows.flip(0) if tbo_subbatch_index == 1 else rows

    dispatcher.RemoteDispatcher.combine_b = reversed_rows


# By name: what it does, and the module that it waits for.
FAULTS: dict[str, tuple[Callable[[ModuleType], None], str]] = {
    "output_zeroed": (output_zeroed, f"{_AFD}.ffn.experts"),
    "experts_swapped": (experts_swapped, f"{_AFD}.ffn.model_runner"),
    "layer_stale": (layer_stale, f"{_AFD}.ffn.model_runner"),
    "topk_weights_ignored": (topk_weights_ignored, f"{_AFD}.attention.dispatcher"),
    "microbatch_rows_exchanged": (microbatch_rows_exchanged, f"{_AFD}.attention.dispatcher"),
}


# Not faults: what a test looks for while a server works.
NO_SYNC = "no_sync"
_FIRST_STEP = 12  # before it kernels are compiled and tables made


def _no_sync_in_attention(dispatcher: ModuleType) -> None:
    """A host that waits for its GPU between the layers of a step is an error."""
    cls = dispatcher.RemoteDispatcher
    for name in ("dispatch_a", "combine_b"):
        setattr(cls, name, _without_sync(getattr(cls, name), lambda self: self._runtime.plan))


def _no_sync_in_ffn(loop: ModuleType) -> None:
    run = loop.FFNLoop._run

    def guarded(self: Any, plan: Any) -> None:
        _without_sync(lambda _, plan: run(self, plan), lambda _: plan)(self, plan)

    loop.FFNLoop._run = guarded


def _without_sync(call: Callable[..., Any], plan_of: Callable[[Any], Any]) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if plan_of(self).step_id < _FIRST_STEP or torch.cuda.is_current_stream_capturing():
            return call(self, *args, **kwargs)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return guarded


def install(name: str) -> None:
    """Put the fault in once its module has been imported in this process."""
    from sglang.srt.disaggregation.afd.imports import after_import

    if name == NO_SYNC:
        after_import(f"{_AFD}.attention.dispatcher", _no_sync_in_attention)
        after_import(f"{_AFD}.ffn.loop", _no_sync_in_ffn)
        return
    fault, module = FAULTS[name]
    after_import(module, fault)


def _after_load(model_runner: ModuleType, change: Callable[[list[Any]], None]) -> None:
    load = model_runner.FFNModelRunner.load

    def load_then_change(self: Any) -> list[Any]:
        layers: list[Any] = load(self)
        change(layers)
        return layers

    model_runner.FFNModelRunner.load = load_then_change


def _parameters(layers: list[Any]) -> list[torch.Tensor]:
    """The tensors of these layers that hold something per expert."""
    return [
        parameter.data
        for layer in layers
        for parameter in layer.module.parameters()
        if parameter.dim() > 0 and len(parameter) == layer.module.num_local_experts
    ]
