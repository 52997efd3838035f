"""The zygote of the model families: what their forward passes import, too, and Triton interpreted.

Run by `models.harness` as `python -m models.zygote SOCKET`. Parameters start as NaN in all its
engines, so that a tensor which no loader fills cannot go unnoticed.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from matrix import zygote

MODULES = (
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.attention.hybrid_linear_attn_backend",
    "sglang.srt.layers.attention.linear.gdn_backend",
    "sglang.srt.layers.attention.linear.kda_backend",
    "sglang.srt.layers.attention.linear.lightning_backend",
    "sglang.srt.layers.attention.linear.short_conv_backend",
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.kernels.ops.attention.extend_attention",
)


def expert_blocks(model: Any) -> set[str]:
    """Classes of the modules that hold a `FusedMoE`, as "module:class"."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return {
        f"{type(module).__module__}:{type(module).__qualname__}"
        for module in model.modules()
        if any(isinstance(child, FusedMoE) for child in module.children())
    }


def poison_parameters() -> None:
    import torch

    # Nothing initialised CUDA here. Without this, PyTorch would blame the fork for a missing GPU.
    torch.cuda._is_in_bad_fork = lambda: False

    from sglang.srt.model_loader import loader

    initialize = loader._initialize_model

    @functools.wraps(initialize)
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        model = initialize(*args, **kwargs)
        for block in sorted(expert_blocks(model)):
            print(f"EXPERT BLOCK {block}", flush=True)
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.is_meta:
                parameter.data.fill_(torch.nan)
        return model

    loader._initialize_model = poisoned


if __name__ == "__main__":
    zygote.MODULES = (*zygote.MODULES, *MODULES)
    poison_parameters()
    zygote.main(sys.argv[1])
