"""Builds a family's checkpoint, starts its engines and says how their answers compare."""

from __future__ import annotations

import random
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matrix.cases import start
from matrix.compare import FP32_TOLERANCE, Comparison, compare
from matrix.harness import Zygote
from matrix.jobs import Answer, Job, Request
from matrix.patterns import without_generation
from models import families
from models.families import Family

CAPACITY = 32  # --afd-max-tokens-per-rank: the longest prompt goes in two rounds
NUM_BYTES = 256
JOB_TIMEOUT_S = 240.0
NEW_TOKENS = 3


class FamilyZygote(Zygote):
    """Upstream's Triton kernels run in Triton's interpreter, and nothing is compiled.

    The state of convolutions is FP32 as the rest: in BF16, upstream's choice, a prompt that is split
    between two microbatches differs by one rounding from the same prompt in one piece.
    """

    MODULE = "models.zygote"
    ENVIRONMENT = {
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
    }


class Topology(NamedTuple):
    attn_ranks: int
    ffn_ranks: int
    microbatches: int = 1

    def __str__(self) -> str:
        overlap = f"-mb{self.microbatches}" if self.microbatches > 1 else ""
        return f"{self.attn_ranks}A{self.ffn_ranks}F{overlap}"

    def arguments(self) -> dict[str, Any]:
        return {
            "disaggregation_mode": "afd",
            "afd_attn_ranks": self.attn_ranks,
            "afd_ffn_ranks": self.ffn_ranks,
            "afd_microbatches": str(self.microbatches),
            "afd_max_tokens_per_rank": CAPACITY,
        }


@dataclass
class Reference:
    """What the colocated engine answered, how it scores its own answers, and its expert block."""

    checkpoint: Path
    generated: Job
    answers: list[Answer]
    teacher: Job
    scores: list[Answer]
    block: str


@dataclass
class Outcome:
    """What an AFD engine answered, and its `afd` entries of /server_info."""

    forced: Comparison
    free: Comparison
    state: list[dict[str, Any]]


def topologies(family: Family) -> list[Topology]:
    found = [Topology(2, 1), Topology(1, 2)]
    return [*found, Topology(2, 1, 2)] if family.microbatches == 2 else found


def collect(zygote: Zygote, family: Family, folder: Path) -> Reference:
    """Build the checkpoint, generate with the colocated engine, and have it score the result."""
    checkpoint = zygote.call(families.build, family.name, folder / family.name)
    generated = _prompts()
    log = folder / f"{family.name}.log"
    with start(zygote, checkpoint, log, **_arguments(family)) as engine:
        answers = engine.run(generated)
        assert all(answer.finish == "length" for answer in answers), answers
        teacher = _teacher(generated, answers)
        scores = without_generation(engine.run(teacher))
    (block,) = set(re.findall(r"EXPERT BLOCK (\S+)", log.read_text(errors="replace")))
    return Reference(checkpoint, generated, answers, teacher, scores, block)


def disaggregated(
    zygote: Zygote, family: Family, reference: Reference, topology: Topology, folder: Path
) -> Outcome:
    """The same jobs on attention and FFN ranks: given sequences first, then generation."""
    log = folder / f"{family.name}-{topology}.log"
    arguments = {**_arguments(family), **topology.arguments()}
    with start(zygote, reference.checkpoint, log, **arguments) as engine:
        scores = without_generation(engine.run(reference.teacher))
        answers = engine.run(reference.generated)
        state = engine.state()
    return Outcome(
        compare(reference.scores, scores, FP32_TOLERANCE),
        compare(reference.answers, answers, FP32_TOLERANCE),
        state,
    )


def _arguments(family: Family) -> dict[str, Any]:
    return {"dtype": "float32", "port": _free_port(), **family.arguments}


def _free_port() -> int:
    """Below the ports that the kernel gives away; upstream derives others from it, all free now.

    Upstream's default is the same for every engine, and two may run at a time on one machine.
    """
    chooser = random.SystemRandom()
    while True:
        port = chooser.randrange(10000, 32000)
        if all(_is_free(port + delta) for delta in (0, *range(233, 242))):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _prompts() -> Job:
    rng = random.Random(6)
    ids = [tuple(rng.randrange(NUM_BYTES) for _ in range(n)) for n in (1, 6, 17, CAPACITY + 5)]
    return Job(tuple(Request(i, NEW_TOKENS, score=True) for i in ids), timeout_s=JOB_TIMEOUT_S)


def _teacher(generated: Job, answers: list[Answer]) -> Job:
    pairs = zip(generated.requests, answers, strict=True)
    requests = (Request((*asked.ids, *got.ids), 1, score=True) for asked, got in pairs)
    return Job(tuple(requests), timeout_s=JOB_TIMEOUT_S)
