"""An FFN rank that dies under load ends the server: soon, with an error, without remains."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import requests
from served.conftest import AFD
from served.server import Server

pytestmark = pytest.mark.timeout(1200)  # a fixture may start two servers

LIMIT_S = 20


def test_killed_ffn_rank_ends_the_server(workspace, model_path):
    server = Server(workspace / "loss.log", model_path("tiny"), *AFD, "--afd-attn-ranks", "2")
    outcomes: list[str] = []

    def load() -> None:
        body = {"model": "x", "prompt": "for", "max_tokens": 1500, "ignore_eos": True}
        try:
            answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
            outcomes.append("finished" if answer.ok else "refused")
        except requests.RequestException:
            outcomes.append("broken off")

    clients = [threading.Thread(target=load) for _ in range(4)]
    try:
        for client in clients:
            client.start()
        time.sleep(3)
        (victim,) = server.ffn_pids()
        assert not outcomes, "the load ended before the fault"
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        code = server.wait(LIMIT_S)
        assert time.monotonic() - began < LIMIT_S
        assert code != 0
        for client in clients:
            client.join(5)
        assert len(outcomes) == len(clients), "a client hangs"
        assert "finished" not in outcomes
        assert "FFN rank 0" in server.log.read_text()
    finally:
        server.kill()
