"""Starts real servers as a user does, talks to them, and proves that nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import requests
from matrix.harness import Process, Zygote
from matrix.jobs import Command

START_TIMEOUT_S = 600  # a dozen processes may share two cores
STOP_TIMEOUT_S = 40
OURS = {"SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND", "OMP_WAIT_POLICY"}


def free_port() -> int:
    """A port with free neighbours below those that the kernel gives away.

    DP attention derives more ports from the first; whatever asks the kernel for any port gets none
    of them.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first // 2, first - 1000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """One `sglang.launch_server` command and all processes below it.

    With `zygote` the command is forked from it, else it is a fresh interpreter, as a user's: this
    one, or `python`.
    """

    def __init__(
        self,
        log: Path,
        model: Path,
        *flags: str,
        zygote: Zygote | None = None,
        api: bool = True,
        dtype: str = "float32",
        env: dict[str, str] | None = None,
        faults: tuple[str, ...] = (),
        python: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.flags = flags
        argv = (
            "-m", "sglang.launch_server",
            "--model-path", str(model), "--dtype", dtype,
            "--host", "127.0.0.1", "--port", str(self.port),
            "--max-total-tokens", "16384", *flags,
        )  # fmt: skip
        self.process: subprocess.Popen[bytes] | Process
        if zygote is not None:
            self.process = Process(zygote, Command(argv, log, log.parent, env or {}, faults))
        else:
            self.process = _spawn(python or Path(sys.executable), argv, log, env or {})
        self._seen: dict[int, psutil.Process] = {}
        if api:
            self.wait_healthy()

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.descendants()
            assert self.process.poll() is None, f"server ended:\n{self.tail()}"
            if "The server is fired up" in self.log.read_text(errors="replace"):
                return
            time.sleep(0.5)
        raise AssertionError(f"server not healthy in {START_TIMEOUT_S} s:\n{self.tail()}")

    def wait_answering(self) -> None:
        """As `wait_healthy`, for a server whose log cannot be read."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.descendants()
            assert self.process.poll() is None, "server ended"
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            time.sleep(0.5)
        raise AssertionError(f"server not healthy in {START_TIMEOUT_S} s")

    def descendants(self) -> list[psutil.Process]:
        """Every process that was ever seen below the server and is still alive."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass  # the server is gone; what it left behind is in _seen
        return [p for p in self._seen.values() if _is_running(p)]

    def ffn_pids(self) -> list[int]:
        """Pids of the FFN ranks, by the title they give themselves."""
        return [p.pid for p in self.descendants() if "sglang::afd_ffn" in " ".join(p.cmdline())]

    def info(self) -> list[dict]:
        """The `afd` entry of each attention rank, once the FFN counters stand still."""
        states: list[dict] = []
        for _ in range(20):
            response = requests.get(f"{self.url}/server_info", timeout=30)
            last, states = states, [s.get("afd") for s in response.json()["internal_states"]]
            if states == last:
                break
            time.sleep(2.5)
        return sorted(states, key=lambda state: state["rank"])

    def stop(self) -> int:
        """SIGTERM, as a service manager sends it; returns the exit code."""
        self.descendants()
        self.process.send_signal(signal.SIGTERM)
        return self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; nothing may be left running."""
        try:
            code = self.process.wait(timeout_s)
            deadline = time.monotonic() + 5
            while self.descendants() and time.monotonic() < deadline:
                time.sleep(0.1)
            left = [(p.pid, p.cmdline()[:3]) for p in self.descendants()]
            assert not left, f"left running: {left}"
            return code
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"did not end in {timeout_s} s:\n{self.tail()}") from error
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _spawn(
    python: Path, argv: tuple[str, ...], log: Path, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    # What this process set for itself while it imported the package; a user's shell has none.
    clean = {k: v for k, v in os.environ.items() if k not in OURS}
    with log.open("w") as output:
        return subprocess.Popen(
            [python, *argv],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, **env},
            start_new_session=True,
        )


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
