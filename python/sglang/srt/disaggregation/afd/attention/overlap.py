"""Two microbatches through the layers of any model: one computes while the other's rows are away.

Upstream overlaps two halves of a batch for the few models whose layers are written as operations.
For every other model this file wraps the decoder layers, and runs each half in a line of execution
of its own (`Lane`), of which exactly one runs at any time: a lane stops where its expert module
waits for the FFN ranks, and the other one goes on. A wrapped layer thus returns before its work is
done, with stand-ins that only the next layer may take; the last one waits for both halves and
returns the real result.

What upstream prepares for two halves is used as it is: the split of the batch, the halves' own
`ForwardBatch` and attention metadata.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from sglang.srt.disaggregation.afd.attention import runtime
from sglang.srt.disaggregation.afd.errors import AFDConfigError, AFDError

HALVES = (0, 1)
# Upstream has operations for these; they need the expert-parallel branch of the model.
_UPSTREAMS = frozenset({"DeepseekV2DecoderLayer", "Qwen3MoeDecoderLayer", "MiMoV2DecoderLayer"})

_lanes: tuple[Lane, Lane] | None = None
_running: Lane | None = None
_step: Step | None = None


class Lane:
    """A line of execution that runs only while the main one waits for it."""

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.done = True
        self.result: Any = None
        self._error: BaseException | None = None
        self._call: Callable[[], Any] = lambda: None
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        threading.Thread(target=self._loop, name=f"afd-lane-{microbatch}", daemon=True).start()

    def begin(self, call: Callable[[], Any]) -> None:
        """Run `call` until it pauses or ends, with the settings that PyTorch keeps per thread."""
        assert self.done, "the last call has not ended"
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        stream = _current_stream()

        def with_settings() -> Any:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), stream():
                return call()

        self._call, self.done = with_settings, False
        self.resume()

    def resume(self) -> None:
        """Go on where the call paused.

        Raises:
            BaseException: what the call raised.
        """
        global _running
        _running = self
        self._go.release()
        self._back.acquire()
        _running = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Called within the call: give way until `resume`."""
        self._back.release()
        self._go.acquire()

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            try:
                self.result = self._call()
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                self._error = error
            self.done = True
            self._back.release()


def _current_stream() -> Callable[[], Any]:
    if not torch.cuda.is_available():
        return nullcontext
    return functools.partial(torch.cuda.stream, torch.cuda.current_stream())


def microbatch() -> int:
    """Of the lane that runs now; 0 outside of any."""
    return 0 if _running is None else _running.microbatch


def give_way() -> None:
    """A lane's rows are on their way: let the other lane compute. Nothing outside of any."""
    if _running is not None:
        _running.pause()


