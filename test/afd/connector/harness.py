"""Runs one function per rank of a link: in threads (loopback) or in a pool of processes (gloo)."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.store import host_store
from sglang.srt.disaggregation.afd.errors import PeerLost

MAX_RANKS = 16
TIMEOUT_S = 120

# Importing sglang takes seconds: the fork server does it once, its children start at once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "sglang.srt.disaggregation.afd.connector.gloo"])


_stores = []  # a store lives as long as its object; the ranks of a case may outlive the case


def new_rendezvous(timeout_s: float = 30) -> Rendezvous:
    """A store of its own, hosted by this process as attention rank 0 does."""
    store = host_store("127.0.0.1", timeout_s)
    _stores.append(store)
    del _stores[:-8]
    return Rendezvous(store_host="127.0.0.1", store_port=store.port, timeout_s=timeout_s)


def run_threads(jobs: Sequence[Callable[[], object]]) -> list[object]:
    """Results in the order of the jobs; an exception is a result too."""
    results: list[object] = [TimeoutError("thread did not end")] * len(jobs)

    def run(i: int) -> None:
        results[i] = _outcome(jobs[i], ())

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return results


class ProcessPool:
    """Processes that wait for functions to run; started when first needed."""

    def __init__(self, num_ranks: int = MAX_RANKS) -> None:
        self._ranks = []
        for _ in range(num_ranks):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def start(self, rank: int, function: Callable[..., object], *args: object) -> None:
        self._ranks[rank][1].send((function, args))

    def results(self, num_ranks: int) -> list[object]:
        """Results of ranks 0..num_ranks - 1; an exception, or a death, is a result too."""
        deadline = time.monotonic() + TIMEOUT_S
        found: list[object] = []
        for _, pipe in self._ranks[:num_ranks]:
            if not wait([pipe], max(0.0, deadline - time.monotonic())):
                found.append(TimeoutError("process did not answer"))
                continue
            try:
                found.append(pipe.recv())
            except EOFError as exc:
                found.append(exc)
        return found

    def kill(self, rank: int) -> None:
        self._ranks[rank][0].kill()

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(5)


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        pipe.send(_outcome(function, args))


def _outcome(function: Callable[..., object], args: tuple[object, ...]) -> object:
    try:
        return function(*args)
    except Exception as exc:  # noqa: BLE001
        exc.add_note(traceback.format_exc())
        return exc


def raise_first(results: Sequence[object]) -> None:
    """Raise the cause of a failed run: a lost peer is mostly a consequence of another error."""
    errors = [result for result in results if isinstance(result, Exception)]
    errors.sort(key=lambda error: isinstance(error, PeerLost))
    if errors:
        raise errors[0]
