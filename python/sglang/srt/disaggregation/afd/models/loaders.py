"""Upstream loaders that want more than a role reads, and how they are kept content.

Hooks, see patches.py, and what an FFN rank does to a model before its loader runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def hide_absent(model: torch.nn.Module) -> None:
    """Have `model.named_parameters()` name only what exists here; the rest is on the meta device.

    Some loaders check at the end that every parameter of the model was loaded.
    """
    named = model.named_parameters

    def present(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in named(*args, **kwargs) if not p.is_meta)

    model.named_parameters = present


def laguna(orig: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `LagunaForCausalLM.load_weights`: it counts the experts of all sparse layers at the end,
    and takes the list of layers from this entry, which nothing else in it reads."""
    kinds = self.config.mlp_layer_types
    self.config.mlp_layer_types = ["not counted"] * len(kinds)
    try:
        return orig(self, *args, **kwargs)
    finally:
        self.config.mlp_layer_types = kinds
