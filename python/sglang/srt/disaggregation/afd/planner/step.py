"""The arithmetic of a decode step: the identity, the hidden-FFN predictor, and the pipeline.

Times are seconds. M and N count ranks; a post that counts nodes of k GPUs is converted first
(`ranks`). Nothing here knows a model or a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import checks


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """One colocated decode step, split three ways.

    Attributes:
        fmha_s: attention kernels, which read the KV cache; grows with batch and context.
        dense_s: projections, norms, router, shared experts, head: paid per microbatch.
        moe_s: routed experts, with their all-to-all.
        batch: requests per rank.
    """

    fmha_s: float
    dense_s: float
    moe_s: float
    batch: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("FMHA", self.fmha_s), ("dense", self.dense_s), ("MoE", self.moe_s)):
            checks.number(f"{name} time of the colocated step", value, 0, 3600, "seconds")
        if not self.total_s > 0:
            raise AFDConfigError("the colocated step takes no time; give its three parts in ms")
        checks.number("batch of the colocated step", self.batch, 1e-9, 1e7)

    @property
    def total_s(self) -> float:
        return self.fmha_s + self.dense_s + self.moe_s


def ranks(nodes: int, gpus_per_node: int) -> int:
    """Ranks of `nodes` nodes, for figures that count nodes."""
    return checks.count("nodes", nodes) * checks.count("GPUs per node", gpus_per_node)


def ffn_tax(attn_ranks: int, ffn_ranks: int) -> float:
    """Share of the GPUs that hold no requests."""
    _ranks(attn_ranks, ffn_ranks)
    return ffn_ranks / (attn_ranks + ffn_ranks)


def speedup(batch_ratio: float, attn_ranks: int, ffn_ranks: int, time_ratio: float) -> float:
    """The identity: throughput per GPU, AFD over colocated. Exact, whatever the hardware.

    Args:
        batch_ratio: B_afd / B_colo, requests per rank.
        time_ratio: T_colo / T_afd, of a whole step.
    """
    _ranks(attn_ranks, ffn_ranks)
    checks.number("B_afd/B_colo", batch_ratio, 1e-6, 1e6)
    checks.number("T_colo/T_afd", time_ratio, 1e-6, 1e6)
    return batch_ratio * attn_ranks / (attn_ranks + ffn_ranks) * time_ratio


def hidden_step_s(colo: Decomposition, batch_ratio: float, microbatches: int) -> float:
    """T_afd while the FFN side hides behind attention: (B_afd/B_colo) T_FMHA + m T_dense.

    Valid while a microbatch is away no longer than attention works on the others
    (`Stage.regime`); what is away then costs nothing.
    """
    checks.number("B_afd/B_colo", batch_ratio, 1e-6, 1e6)
    _microbatches(microbatches)
    return batch_ratio * colo.fmha_s + microbatches * colo.dense_s


def invert(
    afd_speedup: float,
    moved_moe_speedup: float,
    batch_ratio: float,
    attn_ranks: int,
    ffn_ranks: int,
    microbatches: int,
) -> Decomposition:
    """Shares of a colocated step (total 1) from two published ratios.

    Solves the identity with the hidden-FFN predictor, and `projection`, for the three shares.

    Args:
        afd_speedup: AFD over colocated.
        moved_moe_speedup: projection with the MoE part on another accelerator, 1 / (1 - MoE).
    Raises:
        AFDConfigError: no shares between 0 and 1 satisfy both, or B_afd/B_colo equals m, where
            FMHA and dense cannot be told apart.
    """
    checks.number("speed-up", afd_speedup, 1e-3, 1e3)
    checks.number("projection", moved_moe_speedup, 1, 1e3)
    _microbatches(microbatches)
    if abs(batch_ratio - microbatches) < 1e-9:
        raise AFDConfigError(
            f"B_afd/B_colo {batch_ratio:g} equals m, so FMHA and dense scale alike and one pair of "
            "ratios cannot separate them; use another point"
        )
    afd_step = speedup(batch_ratio, attn_ranks, ffn_ranks, 1.0) / afd_speedup
    stay = 1 / moved_moe_speedup
    fmha = (microbatches * stay - afd_step) / (microbatches - batch_ratio)
    dense = stay - fmha
    if min(fmha, dense) < 0:
        raise AFDConfigError(
            f"speed-up {afd_speedup:g} and projection {moved_moe_speedup:g} contradict each other: "
            f"FMHA would be {fmha:.3f} and dense {dense:.3f} of the step"
        )
    return Decomposition(fmha_s=fmha, dense_s=dense, moe_s=1 - stay)


class Projection(NamedTuple):
    """Throughput over colocated, per attention GPU, with parts on another accelerator.

    The FFN tax is gone, since no GPU is spent; the batch cancels, since both sides of what is
    left grow with it. The accelerators themselves are not counted.
    """

    moe_moved: float
    dense_moved_too: float


def project(colo: Decomposition) -> Projection:
    """FFN on another accelerator class, both transfers hidden."""
    if colo.fmha_s == 0:
        raise AFDConfigError("FMHA takes no time, so a projection without the rest is unbounded")
    return Projection(
        colo.total_s / (colo.fmha_s + colo.dense_s),
        colo.total_s / colo.fmha_s,
    )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One MoE layer and microbatch of an AFD step.

    Attributes:
        attn_s: T_a, attention and dense work.
        expert_s: T_e, routed experts on the FFN ranks.
        link_s: T_c, one direction of the link.
        layers: L, MoE layers.
        microbatches: m.
    """

    attn_s: float
    expert_s: float
    link_s: float
    layers: int
    microbatches: int

    def __post_init__(self) -> None:
        checks.number("T_a", self.attn_s, 1e-12, 3600, "seconds")
        checks.number("T_e", self.expert_s, 0, 3600, "seconds")
        checks.number("T_c", self.link_s, 0, 3600, "seconds")
        checks.count("layers", self.layers)
        _microbatches(self.microbatches)

    @property
    def away_s(self) -> float:
        """From the last attention kernel of a microbatch to the first of its next layer."""
        return self.expert_s + 2 * self.link_s

    @property
    def round_s(self) -> float:
        """One microbatch through one layer, alone: T_a + T_e + 2 T_c."""
        return self.attn_s + self.away_s

    @property
    def period_s(self) -> float:
        """Time between two microbatches at the busiest place: T_f.

        Attention, experts and each direction of the link take one microbatch at a time, and a
        microbatch cannot be in two layers at once.
        """
        return max(self.attn_s, self.expert_s, self.link_s, self.round_s / self.microbatches)

    @property
    def step_s(self) -> float:
        """The whole step: (T_a + T_e + 2 T_c) + T_f (m L - 1)."""
        return self.round_s + self.period_s * (self.microbatches * self.layers - 1)

    @property
    def slack(self) -> float:
        """Room before the FFN side shows, as a share of what can hide it; negative: it shows.

        Hidden means T_e + 2 T_c <= (m - 1) T_a.
        """
        cover = (self.microbatches - 1) * self.attn_s
        return 1 - self.away_s / cover if cover else -1.0

    @property
    def binds(self) -> str:
        """What sets the step: attention, experts, link, or the round trip of a microbatch."""
        named = {
            "attention": self.attn_s,
            "experts": self.expert_s,
            "link": self.link_s,
            "round trip": self.round_s / self.microbatches,
        }
        return max(named, key=lambda name: named[name])

    @property
    def regime(self) -> str:
        return "hidden" if self.slack >= 0 else "exposed"


