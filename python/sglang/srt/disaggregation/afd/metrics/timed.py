"""Connectors that note what they spend. A rank without metrics or trace has none of these."""

from __future__ import annotations

import time
from typing import Any

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    DispatchHandle,
    FFNConnector,
    Transfer,
)
from sglang.srt.disaggregation.afd.metrics.steps import Notes


class TimedAttn(AttnConnector):
    """`inner`, with the host time of every call noted."""

    def __init__(self, inner: AttnConnector, notes: Notes) -> None:
        self.inner = inner
        self._note = notes.note

    def dispatch(
        self,
        transfer: Transfer,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        max_rows: tuple[int, ...] | None = None,
    ) -> DispatchHandle:
        began = time.monotonic_ns()
        handle = self.inner.dispatch(transfer, hidden_TH, topk_ids_TK, topk_weights_TK, max_rows)
        self._note("dispatch", transfer, began, time.monotonic_ns())
        return handle

    def combine(self, handle: DispatchHandle) -> torch.Tensor:
        began = time.monotonic_ns()
        out_TH = self.inner.combine(handle)
        self._note("combine", handle.transfer, began, time.monotonic_ns())
        return out_TH

    def close(self) -> None:
        self.inner.close()


class TimedFFN(FFNConnector[Any]):
    """`inner`, with the host time of every call noted; what lies between two is the experts'."""

    def __init__(self, inner: FFNConnector[Any], notes: Notes) -> None:
        self.inner = inner
        self._note = notes.note
        self._received_ns = 0

    def receive(self, transfer: Transfer, max_rows: tuple[int, ...] | None = None) -> Any:
        began = time.monotonic_ns()
        batch = self.inner.receive(transfer, max_rows)
        self._received_ns = time.monotonic_ns()
        self._note("receive", transfer, began, self._received_ns)
        return batch

    def send(self, batch: Any, out: torch.Tensor) -> None:
        began = time.monotonic_ns()
        if self._received_ns:  # else a trace began between the two
            self._note("experts", batch.transfer, self._received_ns, began)
        self.inner.send(batch, out)
        self._note("send", batch.transfer, began, time.monotonic_ns())

    def close(self) -> None:
        self.inner.close()
