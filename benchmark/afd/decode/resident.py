"""The batch for which a rank of the FULL model has room, whatever part of its layers runs.

Every layout of a comparison gets what its own memory holds, by one rule: `SHARE` of what the weights
leave of a GPU is KV cache. The planner's sizes and memory, so that no server has to start to know it.
"""

from __future__ import annotations

from typing import Any

from decode.configurations import Configuration
from sglang.srt.disaggregation.afd.planner import capacity, models
from sglang.srt.disaggregation.afd.planner.hardware import Hardware

SHARE = 0.85


def batch(
    configuration: Configuration,
    shape: str,
    config: dict[str, Any],
    kv_dtype: str,
    hardware: Hardware,
    context: int,
) -> int:
    """Requests per rank, a multiple of the microbatches.

    Args:
        config: config.json of the shape with all of its layers.
    Raises:
        ValueError: nothing fits, or the rule does not know the layout.
    """
    model = models.parse(config, shape, kv_bits=8.0 if kv_dtype.startswith("fp8") else None)
    if configuration.is_afd:
        room = capacity.attn_rank(model, hardware, context, SHARE)
    elif not configuration.batch_is_shared:
        room = capacity.colocated_rank(model, hardware, context, configuration.attn_ranks, SHARE)
    else:
        raise ValueError(
            f"{configuration.name}: ranks of a tensor-parallel layout share one batch, for which "
            "--batch resident has no rule; give numbers"
        )
    found = room.batch // configuration.microbatches * configuration.microbatches
    if found < 1:
        raise ValueError(
            f"{configuration.name}: {room.weights / 2**30:.0f} GiB of weights leave no "
            f"room on {hardware.title} for {configuration.microbatches} request(s) of {context} "
            "tokens; use more GPUs, or a shorter --context"
        )
    return found
