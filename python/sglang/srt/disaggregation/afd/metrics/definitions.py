"""Every metric of this package: name, kind, labels, meaning. Imports neither torch nor Prometheus.

docs/metrics.md is generated from `METRICS`, and a test checks the dashboard against it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sglang.srt.disaggregation.afd.messages import Role

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "sglang:afd_"
ATTN: tuple[Role, ...] = ("attn",)
FFN: tuple[Role, ...] = ("ffn",)
BOTH: tuple[Role, ...] = ("attn", "ffn")
COMMON_LABELS = ("role", "rank")

# Seconds, about three per decade: one layer's send on a GPU to a prefill in rounds on a CPU.
SECONDS = (
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
)
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Metric(NamedTuple):
    """One metric; in Prometheus it has `PREFIX` before its name and `COMMON_LABELS` too.

    Attributes:
        roles: of the ranks that have it.
        labels: beside the common ones.
        devices: where it has values.
        buckets: upper bounds, of a histogram.
    """

    name: str
    kind: Kind
    roles: tuple[Role, ...]
    labels: tuple[str, ...]
    help: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _times(name: str, roles: tuple[Role, ...], help_: str) -> Metric:
    """A histogram of host seconds in each step. A GPU's host only enqueues, so it has none."""
    return Metric(name, "histogram", roles, ("mode",), help_, ("cpu",), SECONDS)


METRICS = (
    Metric(
        "info",
        "gauge",
        BOTH,
        ("host", "device", "connector", "microbatches", "afd_version", "sglang_version"),
        "Always 1; the labels say what runs where.",
    ),
    Metric(
        "steps_total",
        "counter",
        BOTH,
        ("mode", "graph", "reason"),
        "Steps by mode of the plan; `graph` is hit or miss, and `reason` why a miss is one: "
        "prefill, warmup, capture, disabled (no graph was captured), too_large (beyond the largest "
        "graph), other.",
    ),
    Metric(
        "rounds_total", "counter", BOTH, (), "Rounds of all steps; equal to steps if none split."
    ),
    Metric(
        "tokens_total",
        "counter",
        ATTN,
        (),
        "Tokens that left for at least one expert, counted in the first MoE layer.",
    ),
    Metric(
        "rows_total",
        "counter",
        FFN,
        (),
        "Rows with an expert here, counted in the first MoE layer. A token is one row on every FFN "
        "rank that owns one of its experts.",
    ),
    Metric(
        "capacity_use",
        "histogram",
        ATTN,
        (),
        "Tokens of this rank in the first round of a step, as a fraction of the capacity.",
        buckets=FRACTIONS,
    ),
    Metric(
        "expert_rows_total",
        "counter",
        FFN,
        ("expert",),
        "Rows of each expert, by its id within a layer, summed over the MoE layers.",
    ),
    Metric(
        "expert_imbalance",
        "gauge",
        FFN,
        ("layer",),
        "Rows of the busiest expert of this rank over the mean of its experts, since the start.",
    ),
    _times("step_seconds", BOTH, "A step from its plan to the end of its last transfer."),
    _times("dispatch_seconds", ATTN, "Time per step to hand tokens to the connector."),
    _times("combine_wait_seconds", ATTN, "Time per step in which results were waited for."),
    _times(
        "dispatch_wait_seconds",
        FFN,
        "Time per step in which tokens were waited for, attention's own work included.",
    ),
    _times("expert_seconds", FFN, "Time per step in the experts' GEMMs."),
    _times("send_seconds", FFN, "Time per step to hand results to the connector."),
    Metric(
        "peer_wait_seconds_total",
        "counter",
        BOTH,
        ("peer",),
        "Time in which this peer was waited for. Peers are waited for in rank order, so what two "
        "slow ones share is the first one's.",
        ("cpu",),
    ),
    Metric(
        "straggler_steps_total",
        "counter",
        BOTH,
        ("peer",),
        "Steps that waited several times longer than usual, by the peer they waited for most.",
        ("cpu",),
    ),
    Metric(
        "peer_heartbeat_age_seconds",
        "gauge",
        BOTH,
        ("peer",),
        "Time since the peer's last sign of life; attention rank 0 hears all ranks, they hear it.",
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}


def of_role(role: Role) -> tuple[Metric, ...]:
    return tuple(metric for metric in METRICS if role in metric.roles)
