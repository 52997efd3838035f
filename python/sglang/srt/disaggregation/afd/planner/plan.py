"""Chooses: the best AFD layout, the best colocated one, and which of them to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import capacity, checks, layout
from sglang.srt.disaggregation.afd.planner.estimate import Cost
from sglang.srt.disaggregation.afd.planner.layout import Layout

# Below this lead a prediction does not decide: the roofline is no better than that.
MARGIN = 1.1
# What upstream's wide expert parallelism runs on.
COLOCATED_LINK = "deepep"
MICROBATCHES = (1, 2)
# A model "fits one GPU" if shedding its experts would not even double the batch.
_FITS = 2.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user wants.

    Attributes:
        gpus: GPUs to use.
        context: tokens of a request, prompt and output, at its longest.
        slo_s: longest decode step, None for no limit.
        connectors: names to choose from.
        microbatches: numbers to choose from.
        attn_ranks, ffn_ranks: M and N if they are given.
        whole: use all GPUs in one layout instead of several copies of a smaller one.
    """

    gpus: int
    context: int
    slo_s: float | None = None
    connectors: tuple[str, ...] = ()
    microbatches: tuple[int, ...] = MICROBATCHES
    attn_ranks: int | None = None
    ffn_ranks: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        checks.count("--gpus", self.gpus, high=10**5)
        checks.count("--context", self.context, high=10**8)
        if self.slo_s is not None:
            checks.number("--slo-ms", self.slo_s * 1e3, 1e-3, 1e6, "ms")
        for microbatches in self.microbatches:
            if microbatches not in MICROBATCHES:
                raise AFDConfigError(f"--microbatches {microbatches}: this version runs 1 or 2")
        for flag, value in (
            ("--attn-ranks", self.attn_ranks),
            ("--ffn-ranks", self.ffn_ranks),
        ):
            if value is not None:
                checks.count(flag, value, high=10**5)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
        best: the best AFD layout, None if none is possible.
        colocated: the best colocated layout, None if none is possible.
        others: further AFD layouts, best first, one per M:N.
        reasons: why not to run AFD, empty if it should be run.
        notes: what the user should know.
    """

    cost: Cost
    request: Request
    best: Layout | None
    colocated: Layout | None
    others: tuple[Layout, ...]
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Throughput per GPU of `best` over `colocated`."""
        if self.best is None or self.colocated is None:
            return None
        return self.best.throughput / self.colocated.throughput


def default_connectors() -> tuple[str, ...]:
    """GPU connectors that this environment could start."""
    return registry.available("cuda")


def make(cost: Cost, request: Request) -> Plan:
    """Price every layout and compare.

    Raises:
        AFDConfigError: nothing fits at all, or a connector without numbers.
    """
    found = sorted(afd_layouts(cost, request), key=lambda option: -option.throughput)
    best_of = {(option.attn_ranks, option.ffn_ranks): option for option in reversed(found)}
    best = found[0] if found else None
    beside = max(
        colocated_layouts(cost, request), key=lambda option: option.throughput, default=None
    )
    if best is None and beside is None:
        raise AFDConfigError(_nothing(cost, request))
    others = sorted(best_of.values(), key=lambda option: -option.throughput)
    plan = Plan(cost=cost, request=request, best=best, colocated=beside, others=tuple(others))
    return replace(plan, reasons=tuple(_reasons(plan)), notes=tuple(_notes(plan)))


def afd_layouts(cost: Cost, request: Request) -> Iterator[Layout]:
    """Every AFD layout of the request that fits."""
    for attn_ranks, ffn_ranks in pairs(cost, request):
        for name in request.connectors or default_connectors():
            wire = cost.estimates.link(name, cost.hardware)
            for microbatches in request.microbatches:
                option = layout.afd(
                    cost,
                    request.context,
                    attn_ranks,
                    ffn_ranks,
                    microbatches,
                    wire,
                    request.slo_s,
                )
                if option is not None:
                    yield option


def colocated_layouts(cost: Cost, request: Request) -> Iterator[Layout]:
    """One GPU alone, and every width of expert parallelism that divides the GPUs."""
    wire = cost.estimates.link(COLOCATED_LINK, cost.hardware)
    for ep in _divisors(min(request.gpus, 10**4), request.gpus):
        if ep > cost.hardware.domain_gpus:
            continue
        option = layout.colocated(cost, request.context, ep, wire, request.slo_s)
        if option is not None:
            yield option


