"""Counts rows per expert on the device of an FFN rank, without the host waiting for anything."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    ExpertMajorBatch,
    FFNConnector,
    ReceivedBatch,
    Transfer,
)


class ExpertRows:
    """Rows since the start, by MoE layer and expert of this rank.

    Args:
        slots: experts that batches may name, `Topology.slots_per_rank`.
    """

    def __init__(self, moe_layers: int, slots: int, device: torch.device) -> None:
        # Column 0 takes the masked entries, whose id is -1.
        self._rows = torch.zeros((moe_layers, slots + 1), dtype=torch.int64, device=device)
        self._on_host = torch.zeros(
            self._rows.shape, dtype=torch.int64, pin_memory=device.type == "cuda"
        )

    def count(self, batch: ReceivedBatch | ExpertMajorBatch) -> None:
        """May be captured in a graph, which then counts at each replay."""
        rows = self._rows[batch.transfer.layer]
        if isinstance(batch, ExpertMajorBatch):
            rows[1:] += batch.rows_per_expert_E
            return
        column = batch.topk_ids_RK.flatten().long() + 1
        rows.scatter_add_(0, column, torch.ones_like(column))

    def step_enqueued(self) -> None:
        """Copy behind the step; the reporter sees the numbers once the step ran."""
        self._on_host.copy_(self._rows, non_blocking=True)

    def read(self) -> list[list[int]]:
        """By layer, then by expert of this rank: as of a step that has ended."""
        table: list[list[int]] = self._on_host[:, 1:].tolist()
        return table


class CountedFFN(FFNConnector[Any]):
    """`inner`, with the rows of every batch counted."""

    def __init__(self, inner: FFNConnector[Any], rows: ExpertRows) -> None:
        self.inner = inner
        self._rows = rows

    def receive(self, transfer: Transfer, max_rows: tuple[int, ...] | None = None) -> Any:
        batch = self.inner.receive(transfer, max_rows)
        self._rows.count(batch)
        return batch

    def send(self, batch: Any, out: torch.Tensor) -> None:
        self.inner.send(batch, out)

    def close(self) -> None:
        self.inner.close()
