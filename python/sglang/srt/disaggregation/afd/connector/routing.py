"""Which tokens go to which FFN rank, and how their partial results are added up.

Pure torch on any device; moves nothing between ranks. Shape letters as in `base`, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from sglang.srt.disaggregation.afd.topology import Topology


class RankRoute(NamedTuple):
    """The tokens of one attention rank that have an expert on one FFN rank.

    Attributes:
        token_idx_R: int64, ascending index of each row's token.
        topk_ids_RK: int32, expert index within the FFN rank, -1 where the entry is not its own.
        topk_weights_RK: float32, 0 where the id is -1.
    """

    token_idx_R: torch.Tensor
    topk_ids_RK: torch.Tensor
    topk_weights_RK: torch.Tensor


class Router:
    """Splits router output by FFN rank."""

    def __init__(self, topology: Topology, device: torch.device | str = "cpu") -> None:
        self._num_ffn_ranks = topology.ffn_ranks
        # One entry more than experts: a masked id of -1 indexes the last one, which is nobody's.
        with torch.inference_mode(False):
            self._owner_E = torch.tensor([*topology.owner_of, -1], device=device)
            self._local_E = torch.tensor([*topology.local_of, -1], dtype=torch.int32, device=device)

    def split(
        self, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> tuple[RankRoute, ...]:
        """Return one route per FFN rank.

        Args:
            topk_ids_TK: integer, global expert ids; -1 masks an entry.
            topk_weights_TK: float32.
        """
        ids_TK = topk_ids_TK.long()
        owner_TK = self._owner_E[ids_TK]
        local_TK = self._local_E[ids_TK]
        routes = []
        for ffn_rank in range(self._num_ffn_ranks):
            mine_TK = owner_TK == ffn_rank
            token_idx_R = mine_TK.any(dim=1).nonzero().squeeze(1)
            other_RK = ~mine_TK[token_idx_R]
            routes.append(
                RankRoute(
                    token_idx_R,
                    local_TK[token_idx_R].masked_fill_(other_RK, -1),
                    topk_weights_TK[token_idx_R].masked_fill_(other_RK, 0.0),
                )
            )
        return tuple(routes)


def sum_partials(
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    partials: Iterable[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Add the rows that came back, in FP32 and in the order given, and cast once: [T, H].

    Args:
        partials: per FFN rank, in rank order: token index of each row [R], rows [R, H]. A rank
            answers at most one row per token.
    """
    acc_TH = torch.zeros(num_tokens, hidden_size, dtype=torch.float32, device=device)
    for token_idx_R, rows_RH in partials:
        acc_TH[token_idx_R] += rows_RH.float()
    return acc_TH.to(dtype)