def pairs(cost: Cost, request: Request) -> Iterator[tuple[int, int]]:
    """M and N to try: all of the GPUs, or equal parts of them, within one link domain.

    Beyond one host, each host serves one role, since a command starts one role there.
    """
    host, domain = cost.hardware.host_gpus, cost.hardware.domain_gpus
    if request.attn_ranks is not None and request.ffn_ranks is not None:
        yield request.attn_ranks, request.ffn_ranks
        return
    for world in _divisors(request.gpus, request.gpus):
        if world < 2 or world > domain or (world > host and world % host):
            continue
        if request.whole and world < request.gpus:
            continue
        unit = host if world > host else 1
        for ffn_ranks in range(unit, world, unit):
            attn_ranks = world - ffn_ranks
            if request.attn_ranks in (None, attn_ranks) and request.ffn_ranks in (None, ffn_ranks):
                yield attn_ranks, ffn_ranks


def _divisors(limit: int, number: int) -> list[int]:
    return [width for width in range(1, limit + 1) if number % width == 0]


def _reasons(plan: Plan) -> Iterator[str]:
    """Why not AFD."""
    cost, context = plan.cost, plan.request.context
    if plan.best is None:
        yield f"no AFD layout fits: {_nothing(cost, plan.request)}"
        return
    alone = cost.colocated_room(context, 1)
    expanded = cost.attn_room(context).batch
    if alone.batch and expanded < _FITS * alone.batch:
        yield (
            f"the model fits one GPU: {alone.weights / 1e9:.0f} of "
            f"{cost.hardware.memory_bytes / 1e9:.0f} GB, with room for {alone.batch} requests "
            f"beside it, against {expanded} on an attention rank; run one copy per GPU"
        )
    if plan.colocated is not None and plan.best.throughput <= plan.colocated.throughput:
        yield (
            f"colocated {plan.colocated.name} is predicted at {plan.colocated.throughput:.0f} "
            f"tokens/s/GPU, {plan.best.name} at {plan.best.throughput:.0f}"
        )


def _notes(plan: Plan) -> Iterator[str]:
    """What the prediction leaves open, and what the command needs."""
    best = plan.best
    if best is None:
        return
    if plan.speedup is not None and 1 < plan.speedup < MARGIN:
        yield (
            f"a lead of {plan.speedup:.2f} is within the error of the estimate: measure both, then "
            "pass the colocated step with --step-ms"
        )
    if best.microbatches == 2:
        yield "two microbatches use SGLang's two-batch overlap, which this version has not measured"
    if best.connector == "deepep":
        yield "connector deepep needs the package deep_ep, and serving over it is not tested"
    if best.gpus > 2:
        yield (
            f"connector {best.connector} was timed between two GPUs; what each further rank adds "
            f"({best.connector}.rank_us in `list`) is not"
        )
    longest = plan.cost.model.max_context
    if longest is not None and plan.request.context > longest:
        yield f"--context {plan.request.context} exceeds the model's {longest} tokens"
    if best.gpus < plan.request.gpus:
        copies = plan.request.gpus // best.gpus
        yield f"run {copies} copies of this layout, {best.gpus} GPUs each"
    if best.gpus > plan.cost.hardware.domain_gpus:
        yield (
            f"{best.gpus} GPUs exceed one link domain of {plan.cost.hardware.domain_gpus}: the "
            "times assume the domain's link everywhere and are too good"
        )


def _nothing(cost: Cost, request: Request) -> str:
    """Why nothing fits, with what would."""
    if request.gpus > 1 and next(pairs(cost, request), None) is None:
        wanted = [ranks or "any" for ranks in (request.attn_ranks, request.ffn_ranks)]
        return (
            f"M = {wanted[0]} and N = {wanted[1]} are no layout of {request.gpus} GPUs of "
            f"{cost.hardware.name}; leave one of them out"
        )
    fewest = capacity.fewest_ffn_ranks(cost.model, cost.hardware, cost.estimates.ffn_share)
    room = cost.attn_room(request.context)
    gigabytes = cost.model.routed_weight_bytes / 1e9
    if room.batch < 1:
        return (
            f"an attention rank of {cost.hardware.name} has {max(0.0, room.kv) / 1e9:.0f} GB for "
            f"KV and one request of {request.context} tokens takes {room.request / 1e9:.1f} GB; "
            "lower --context, or take larger GPUs"
        )
    if fewest is None or fewest + 1 > request.gpus:
        needed = "more FFN ranks than experts" if fewest is None else f"{fewest} FFN ranks"
        return (
            f"{gigabytes:.0f} GB of routed experts need {needed} of {cost.hardware.name}, and "
            f"--gpus is {request.gpus}; raise --gpus, or take a quantised checkpoint"
        )
    if request.slo_s is not None:
        return f"no layout decodes a step in --slo-ms {request.slo_s * 1e3:g}; raise it"
    return "the given M and N do not hold the experts; raise --ffn-ranks"
