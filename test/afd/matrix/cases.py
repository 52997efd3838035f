"""The engines of the matrix, how they are started, and what is collected from each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matrix.harness import Engine, Zygote
from matrix.jobs import Answer, EngineSpec, Job
from matrix.patterns import CAPACITY, PATTERNS, teacher_forced, without_generation
from served.server import free_port

MAX_TOTAL_TOKENS = 16384
# What every equality test must notice: functions of matrix.faults, by name, since that module
# imports torch, which the test's process does without.
FAULTS = (
    "output_zeroed",
    "experts_swapped",
    "topk_weights_ignored",
    "layer_not_loaded",
    "microbatch_rows_exchanged",
)


class Case(NamedTuple):
    """An AFD engine: M, N, microbatches, and where it leaves the usual."""

    attn_ranks: int
    ffn_ranks: int
    microbatches: int
    chunk: int | None = None  # tokens per attention rank; None leaves the default
    dtype: str = "float32"
    num_experts: int = 8

    def __str__(self) -> str:
        parts = [f"{self.attn_ranks}A{self.ffn_ranks}F", f"mb{self.microbatches}"]
        if self.chunk is not None:
            parts.append(f"chunk{self.chunk}")
        if self.num_experts != 8:
            parts.append(f"{self.num_experts}experts")
        if self.dtype != "float32":
            parts.append(self.dtype)
        return "-".join(parts)

    def arguments(self) -> dict[str, Any]:
        chunk = {} if self.chunk is None else {"chunked_prefill_size": self.chunk * self.attn_ranks}
        return {
            **chunk,
            "dtype": self.dtype,
            "disaggregation_mode": "afd",
            "afd_attn_ranks": self.attn_ranks,
            "afd_ffn_ranks": self.ffn_ranks,
            "afd_microbatches": str(self.microbatches),
            "afd_max_tokens_per_rank": CAPACITY,
        }


class Plan(NamedTuple):
    """What the log says about one step."""

    mode: str
    microbatches: int
    rounds: int
    tokens: tuple[int, ...]


@dataclass
class Reference:
    """Answers by pattern, and the job that scores them with its answers."""

    answers: dict[str, list[Answer]]
    teacher: Job
    scores: list[Answer]


def start(
    zygote: Zygote, model: Path, log: Path, faults: tuple[str, ...] = (), **arguments: Any
) -> Engine:
    common = {"max_total_tokens": MAX_TOTAL_TOKENS, "log_level": "info", "port": free_port()}
    return Engine(zygote, EngineSpec(model, log, {**common, **arguments}, faults))


def collect(engine: Engine) -> Reference:
    """Run every pattern, then have the engine score its own answers."""
    answers = run_patterns(engine)
    teacher = teacher_forced(answers)
    return Reference(answers, teacher, without_generation(engine.run(teacher)))


def run_patterns(engine: Engine) -> dict[str, list[Answer]]:
    return {
        name: [answer for job in jobs for answer in engine.run(job)]
        for name, jobs in PATTERNS.items()
    }


def plans(log: Path) -> list[Plan]:
    """The step plans that attention rank 0 published."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if "AFD plan" not in line:
            continue
        value = dict(re.findall(r"(\w+)=('\w*'|\([^)]*\)|\d+)", line))
        tokens = tuple(int(n) for n in re.findall(r"\d+", value["tokens"]))
        mode = value["mode"].strip("'")
        found.append(Plan(mode, int(value["microbatches"]), int(value["rounds"]), tokens))
    return found