class Conditions(NamedTuple):
    """MegaScale-Infer's three (arXiv 2504.02263), and its estimate of a step.

    Attributes:
        balanced: T_a is about T_e (within `tolerance`).
        link_shorter: T_c < T_f, with T_f the longer of T_a and T_e.
        enough_microbatches: m T_f >= 2 (T_f + T_c).
        step_s: (T_a + T_e + 2 T_c) + T_f (m L - 1), which stands on the last two.
    """

    balanced: bool
    link_shorter: bool
    enough_microbatches: bool
    step_s: float


def conditions(stage: Stage, tolerance: float = 0.1) -> Conditions:
    """MegaScale-Infer's conditions for a gap-free pipeline."""
    longer = max(stage.attn_s, stage.expert_s)
    return Conditions(
        abs(stage.attn_s - stage.expert_s) <= tolerance * longer,
        stage.link_s < longer,
        stage.microbatches * longer >= 2 * (longer + stage.link_s),
        stage.round_s + longer * (stage.microbatches * stage.layers - 1),
    )


def stage_budget_s(tokens_per_s: float, layers: int, stages: int) -> float:
    """Time of one pipeline stage in one layer if each request is to get `tokens_per_s`."""
    checks.number("tokens per second", tokens_per_s, 1e-3, 1e6)
    return 1 / tokens_per_s / checks.count("layers", layers) / checks.count("stages", stages)


def _ranks(attn_ranks: int, ffn_ranks: int) -> None:
    checks.count("M, attention ranks", attn_ranks, high=10**6)
    checks.count("N, FFN ranks", ffn_ranks, high=10**6)


def _microbatches(microbatches: int) -> None:
    checks.count("m, microbatches", microbatches, high=64)
