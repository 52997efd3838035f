"""One row per distinct expert-block module of upstream: a tiny model with the family's traits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Interpreted on a CPU, see harness.py, where one program does the work of eight in less time.
TRITON = {"attention_backend": "triton", "triton_attention_num_kv_splits": 1}
# The radix cache of recurrent state needs a kernel that exists for GPUs only.
RECURRENT = {"disable_radix_cache": True, "max_mamba_cache_size": 64}


@dataclass(frozen=True)
class Family:
    """One tiny model.

    Attributes:
        name: of the row.
        architecture: as upstream's registry and config.json name it.
        build: writes the checkpoint into a folder.
        arguments: of `sglang.Engine`, colocated and AFD alike.
        microbatches: 2 if two of them are compared, too.
        fused_experts: the checkpoint holds all experts of a layer in one tensor.
        format: of the expert weights.
    """

    name: str
    architecture: str
    build: Callable[[Path], Path]
    arguments: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 2
    fused_experts: bool = False
    format: str = "FP32"


def by_name() -> dict[str, Family]:
    from models import known, spelled

    return {family.name: family for family in (*known.FAMILIES, *spelled.FAMILIES)}


def build(name: str, folder: Path) -> Path:
    """Write the checkpoint of a family; runs where torch and transformers are imported already."""
    return by_name()[name].build(folder)
