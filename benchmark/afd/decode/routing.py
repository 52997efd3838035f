"""What the router chose in one step: kept, to be replayed on the FFN side, and counted."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch


class Recorder:
    """Listens to every router of a model for as long as it is open."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._ids: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._weights: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._hooks = []
        from sglang.srt.layers.moe.topk import TopK

        routers = [module for module in model.modules() if isinstance(module, TopK)]
        for index, router in enumerate(routers):

            def keep(module: Any, args: Any, output: Any, index: int = index) -> None:
                if getattr(output, "topk_ids", None) is not None:
                    self._ids[index].append(output.topk_ids.detach().cpu())
                    self._weights[index].append(output.topk_weights.detach().cpu())

            self._hooks.append(router.register_forward_hook(keep))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def recorded(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids and weights [layers, tokens, K] of what was heard; None if a kernel hid its choice."""
        if not self._ids:
            return None
        ids = [torch.cat(self._ids[index]) for index in sorted(self._ids)]
        weights = [torch.cat(self._weights[index]) for index in sorted(self._weights)]
        return torch.stack(ids), torch.stack(weights)


def save(path: Path, ids_LTK: torch.Tensor, weights_LTK: torch.Tensor) -> None:
    """The file that the connector `null` reads arrivals from."""
    from safetensors.torch import save_file

    save_file(
        {"ids": ids_LTK.int().contiguous(), "weights": weights_LTK.float().contiguous()}, path
    )


def max_rows_per_expert(ids_LTK: torch.Tensor) -> int:
    """Rows of the fullest expert in any layer."""
    flat_LX = ids_LTK.flatten(1).long()
    return max(int(torch.bincount(row[row >= 0]).max()) for row in flat_LX)
