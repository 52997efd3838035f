"""What a rank with metrics keeps: its clock, its instruments, and its wrapped connector."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    FFNConnector,
    LinkSpec,
    TellsWaits,
)
from sglang.srt.disaggregation.afd.messages import Role, StepPlan
from sglang.srt.disaggregation.afd.metrics.expert_rows import CountedFFN, ExpertRows
from sglang.srt.disaggregation.afd.metrics.instruments import Instruments
from sglang.srt.disaggregation.afd.metrics.reporter import Reporter, Source
from sglang.srt.disaggregation.afd.metrics.steps import StepClock
from sglang.srt.disaggregation.afd.metrics.timed import TimedAttn, TimedFFN

Silences = Callable[[], Mapping[str, float]]


class Link(NamedTuple):
    """What a meter has to know of the rank's link."""

    rank: int
    spec: LinkSpec
    moe_layers: int
    connector: str  # its name
    device: torch.device
    silences: Silences  # seconds since each peer's last sign of life, by name


class Meter:
    """One role's part follows in the subclasses.

    Attributes:
        clock: notes the steps.
        reporter: turns them into metrics.
    """

    def __init__(self, role: Role, link: Link, *sources: Source) -> None:
        self._link = link
        # Host times say nothing about a GPU, for which the host only enqueues.
        self._times_host = link.device.type == "cpu"
        self.clock = StepClock(link.moe_layers)
        self.instruments = Instruments(role, link.rank)
        self.instruments.set(
            "info",
            1,
            socket.gethostname(),
            device_name(link.device),
            link.connector,
            str(link.spec.microbatches),
            version("sglang-afd"),
            version("sglang"),
        )
        self.reporter = Reporter(
            self.instruments,
            self.clock,
            link.spec.topology,
            link.spec.capacity,
            (self._report_silences, *sources),
        )
        self.reporter.start()

    def text(self) -> bytes:
        """All metrics as of now, in Prometheus's format."""
        self.reporter.report()
        return self.instruments.text()

    def close(self) -> None:
        self.reporter.stop()

    def _hear_waits(self, connector: object) -> None:
        if isinstance(connector, TellsWaits):
            connector.set_on_wait(self.clock.waited)

    def _report_silences(self, instruments: Instruments) -> None:
        for peer, silent_s in self._link.silences().items():
            instruments.set("peer_heartbeat_age_seconds", silent_s, peer)


class AttnMeter(Meter):
    """Of an attention rank; `tokens` is its count on the device."""

    def __init__(self, link: Link, tokens: torch.Tensor) -> None:
        self._tokens = tokens
        self._on_host = torch.zeros_like(tokens, device="cpu", pin_memory=tokens.is_cuda)
        super().__init__("attn", link, self._report_tokens)

    def wrap(self, connector: AttnConnector) -> AttnConnector:
        self._hear_waits(connector)
        return TimedAttn(connector, self.clock) if self._times_host else connector

    def begin(self, plan: StepPlan) -> None:
        self.clock.begin(plan)
        if plan.mode != "capture":  # a graph would replay the copy
            self._on_host.copy_(self._tokens, non_blocking=True)

    def _report_tokens(self, instruments: Instruments) -> None:
        counted = self._on_host if self._tokens.is_cuda else self._tokens
        instruments.count_to("tokens_total", int(counted))


class FFNMeter(Meter):
    """Of an FFN rank; `rows` is what it counted so far, as its heartbeats say."""

    def __init__(self, link: Link, rows: Callable[[], int]) -> None:
        topology = link.spec.topology
        self._read_rows = rows
        self._expert_rows = ExpertRows(link.moe_layers, topology.slots_per_rank, link.device)
        self._experts = topology.expert_range(link.rank)
        super().__init__("ffn", link, self._report_rows)

    def wrap(self, connector: FFNConnector[Any]) -> FFNConnector[Any]:
        self._hear_waits(connector)
        counted = CountedFFN(connector, self._expert_rows)
        # The counting is inside the receive: on a CPU it takes microseconds of it.
        return TimedFFN(counted, self.clock) if self._times_host else counted

    def begin(self, plan: StepPlan) -> None:
        self.clock.begin(plan)

    def step_enqueued(self) -> None:
        self._expert_rows.step_enqueued()

    def _report_rows(self, instruments: Instruments) -> None:
        instruments.count_to("rows_total", self._read_rows())
        table = self._expert_rows.read()
        for place, expert in enumerate(self._experts):
            total = sum(row[place] for row in table)
            instruments.count_to("expert_rows_total", total, str(expert))
        for layer, row in enumerate(table):
            ours = row[: len(self._experts)]
            if sum(ours):
                imbalance = max(ours) * len(ours) / sum(ours)
                instruments.set("expert_imbalance", imbalance, str(layer))


def device_name(device: torch.device) -> str:
    """`cpu`, or a GPU's name with its index, for people."""
    if device.type == "cpu":
        return "cpu"
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"{device.type}:{index} {torch.cuda.get_device_name(index)}"
