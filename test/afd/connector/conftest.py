"""The process pool that all connector tests share, and how to run one link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from connector import contract, harness

from sglang.srt.disaggregation.afd.connector.base import LinkSpec
from sglang.srt.disaggregation.afd.connector.loopback import LoopbackHub


@pytest.fixture(scope="session")
def pool() -> Iterator[harness.ProcessPool]:
    pool = harness.ProcessPool()
    yield pool
    pool.close()


@pytest.fixture
def run_link(request: pytest.FixtureRequest) -> Callable[..., list[object]]:
    """`run_link(name, spec, scripts)`: one script per world rank, or one for all."""

    def run(name: str, spec: LinkSpec, *scripts: Callable[..., object]) -> list[object]:
        world = range(spec.topology.world_size)
        per_rank = list(scripts) if len(scripts) > 1 else list(scripts) * len(world)
        if name == "loopback":
            hub = LoopbackHub(spec)
            return harness.run_threads(
                [partial(contract.run_rank, name, spec, r, hub, per_rank[r]) for r in world]
            )
        pool = request.getfixturevalue("pool")
        rendezvous = harness.new_rendezvous()
        for r in world:
            pool.start(r, contract.run_rank, name, spec, r, rendezvous, per_rank[r])
        return pool.results(len(world))

    return run
