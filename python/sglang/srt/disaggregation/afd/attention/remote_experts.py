"""The expert module of an attention rank: no weights, no compute, only a dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase


class RemoteExpertsMethod(FusedMoEMethodBase):
    """Stands where a quantisation method would create weights and run a grouped GEMM."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        pass  # the experts live on FFN ranks

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        pass  # nothing runs here

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        """The dispatch is already on its way; hand it on to `combine`."""
        return dispatch_output


class WeightlessConfig:
    """A quantisation config that gives experts no weights and otherwise answers as `inner`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> RemoteExpertsMethod:
        return RemoteExpertsMethod()

    def get_name(self) -> str:
        return self._inner.get_name() if self._inner is not None else "remote"
