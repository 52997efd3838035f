"""Builds the routed experts of one FFN rank with upstream's model class and loader."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang.srt.disaggregation.afd import config as afd_config
from sglang.srt.disaggregation.afd import facts, wire
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.ffn import deep_gemm
from sglang.srt.disaggregation.afd.ffn.experts import LocalExperts
from sglang.srt.disaggregation.afd.models import families, loaders, weights
from sglang.srt.disaggregation.afd.topology import Topology

logger = logging.getLogger(__name__)


class FFNModelRunner:
    """The experts of one FFN rank.

    `__init__` builds the model on the meta device, experts apart, so the shape is known before a
    weight is read; `load` reads this rank's tensors and drops the rest of the model.
    """

    def __init__(self, server_args: Any, ffn_rank: int, gpu_id: int = 0) -> None:
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.model_executor.model_runner_components.load_model_utils import (
            build_load_config,
        )
        from sglang.srt.model_loader import loader as upstream

        self._server_args = server_args
        self._ffn_rank = ffn_rank
        self.device = torch.device(DeviceConfig(server_args.device).device)
        self.model_config = ModelConfig.from_server_args(server_args)
        _init_world_of_one(server_args, self.model_config, gpu_id)
        backend = self._choose_runner()
        initialize_moe_config(server_args)
        load_config = build_load_config(
            server_args=server_args,
            tp_rank=0,
            remote_instance_weight_transporter_engine=None,
            remote_instance_weight_transporter_session_id=None,
            draft_model_idx=None,
            weight_cache_mode=server_args.weight_cache_mode,
            weight_cache_socket=server_args.weight_cache_socket,
        )
        if self.device.type == "cpu":
            # Some models read entries that only this step of upstream's runner adds.
            self.model_config = adjust_config_with_unaligned_cpu_tp(
                self.model_config, load_config, tp_size=1
            )
        self._loader = upstream.get_model_loader(load_config, self.model_config)
        quant_config = upstream._get_quantization_config(self.model_config, load_config)
        with upstream.set_default_torch_dtype(self.model_config.dtype), torch.device("meta"):
            self._model = upstream._initialize_model(self.model_config, load_config, quant_config)
        self._modules = sorted(
            (m for m in self._model.modules() if isinstance(m, FusedMoE) and _is_ours(m)),
            key=lambda m: m.layer_id,
        )
        if families.scales_itself(server_args):
            for module in self._modules:
                module.moe_runner_config.routed_scaling_factor = None
        for module in self._modules:
            # What a connector delivers is its own memory: no result is written over it.
            module.moe_runner_config.inplace = False
        if backend == wire.DEEP_GEMM:
            deep_gemm.check(self._modules, self._fp8)
        num_experts = {m.afd_num_experts for m in self._modules}
        self.shape = facts.expert_shape(
            [m.moe_runner_config for m in self._modules],
            self.model_config,
            server_args.model_path,
            num_experts=num_experts.pop() if len(num_experts) == 1 else None,
        )
        for module in self._modules:
            # Not every model says it; DeepGEMM's runner sums so many rows per token.
            module.moe_runner_config.top_k = self.shape.topk

    def _choose_runner(self) -> str:
        """Have upstream read the MoE runner that fits the connector; returns its name.

        Raises:
            AFDConfigError: the tokens' dtype or the flag needs DeepGEMM, which does not run here.
        """
        args = self._server_args
        connector = afd_config.build(args).connector
        lacks = deep_gemm.obstacle(self.device)
        works = not lacks and self.model_config.dtype == torch.bfloat16
        backend = wire.runner_backend(args, connector, works)
        self._fp8 = wire.fp8(args, connector)
        if self._fp8 and (lacks or deep_gemm.rounds_scales()):
            raise AFDConfigError(
                f"FFN rank {self._ffn_rank} cannot compute with FP8 tokens: "
                f"{lacks or 'this GPU wants scales that are powers of two'}; start all ranks with "
                "--afd-wire-dtype bf16"
            )
        if backend == wire.DEEP_GEMM:
            if lacks:
                raise AFDConfigError(
                    f"--moe-runner-backend {backend} does not run on FFN rank {self._ffn_rank}: "
                    f"{lacks}; choose {wire.TRITON}"
                )
            deep_gemm.skip_upstreams_warm_up()
        if backend != args.moe_runner_backend:
            args.override("afd", moe_runner_backend=backend)
        logger.info(
            "FFN rank %d: MoE runner %s; tokens arrive as %s",
            self._ffn_rank,
            backend,
            "FP8" if self._fp8 else self.model_config.dtype,
        )
        return backend

    def load(self) -> list[LocalExperts]:
        """Read this rank's expert tensors and return the layers in order."""
        from sglang.srt.model_loader import loader as upstream
        from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

        if isinstance(self._loader, upstream.DummyModelLoader):
            for module in self._modules:
                initialize_dummy_weights(module)
        else:
            topology = Topology(
                self._server_args.afd_attn_ranks,
                self._server_args.afd_ffn_ranks,
                self.shape.num_experts,
            )
            weights.select(weights.wanted_by_ffn(topology, self._ffn_rank))
            loaders.hide_absent(self._model)
            self._model.load_weights(self._loader._get_all_weights(self.model_config, self._model))
        for module in self._modules:
            with upstream.device_loading_context(module, self.device):
                module.quant_method.process_weights_after_loading(module)
        del self._model
        return [LocalExperts(module, self.device) for module in self._modules]

    def parameter_bytes(self) -> int:
        return weights.parameter_bytes(torch.nn.ModuleList(self._modules))


def _is_ours(module: Any) -> bool:
    return hasattr(module, "afd_num_experts")


def _init_world_of_one(server_args: Any, model_config: Any, gpu_id: int) -> None:
    """Upstream's layers ask for parallel groups; this process is alone in all of them."""
    from sglang.srt.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    # An in-process store: no address, no port, nothing to collide with.
    torch.distributed.init_process_group(
        backend="gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=gpu_id)
    initialize_model_parallel()
    initialize_dp_attention(server_args, model_config)
