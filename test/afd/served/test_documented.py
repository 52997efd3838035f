"""The commands of the documentation that are marked for a CPU run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import requests
import test_docs
from matrix.harness import Process
from matrix.jobs import Command
from served.server import free_port

pytestmark = pytest.mark.timeout(600)

BENCH_TIMEOUT_S = 250
# Chosen by the tests, so that they run beside each other and on a small machine.
CHOSEN = {"--model-path", "--port", "--dtype", "--max-total-tokens"}
ADDRESS = "--afd-bootstrap-addr"


def flags(command: test_docs.Command) -> tuple[str, ...]:
    """What is typed behind the module, without what the tests choose."""
    kept: list[str] = []
    words = iter(command.words[3:])
    for word in words:
        if word in CHOSEN:
            next(words)
        else:
            kept.append(word)
    return tuple(kept)


def model_of(command: test_docs.Command) -> str:
    model = command.words[command.words.index("--model-path") + 1]
    return "demo" if Path(model).name == "demo-model" else "tiny"


def runs_of(module: str) -> dict[tuple[str, ...], str]:
    """Model by flags, of the commands of one module; the same flags on two pages are one run."""
    start = ("python", "-m", module)
    commands = [c for c in test_docs.COMMANDS if c.cpu and c.words[:3] == start]
    return {flags(command): model_of(command) for command in commands}


SERVERS = runs_of("sglang.launch_server")
BENCHES = runs_of("sglang.bench_one_batch")
WHOLE = {typed: model for typed, model in SERVERS.items() if "--afd-role" not in typed}
APART = [typed for typed in SERVERS if "--afd-role" in typed]


def complete(url: str) -> None:
    body = {"model": "x", "prompt": "def", "max_tokens": 4, "temperature": 0}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text


def test_there_are_commands_of_each_kind():
    assert WHOLE
    assert BENCHES
    assert {typed[typed.index("--afd-role") + 1] for typed in APART} == {"attn", "ffn"}


@pytest.mark.parametrize("typed", WHOLE, ids=" ".join)
def test_servers_serve(serve, typed):
    server = serve(WHOLE[typed], *typed, log=f"documented-{len(typed)}-{WHOLE[typed]}")
    complete(server.url)
    assert server.stop() == 0, server.tail()


def test_roles_that_are_started_apart_serve_together(serve):
    """In the order of the page, under an address of the test's own."""
    address = f"127.0.0.1:{free_port()}"
    started = {}
    for typed in APART:
        own = list(typed)
        own[own.index(ADDRESS) + 1] = address
        role = own[own.index("--afd-role") + 1]
        started[role] = serve("tiny", *own, log=f"documented-{role}", api=role == "attn")
    complete(started["attn"].url)
    assert started["attn"].stop() == 0
    assert started["ffn"].wait(20) == 0, started["ffn"].tail()


@pytest.mark.parametrize("typed", BENCHES, ids=" ".join)
def test_benchmarks_run(zygote, workspace, model_path, typed):
    """Their prompts are numbers below 10,000: the demo model has as many tokens."""
    log = workspace / "documented-bench.log"
    argv = ("-m", "sglang.bench_one_batch", "--model-path", str(model_path("demo")), *typed)
    argv += ("--max-total-tokens", "4096")
    process = Process(zygote, Command(argv, log, workspace))
    assert process.wait(BENCH_TIMEOUT_S) == 0, log.read_text()[-3000:]
    assert re.search(r"Prefill\. latency: .* throughput: ", log.read_text())
    assert re.search(r"Decode\.  median latency: .* median throughput: ", log.read_text())
