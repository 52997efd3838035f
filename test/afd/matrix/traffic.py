"""Jobs of live traffic: mixed lengths, aborts, a draining tail."""

from __future__ import annotations

import random
from dataclasses import replace

from matrix.jobs import Job, Request
from matrix.patterns import prompt

NUM_REQUESTS = 300
CONCURRENCY = 32
ABORT_SHARE = 0.2
STORM = 48


def mixed() -> Job:
    """Requests of 1 to 48 tokens in and 3 to 16 out; a fifth is aborted after 1 or 2."""
    rng = random.Random(200)
    requests = []
    for _ in range(NUM_REQUESTS):
        abort_after = rng.randint(1, 2) if rng.random() < ABORT_SHARE else None
        new_tokens = 64 if abort_after else rng.randint(3, 16)
        ids = prompt(rng, rng.randint(1, 48))
        requests.append(Request(ids, new_tokens, abort_after=abort_after))
    return Job(tuple(requests), CONCURRENCY, timeout_s=200)


def storm() -> Job:
    """Everything is aborted, some of it while it still waits for its first token."""
    rng = random.Random(201)
    return Job(
        tuple(
            Request(prompt(rng, rng.randint(1, 40)), 200, abort_after=i % 3) for i in range(STORM)
        )
    )


def tail() -> Job:
    """Short requests come and go beside a long one, which in the end is alone."""
    rng = random.Random(202)
    short = [Request(prompt(rng, 8), rng.randint(2, 6), delay_s=0.1 * i) for i in range(24)]
    return Job((Request(prompt(rng, 20), 160), *short), concurrency=10)


def normal() -> Job:
    rng = random.Random(203)
    return Job((Request(prompt(rng, 40), 8),))


def undisturbed(job: Job) -> Job:
    """The same requests without aborts: nothing but their first tokens can be compared."""
    kept = (replace(r, abort_after=None, delay_s=0.0) for r in job.requests)
    return replace(job, requests=tuple(kept))
