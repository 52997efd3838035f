"""What the planner prints: every term with its unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang.srt.disaggregation.afd.planner import command, link
from sglang.srt.disaggregation.afd.planner.capacity import Room
from sglang.srt.disaggregation.afd.planner.estimate import Cost
from sglang.srt.disaggregation.afd.planner.layout import Layout
from sglang.srt.disaggregation.afd.planner.plan import Plan

_OTHERS = 6


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def plan_text(plan: Plan, model_path: str) -> str:
    """The whole answer of `plan`."""
    lines = [*_question(plan), ""]
    if plan.best is not None:
        lines += ["AFD", *_indent(_afd(plan, plan.best)), ""]
    if plan.colocated is not None:
        lines += ["Colocated, best width", *_indent(_colocated(plan, plan.colocated)), ""]
    if plan.best is not None and plan.colocated is not None:
        lines += ["AFD over colocated, per GPU", *_indent(_identity(plan.best, plan.colocated)), ""]
    if len(plan.others) > 1:
        lines += ["Ratios, best first", *_indent(_ratios(plan)), ""]
    lines += _verdict(plan, model_path)
    return "\n".join(lines)


def _question(plan: Plan) -> Iterator[str]:
    cost, request = plan.cost, plan.request
    model, hardware = cost.model, cost.hardware
    slo = "none" if request.slo_s is None else f"{request.slo_s * 1e3:g} ms per step"
    yield (
        f"{model.name} on {request.gpus} x {hardware.title}; context {request.context}; "
        f"limit: {slo}"
    )
    yield (
        f"model: {model.total_params / 1e9:.1f} B parameters, {model.active_params / 1e9:.1f} B "
        f"active, {model.moe_layers} MoE layers of {model.experts} experts, top-{model.topk}; "
        f"{model.routed_weight_bytes / 1e9:.1f} GB routed, {model.attn_weight_bytes / 1e9:.1f} GB "
        f"of everything else; KV {model.kv_request_bytes(request.context) / 1e9:.2f} GB per request"
    )
    measured = (cost.fmha_scale, cost.dense_scale, cost.moe_scale) != (1, 1, 1)
    yield (
        f"times: measured step, scaled by {cost.fmha_scale:.2f} FMHA, {cost.dense_scale:.2f} "
        f"dense, {cost.moe_scale:.2f} MoE against the estimate"
        if measured
        else "times: estimated from sizes and hardware; --step-ms takes a measured step"
    )


def _room(room: Room, batch: int, limited_by: str) -> str:
    return (
        f"memory of a rank: {room.weights / 1e9:.1f} GB weights + {room.kv / 1e9:.1f} GB KV + "
        f"{room.reserve / 1e9:.1f} GB reserve; {room.batch} requests fit, {batch} run "
        f"(limited by {limited_by})"
    )


def _afd(plan: Plan, best: Layout) -> Iterator[str]:
    stage, cost = best.stage, plan.cost
    assert stage is not None
    yield (
        f"{best.name} (M = {best.attn_ranks} attention, N = {best.ffn_ranks} FFN ranks), "
        f"m = {best.microbatches}, connector {best.connector}"
    )
    yield _room(best.room, best.batch, best.limited_by)
    yield from _stage_terms(cost, plan.request.context, best)
    yield (
        f"away: T_e + 2 T_c = {stage.away_s * 1e6:.1f} us against (m - 1) T_a = "
        f"{(stage.microbatches - 1) * stage.attn_s * 1e6:.1f} us: {stage.regime}"
        + (f", {stage.slack:+.0%} from the boundary" if stage.microbatches > 1 else "")
    )
    yield (
        f"step: (T_a + T_e + 2 T_c) + T_f (m L - 1) = {stage.round_s * 1e6:.1f} us + "
        f"{stage.period_s * 1e6:.1f} us x {stage.microbatches * stage.layers - 1} = "
        f"{best.step_s * 1e3:.2f} ms; {stage.binds} binds"
    )
    yield f"throughput: {best.throughput:.0f} tokens/s per GPU, FFN ranks counted"


def _stage_terms(cost: Cost, context: int, best: Layout) -> Iterator[str]:
    stage, model = best.stage, cost.model
    assert stage is not None
    tokens = -(-best.batch // best.microbatches)
    fmha = cost.fmha_s(best.batch, context) * 1e3
    dense = cost.dense_s(tokens) * 1e3
    yield (
        f"T_a = {stage.attn_s * 1e6:.1f} us per layer and microbatch: FMHA {fmha:.2f} ms / (m L) + "
        f"dense {dense:.2f} ms / L"
    )
    yield f"T_e = {stage.expert_s * 1e6:.1f} us: {tokens * best.attn_ranks} tokens, routed evenly"
    wire = cost.estimates.link(best.connector, cost.hardware)
    moved = link.transfer(
        wire,
        model.hidden,
        model.experts,
        model.topk,
        tokens,
        best.attn_ranks,
        best.ffn_ranks,
    )
    yield (
        f"T_c = {stage.link_s * 1e6:.1f} us each way: {moved.copies:.2f} copies of a token "
        f"(one per {wire.copies}), {moved.dispatch_bytes / 1e6:.2f} MB out and "
        f"{moved.combine_bytes / 1e6:.2f} MB back at the busier end"
    )


def _colocated(plan: Plan, beside: Layout) -> Iterator[str]:
    parts = beside.parts
    assert parts is not None
    yield f"{beside.name}, {plan.request.gpus // beside.attn_ranks} copies; all-to-all: {beside.connector}"
    yield _room(beside.room, beside.batch, beside.limited_by)
    yield (
        f"step: FMHA {parts.fmha_s * 1e3:.2f} + dense {parts.dense_s * 1e3:.2f} + MoE "
        f"{parts.moe_s * 1e3:.2f} = {beside.step_s * 1e3:.2f} ms, nothing overlapped"
    )
    yield f"throughput: {beside.throughput:.0f} tokens/s per GPU"


def _identity(best: Layout, beside: Layout) -> Iterator[str]:
    batch = best.batch / beside.batch
    share = best.attn_ranks / best.gpus
    time = beside.step_s / best.step_s
    yield (
        f"B_afd/B_colo x M/(M+N) x T_colo/T_afd = {batch:.3f} x {share:.3f} x {time:.3f} = "
        f"{batch * share * time:.3f}"
    )


def _ratios(plan: Plan) -> list[str]:
    rows = [["layout", "m", "connector", "batch", "step ms", "tok/s/GPU", "regime", "binds"]]
    for option in plan.others[:_OTHERS]:
        assert option.stage is not None
        rows.append(
            [
                option.name,
                str(option.microbatches),
                option.connector,
                str(option.batch),
                f"{option.step_s * 1e3:.2f}",
                f"{option.throughput:.0f}",
                option.stage.regime,
                option.stage.binds,
            ]
        )
    return columns(rows)


def _verdict(plan: Plan, model_path: str) -> Iterator[str]:
    hardware = plan.cost.hardware
    for note in plan.notes:
        yield f"note: {note}"
    if not plan.reasons:
        assert plan.best is not None
        yield "verdict: run AFD"
        yield from command.launch(plan.best, hardware, model_path)
        return
    yield "verdict: don't run AFD here"
    for reason in plan.reasons:
        yield f"  because {reason}"
    if plan.colocated is not None:
        yield "instead:"
        yield from command.launch(plan.colocated, hardware, model_path)
    if plan.best is not None:
        yield "AFD all the same:"
        yield from command.launch(plan.best, hardware, model_path)


def _indent(lines: Sequence[str] | Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines]
