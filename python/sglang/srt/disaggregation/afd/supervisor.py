"""Watches the processes of a server, and is watched: one that ended or was stopped is a loss.

Control channels notice a rank that hangs. What has none, the detokenizer, the DP controller and
the main process itself, is noticed here.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import psutil

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_REFRESH_S = 5.0


class Supervisor:
    """Watches processes from a daemon thread and calls `on_loss` once for the first that is lost.

    Args:
        on_loss: takes the text; runs on the supervisor's thread.
        stopped_limit_s: seconds after which a process in the stopped state (SIGSTOP) is lost.

    `expect_end()` says that an end is wanted from now on.
    """

    def __init__(self, on_loss: Callable[[str], None], stopped_limit_s: float) -> None:
        self._on_loss = on_loss
        self._stopped_limit_s = stopped_limit_s
        self._names: dict[int, str] = {}
        self._processes: list[BaseProcess] = []
        # With their start times, so that another process with the same pid is not taken for one.
        self._others: dict[int, psutil.Process | None] = {}
        self._stopped_since: dict[int, float] = {}
        self._descendants: list[psutil.Process] = []
        self._refresh_at = 0.0
        self._expected = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="afd-supervisor", daemon=True)

    def add(self, name: str, process: BaseProcess) -> None:
        assert process.pid is not None
        self._names[process.pid] = name
        self._processes.append(process)

    def add_pids(self, name: str, pids: list[int]) -> None:
        """Processes that are not our children; one that has gone already is lost."""
        for pid in pids:
            if pid not in self._names:
                self._names[pid] = f"{name} {pid}"
                self._others[pid] = _look_up(pid)

    def start(self) -> None:
        self._thread.start()

    def expect_end(self) -> None:
        self._expected.set()

    def _watch(self) -> None:
        while not self._expected.is_set():
            wait([process.sentinel for process in self._processes], timeout=_POLL_S)
            lost = self._first_lost() or self._first_stopped()
            if lost is not None and not self._expected.is_set():
                self._on_loss(lost)
                return

    def _first_lost(self) -> str | None:
        for process in self._processes:
            if process.exitcode is not None:
                return f"{self._names[process.pid or 0]} ended with exit code {process.exitcode}"
        for pid, other in list(self._others.items()):
            if other is None or not _lives(other):
                return f"{self._names[pid]} is gone"
        return None

    def _first_stopped(self) -> str | None:
        now = time.monotonic()
        if now >= self._refresh_at:
            self._descendants = psutil.Process().children(recursive=True)
            self._refresh_at = now + _REFRESH_S
        for process in self._descendants:
            if state(process.pid) != psutil.STATUS_STOPPED:
                self._stopped_since.pop(process.pid, None)
                continue
            stopped_s = now - self._stopped_since.setdefault(process.pid, now)
            if stopped_s > self._stopped_limit_s:
                name = self._names.get(process.pid) or f"process {process.pid} ({process.name()})"
                return f"{name} has been stopped for {stopped_s:.0f} s (SIGSTOP?)"
        return None


def _look_up(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def watch_launcher(pid: int, limit_s: float) -> None:
    """Kill the server's main process when it was stopped for longer than `limit_s`.

    Its clients would wait for ever. Everything below it ends with it.
    """

    def watch() -> None:
        since: float | None = None
        while (now := state(pid)) != "":
            if now != psutil.STATUS_STOPPED:
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > limit_s:
                logger.error(
                    "AFD: the server's main process %d has been stopped for %.0f s (SIGSTOP?); "
                    "it is killed",
                    pid,
                    limit_s,
                )
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(_POLL_S)

    threading.Thread(target=watch, name="afd-launcher-watch", daemon=True).start()


def state(pid: int) -> str:
    """One of psutil's STATUS_* words; empty for a process that is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""
