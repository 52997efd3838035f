"""Step times from sizes and hardware: a roofline with a handful of measured shares.

Rough by nature; a measured colocated step replaces its level (`Cost.calibrated`) and leaves only
the growth with batch, context and ranks to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import capacity, checks, link
from sglang.srt.disaggregation.afd.planner.hardware import Hardware
from sglang.srt.disaggregation.afd.planner.models import ModelShape
from sglang.srt.disaggregation.afd.planner.step import Decomposition, Stage

_BOUNDS = {
    "kv_read": (0.01, 1.0),
    "weight_read": (0.01, 1.0),
    "math": (0.01, 1.0),
    "dense_us": (0.0, 1e4),
    "experts_us": (0.0, 1e4),
    "kv_share": (0.05, 1.0),
    "ffn_share": (0.05, 1.0),
}
OF_LINK = ("round_trip_us", "rank_us", "link_share")


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The numbers of data/estimates.json, which says where each one is from.

    Attributes:
        kv_read, weight_read, math: shares of the hardware's peaks.
        dense_us, experts_us: microseconds per layer beside memory and arithmetic.
        kv_share, ffn_share: shares of memory, see `capacity`.
        links: entry of each connector.
        sources: by key.
    """

    kv_read: float
    weight_read: float
    math: float
    dense_us: float
    experts_us: float
    kv_share: float
    ffn_share: float
    links: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, str]

    def link(self, name: str, hardware: Hardware) -> link.Link:
        """Connector `name` on this hardware.

        Raises:
            AFDConfigError: there are no numbers for it.
        """
        if name not in self.links:
            raise AFDConfigError(
                f"--connector {name}: the planner has no numbers for it; it has them for "
                f"{', '.join(self.links)}"
            )
        return link.named(name, self.links[name], hardware.link_rate)


