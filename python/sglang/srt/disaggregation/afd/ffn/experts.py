"""The grouped GEMM of one MoE layer on one FFN rank, by upstream's runner for the device."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.disaggregation.afd.connector.base import ExpertMajorBatch, ReceivedBatch


class LocalExperts:
    """One layer's experts: upstream's `FusedMoE` module, holding this rank's share.

    On CPU upstream's runner takes neither masked entries nor an expert twice per row, so each
    (row, expert) pair becomes a row of its own with weight 1, and the weighted sum is taken here
    in FP32, as upstream takes it.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module = module
        self._compute = self._on_cpu if device.type == "cpu" else self._on_gpu

    def __call__(self, batch: ReceivedBatch | ExpertMajorBatch) -> torch.Tensor:
        """Expert outputs in the hidden dtype: one row per received row, [R, H] or [E, L, H]."""
        if isinstance(batch, ExpertMajorBatch):
            return self._expert_major(batch)
        if batch.hidden_RH.shape[0] == 0:
            return batch.hidden_RH
        return self._compute(batch)

    def _expert_major(self, batch: ExpertMajorBatch) -> torch.Tensor:
        """Each row has one expert, and rows beyond an expert's count have none."""
        slots, length, _ = batch.hidden_ELH.shape
        slot_E1 = torch.arange(slots, dtype=torch.int32, device=batch.hidden_ELH.device)[:, None]
        place_L = torch.arange(length, dtype=torch.int32, device=batch.hidden_ELH.device)
        ids_EL = torch.where(place_L < batch.rows_per_expert_E[:, None], slot_E1, -1)
        ids_P1 = ids_EL.reshape(-1, 1)
        ones_P1 = torch.ones(ids_P1.shape, dtype=torch.float32, device=ids_P1.device)
        out_PH = self._run_core(batch.hidden_ELH.flatten(0, 1), ids_P1, ones_P1)
        return out_PH.view(batch.hidden_ELH.shape)

    def _on_gpu(self, batch: ReceivedBatch) -> torch.Tensor:
        """Upstream's fused MoE kernels skip entries whose expert is -1."""
        return self._run_core(batch.hidden_RH, batch.topk_ids_RK, batch.topk_weights_RK)

    def _on_cpu(self, batch: ReceivedBatch) -> torch.Tensor:
        hidden = batch.hidden_RH
        row_P, entry_P = (batch.topk_ids_RK >= 0).nonzero(as_tuple=True)
        ids_P1 = batch.topk_ids_RK[row_P, entry_P].unsqueeze(1)
        ones_P1 = torch.ones(ids_P1.shape, dtype=torch.float32, device=hidden.device)
        pairs = self._run_core(hidden[row_P], ids_P1, ones_P1)
        weight_P1 = batch.topk_weights_RK[row_P, entry_P].unsqueeze(1)
        total_RH = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        total_RH.index_add_(0, row_P, pairs.float() * weight_P1)
        return total_RH.to(hidden.dtype)

    def _run_core(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        dispatched = StandardDispatchOutput(
            hidden_states=hidden,
            hidden_states_scale=None,
            topk_output=StandardTopKOutput(weights, ids, weights),
        )
        output: torch.Tensor = self.module.run_moe_core(dispatched).hidden_states
        return output