class Step:
    """Both halves of one forward on their way through the layers."""

    def __init__(self, batch: Any) -> None:
        from sglang.srt.batch_overlap.operations import _resolve_tbo_child_contexts

        global _lanes
        if _lanes is None:
            _lanes = (Lane(0), Lane(1))
        self._lanes = _lanes
        self._batch = batch
        self._children = batch.tbo_children
        self._contexts = _resolve_tbo_child_contexts()
        self._stand_ins: tuple[Any, ...] = ()
        self._results: list[tuple[Any, ...]] = [(), ()]

    def layer(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send both halves into `layer`; its result if it is the last, else stand-ins for it."""
        given = [*args, *kwargs.values()]
        known = {id(value) for value in given}
        if self._stand_ins and not any(id(value) in known for value in self._stand_ins):
            raise AFDError(
                f"{type(layer.module).__name__} {layer.index} does not take what the layer before it "
                "returned, so its halves cannot overlap; use --afd-microbatches 1"
            )
        if all(map(self._is_empty, HALVES)):
            for half in HALVES:
                layer.send_nothing(half)
            return layer.unchanged(args, kwargs)
        rows = self._batch.input_ids.shape[0]
        for half in HALVES:
            self._finish(half)
            sub = functools.partial(self._of_half, half, rows)
            call = functools.partial(
                layer.forward, *map(sub, args), **{k: sub(v) for k, v in kwargs.items()}
            )
            self._in_context(half, self._lanes[half].begin, self._call(layer, half, call))
        if not layer.is_last and layer.num_results:
            self._stand_ins = tuple(torch.empty(0) for _ in range(layer.num_results))
            return self._shaped(layer, self._stand_ins)
        for half in HALVES:
            self._finish(half)
        layer.learn(next(self._lanes[h].result for h in HALVES if not self._is_empty(h)))
        merged = tuple(self._merged(i, rows) for i in range(layer.num_results))
        # Unless this is the last layer, the merged tensors stand for their halves, too.
        self._stand_ins = merged
        return self._shaped(layer, merged)

    def _call(self, layer: Layer, half: int, call: Callable[[], Any]) -> Callable[[], Any]:
        return functools.partial(layer.send_nothing, half) if self._is_empty(half) else call

    def _is_empty(self, half: int) -> bool:
        first, last = self._children[half].tbo_parent_token_range
        return bool(first == last)

    def _finish(self, half: int) -> None:
        """Let the half's last call end and keep what it returned."""
        lane = self._lanes[half]
        while not lane.done:
            self._in_context(half, lane.resume)
        if lane.result is not None:
            result = lane.result
            self._results[half] = result if isinstance(result, tuple) else (result,)
        lane.result = None if self._is_empty(half) else lane.result

    def _in_context(self, half: int, call: Callable[..., None], *args: Any) -> None:
        from sglang.srt.layers.dp_attention import set_dp_buffer_len
        from sglang.srt.model_executor.forward_context import (
            get_forward_context,
            set_forward_context,
        )

        child = self._children[half]
        set_dp_buffer_len(
            child.global_dp_buffer_len,
            child.tbo_padded_len,
            child.dp_padding_mode.is_max_len(),
            child.global_num_tokens_cpu,
        )
        before = get_forward_context()
        set_forward_context(self._contexts[half] or before)
        try:
            call(*args)
        finally:
            set_forward_context(before)

    def _of_half(self, half: int, rows: int, value: Any) -> Any:
        """What a half's layer takes in the place of `value`."""
        for stand_in, result in zip(self._stand_ins, self._results[half], strict=False):
            if value is stand_in:
                return result
        if value is self._batch:
            return self._children[half]
        if not isinstance(value, torch.Tensor) or self._is_empty(half):
            return value
        child = self._children[half]
        first, last = child.tbo_parent_token_range
        dims = (0, value.dim() - 1)  # positions may be [3, T]
        for dim in dims if value.is_floating_point() else reversed(dims):
            if value.dim() > dim and value.shape[dim] == rows:
                own = value.narrow(dim, first, last - first)
                return _padded(own, dim, child.tbo_padded_len)
        return value

    def _merged(self, index: int, rows: int) -> Any:
        """Entry `index` of what the layer returns, for the whole batch."""
        return self._joined([r[index] if r else None for r in self._results], rows)

    def _joined(self, parts: list[Any], rows: int) -> Any:
        example = next((part for part in parts if part is not None), None)
        if isinstance(example, tuple):
            empty = (None,) * len(example)
            pairs = zip(*(part or empty for part in parts), strict=True)
            return tuple(self._joined(list(pair), rows) for pair in pairs)
        if not isinstance(example, torch.Tensor):
            return example
        merged = example.new_zeros((rows, *example.shape[1:]))
        for half, part in zip(HALVES, parts, strict=True):
            if part is not None:
                first, last = self._children[half].tbo_parent_token_range
                merged[first:last] = part[: last - first]
        return merged

    def _shaped(self, layer: Layer, values: tuple[Any, ...]) -> Any:
        return values if layer.returns_tuple else values[0]


def _padded(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - value.shape[dim]
    if missing == 0:
        return value
    shape = list(value.shape)
    shape[dim] = missing
    return torch.cat((value, value.new_zeros(shape)), dim)


class Layer:
    """One decoder layer of the model, whose `forward` it replaces."""

    def __init__(self, module: torch.nn.Module, index: int, is_last: bool) -> None:
        self.module, self.index, self.is_last = module, index, is_last
        self.forward = module.forward
        self.num_results = 0  # until the first call has shown it
        self.returns_tuple = False
        self._dispatchers = [m.dispatcher for m in module.modules() if hasattr(m, "dispatcher")]

        @functools.wraps(self.forward)
        def overlapping(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        overlapping.afd_layer = self  # type: ignore[attr-defined]
        module.forward = overlapping

    @property
    def has_experts(self) -> bool:
        return bool(self._dispatchers)

    def learn(self, result: Any) -> None:
        """Note how many tensors the layer returns, and whether in a tuple."""
        self.returns_tuple = isinstance(result, tuple)
        self.num_results = len(result) if self.returns_tuple else 1

    def send_nothing(self, half: int) -> None:
        """What a half without rows does here."""
        for dispatcher in self._dispatchers:
            dispatcher.send_nothing(half)

    def unchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a rank without rows returns: nobody reads it, so what it was given will do."""
        given = inspect.signature(self.forward).bind(*args, **kwargs).arguments
        hidden = given["hidden_states"]
        if "residual" not in given:
            return hidden
        return hidden, hidden if given["residual"] is None else given["residual"]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        global _step
        batch = next((v for v in (*args, *kwargs.values()) if hasattr(v, "tbo_children")), None)
        if batch is None and runtime.current().plan.microbatches == 2:
            raise AFDError(
                f"{type(self.module).__name__} is not told its batch, so it cannot run the halves that "
                "the FFN ranks expect; use --afd-microbatches 1"
            )
        overlaps = batch is not None and batch.can_run_tbo and batch.tbo_children is not None
        if not overlaps or (_step is None and not self.has_experts):
            with _whole_batch():
                return self.forward(*args, **kwargs)
        if _step is None or _step._batch is not batch:
            _step = Step(batch)
        try:
            result = _step.layer(self, args, kwargs)
        except BaseException:
            _step = None
            raise
        if self.is_last:
            _step = None
        return result


def _whole_batch() -> AbstractContextManager[Any]:
    """Attention of a batch in one piece: some layers want to see its backend, not what splits it."""
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
    from sglang.srt.model_executor.forward_context import forward_context, get_forward_context

    context = get_forward_context()
    if not isinstance(context.attn_backend, TboAttnBackend):
        return nullcontext()
    return forward_context(replace(context, attn_backend=context.attn_backend.primary))


def wrap(model: torch.nn.Module) -> None:
    """Wrap the decoder layers of `model`, unless upstream has operations for them.

    Raises:
        AFDConfigError: there is no list of layers that holds all experts.
    """
    for layers in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        has_experts = any(_holds_experts(layer) for layer in layers)
        if not has_experts:
            continue
        if type(layers[-1]).__name__ in _UPSTREAMS:
            return
        for index, module in enumerate(layers):
            Layer(module, index, is_last=index == len(layers) - 1)
        return
    raise AFDConfigError(
        f"--afd-microbatches 2 does not work with a {type(model).__name__}: it has no list of decoder "
        "layers; leave the flag out"
    )


def _holds_experts(module: torch.nn.Module) -> bool:
    from sglang.srt.disaggregation.afd.attention.dispatcher import RemoteDispatcher

    found = (getattr(m, "dispatcher", None) for m in module.modules())
    return any(isinstance(dispatcher, RemoteDispatcher) for dispatcher in found)


# --- hooks, see patches.py ---------------------------------------------------------------------

# Of recurrent models. Upstream runs the first ones on the whole batch, before its layers.
_OF_BATCH = ("mamba_clear_indices", "mamba_cow_src_indices", "mamba_cow_dst_indices")
_OF_SEQUENCES = ("mamba_track_indices", "mamba_track_mask", "mamba_track_seqlens")


def filter_batch(orig: Any, cls: Any, batch: Any, **kwargs: Any) -> Any:
    """AROUND `TboForwardBatchPreparer.filter_batch`: it refuses entries that it does not know."""
    kept = {name: getattr(batch, name) for name in (*_OF_BATCH, *_OF_SEQUENCES)}
    for name in kept:
        setattr(batch, name, None)
    try:
        child = orig(cls, batch, **kwargs)
    finally:
        for name, value in kept.items():
            setattr(batch, name, value)
    own = slice(kwargs["start_seq_index"], kwargs["end_seq_index"])
    for name in _OF_SEQUENCES:
        setattr(child, name, None if kept[name] is None else kept[name][own])
    return child


def forward_maybe_tbo(orig: Any, layers: Any, enable_tbo: bool, *args: Any, **kwargs: Any) -> Any:
    """AROUND `model_forward_maybe_tbo`: wrapped layers overlap by themselves, in a plain loop."""
    if not runtime.is_active() or not hasattr(layers[0].forward, "afd_layer"):
        return orig(layers, enable_tbo, *args, **kwargs)
    hidden, residual = kwargs.pop("hidden_states"), kwargs.pop("residual")
    kwargs.pop("input_data_scatter_mode")
    given = {name: value for name, value in kwargs.items() if value is not None}
    for layer in layers:
        hidden, residual = layer(hidden_states=hidden, residual=residual, **given)
    return hidden, residual
