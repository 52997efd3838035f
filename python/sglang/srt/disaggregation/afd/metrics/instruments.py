"""The metrics of one rank as objects of prometheus_client.

On an attention rank they write to upstream's multiprocess folder, from which the API's /metrics
reads; on an FFN rank they live in this process.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.afd.messages import Role
from sglang.srt.disaggregation.afd.metrics import definitions


class Instruments:
    """What `definitions` lists for `role`, each with the labels of this rank filled in.

    Make it only once PROMETHEUS_MULTIPROC_DIR is as it should be: prometheus_client reads it
    when it is imported, which happens here.
    """

    def __init__(self, role: Role, rank: int) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.role: Role = role
        self.rank = rank
        # Not the global one: a model may be loaded twice in a process.
        self.registry = CollectorRegistry()
        self._own = {"role": role, "rank": str(rank)}
        self._made: dict[str, Any] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        for metric in definitions.of_role(role):
            labels = (*definitions.COMMON_LABELS, *metric.labels)
            common: dict[str, Any] = {"labelnames": labels, "registry": self.registry}
            if metric.kind == "counter":
                made: Any = Counter(metric.full_name, metric.help, **common)
            elif metric.kind == "gauge":
                made = Gauge(
                    metric.full_name, metric.help, multiprocess_mode="mostrecent", **common
                )
            else:
                made = Histogram(metric.full_name, metric.help, buckets=metric.buckets, **common)
            self._made[metric.name] = made

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count up. `labels` are the values of the metric's own labels, in their order."""
        if amount:
            self._child(name, labels).inc(amount)

    def count_to(self, name: str, total: float, *labels: str) -> None:
        """As `add`, for something that is counted elsewhere: `total` since the start."""
        last = self._counted.get((name, labels), 0)
        if total > last:
            self._counted[name, labels] = total
            self.add(name, total - last, *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        self._child(name, labels).set(value)

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._child(name, labels).observe(value)

    def text(self) -> bytes:
        """All values in Prometheus's text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self.registry))

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            own = dict(zip(definitions.BY_NAME[name].labels, labels, strict=True))
            child = self._children[name, labels] = self._made[name].labels(**self._own, **own)
        return child
