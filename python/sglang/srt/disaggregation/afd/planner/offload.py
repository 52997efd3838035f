"""FFN on another accelerator class: what its peak and the transport to it would take."""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang.srt.disaggregation.afd.planner import checks
from sglang.srt.disaggregation.afd.planner.hardware import Hardware
from sglang.srt.disaggregation.afd.planner.models import ModelShape


class Offload(NamedTuple):
    """One step of all attention GPUs against the accelerator.

    Attributes:
        units: units whose memory holds the experts.
        moe_s: routed experts at the peak of the units, seconds.
        active_s: the same if all active parameters are counted, as some posts do.
        transport_bytes: to and from one attention GPU.
    """

    units: int
    moe_s: float
    active_s: float
    transport_bytes: float


def offload(
    model: ModelShape,
    accelerator: Hardware,
    units: int | None,
    gpus: int,
    batch: int,
    element_bytes: float,
) -> Offload:
    """Price the routed experts of `gpus` attention GPUs with `batch` requests each.

    Args:
        units: of the accelerator; None for as many as the experts need.
        element_bytes: per hidden element, both directions together, for example 3 for FP8 out and
            BF16 back. One row per token and layer each way.
    """
    checks.count("--batch", batch)
    checks.count("--gpus", gpus, high=10**5)
    checks.number("--element-bytes", element_bytes, 0.5, 16)
    needed = math.ceil(model.routed_weight_bytes / accelerator.memory_bytes)
    units = needed if units is None else checks.count("--units", units, high=10**5)
    rate = units * accelerator.math_rate(model.expert_bytes)
    tokens = gpus * batch
    expert_flops = 2 * model.moe_layers * model.topk * model.expert_params
    return Offload(
        units=needed,
        moe_s=tokens * expert_flops / rate,
        active_s=tokens * 2 * model.active_params / rate,
        transport_bytes=batch * model.moe_layers * model.hidden * element_bytes,
    )
