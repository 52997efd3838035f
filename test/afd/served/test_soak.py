"""Many requests on one server: none is lost, memory stays flat, and the roles' counters agree."""

from __future__ import annotations

import os

import pytest
from served import soak
from served.conftest import AFD

# About ten requests a second on two cores; a smaller number for a look in between.
NUM_REQUESTS = int(os.environ.get("SGLANG_AFD_SOAK_REQUESTS", "20000"))
LARGEST_SLOPE = 1.0  # MiB per 1000 requests, of each process
# Before that many requests, caches that fill look like a leak.
ENOUGH_FOR_A_SLOPE = 10_000
FLAGS = (*AFD, "--afd-attn-ranks", "2", "--afd-max-tokens-per-rank", "64")


@pytest.mark.pain(54)
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_soak(serve, record_property):
    server = serve("tiny", *FLAGS, log="soak", zygote=None)
    asked = soak.requests_of(NUM_REQUESTS)
    outcome = soak.run(server, asked)
    memory = soak.slopes(outcome, NUM_REQUESTS)
    info = server.info()
    for name, value in (
        ("topology", "2A1F"),
        ("requests", NUM_REQUESTS),
        ("concurrency", soak.CONCURRENCY),
        ("answered", dict(outcome.done)),
        ("wrong", len(outcome.wrong)),
        ("changed", outcome.changed),
        ("traffic_seconds", round(outcome.seconds, 1)),
        ("attn_tokens", [rank["tokens"] for rank in info]),
        ("ffn_tokens", [rank["tokens"] for rank in info[0]["ffn"]]),
        ("steps", info[0]["steps"]),
        ("memory", memory),
    ):
        record_property(name, value)
    assert not outcome.wrong, "\n".join(outcome.wrong[:10])
    assert outcome.num_done == NUM_REQUESTS
    aborts = sum(bool(ask.abort) for ask in asked)
    assert outcome.done["aborted"] == aborts > NUM_REQUESTS * soak.ABORT_SHARE / 2
    # FP32: another batch moves a score by 1e-6, and a near-tie may then fall the other way.
    assert outcome.changed <= NUM_REQUESTS / 1000
    (ffn,) = info[0]["ffn"]
    assert sum(rank["tokens"] for rank in info) == ffn["tokens"]
    assert {rank["steps"] for rank in info} == {ffn["steps"]}
    assert not any(rank["tokens"] == 0 for rank in info)
    if NUM_REQUESTS >= ENOUGH_FOR_A_SLOPE:
        steep = {n: m for n, m in memory.items() if m["mib_per_1000_requests"] > LARGEST_SLOPE}
        assert not steep, steep
    assert server.stop() == 0, server.tail()
