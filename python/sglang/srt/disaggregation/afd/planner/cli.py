"""The command line: plan, sweep, project, compare, list. Exit code 2 for what the user can mend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import (
    checks,
    compare,
    estimate,
    hardware,
    layout,
    models,
    offload,
    plan,
    plot,
    report,
    results,
    step,
    sweep,
)
from sglang.srt.disaggregation.afd.planner.estimate import Cost
from sglang.srt.disaggregation.afd.planner.step import Decomposition

_MOST_RATIOS = 500


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    args = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], list[str]] = args.command
    try:
        print("\n".join(command(args)))
    except AFDConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough; nothing is left to flush to.
        sys.stdout = None
    return 0


def _plan(args: argparse.Namespace) -> list[str]:
    cost = _cost(args)
    request = plan.Request(
        gpus=args.gpus,
        context=args.context,
        slo_s=None if args.slo_ms is None else args.slo_ms / 1e3,
        connectors=tuple(args.connector or ()),
        microbatches=tuple(args.microbatches or plan.MICROBATCHES),
        attn_ranks=args.attn_ranks,
        ffn_ranks=args.ffn_ranks,
    )
    path = args.model_path or cost.model.path
    return [report.plan_text(plan.make(cost, request), path)]


def _sweep(args: argparse.Namespace) -> list[str]:
    cost = _cost(args)
    connector = args.connector or plan.default_connectors()[0]
    wire = cost.estimates.link(connector, cost.hardware)
    slo_s = None if args.slo_ms is None else checks.number("--slo-ms", args.slo_ms, 1e-3, 1e6) / 1e3
    checks.count("--context", args.context)
    pairs = [(m, n) for m in args.attn_ranks for n in args.ffn_ranks]
    if len(pairs) > _MOST_RATIOS:
        raise AFDConfigError(f"{len(pairs)} ratios to sweep; give at most {_MOST_RATIOS}")
    points = sweep.sweep(cost, args.context, pairs, args.microbatches, wire, slo_s)
    most = max(m + n for m, n in pairs)
    request = plan.Request(gpus=most, context=args.context, slo_s=slo_s)
    beside = max(
        (o for w in _powers(most) if (o := _colocated(cost, request, w)) is not None),
        key=lambda option: option.throughput,
        default=None,
    )
    name = f"{cost.model.name}, {cost.hardware.name}, context {args.context}"
    lines = [f"{name}, m = {args.microbatches}, {connector}", *report.columns(sweep.table(points))]
    if beside is not None:
        lines.append(
            f"colocated {beside.name}: batch {beside.batch}, {beside.step_s * 1e3:.2f} ms, "
            f"{beside.throughput:.0f} tok/s/GPU"
        )
    if args.out is not None:
        levels = [] if beside is None else [(f"colocated {beside.name}", beside)]
        curves = [(f"AFD, m = {args.microbatches}", points)]
        plot.draw(plot.sweep_panels(curves, levels), args.out, name)
        lines.append(f"wrote {args.out}")
    return lines


def _project(args: argparse.Namespace) -> list[str]:
    lines = []
    if args.step_ms is not None and args.model is None:
        parts = _typed_step(args)
        batch = args.batch or args.step_batch or 1
    else:
        cost = _cost(args)
        room = cost.colocated_room(args.context, args.ep)
        if room.batch < 1:
            raise AFDConfigError(
                f"--ep {args.ep}: not one request fits beside the weights on {cost.hardware.name}"
            )
        wire = cost.estimates.link(plan.COLOCATED_LINK, cost.hardware)
        parts = cost.colocated(room.batch, args.context, args.ep, wire)
        batch = args.batch or cost.attn_room(args.context).batch
        lines.append(f"colocated EP{args.ep}, batch {room.batch}, {parts.total_s * 1e3:.2f} ms")
    shares = [part / parts.total_s for part in (parts.fmha_s, parts.dense_s, parts.moe_s)]
    lines.append("shares: FMHA {:.3f}, dense {:.3f}, MoE {:.3f}".format(*shares))
    projection = step.project(parts)
    lines.append(f"MoE on the accelerator: {projection.moe_moved:.2f} x colocated per GPU")
    lines.append(f"dense moved too: {projection.dense_moved_too:.2f} x (1 / FMHA share)")
    lines.append("both count GPUs only, and hide the accelerator and the transport entirely")
    if args.accelerator is not None:
        if args.model is None:
            raise AFDConfigError("--accelerator needs --model, for the size of its experts")
        machine = hardware.load(args.accelerator)
        model = _model(args)
        priced = offload.offload(model, machine, args.units, args.gpus, batch, args.element_bytes)
        units = args.units or priced.units
        lines.append(
            f"{machine.title}: experts need {priced.units} unit(s), {units} used; "
            f"{args.gpus} GPUs with {batch} requests each"
        )
        lines.append(
            f"MoE at the peak: {priced.moe_s * 1e3:.3f} ms per step (all active parameters: "
            f"{priced.active_s * 1e3:.3f} ms)"
        )
        lines.append(f"transport: {priced.transport_bytes / 1e6:.0f} MB per GPU and step")
        if args.units is not None and args.units < priced.units:
            lines.append(f"note: {args.units} unit(s) do not hold the experts")
    return lines


def _compare(args: argparse.Namespace) -> list[str]:
    lines = []
    for path in args.result:
        result = results.load(path)
        where = f"--result {path}"
        lines.append(f"{path.name}: {result['bench']}")
        if any("step_ms" in row for row in result["rows"]):
            lines += compare.decode(result, where)
        else:
            machine = compare.machine(result, args.hardware)
            lines += compare.links(result, where, machine, estimate.load(_overrides(args)))
    return lines


def _list(args: argparse.Namespace) -> list[str]:
    lines = ["models"]
    for name in models.names():
        shape = models.load(name)
        lines.append(
            f"  {name}: {shape.total_params / 1e9:.1f} B, {shape.active_params / 1e9:.1f} B active; "
            f"{shape.source}"
        )
    lines.append("hardware")
    for name in hardware.names():
        machine = hardware.load(name)
        lines.append(f"  {name}: {machine.title}")
        lines += [
            f"    {key} = {number.value:g}: {number.source}"
            for key, number in machine.numbers.items()
        ]
    known = estimate.load(_overrides(args))
    lines.append("estimates")
    for key, source in known.sources.items():
        lines.append(f"  {key} = {getattr(known, key):g}: {source}")
    lines += [f"  link {name}: {entry['source']}" for name, entry in known.links.items()]
    return lines


def _model(args: argparse.Namespace) -> models.ModelShape:
    return models.load(args.model, args.linear_bits, args.expert_bits, args.kv_bits)


def _cost(args: argparse.Namespace) -> Cost:
    if args.model is None or args.hardware is None:
        raise AFDConfigError("give --model and --hardware, or a measured step with --step-ms")
    checks.count("--context", args.context, high=10**8)
    cost = Cost(
        model=_model(args),
        hardware=hardware.load(args.hardware),
        estimates=estimate.load(_overrides(args)),
    )
    wire = cost.estimates.link(plan.COLOCATED_LINK, cost.hardware)
    if args.step_file is not None:
        if args.step_ms is not None:
            raise AFDConfigError("--step-file and --step-ms both give the colocated step; drop one")
        where = f"--step-file {args.step_file}"
        rows = results.decode_rows(results.load(args.step_file), where)
        return cost.calibrated(*results.measured_step(rows, where), wire)
    if args.step_ms is None:
        return cost
    typed = _typed_step(args)
    if args.step_batch is None:
        raise AFDConfigError("--step-ms needs --step-batch, the requests per rank that it ran with")
    context = args.step_context or args.context
    checks.count("--step-context", context, high=10**8)
    checks.count("--step-ep", args.step_ep, high=10**5)
    return cost.calibrated(typed, context, args.step_ep, wire)


def _typed_step(args: argparse.Namespace) -> Decomposition:
    cells = args.step_ms.split(",")
    try:
        fmha, dense, moe = (float(cell) for cell in cells)
    except ValueError as error:
        raise AFDConfigError(
            f"--step-ms {args.step_ms!r} must be three numbers, FMHA,DENSE,MOE in ms"
        ) from error
    batch = 1 if args.step_batch is None else checks.count("--step-batch", args.step_batch)
    return Decomposition(fmha_s=fmha / 1e3, dense_s=dense / 1e3, moe_s=moe / 1e3, batch=batch)


def _overrides(args: argparse.Namespace) -> dict[str, float]:
    found = {}
    for item in args.set or ():
        key, _, value = item.partition("=")
        try:
            found[key] = float(value)
        except ValueError as error:
            raise AFDConfigError(f"--set {item}: must be KEY=NUMBER") from error
    return found


def _colocated(cost: Cost, request: plan.Request, ep: int) -> layout.Layout | None:
    wire = cost.estimates.link(plan.COLOCATED_LINK, cost.hardware)
    return layout.colocated(cost, request.context, ep, wire, request.slo_s)


def _powers(highest: int) -> list[int]:
    return [1 << power for power in range(highest.bit_length()) if 1 << power <= highest]


def _ranks(text: str) -> list[int]:
    """`4`, `4,8,12` or `4:64:4` as a list."""
    try:
        if ":" in text:
            first, last, by = (int(part) for part in text.split(":"))
            return list(range(first, last + 1, by))
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a list like 4,8,12 nor a range like 4:64:4"
        ) from error
    if min(found, default=0) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: ranks start at 1")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="planner",
        allow_abbrev=False,
        description="Predict what attention-FFN disaggregation gains. See docs/planner.md.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = commands.add_parser("plan", allow_abbrev=False, help="best M:N, and whether to use it")
    _model_flags(made, required=True)
    made.add_argument("--gpus", type=int, required=True, help="GPUs to use")
    made.add_argument("--slo-ms", type=float, help="longest decode step; default no limit")
    made.add_argument(
        "--connector", action="append", help="may be repeated; default those installed here"
    )
    made.add_argument("--microbatches", type=int, action="append", help="1 or 2; default both")
    made.add_argument("--attn-ranks", type=int, help="M; default any")
    made.add_argument("--ffn-ranks", type=int, help="N; default any")
    made.add_argument("--model-path", help="for the printed command; default --model")
    made.set_defaults(command=_plan)

    swept = commands.add_parser("sweep", allow_abbrev=False, help="table and plot over M:N")
    _model_flags(swept, required=True)
    swept.add_argument("--attn-ranks", type=_ranks, required=True, help="M: 4,8,12 or 4:64:4")
    swept.add_argument("--ffn-ranks", type=_ranks, required=True, help="N, likewise")
    swept.add_argument("--microbatches", type=int, choices=plan.MICROBATCHES, default=2)
    swept.add_argument("--connector", help="default the first that is installed here")
    swept.add_argument("--slo-ms", type=float, help="longest decode step; default no limit")
    swept.add_argument("--out", type=Path, help="plot to this .svg or .png file")
    swept.set_defaults(command=_sweep)

    moved = commands.add_parser(
        "project", allow_abbrev=False, help="FFN on another accelerator class"
    )
    _model_flags(moved, required=False)
    moved.add_argument("--ep", type=int, default=4, help="width of the colocated step; default 4")
    moved.add_argument("--accelerator", help="hardware that runs the experts, e.g. lpx-rack")
    moved.add_argument("--units", type=int, help="of it; default as many as hold the experts")
    moved.add_argument("--gpus", type=int, default=72, help="attention GPUs; default 72")
    moved.add_argument("--batch", type=int, help="requests per GPU; default what fits")
    moved.add_argument(
        "--element-bytes", type=float, default=3.0, help="out and back per element; default 3"
    )
    moved.set_defaults(command=_project)

    compared = commands.add_parser("compare", allow_abbrev=False, help="predicted against measured")
    compared.add_argument("result", type=Path, nargs="+", help="files of benchmark/afd/results")
    compared.add_argument("--hardware", help="default what the file's GPUs call themselves")
    _set_flag(compared)
    compared.set_defaults(command=_compare)

    listed = commands.add_parser("list", allow_abbrev=False, help="every number and its source")
    _set_flag(listed)
    listed.set_defaults(command=_list)
    return parser


def _model_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--model", required=required, help="a known name, a folder with config.json, or a file"
    )
    parser.add_argument("--hardware", required=required, help="a known name or a .json file")
    parser.add_argument(
        "--context", type=int, default=8192, help="tokens per request; default 8192"
    )
    parser.add_argument("--linear-bits", type=float, help="bits of a linear weight")
    parser.add_argument("--expert-bits", type=float, help="bits of an expert weight")
    parser.add_argument("--kv-bits", type=float, help="bits of a KV element; default 16")
    parser.add_argument("--step-ms", metavar="FMHA,DENSE,MOE", help="a measured colocated step")
    parser.add_argument("--step-batch", type=int, help="its requests per rank")
    parser.add_argument("--step-context", type=int, help="its context; default --context")
    parser.add_argument("--step-ep", type=int, default=1, help="its EP width; default 1")
    parser.add_argument("--step-file", type=Path, help="a results file with such a step instead")
    _set_flag(parser)


def _set_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", metavar="KEY=NUMBER", help="replace an estimate; see `list`"
    )
