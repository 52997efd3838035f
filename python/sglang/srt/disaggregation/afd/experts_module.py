"""What the two roles do to upstream's expert module while the model is being built.

On an attention rank the module keeps no weights and its dispatcher is ours. On an FFN rank it is
built for real, for the share of that rank, while the rest of the model stays on the meta device.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from sglang.srt.disaggregation.afd.topology import Topology


def _server_args() -> Any:
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return args if getattr(args, "afd_enabled", False) else None


def init_experts(orig: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `FusedMoE.__init__`."""
    server_args = _server_args()
    if server_args is None or self.is_shared_fused_moe:
        orig(self, *args, **kwargs)
        return
    bound = inspect.signature(orig).bind(self, *args, **kwargs)
    if server_args.is_ffn_rank:
        _init_local(orig, bound, server_args)
    else:
        _init_remote(orig, bound)


def _init_remote(orig: Any, bound: inspect.BoundArguments) -> None:
    from sglang.srt.disaggregation.afd.attention.remote_experts import WeightlessConfig
    from sglang.srt.runtime_context import get_parallel

    module = bound.arguments["self"]
    quant_config = bound.arguments.get("quant_config")
    bound.arguments["quant_config"] = WeightlessConfig(quant_config)
    # One rank that owns everything: no divisibility rule of expert or tensor parallelism applies.
    with get_parallel().override(moe_ep_size=1, moe_ep_rank=0, moe_tp_size=1, moe_tp_rank=0):
        orig(*bound.args, **bound.kwargs)
    module.quant_config = quant_config


def _init_local(orig: Any, bound: inspect.BoundArguments, server_args: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    module = bound.arguments["self"]
    num_experts = bound.arguments["num_experts"]
    ffn_rank = server_args.ffn_rank
    topology = Topology(server_args.afd_attn_ranks, server_args.afd_ffn_ranks, num_experts)
    bound.arguments["num_experts"] = topology.slots_per_rank * topology.ffn_ranks
    share = get_parallel().override(
        moe_ep_size=topology.ffn_ranks, moe_ep_rank=ffn_rank, moe_tp_size=1, moe_tp_rank=0
    )
    with share, torch.device(server_args.device):
        orig(*bound.args, **bound.kwargs)
    # Upstream spreads experts in blocks of equal size; ours may differ by one (topology.py).
    owned = topology.expert_range(ffn_rank)
    module._map_global_expert_id_to_local_expert_id = lambda e: (
        e - owned.start if e in owned else -1
    )
    module.afd_num_experts = num_experts
    module.afd_owned = owned
    # The attention rank does it, see RemoteDispatcher.
    module.moe_runner_config.apply_router_weight_on_input = False
    # Rows that pad a batch carry no expert; "all experts are local" would let upstream skip the
    # check for such entries. One expert more than there are is nobody's.
    module.moe_runner_config.num_experts = num_experts + 1


def load_fused(
    orig: Any, self: Any, param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """AROUND `FusedMoE.weight_loader_fused`: it copies the experts of a checkpoint's tensor, all of
    them, where an FFN rank has slots for its own."""
    owned = getattr(self, "afd_owned", None)
    if owned is not None:
        own = loaded_weight[owned.start : owned.stop]
        empty = param.shape[0] - len(owned)
        loaded_weight = torch.cat((own, own.new_zeros(empty, *own.shape[1:]))) if empty else own
    orig(self, param, loaded_weight, *args, **kwargs)


def create_dispatcher(orig: Any, moe_runner_config: Any) -> Any:
    """AROUND `create_moe_dispatcher`."""
    server_args = _server_args()
    if server_args is None or server_args.is_ffn_rank:
        return orig(moe_runner_config)
    from sglang.srt.disaggregation.afd.attention.dispatcher import RemoteDispatcher

    return RemoteDispatcher(moe_runner_config)


def no_deepep(orig: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `DeepEPDispatcher.__init__`: some models make one of their own, and never call it."""
    if _server_args() is None:
        orig(self, *args, **kwargs)


def impl_class(orig: Any, quant_config: Any) -> Any:
    """AROUND `get_moe_impl_class`."""
    if _server_args() is None:
        return orig(quant_config)
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return FusedMoE


def no_expert_location(orig: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `compute_initial_expert_location_metadata`."""
    return orig(*args, **kwargs) if _server_args() is None else None


def no_dispatch_info(orig: Any, cls: Any, layer_id: int) -> Any:
    """AROUND `ExpertLocationDispatchInfo.init_new`."""
    return orig(cls, layer_id) if _server_args() is None else None
