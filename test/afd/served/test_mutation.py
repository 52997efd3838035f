"""The served equality tests are able to fail: each fault on the way turns them red."""

from __future__ import annotations

import pytest
from matrix.cases import FAULTS
from served import test_api, test_served
from served.api import CALLS, FLAGS
from served.conftest import AFD
from served.record import collect

# A server per fault.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

GATES = (
    test_served.test_completions_are_equal,
    test_served.test_streams_are_equal,
    test_served.test_chats_are_equal,
)
# Calls whose answer is some other text if an expert, a weight or a row is wrong. Others answer the
# same whatever the model says: a grammar of one choice, a token with a bias of 100, an error.
TELLING = ("several prompts", "logprobs", "echo with logprobs", "input logprobs", "min_tokens")
BATCHES = ("several prompts", "n", "input_ids of a batch")


@pytest.fixture(scope="module")
def colocated(serve):
    server = serve("tiny", *FLAGS, log="mutation-colocated")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def expected(colocated):
    return collect(colocated)


def red(gate, *arguments) -> bool:
    try:
        gate(*arguments)
    except AssertionError:
        return True
    return False


@pytest.fixture
def serve_with(serve):
    started = []

    def get(*faults: str):
        name = "_".join(faults) or "none"
        flags = (*FLAGS, *AFD, "--afd-microbatches", "2")
        started.append(serve("tiny", *flags, log=f"mutation-{name}", faults=faults))
        return started[-1]

    yield get
    for server in started:
        server.kill()


def test_without_a_fault_all_gates_are_green(serve_with, colocated, expected):
    server = serve_with()
    record = collect(server)
    servers = {"colocated": colocated, "afd": server}
    for gate in GATES:
        gate((expected, record))
    for name in {*TELLING, *BATCHES}:
        test_api.test_answer_is_upstreams(servers, name)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_every_gate_red(serve_with, colocated, expected, fault):
    server = serve_with(fault)
    record = collect(server)
    assert len(record.completions) == len(expected.completions), "it broke, instead of erring"
    green = [gate.__name__ for gate in GATES if not red(gate, (expected, record))]
    # Only a batch of several requests has two rows in the second microbatch.
    names = BATCHES if fault == "microbatch_rows_exchanged" else TELLING
    servers = {"colocated": colocated, "afd": server}
    api = [name for name in names if red(test_api.test_answer_is_upstreams, servers, name)]
    assert not green, "the fault was not noticed by these"
    assert api, f"none of {names} noticed the fault; all calls: {len(CALLS)}"
