"""Random traffic with admissions and aborts under graphs: no hang, and no wrong token.

Every request is a sequence that was scored before, alone; what comes back of it must be as close to
that as two batch sizes are to each other. A row that went to another request would be far off.
`AFD_TRAFFIC_S` is the time for each case, 60 seconds if unset.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import uuid
from dataclasses import replace

import pytest
import requests
import torch
from gpu.conftest import BENCHMARKS, case, connectors

sys.path.append(str(BENCHMARKS))

import gate_scores

SECONDS = float(os.environ.get("AFD_TRAFFIC_S", "60"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400 + SECONDS),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CLIENTS = 14
ABORTS = 0.2
FACTOR = 3.0  # many more draws of rounding than the two scorings that it multiplies
CASES = [(name, microbatches) for name in connectors() for microbatches in (1, 2)]


class Traffic:
    """Clients that ask until the time is up."""

    def __init__(self, url, asked, reference, bound):
        self.url, self.asked, self.reference, self.bound = url, asked, reference, bound
        self.until = time.monotonic() + SECONDS
        self.wrong: list[str] = []
        self.done = self.aborted = 0
        self.largest = 0.0
        self._lock = threading.Lock()

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.until and not self.wrong:
            index = rng.randrange(len(self.asked))
            whole = self.asked[index]
            sequence = replace(whole, forced=whole.forced[: rng.randint(1, len(whole.forced))])
            rid = uuid.uuid4().hex
            timer = None
            if rng.random() < ABORTS:
                timer = threading.Timer(rng.uniform(0.0, 0.15), self._abort, (rid,))
                timer.start()
            try:
                found = gate_scores.score(self.url, [sequence], 1, rids=[rid], aborts=True)
            except Exception as error:  # noqa: BLE001 - the thread's way to report it
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            self._check(index, found, len(sequence.forced))
            time.sleep(rng.choice((0.0, 0.0, 0.05)))

    def _abort(self, rid: str) -> None:
        requests.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=30)

    def _check(self, index: int, found, num_forced: int) -> None:
        decode = found.decode[0]
        apart = [
            abs(a - b)
            for ours, theirs in ((found.prefill[0], self.reference.prefill[index]),
                                 (decode, self.reference.decode[index]))
            for a, b in zip(ours, theirs, strict=False)
        ]  # fmt: skip
        with self._lock:
            self.done += 1
            self.aborted += len(decode) < num_forced
            self.largest = max([self.largest, *apart])
            if not max(apart, default=0.0) <= self.bound:
                self.wrong.append(
                    f"sequence {index} is {max(apart):.4g} off, at most {self.bound:.4g}"
                )


@pytest.mark.pain(4, 36, 59)
@pytest.mark.parametrize(("connector", "microbatches"), CASES)
def test_random_traffic(fleet, connector, microbatches):
    asked = fleet.setup.asked("bf16")
    graphs = ("--cuda-graph-bs-decode", "1", "2", "4", "8", "16")
    with fleet.serving(case(connector, True, microbatches), *graphs) as server:
        reference = gate_scores.score(server.url, asked, 1)
        others = [gate_scores.score(server.url, asked, width) for width in (4, 16)]
        apart = max(gate_scores.distance(reference, other).largest for other in others)
        traffic = Traffic(server.url, asked, reference, FACTOR * apart)
        clients = [
            threading.Thread(target=traffic.client, args=(seed,), daemon=True)
            for seed in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(SECONDS + 60)
        hung = sum(client.is_alive() for client in clients)
        state = requests.get(f"{server.url}/server_info", timeout=30).json()
    afd = state["internal_states"][0]["afd"]
    print(
        f"{connector}, {microbatches} microbatch(es): {traffic.done} requests, {traffic.aborted} "
        f"aborted, max |d logprob| {traffic.largest:.4g} of {traffic.bound:.4g}; "
        f"{afd['graph_replays']} replays, eager steps {afd['eager_steps']}"
    )
    assert not traffic.wrong, traffic.wrong[:5]
    assert not hung, f"{hung} clients wait"
    assert traffic.done > CLIENTS and traffic.aborted > 0
    eager_decodes = afd["eager_steps"].get("decode", 0)
    assert eager_decodes <= 0.01 * afd["graph_replays"]
