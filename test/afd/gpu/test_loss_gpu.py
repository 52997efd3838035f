"""A stopped FFN rank under graphs: a kernel on the attention GPU spins, and nobody asks it for the
time. The server ends within the peer timeout, says whom it lost, and leaves no GPU busy."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import psutil
import pytest
import requests
import torch
from gpu.conftest import case, connectors, used_mib, utilization, wait_for_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PEER_TIMEOUT_S = 8
LIMIT_S = PEER_TIMEOUT_S + 20
LEFT_MIB = 300
GPUS = range(torch.cuda.device_count())


def below(pid: int, title: str) -> psutil.Process:
    (found,) = [
        process
        for process in psutil.Process(pid).children(recursive=True)
        if title in " ".join(process.cmdline())
    ]
    return found


def generate(url: str, answers: list[str]) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0, "max_new_tokens": 3500, "ignore_eos": True},
    }
    try:
        answer = requests.post(f"{url}/generate", json=body, timeout=120)
        answers.append(f"{answer.status_code} {answer.text}")
    except requests.RequestException as error:
        answers.append(str(error))


@pytest.mark.pain(36, 53, 55)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("connector", connectors())
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda n: n.name)
def test_a_lost_ffn_rank_ends_the_server(fleet, connector, graph, number):
    if number == signal.SIGKILL and not graph:
        pytest.skip("the supervisor sees the end of a process whatever its peers do")
    before = [used_mib(gpu) for gpu in GPUS]
    answers: list[str] = []
    # The last one of a flag counts.
    flags = ("--afd-peer-timeout", str(PEER_TIMEOUT_S))
    with fleet.serving(case(connector, graph), *flags) as server:
        for _ in range(2):  # kernels are compiled before the clock runs
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8}}
            requests.post(f"{server.url}/generate", json=body, timeout=200).raise_for_status()
        asked = threading.Thread(target=generate, args=(server.url, answers))
        asked.start()
        time.sleep(1.5)
        assert asked.is_alive(), "the load ended before the fault"
        processes = psutil.Process(server.process.pid).children(recursive=True)
        victim = below(server.process.pid, "sglang::afd_ffn_0")
        began = time.monotonic()
        os.kill(victim.pid, number)
        code = wait_for_end(server, LIMIT_S)
        took_s = time.monotonic() - began
        asked.join(30)
        log = server.log.read_text(errors="replace")
        _, alive = psutil.wait_procs(processes, timeout=10)
        left = [process.cmdline()[:2] for process in alive]
    print(f"{connector}: ended {took_s:.1f} s after {number.name}, code {code}; client: {answers}")
    assert code != 0
    assert not left, left
    assert re.search("FFN rank 0|ffn 0", log)
    assert answers and not answers[0].startswith("200")
    deadline = time.monotonic() + 20
    while any(utilization()) or any(used_mib(g) > before[g] + LEFT_MIB for g in GPUS):
        assert time.monotonic() < deadline, (utilization(), [used_mib(g) for g in GPUS], before)
        time.sleep(1)
