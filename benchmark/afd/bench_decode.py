"""Steady-state decode at long context, without paying for a prefill: colocated and AFD side by side.

Requests are admitted with their KV slots allocated and filled, then windows of decode steps are
timed. All configurations are loaded first and then take turns, so that every repetition of one has
the others' as neighbours in time. `decode/configurations.py` explains their names.

    python benchmark/afd/bench_decode.py --shape Qwen3-30B-A3B-FP8 --batch 16,64,128 \
        --context 1024,4096 --connector nccl --out benchmark/afd/results/decode.json

`--table goal` holds AFD against its two sides and against colocated; `--table ablate` shows what graphs,
microbatches and the overlap scheduler buy on the connectors of `--connector`.

T_a is the period of an attention rank whose experts return their input; T_e that of an FFN rank
with every arrival preset, with the routing that the attention rank recorded. A step is timed from
the end of the step before it, with the host one step ahead of the device, as under SGLang's overlap
scheduler. `batch` counts requests per rank that holds KV cache.

A configuration that does not start is left out, and the exit code is 1. Rows are written after
every point. On a CPU: `--device cpu --shape tiny --connector gloo`, to see that all of it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gate
import results_file
from decode import arena, kernels, resident, shapes
from decode.configurations import COLOCATED, NULL, Configuration, Settings, parse
from decode.group import Group, GroupFailed
from decode.rows import Samples, row
from decode.steps import shape_of
from report import title

from sglang.srt.disaggregation.afd.planner import hardware

# What ranks find in their environment unless it is set: no minutes of kernel compilation for shapes
# that never come, and no complaint that neighbours take memory.
_ENVIRONMENT = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "SGLANG_AFD_BENCHMARK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_RESIDENT_RULE = f"kv_tokens: {resident.SHARE} of what weights leave of a GPU"
RESIDENT = "resident"
_TRACED_STEPS = 5


def table(name: str, connectors: Sequence[str]) -> list[str]:
    """Configurations of a table of the documentation."""
    if name == "ablate":
        kinds = ("mb1", "mb2", "mb1:eager")
        return [f"afd:{connector}:{kind}" for connector in connectors for kind in kinds]
    sides = ["colocated:1", "colocated:dp2ep2", "null:mb1", "null:mb2"]
    return [*sides, *(f"afd:{c}:mb{m}" for c in connectors for m in (1, 2))]


def main() -> int:
    args = _arguments()
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    run = Run(args)
    for number, wave in enumerate(args.configs.split(";")):
        try:
            run.wave(number, [name for name in wave.split(",") if name])
        except ValueError as error:
            sys.exit(f"bench_decode: {error}")
    return 1 if run.failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="Qwen3-30B-A3B-FP8", choices=shapes.names())
    parser.add_argument("--layers", type=int, help="cut the shape to so many layers")
    parser.add_argument(
        "--batch",
        default="16,64,128",
        help="requests per rank; resident: what the full model leaves room for, by layout",
    )
    parser.add_argument("--context", default="1024,4096", help="tokens in each request's KV cache")
    parser.add_argument("--table", choices=("goal", "ablate"), default="goal")
    parser.add_argument("--connector", default="nccl", help="of the table; several with commas")
    parser.add_argument(
        "--configs",
        help="comma-separated; `;` between those that are loaded together and those that follow",
    )
    parser.add_argument("--reps", type=int, default=5, help="windows per configuration and point")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per window")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument(
        "--ahead", default="1", help="steps that the host is ahead of the device; 1,0 to time both"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention-backend", help="default: flashinfer, on CPU torch_native")
    parser.add_argument("--kv-dtype", default="auto", help="as --kv-cache-dtype of SGLang")
    parser.add_argument(
        "--kv",
        choices=("shared", "own"),
        default="shared",
        help="one KV allocation per GPU for all configurations, or one each",
    )
    parser.add_argument("--trace", type=Path, help="write kernels of one step, as small JSON")
    parser.add_argument("--trace-point", default="", help="BATCHxCONTEXT; default: the last one")
    parser.add_argument(
        "--gate", type=Path, help="results of gate.py; default: the newest there are"
    )
    parser.add_argument("--ready-timeout", type=float, default=300, help="seconds to load")
    parser.add_argument("--step-timeout", type=float, default=60, help="seconds for one window")
    parser.add_argument("--budget", type=float, default=0, help="stop after so many seconds; 0: no")
    parser.add_argument("--server-flags", default="", help="more flags of SGLang, for all")
    parser.add_argument("--out", type=Path, help="JSON file of results")
    args = parser.parse_args()
    if args.warm_up < 1:
        parser.error("--warm-up must be at least 1: a step is timed from the end of another")
    if args.configs is None:
        args.configs = ",".join(table(args.table, args.connector.split(",")))
        args.ahead = "1,0" if args.table == "ablate" else args.ahead
    try:
        for name in args.configs.replace(";", ",").split(","):
            parse(name)
    except ValueError as error:
        parser.error(str(error))
    args.batches = [] if args.batch == RESIDENT else [int(b) for b in args.batch.split(",")]
    args.aheads = [int(steps) for steps in args.ahead.split(",")]
    args.contexts = [int(tokens) for tokens in args.context.split(",")]
    is_cpu = args.device == "cpu"
    args.attention_backend = args.attention_backend or ("torch_native" if is_cpu else "flashinfer")
    args.kv = "own" if is_cpu else args.kv
    args.trace = None if is_cpu else args.trace
    return args


class Run:
    """Rows of one command, measured wave by wave."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        self._traces: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="bench_decode_")
        model = shapes.write(args.shape, Path(self._folder.name) / args.shape, args.layers)
        # The routing is recorded, and the trace taken, with one admission that is longer.
        window = max(args.warm_up + args.steps, args.warm_up + 1 + _TRACED_STEPS)
        slack = window + 8
        self._model, self._slack = str(model), slack
        self._memory: dict[int, Any] = {}
        self._memory_bytes: dict[int, int] = {}
        self.failed = False

    def wave(self, number: int, names: list[str]) -> None:
        """Load all of `names` side by side, measure every point, end them."""
        configurations = [parse(name) for name in names]
        if self._args.device == "cpu":
            configurations = [replace(each, graph=False) for each in configurations]
        settings = [self._settings(each) for each in configurations]
        if self._args.kv == "shared":
            self._set_memory_aside(configurations, settings)
        groups = [
            Group(each, own, self._memory)
            for each, own in zip(configurations, settings, strict=True)
        ]
        try:
            for group in list(groups):
                self._guarded(groups, group, group.wait_ready, self._args.ready_timeout)
            self._say(f"{len(groups)} of {len(names)} configurations are ready")
            for group in groups:
                self._say(f"  {group.name}: {group.ready_s:.0f} s, {_in_short(group)}")
            sizes = range(max(1, len(self._args.batches)))
            for context, index in itertools.product(self._args.contexts, sizes):
                if self._is_late():
                    return
                self._point(number, groups, index, context)
            if self._args.trace:
                self._take_traces(groups)
        finally:
            for group in groups:
                group.stop()

    def _batches(self, configuration: Configuration, context: int) -> list[int]:
        """Requests per rank of each point at this context."""
        args = self._args
        if args.batches:
            return list(args.batches)
        machine = hardware.by_device_name(_device_name())
        if machine is None:
            raise ValueError(f"--batch {RESIDENT}: the planner has no numbers for this device")
        config = shapes.config(args.shape)
        return [resident.batch(configuration, args.shape, config, args.kv_dtype, machine, context)]

    def _settings(self, configuration: Configuration) -> Settings:
        args = self._args
        sizes = {context: self._batches(configuration, context) for context in args.contexts}
        longest = max(args.contexts)
        return Settings(
            model=self._model,
            device=args.device,
            batches=tuple(sorted({batch for each in sizes.values() for batch in each})),
            max_tokens=max(max(each) * (c + self._slack) for c, each in sizes.items()),
            max_length=longest + self._slack,
            attention_backend=args.attention_backend,
            kv_dtype=args.kv_dtype,
            peer_timeout_s=args.step_timeout,
            flags=tuple(args.server_flags.split()),
        )

    def _set_memory_aside(
        self, configurations: list[Configuration], settings: list[Settings]
    ) -> None:
        """What a wave needs; kept for those that follow, unless they need more."""
        args = self._args
        per_token = shapes.kv_bytes_per_token(shapes.config(args.shape, args.layers), args.kv_dtype)
        tokens: dict[int, int] = {}
        for each, own in zip(configurations, settings, strict=True):
            for gpu in each.attn_gpus:
                tokens[gpu] = max(tokens.get(gpu, 0), own.max_tokens)
        for gpu, most in sorted(tokens.items()):
            # Beyond the requests: a page of padding, and the rounding of each buffer.
            num_bytes = int(per_token * (most + 256)) + (1 << 26)
            if gpu in self._memory and self._memory_bytes[gpu] >= num_bytes:
                continue
            self._memory.pop(gpu, None)
            self._memory[gpu] = arena.make(num_bytes, gpu, args.kv_dtype.startswith("fp8"))
            self._memory_bytes[gpu] = num_bytes
            self._say(f"{num_bytes / 2**30:.1f} GiB of KV memory on GPU {gpu}")

    def _guarded(self, groups: list[Group], group: Group, call: Any, *args: Any) -> Any:
        """`call`'s result; a group that fails is ended and taken out."""
        try:
            return call(*args)
        except GroupFailed as error:
            self.failed = True
            self._say(f"FAILED {error}")
            groups.remove(group)
            group.stop()
            return None

    def _point(self, wave: int, groups: list[Group], index: int, context: int) -> None:
        """Measure the `index`th batch of each group at this context."""
        args = self._args
        sizes = {g.name: self._batches(g.configuration, context)[index] for g in groups}
        samples: dict[tuple[str, str, int], Samples] = {}
        fullest: dict[str, int | None] = {}
        for group in list(groups):
            batch = sizes[group.name]
            recorded = self._guarded(groups, group, self._record, group, batch, context)
            fullest[group.name] = recorded
        for _ in range(args.reps):
            for group, ahead in itertools.product(list(groups), args.aheads):
                if group not in groups:
                    continue
                batch = sizes[group.name]
                found = self._guarded(groups, group, self._window, group, batch, context, ahead)
                for part, (step_ms, wall_ms, middle) in (found or {}).items():
                    kept = samples.setdefault((group.name, part, ahead), Samples())
                    kept.add(step_ms, wall_ms)
                    kept.context = middle
        by_name = {group.name: group for group in groups}
        for (name, part, ahead), kept in samples.items():
            if name not in by_name:
                continue
            group = by_name[name]
            found_row = row(
                group.configuration,
                kept,
                batch=sizes[name],
                context=context,
                part=part,
                common={
                    **self._common(group, wave),
                    "ahead": ahead,
                    "max_rows_per_expert": fullest[name],
                    "routing": "recorded" if part == "ffn" else "natural",
                },
            )
            self._rows.append(found_row)
            self._say(_line(found_row))
        self._write()

    def _common(self, group: Group, wave: int) -> dict[str, Any]:
        args, facts = self._args, group.facts[0]
        experts = (group.ffn_facts or group.facts)[0]
        ffn_bytes = max((each["weight_bytes"] for each in group.ffn_facts), default=None)
        return {
            "configuration": group.name,
            "model": args.shape,
            "layers": facts["layers"],
            "quant": shapes.quant(args.shape),
            "weights": "random",
            "kv_dtype": facts["kv_dtype"],
            "attention_backend": facts["attention_backend"],
            "moe_runner_backend": experts["moe_runner_backend"],
            "resident_rule": _RESIDENT_RULE,
            "resident": not args.batches,
            "gate": self._gate(group),
            "device": args.device,
            "wave": wave,
            "ready_s": round(group.ready_s, 1),
            "capture_s": round(facts["capture_s"], 1),
            "graph_mib": round(facts["graph_mib"]),
            "weight_mib": round(facts["weight_bytes"] / 2**20),
            "ffn_weight_mib": None if ffn_bytes is None else round(ffn_bytes / 2**20),
            "kv_tokens": facts.get("kv_tokens"),
        }

    def _gate(self, group: Group) -> str:
        """What the gate said of such a server at this commit; sides alone and colocated have none."""
        found, quant = group.configuration, shapes.quant(self._args.shape)
        if found.connector in (NULL, COLOCATED):
            return "none"
        return gate.verdict(
            found.connector,
            {"bfloat16": "bf16", "float32": "fp32"}.get(quant, quant),
            found.microbatches,
            found.graph,
            self._args.gate,
            (found.attn_ranks, found.ffn_ranks),
        )

    def _path(self, batch: int, context: int) -> Path:
        return Path(self._folder.name) / f"routing_{batch}_{context}.safetensors"

    def _record(self, group: Group, batch: int, context: int) -> int | None:
        """Rows of the fullest expert, with the routing kept for T_e."""
        path = self._path(batch, context) if group.configuration.ffn_ranks else None
        answers = group.attn(
            "record",
            self._args.step_timeout,
            size=batch,
            context=context,
            path=None if path is None else str(path),
        )
        known = [answer for answer in answers if answer is not None]
        return max(known) if known else None

    def _window(
        self, group: Group, batch: int, context: int, ahead: int
    ) -> dict[str, tuple[list[list[float]], list[list[float]], int]]:
        """One repetition: by part, times of each rank, device and wall, and the context."""
        args, configuration = self._args, group.configuration
        windows = group.attn(
            "measure",
            args.step_timeout,
            size=batch,
            context=context,
            steps=args.steps,
            warm_up=args.warm_up,
            ahead=ahead,
        )
        part = "attn" if configuration.connector == NULL else "all"
        found = {
            part: ([w.step_ms for w in windows], [w.wall_ms for w in windows], windows[0].context)
        }
        if configuration.ffn_ranks and ahead == args.aheads[0]:
            alone = group.ffn(
                "measure",
                args.step_timeout,
                shape=shape_of(batch, configuration.microbatches, configuration.graph),
                path=str(self._path(batch, context)),
                steps=args.steps,
                warm_up=args.warm_up,
            )
            found["ffn"] = (alone, alone, 0)
        return found

    def _take_traces(self, groups: list[Group]) -> None:
        args = self._args
        given = tuple(map(int, args.trace_point.split("x"))) if args.trace_point else None
        for group in [each for each in groups if each.configuration.graph]:
            context = args.contexts[-1]
            batch = self._batches(group.configuration, context)[-1]
            if given is not None:
                batch, context = given
            trace = self._guarded(groups, group, self._trace, group, batch, context)
            if trace is None:
                continue
            self._traces[group.name] = {"batch_per_rank": batch, "context": context, **trace}
            for found in self._rows:
                same = (found["batch_per_rank"], found["context"]) == (batch, context)
                if same and found["part"] != "ffn" and found["configuration"] == group.name:
                    found |= {f"{kind}_ms": ms for kind, ms in trace["class_ms"].items()}
                    found |= trace["overlap"]
            self._say(f"trace of {group.name}: {json.dumps(trace['class_ms'])} {trace['overlap']}")
            self._write()
            args.trace.parent.mkdir(parents=True, exist_ok=True)
            document = {
                "commit": results_file.commit(),
                "model": args.shape,
                "unit": "ns",
                "configurations": self._traces,
            }
            args.trace.write_text(json.dumps(document, separators=(",", ":")) + "\n")

    def _trace(self, group: Group, batch: int, context: int) -> dict[str, Any]:
        args, configuration = self._args, group.configuration
        if configuration.ffn_ranks:
            group.ffn("trace_start", args.step_timeout)
        answers = group.attn(
            "trace",
            args.step_timeout,
            size=batch,
            context=context,
            steps=_TRACED_STEPS,
            warm_up=args.warm_up,
            ahead=1,
        )
        ffn = group.ffn("trace_stop", args.step_timeout) if configuration.ffn_ranks else []
        role = "attn" if configuration.is_afd else "all"
        replays = kernels.steps(answers[0], _TRACED_STEPS)
        if len(replays) < 3:
            raise GroupFailed(f"{group.name}: {len(replays)} graph replays in the trace, too few")
        middle = len(replays) // 2
        step = replays[middle]
        found: dict[str, Any] = {
            "class_ms": {k: round(ms, 4) for k, ms in kernels.by_class(step, role).items()},
            "overlap": {},
            "ranks": [kernels.compact(step, role, step[0].start)],
        }
        if ffn:
            ffn_replays = kernels.steps(ffn[0], len(replays))
            ffn_step = ffn_replays[middle] if len(ffn_replays) > middle else []
            shares = kernels.overlap(step, ffn_step)
            found["overlap"] = {key: round(value, 4) for key, value in shares.items()}
            found["ffn_class_ms"] = {
                k: round(ms, 4) for k, ms in kernels.by_class(ffn_step, "ffn").items()
            }
            found["ranks"].append(kernels.compact(ffn_step, "ffn", step[0].start))
        return found

    def _is_late(self) -> bool:
        budget = self._args.budget
        if not budget or time.monotonic() - self._began < budget:
            return False
        self._say(f"the budget of {budget:g} s is used up; the points that are left are left out")
        self.failed = True
        return True

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def _write(self) -> None:
        if self._args.out:
            results_file.write(self._args.out, "decode", self._rows)


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def _in_short(group: Group) -> str:
    facts, experts = group.facts[0], (group.ffn_facts or group.facts)[0]
    return (
        f"weights {facts['weight_bytes'] / 2**30:.2f} GiB, captured in {facts['capture_s']:.1f} s, "
        f"{facts['attention_backend']}, experts on {experts['moe_runner_backend']}"
    )


def _line(found: dict[str, Any]) -> str:
    rate = found.get("tokens_per_s_per_gpu")
    return (
        f"{found['batch_per_rank']:4} x {found['context']:5}  {title(found):28} "
        f"{found['step_ms']:8.3f} ms (iqr {found['iqr']:.3f}, wall {found['wall_step_ms']:.3f})"
        + ("" if rate is None else f"  {rate:8.0f} tokens/s/GPU")
    )


if __name__ == "__main__":
    sys.exit(main())
