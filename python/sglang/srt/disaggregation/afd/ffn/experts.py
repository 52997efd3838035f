"""The grouped GEMM of one MoE layer on one FFN rank, by upstream's runner for the device.

Shape letters as in `connector.base`; P (row, expert) pairs.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    BLOCK_ROWS,
    ExpertMajorBatch,
    ReceivedBatch,
)

logger = logging.getLogger(__name__)

_GROUP = 128  # values of a row that share a scale


class LocalExperts:
    """One layer's experts: upstream's `FusedMoE` module, holding this rank's share.

    On CPU upstream's runner takes neither masked entries nor an expert twice per row, so each
    (row, expert) pair becomes a row of its own with weight 1, and the weighted sum is taken here
    in FP32, as upstream takes it.

    Attributes:
        module: upstream's.
        is_masked: rows sorted by expert go through masked GEMMs (upstream's DeepGEMM runner), which
            read each expert's count on the device. Else each row is a token with one expert for the
            Triton runner, whose other kernels run over all the room for rows.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module = module
        self._compute = self._on_cpu if device.type == "cpu" else self._on_gpu
        self.is_masked = _runner(module) == "deep_gemm"
        self._expert_major = self._by_masked_gemm if self.is_masked else self._by_tokens

    def __call__(self, batch: ReceivedBatch | ExpertMajorBatch) -> torch.Tensor:
        """Expert outputs in the hidden dtype: one row per received row, [R, H] or [E, L, H]."""
        if isinstance(batch, ExpertMajorBatch):
            return self._expert_major(batch)
        if batch.hidden_RH.shape[0] == 0:
            return batch.hidden_RH
        return self._compute(batch)

    def _by_masked_gemm(self, batch: ExpertMajorBatch) -> torch.Tensor:
        """Rows beyond an expert's count are neither read for others nor meaningful afterwards."""
        from sglang.srt.layers.moe.token_dispatcher import DeepEPLLDispatchOutput

        hidden_ELH, scales_ELG = batch.hidden_ELH, batch.scales_ELG
        slots, length, _ = hidden_ELH.shape
        weight, counts_E = self.module.w13_weight, batch.rows_per_expert_E
        assert slots == weight.shape[0], (slots, weight.shape)
        if length % BLOCK_ROWS:
            _tell_of_copy(length)
            hidden_ELH, scales_ELG = _with_room(hidden_ELH, scales_ELG)
        if scales_ELG is None and weight.dtype == torch.float8_e4m3fn:
            hidden_ELH, scales_ELG = _to_fp8(hidden_ELH, counts_E, batch.expected_rows)
        assert hidden_ELH.dtype == weight.dtype, (hidden_ELH.dtype, weight.dtype)
        dispatched = DeepEPLLDispatchOutput(
            # The runner empties the tensor objects that it gets; the batch keeps its own.
            hidden_states=hidden_ELH.detach(),
            hidden_states_scale=None if scales_ELG is None else scales_ELG.detach(),
            topk_ids=counts_E,  # these two are handed through; rows have neither
            topk_weights=counts_E,
            masked_m=counts_E,
            expected_m=batch.expected_rows,
        )
        out_ELH: torch.Tensor = self.module.run_moe_core(dispatched).hidden_states
        factor = self.module.moe_runner_config.routed_scaling_factor
        if factor not in (None, 1.0):
            out_ELH.mul_(factor)  # this runner leaves it to the model, as upstream's DeepEP does
        return out_ELH[:, :length]

    def _by_tokens(self, batch: ExpertMajorBatch) -> torch.Tensor:
        """Each row has one expert, and rows beyond an expert's count have none."""
        assert batch.scales_ELG is None, "the Triton runner takes no FP8 rows"
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
            # DeepGEMM's runner empties the tensor object that it gets; the batch keeps its own.
            hidden_states=hidden.view_as(hidden),
            hidden_states_scale=None,
            topk_output=StandardTopKOutput(weights, ids, weights),
        )
        output: torch.Tensor = self.module.run_moe_core(dispatched).hidden_states
        return output


def _runner(module: Any) -> str:
    """Name of the runner that upstream chose for the module; empty if it has none of its own."""
    runner = getattr(module.quant_method, "runner", None)
    return "" if runner is None else str(runner.runner_backend.value)


@functools.cache
def _tell_of_copy(length: int) -> None:
    logger.warning(
        "the connector has room for %d rows of an expert, no multiple of %d: every batch is copied",
        length,
        BLOCK_ROWS,
    )


def _with_room(
    hidden_ELH: torch.Tensor, scales_ELG: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same rows with room for whole blocks, because the GEMMs write whole blocks."""
    slots, length, hidden_size = hidden_ELH.shape
    room = -(-length // BLOCK_ROWS) * BLOCK_ROWS
    wide_ELH = hidden_ELH.new_empty(slots, room, hidden_size)
    wide_ELH[:, :length].copy_(hidden_ELH)
    if scales_ELG is None:
        return wide_ELH, None
    wide_ELG = scales_ELG.new_empty(slots, scales_ELG.shape[2], room).mT
    wide_ELG[:, :length].copy_(scales_ELG)
    return wide_ELH, wide_ELG


def _to_fp8(
    hidden_ELH: torch.Tensor, rows_per_expert_E: torch.Tensor, expected_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 rows and their scales, up to each expert's count, in the layout that DeepGEMM reads."""
    from sglang.kernels.ops.quantization import per_token_group_quant
    from sglang.srt.layers import deep_gemm_wrapper

    rows_ELH, scales_ELG = per_token_group_quant(
        hidden_ELH,
        group_size=_GROUP,
        scale_ue8m0=deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0,
        masked_m=rows_per_expert_E,
        expected_m=expected_rows,
        column_major_scales=True,
    )
    return rows_ELH, scales_ELG
