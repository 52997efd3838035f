"""Request patterns that an engine must answer as the colocated one does, whatever its topology."""

from __future__ import annotations

import random
from collections.abc import Sequence

from matrix.jobs import Answer, Job, Request

CAPACITY = 16  # --afd-max-tokens-per-rank of every case: most prompts go in rounds
NUM_BYTES = 256  # ordinary tokens of the tiny model
LAST = -1  # the attention rank with the highest index


def prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(NUM_BYTES) for _ in range(length))


def _batch(size: int) -> tuple[Job, ...]:
    rng = random.Random(size)
    return (Job(tuple(Request(prompt(rng, rng.randint(2, 20)), 6) for _ in range(size))),)


def _lengths() -> tuple[Job, ...]:
    """From one token to ten times the capacity, around its multiples."""
    rng = random.Random(100)
    lengths = (1, 2, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY + 1, 10 * CAPACITY)
    return (Job(tuple(Request(prompt(rng, n), 4, score=True) for n in lengths)),)


def _one_rank() -> tuple[Job, ...]:
    """One request at a time, so that every other attention rank idles; then several on one."""
    rng = random.Random(101)
    alone = [Job((Request(prompt(rng, 5 * CAPACITY), 6, rank=rank),)) for rank in (0, LAST)]
    crowd = Job(tuple(Request(prompt(rng, 9), 6, rank=LAST) for _ in range(5)))
    return (*alone, crowd)


def _staggered() -> tuple[Job, ...]:
    """Some ranks prefill while others decode, and requests end at different times."""
    rng = random.Random(102)
    lengths = (3, 40, 1, 90, 12, 60, 2, 33, 7, 120)
    return (
        Job(
            tuple(
                Request(prompt(rng, n), rng.randint(4, 14), delay_s=0.06 * i, rank=i)
                for i, n in enumerate(lengths)
            )
        ),
    )


def _prefix() -> tuple[Job, ...]:
    """The second job finds its first 80 tokens in the radix cache of its rank."""
    rng = random.Random(103)
    shared = prompt(rng, 80)
    first = Request(shared, 4, rank=0)
    others = [Request(shared + prompt(rng, n), 6, rank=0) for n in (1, 5, 30)]
    return (Job((first,)), Job((first, *others)))


PATTERNS = {
    "batch_1": _batch(1),
    "batch_2": _batch(2),
    "batch_5": _batch(5),
    "batch_16": _batch(16),
    "lengths": _lengths(),
    "one_rank": _one_rank(),
    "staggered": _staggered(),
    "prefix": _prefix(),
}


def teacher_forced(answers: dict[str, list[Answer]]) -> Job:
    """Scores what the colocated engine generated in `answers`, pattern by pattern."""
    requests = []
    for name, pattern in PATTERNS.items():
        asked = [request for job in pattern for request in job.requests]
        for request, answer in zip(asked, answers[name], strict=True):
            requests.append(Request((*request.ids, *answer.ids), 1, score=True))
    return Job(tuple(requests), concurrency=16)


def without_generation(answers: Sequence[Answer]) -> list[Answer]:
    """The scored prompts alone: what was generated after them is dropped."""
    return [
        Answer(logprobs=a.logprobs[: len(a.logprobs) - len(a.ids)], finish=a.finish)
        for a in answers
    ]
