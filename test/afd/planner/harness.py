"""What the planner's tests share: published figures, and a model on a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.afd.planner import estimate, hardware, models
from sglang.srt.disaggregation.afd.planner.estimate import Cost

ROOT = Path(__file__).resolve().parents[3]
PLANNER = ROOT / "python/sglang/srt/disaggregation/afd/planner"
PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())


def cost(model: str, machine: str, **overrides: float) -> Cost:
    """Costs with the packaged estimates, or with some of them replaced."""
    return Cost(
        model=models.load(model),
        hardware=hardware.load(machine),
        estimates=estimate.load(overrides),
    )


def near(found: float, expected: float, share: float) -> bool:
    """Whether `found` is within a share of `expected`."""
    return abs(found / expected - 1) <= share
