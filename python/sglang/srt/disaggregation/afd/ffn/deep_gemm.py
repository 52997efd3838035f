"""What an FFN rank must know about DeepGEMM, upstream's grouped GEMM for rows sorted by expert.

Its kernels are compiled when they are first called, by nvcc, in seconds each. That must not happen
while attention ranks wait, nor while a graph is captured: `compile_ahead` calls each one at loading.

Shape letters as in `connector.base`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sglang.srt.disaggregation.afd import envs, wire
from sglang.srt.disaggregation.afd.connector.base import (
    BLOCK_ROWS,
    ExpertMajorBatch,
    LinkSpec,
    Transfer,
)
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.ffn.experts import LocalExperts

logger = logging.getLogger(__name__)

_GROUP = 128  # values of a row that share a scale
# DeepGEMM chooses a kernel by how many blocks the expected rows of an expert fill: the smaller of
# its two sizes of blocks tells all cases apart.
_SMALL_BLOCK = 64


def obstacle(device: torch.device) -> str:
    """Why DeepGEMM does not run on this rank; empty if it does."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    from sglang.srt.layers import deep_gemm_wrapper

    if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
        return ""
    return (
        "it needs a GPU of compute capability 9.0 or 10.0, the Python package deep_gemm, and "
        f"{envs.DEEP_GEMM} not to be 0"
    )


def rounds_scales() -> bool:
    """True on GPUs whose kernels take scales that are powers of two; connectors send any."""
    from sglang.srt.layers import deep_gemm_wrapper

    return bool(deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0)


def skip_upstreams_warm_up() -> None:
    """Keep upstream from compiling for every number of rows up to 16384, at the first call.

    A capacity bounds the rows here, and the first call may come while attention ranks wait.
    """
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils

    assert hasattr(compile_utils, "_ENABLE_JIT_DEEPGEMM_PRECOMPILE")
    compile_utils._ENABLE_JIT_DEEPGEMM_PRECOMPILE = False


def check(modules: list[Any], fp8: bool) -> None:
    """Refuse experts for which upstream's DeepGEMM runner would compute something else.

    Args:
        modules: upstream's `FusedMoE` of each layer.
        fp8: tokens arrive as FP8.
    Raises:
        AFDConfigError: names what is missing.
    """
    for module in modules:
        missing = _gap(module)
        if missing:
            raise AFDConfigError(
                f"--moe-runner-backend {wire.DEEP_GEMM} lacks what MoE layer {module.layer_id} needs: "
                f"{missing}; add --moe-runner-backend {wire.TRITON} to every command"
            )
        if fp8 and module.w13_weight.dtype != torch.float8_e4m3fn:
            raise AFDConfigError(
                f"--afd-wire-dtype fp8 does not work with MoE layer {module.layer_id}, whose experts "
                f"are {module.w13_weight.dtype}; start all ranks with --afd-wire-dtype bf16"
            )


def _gap(module: Any) -> str:
    """What upstream's DeepGEMM runner leaves out without a word; empty if nothing."""
    config = module.moe_runner_config
    if getattr(module, "w13_weight_bias", None) is not None:
        return "a bias"
    if module.w13_weight.dtype == torch.bfloat16:
        if (config.activation, config.is_gated) != ("silu", True):
            return f"activation {config.activation} of BF16 experts"
        if {config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit} != {None}:
            return "a clamped activation of BF16 experts"
    elif config.activation == "silu":
        if config.gemm1_alpha is None and config.gemm1_clamp_limit is not None:
            return "a clamped activation"
        if config.gemm1_alpha is not None and config.gate_up_interleaved:
            return "gate and up projections in turn"
    if module.intermediate_size_per_partition % _GROUP or module.hidden_size % _GROUP:
        return f"hidden sizes that are no multiples of {_GROUP}"
    return ""


@torch.inference_mode()
def compile_ahead(layers: list[LocalExperts], spec: LinkSpec) -> None:
    """Call the masked GEMMs of every shape, without a row, as often as their kernels may differ.

    Upstream's variable for that (`envs.DEEP_GEMM_PRECOMPILE`) set to 0 leaves it at one call.
    """
    shapes = {tuple(each.module.w13_weight.shape): each for each in layers if each.is_masked}
    began = time.monotonic()
    for (slots, _, hidden_size), layer in shapes.items():
        device = layer.module.w13_weight.device
        shape = (slots, BLOCK_ROWS, hidden_size)
        scales_ELG = None
        if spec.fp8:
            groups = (slots, hidden_size // _GROUP, BLOCK_ROWS)
            scales_ELG = torch.ones(groups, dtype=torch.float32, device=device).mT
        dtype = torch.float8_e4m3fn if spec.fp8 else spec.dtype
        hidden_ELH = torch.zeros(shape, dtype=dtype, device=device)
        for expected_rows in _cases(spec):
            layer(
                ExpertMajorBatch(
                    transfer=Transfer(0, 0, 0),
                    hidden_ELH=hidden_ELH,
                    scales_ELG=scales_ELG,
                    rows_per_expert_E=torch.zeros(slots, dtype=torch.int32, device=device),
                    expected_rows=expected_rows,
                )
            )
        torch.cuda.synchronize(device)
    if shapes:
        logger.info("compiled or loaded the GEMM kernels in %.1f s", time.monotonic() - began)


def _cases(spec: LinkSpec) -> list[int]:
    """Expected rows per expert, one number for each kernel that a plan within the capacity can bring."""
    entries = spec.topology.attn_ranks * spec.capacity * spec.topk
    most = max(1, -(-entries // spec.topology.num_experts))
    if not envs.flag(envs.DEEP_GEMM_PRECOMPILE, True):
        return [1]
    return [*range(1, most + 1, _SMALL_BLOCK)]
