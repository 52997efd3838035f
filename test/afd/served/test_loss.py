"""A server that loses a process, or is told to end, ends: in time, with answers, without remains."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from served.conftest import AFD
from served.server import Server, free_port

PEER_TIMEOUT_S = 6
LIMIT_S = 20
FLAGS = (*AFD, "--afd-attn-ranks", "2", "--afd-peer-timeout", str(PEER_TIMEOUT_S))
# Part of the title of the process that is hit, and what the reason says of it.
VICTIMS = {
    # Attention ranks, who lose it, may end before the supervisor has looked; the log has its name.
    "ffn": ("sglang::afd_ffn_0", "FFN rank 0|ffn 0|attention process"),
    "leader": ("sglang::scheduler_DP0", "attention process|attn 0"),
    "member": ("sglang::scheduler_DP1", "attention process|attn 1"),
    "controller": ("sglang::data_parallel_controller", "attention process|process"),
    "detokenizer": ("sglang::detokenizer", "a process of the server failed|detokenizer|process"),
    "launcher": ("", ""),
}
KILLS = [(name, signal.SIGKILL, "load") for name in VICTIMS]
# Each is noticed by somebody else: by heartbeats, by the supervisor, by attention rank 0.
STOPS = [(name, signal.SIGSTOP, "load") for name in ("ffn", "detokenizer", "launcher")]
REST = [
    (name, number, state)
    for name in VICTIMS
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for state in ("load", "idle")
    if (name, number, state) not in (*KILLS, *STOPS)
]


class Answer:
    """Status (0: connection broken) and text of one request."""

    def __init__(self, url: str, max_tokens: int, stream: bool = False) -> None:
        self.status, self.text = 0, ""
        body = {"model": "x", "prompt": "for", "max_tokens": max_tokens, "ignore_eos": True}
        try:
            answer = requests.post(
                f"{url}/v1/completions", json={**body, "stream": stream}, timeout=60
            )
            self.status, self.text = answer.status_code, answer.text
        except requests.RequestException as error:
            self.text = str(error)


def ask(pool: ThreadPoolExecutor, server: Server, count: int, max_tokens: int) -> list[Future]:
    return [pool.submit(Answer, server.url, max_tokens, i % 2 == 1) for i in range(count)]


@pytest.fixture
def temporary():
    """A temporary folder for the server, with a name that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def server(serve, temporary, request):
    running = serve(
        "tiny", *FLAGS, log=f"loss-{request.node.callspec.id}", env={"TMPDIR": str(temporary)}
    )
    running.outside = [
        Path(line)
        for file in temporary.glob("sglang-afd-*/outside")
        for line in file.read_text().splitlines()
    ]
    assert running.outside
    yield running
    running.kill()


def remains(server: Server, temporary: Path) -> list[Path]:
    """Files of the server that are still there."""
    left = [path for path in server.outside if path.exists()]
    for path in temporary.rglob("*"):
        if stat.S_ISSOCK(path.stat().st_mode) or path.name.startswith("sglang-afd-"):
            left.append(path)
    return left


def victim_pid(server: Server, name: str) -> int:
    title = VICTIMS[name][0]
    if not title:
        return server.process.pid
    (found,) = {p.pid for p in server.descendants() if title in " ".join(p.cmdline())}
    return found


def check_loss(server: Server, temporary: Path, name: str, number: int, state: str) -> None:
    limit_s = LIMIT_S + (PEER_TIMEOUT_S if number == signal.SIGSTOP else 0)
    with ThreadPoolExecutor(4) as pool:
        asked = ask(pool, server, 4 if state == "load" else 0, max_tokens=1900)
        time.sleep(1.5)
        assert not any(future.done() for future in asked), "the load ended before the fault"
        began = time.monotonic()
        os.kill(victim_pid(server, name), number)
        code = server.wait(limit_s)
        assert code != 0
        answers = [future.result(timeout=5) for future in asked]
        assert time.monotonic() - began < limit_s
    if name == "ffn":
        assert re.search("FFN rank 0|ffn 0 ", server.tail(400))
    if name == "launcher":  # nobody is left who could answer, or clean up before the next start
        assert {answer.status for answer in answers} <= {0, 200}
        return
    for i, answer in enumerate(answers):
        assert answer.status == (200 if i % 2 else 503), answer.text  # a stream has begun
        assert "AFD: " in answer.text
        assert any(part in answer.text for part in VICTIMS[name][1].split("|")), answer.text
    assert not remains(server, temporary)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/health", timeout=5)