def load(overrides: Mapping[str, float] | None = None) -> Estimates:
    """The packaged numbers, with those that the user set.

    Raises:
        AFDConfigError: unknown key, or a value that cannot be right.
    """
    table = checks.read_json(checks.DATA / "estimates.json", "planner data")
    values = {key: float(table[key]["value"]) for key in _BOUNDS}
    sources = {key: str(table[key]["source"]) for key in _BOUNDS}
    links = {name: dict(entry) for name, entry in table["links"].items()}
    of_links = [f"{name}.{key}" for name in links for key in OF_LINK]
    checks.keys("--set", overrides or (), (), (*_BOUNDS, *of_links))
    for key, value in (overrides or {}).items():
        name, _, field = key.partition(".")
        if field:
            # Checked when the link is made.
            links[name][field] = value
            links[name]["source"] = "partly --set"
            continue
        values[key] = checks.number(f"--set {key}", value, *_BOUNDS[key])
        sources[key] = "--set"
    return Estimates(**values, links=links, sources=sources)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Times of one model on one machine, seconds.

    Attributes:
        fmha_scale, dense_scale, moe_scale: measured over estimated, 1 without a measurement.
    """

    model: ModelShape
    hardware: Hardware
    estimates: Estimates
    fmha_scale: float = 1.0
    dense_scale: float = 1.0
    moe_scale: float = 1.0

    def fmha_s(self, batch: float, context: int) -> float:
        """Attention kernels of one rank and step: reading KV, or its arithmetic if that is longer."""
        read = batch * self.model.kv_request_bytes(context)
        read /= self.hardware.memory_rate * self.estimates.kv_read
        flops = batch * self.model.attn.flops(context)
        # Attention works in BF16 whatever the weights are in.
        compute = flops / (self.hardware.bf16_rate * self.estimates.math)
        return self.fmha_scale * max(read, compute)

    def dense_s(self, tokens: float) -> float:
        """Everything else of an attention rank, one pass over all layers with `tokens` tokens."""
        model, rate = self.model, self.hardware.memory_rate * self.estimates.weight_read
        head = max(2.0, model.linear_bytes) * (model.head_params or model.embed_params)
        read = ((model.attn.params + model.other_params) * model.linear_bytes + head) / rate
        flops = 2 * tokens * model.dense_params
        compute = flops / (self.hardware.math_rate(model.linear_bytes) * self.estimates.math)
        overhead = model.layers * self.estimates.dense_us * 1e-6
        return self.dense_scale * (max(read, compute) + overhead)

    def experts_s(self, tokens: float, ranks: int) -> float:
        """Routed experts of one layer on the fullest of `ranks` ranks, without any link.

        Reading weights and arithmetic are added: grouped products of a few rows per expert
        overlap little of the two. Routing is taken as even.

        Args:
            tokens: of the whole pool, one microbatch.
        """
        model = self.model
        # Each token picks `topk` of `experts`; an expert that nobody picked is not read.
        touched = 1 - (1 - model.topk / model.experts) ** tokens
        most = -(-model.experts // ranks)
        read = most * touched * model.expert_params * model.expert_bytes
        read /= self.hardware.memory_rate * self.estimates.weight_read
        flops = 2 * tokens * model.topk * model.expert_params * most / model.experts
        compute = flops / (self.hardware.math_rate(model.expert_bytes) * self.estimates.math)
        return self.moe_scale * (read + compute + self.estimates.experts_us * 1e-6)

    def colocated(self, batch: float, context: int, ep: int, wire: link.Link) -> Decomposition:
        """A step of `ep` ranks that share the experts, each with its own requests, no overlap."""
        moe = self.experts_s(batch * ep, ep)
        if ep > 1:
            model = self.model
            moved = link.transfer(wire, model.hidden, model.experts, model.topk, batch, ep, ep)
            moe += self.moe_scale * (moved.dispatch_s + moved.combine_s)
        return Decomposition(
            fmha_s=self.fmha_s(batch, context),
            dense_s=self.dense_s(batch),
            moe_s=self.model.moe_layers * moe,
            batch=batch,
        )

    def stage(
        self,
        batch: int,
        context: int,
        attn_ranks: int,
        ffn_ranks: int,
        microbatches: int,
        wire: link.Link,
    ) -> Stage:
        """One layer and microbatch of an AFD step; `batch` requests per attention rank."""
        model = self.model
        tokens = -(-batch // microbatches)
        moved = link.transfer(
            wire, model.hidden, model.experts, model.topk, tokens, attn_ranks, ffn_ranks
        )
        attn = self.fmha_s(batch, context) / microbatches + self.dense_s(tokens)
        return Stage(
            attn_s=attn / model.moe_layers,
            expert_s=self.experts_s(tokens * attn_ranks, ffn_ranks),
            link_s=moved.one_way_s,
            layers=model.moe_layers,
            microbatches=microbatches,
        )

    def calibrated(self, measured: Decomposition, context: int, ep: int, wire: link.Link) -> Cost:
        """The same with its level set by a measured colocated step.

        The MoE factor also covers the measured all-to-all; in an AFD step it applies to the
        experts, while the link keeps its own numbers.

        Args:
            context, ep: of the measurement.
        Raises:
            AFDConfigError: a part that is more than 20 times off the estimate, which says that
                the measurement is of another model, machine, batch or unit.
        """
        guess = self.colocated(measured.batch, context, ep, wire)
        scales = {}
        for part in ("fmha", "dense", "moe"):
            found, expected = getattr(measured, f"{part}_s"), getattr(guess, f"{part}_s")
            if not expected / 20 <= found <= expected * 20:
                raise AFDConfigError(
                    f"--step-ms: the {part} part is {found * 1e3:g} ms where sizes and hardware "
                    f"suggest about {expected * 1e3:.3g} ms; check model, hardware, batch, "
                    "context and the unit"
                )
            scales[f"{part}_scale"] = found / expected
        return replace(self, **scales)

    def attn_room(self, context: int) -> capacity.Room:
        return capacity.attn_rank(self.model, self.hardware, context, self.estimates.kv_share)

    def colocated_room(self, context: int, ep: int) -> capacity.Room:
        return capacity.colocated_rank(
            self.model, self.hardware, context, ep, self.estimates.kv_share
        )
