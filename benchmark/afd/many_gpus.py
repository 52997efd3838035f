"""Everything that a host with four or eight GPUs is asked for, one command.

    python benchmark/afd/many_gpus.py --list
    python benchmark/afd/many_gpus.py --logs /tmp/many --minutes 30

Correctness comes first: the gate on topologies that need more than two GPUs, traffic, and a killed
rank. Then the decode tables against colocated SGLang on the same GPUs. Steps run one after the other,
each with a limit of its own, as many as fit into `--minutes`; their results lie in
`benchmark/afd/results/`, their logs and `steps.json` in `--logs`. A table is measured even if the gate
failed, but its rows then say so, and no page shows them.

Exit code 0 means that every step that was started ended well.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# From there, so that the commands in results hold no path of a machine.
HERE = Path("benchmark") / "afd"
RESULTS = HERE / "results"
TESTS = Path("test") / "afd" / "gpu"
# In the order of their worth, so that a short loan yields the most.
CONNECTORS = "nvlink,deepep,nccl"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command.

    Attributes:
        gpus: it needs at least so many, and is left out on a host with fewer.
        limit_s: it is ended after that.
        ranks: of the servers that tests start, as 2A1F.
    """

    name: str
    gpus: int
    limit_s: int
    command: tuple[str, ...]
    ranks: str = ""


def _gate(name: str, gpus: int, topologies: str, only: str) -> Step:
    out = RESULTS / "gate" / f"{name}.json"
    command = ("gate.py", "--topologies", topologies, "--connectors", CONNECTORS, "--only", only)
    limit_s = 580
    return Step(
        name=name,
        gpus=gpus,
        limit_s=limit_s,
        command=(*command, "--deadline", str(limit_s - 40), "--out", str(out)),
    )


def _tests(name: str, gpus: int, ranks: str, file: str, limit_s: int) -> Step:
    command = ("-m", "pytest", "-m", "gpu", "-q", "-s", "-p", "no:cacheprovider", str(TESTS / file))
    return Step(name=name, gpus=gpus, limit_s=limit_s, command=command, ranks=ranks)


def _decode(
    name: str, gpus: int, shape: str, batches: str, contexts: str, waves: tuple[str, ...], gate: str
) -> Step:
    """Layouts of one wave load together and take turns; waves follow each other."""
    command = ("bench_decode.py", "--shape", shape, "--batch", batches, "--context", contexts)
    limit_s = 580
    return Step(
        name=name,
        gpus=gpus,
        limit_s=limit_s,
        command=(
            *(*command, "--configs", ";".join(waves), "--budget", str(limit_s - 40)),
            *("--gate", str(RESULTS / "gate" / f"{gate}.json")),
            *("--out", str(RESULTS / f"{name}.json")),
        ),
    )


def _afd(ranks: str) -> str:
    return ",".join(
        f"afd:{connector}:mb{microbatches}:{ranks}"
        for connector in CONNECTORS.split(",")[:2]
        for microbatches in (1, 2)
    )


_FOUR = ("colocated:dp4ep4", "colocated:dp4ep4+deepep")
_EIGHT = ("colocated:dp8ep8", "colocated:dp8ep8+deepep", "colocated:dp4ep4+deepep")


def steps() -> list[Step]:
    four, eight = "gate_4gpus", "gate_8gpus"
    return [
        _gate(four, 4, "3A1F,2A2F,2A1F,1A3F", r"graph-.mb-.*f$"),
        _gate(eight, 8, "7A1F,6A2F", r"graph-.mb-.*f$"),
        _tests("loss_3a1f", 4, "3A1F", "test_loss_gpu.py", 400),
        _tests("traffic_2a2f", 4, "2A2F", "test_traffic_gpu.py", 400),
        *(
            _decode(
                f"decode_{label}_4gpus",
                4,
                shape,
                "64,128,256",
                "1024,4096",
                (f"{_afd('3a1f')},null:mb1,null:mb2", ",".join(_FOUR)),
                four,
            )
            for label, shape in (("qwen3_30b", "Qwen3-30B-A3B-FP8"), ("glm45_air", "GLM-4.5-Air"))
        ),
        *(
            _decode(
                f"decode_{label}_8gpus",
                8,
                shape,
                batches,
                contexts,
                (f"{_afd(ranks)},null:mb1,null:mb2", *_EIGHT),
                eight,
            )
            for label, shape, ranks, batches, contexts in (
                ("qwen3_235b", "Qwen3-235B-A22B-FP8", "6a2f", "64,128", "8192,16384"),
                ("minimax_m25", "MiniMax-M2.5", "6a2f", "64,128", "8192,16384"),
                ("glm45_air", "GLM-4.5-Air", "7a1f", "64,128", "8192,16384"),
                ("gpt_oss_120b", "gpt-oss-120b", "7a1f", "64,128", "8192,16384"),
            )
        ),
    ]


def main() -> int:
    args = _arguments()
    if args.list:
        for step in steps():
            ranks = f"AFD_GPU_RANKS={step.ranks} " if step.ranks else ""
            print(f"{step.name} ({step.gpus} GPUs, {step.limit_s} s): {ranks}{_typed(step)}")
        return 0
    import torch

    count = torch.cuda.device_count()
    wanted = [step for step in steps() if step.gpus <= count]
    wanted = [step for step in wanted if not args.only or step.name in args.only.split(",")]
    if not wanted:
        sys.exit(f"many_gpus: nothing to run on {count} GPUs; see --list")
    return run(wanted, args.logs, time.monotonic() + 60 * args.minutes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--only", default="", help="names of steps, comma-separated")
    parser.add_argument("--logs", type=Path, default=Path("many-gpus-logs"))
    parser.add_argument("--minutes", type=float, default=60, help="for all steps")
    return parser.parse_args()


def _typed(step: Step) -> str:
    return shlex.join(["python", *_arguments_of(step)])


def _arguments_of(step: Step) -> list[str]:
    first, *rest = step.command
    return [first, *rest] if first == "-m" else [str(HERE / first), *rest]


def run(wanted: list[Step], logs: Path, deadline: float) -> int:
    """Run the steps that fit; `steps.json` says of each how it ended."""
    logs.mkdir(parents=True, exist_ok=True)
    ended: dict[str, dict[str, object]] = {}
    failed = False
    for step in wanted:
        left_s = deadline - time.monotonic()
        if left_s < step.limit_s / 2:
            ended[step.name] = {"outcome": "not started: no time left"}
            continue
        environment = {**os.environ, **({"AFD_GPU_RANKS": step.ranks} if step.ranks else {})}
        began = time.monotonic()
        with (logs / f"{step.name}.log").open("w") as log:
            try:
                done = subprocess.run(
                    [sys.executable, *_arguments_of(step)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=environment,
                    timeout=min(step.limit_s, left_s),
                )
                outcome = "passed" if done.returncode == 0 else f"exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                outcome = "out of time"
        failed |= outcome != "passed"
        seconds = round(time.monotonic() - began, 1)
        ended[step.name] = {"outcome": outcome, "seconds": seconds, "command": _typed(step)}
        (logs / "steps.json").write_text(json.dumps(ended, indent=1) + "\n")
        print(f"{step.name}: {outcome} ({seconds:.0f} s)", flush=True)
    (logs / "steps.json").write_text(json.dumps(ended, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