def case_id(case: tuple[str, int, str]) -> str:
    return f"{case[0]}-{signal.Signals(case[1]).name}-{case[2]}"


@pytest.mark.pain(36, 53, 55, 56, 57, 59)
@pytest.mark.parametrize("case", KILLS + STOPS, ids=case_id)
def test_a_lost_process_ends_the_server(server, temporary, case):
    check_loss(server, temporary, *case)


@pytest.mark.pain(53, 55, 59)
@pytest.mark.long
@pytest.mark.parametrize("case", REST, ids=case_id)
def test_a_lost_process_ends_the_server_long(server, temporary, case):
    check_loss(server, temporary, *case)


@pytest.mark.pain(60)
@pytest.mark.parametrize(
    # Open requests that end within the drain's ten seconds, and that cannot.
    ("count", "num_long"),
    [
        (0, 0),
        (1, 0),
        (100, 2),
        pytest.param(0, 1, marks=pytest.mark.long),
    ],
)
def test_sigterm_ends_with_answers_and_exit_code_zero(server, temporary, count, num_long):
    with ThreadPoolExecutor(max(1, count + num_long)) as pool:
        short = ask(pool, server, count, max_tokens=60 if count == 1 else 8)
        long = ask(pool, server, num_long, max_tokens=1900)
        time.sleep(0.2 if count == 1 else 1)
        assert count != 1 or not short[0].done(), "the request ended before the signal"
        began = time.monotonic()
        assert server.stop() == 0, server.tail()
        assert time.monotonic() - began < LIMIT_S
        assert [future.result(5).status for future in short] == [200] * count
        for future in long:
            answer = future.result(5)
            assert answer.status in (200, 503)
            assert (
                "shut down before this request had ended" in answer.text or "length" in answer.text
            )
    assert not remains(server, temporary)


@pytest.mark.pain(58)
def test_out_of_memory_on_an_ffn_rank_reaches_the_client_side(serve):
    server = serve("tiny", *FLAGS, log="oom", faults=("out_of_memory_after_warmup",))
    answer = Answer(server.url, max_tokens=64)
    assert answer.status == 503
    assert "FFN rank 0 failed: OutOfMemoryError: this is a test" in answer.text
    assert server.wait(LIMIT_S) != 0
    assert "OutOfMemoryError: this is a test" in server.tail(400)


@pytest.mark.pain(58)
def test_an_attention_rank_that_fails_tells_the_clients_why(serve):
    """Not only that it is gone: the last rank's scheduler fails, and all clients read of what."""
    server = serve("tiny", *FLAGS, log="raises", faults=("attention_raises_after_warmup",))
    with ThreadPoolExecutor(4) as pool:
        answers = [future.result(60) for future in ask(pool, server, 4, max_tokens=64)]
    for i, answer in enumerate(answers):
        assert answer.status == (200 if i % 2 else 503), answer.text  # a stream has begun
        assert "Attention rank 1 failed: RuntimeError: this is a test of attention" in answer.text
    assert server.wait(LIMIT_S) != 0


@pytest.mark.pain(53)
@pytest.mark.parametrize("victim", ["scheduler", pytest.param("launcher", marks=pytest.mark.long)])
def test_ffn_ranks_started_apart_end_with_an_error_that_names_the_peer(serve, victim):
    pair = (*AFD, "--afd-peer-timeout", str(PEER_TIMEOUT_S))
    pair += ("--afd-bootstrap-addr", f"127.0.0.1:{free_port()}")
    ffn = serve("tiny", *pair, "--afd-role", "ffn", log=f"apart-ffn-{victim}", api=False)
    attn = serve("tiny", *pair, "--afd-role", "attn", log=f"apart-attn-{victim}")
    try:
        os.kill(attn.process.pid if victim == "launcher" else scheduler_pid(attn), signal.SIGKILL)
        assert ffn.wait(LIMIT_S) == 1, ffn.tail()
        assert re.search(r"FFN rank 0 ends: PeerLost: the leader \(attn 0\) at 127", ffn.tail(400))
        assert attn.wait(LIMIT_S) != 0
    finally:
        attn.kill()
        ffn.kill()


def scheduler_pid(server: Server) -> int:
    (found,) = {p.pid for p in server.descendants() if "::scheduler" in " ".join(p.cmdline())}
    return found


def test_a_full_disk_below_the_log_ends_nothing(serve, workspace):
    (workspace / "full.log").symlink_to("/dev/full")
    server = serve("tiny", *FLAGS, log="full", api=False)
    server.wait_answering()
    assert Answer(server.url, max_tokens=4).status == 200
    assert server.stop() == 0
