"""The test's side: starts the zygote, asks it for engines, and bounds every wait."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import psutil
from matrix.jobs import Answer, Command, EngineSpec, Job

IMPORT_TIMEOUT_S = 240
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 30
CALL_TIMEOUT_S = 60
HEARTBEAT_TIMEOUT_S = 20
_GRACE_S = 20  # for the pipe, on top of what a job may take
_TESTS = Path(__file__).resolve().parents[1]
# What `sglang.srt.disaggregation.afd.cpu` sets in a process for itself and its children.
_OURS = {"SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND", "OMP_WAIT_POLICY"}


class Zygote:
    """The pre-imported process; `call` and `Engine` each get a fork of it."""

    MODULE = "matrix.zygote"
    ENVIRONMENT: Mapping[str, str] = {}

    def __init__(self, folder: Path) -> None:
        self._socket_folder = tempfile.mkdtemp(prefix="afd")  # a socket's path must be short
        self.address = os.path.join(self._socket_folder, "zygote")
        self._log = folder / "zygote.log"
        env = {k: v for k, v in os.environ.items() if k not in _OURS}
        env["PYTHONPATH"] = str(_TESTS)
        env["SGLANG_AFD_LOG_PLANS"] = "1"
        # A server sets it for its children, but OpenMP reads it once, when the zygote loads it.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        env.update(self.ENVIRONMENT)
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.MODULE, self.address],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )
        deadline = time.monotonic() + IMPORT_TIMEOUT_S
        while not Path(self.address).exists():
            assert self.process.poll() is None, f"the zygote ended:\n{_tail(self._log)}"
            assert time.monotonic() < deadline, f"no zygote in {IMPORT_TIMEOUT_S} s"
            time.sleep(0.2)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function(*arguments)` in a child of its own."""
        child = Child(self, self._log)
        try:
            return child.ask((function, arguments), CALL_TIMEOUT_S)
        finally:
            child.kill()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        shutil.rmtree(self._socket_folder)


class Child:
    """One fork of the zygote: a process group, and a pipe to its leader."""

    def __init__(self, zygote: Zygote, log: Path) -> None:
        self._log = log
        self._pipe: Connection = Client(zygote.address, "AF_UNIX")
        self.pid = int(self._receive(CALL_TIMEOUT_S))

    def ask(self, message: Any, timeout_s: float) -> Any:
        self._pipe.send(message)
        return self._receive(timeout_s)

    def answer_if_there(self) -> Any:
        """The next message, or None if there is none yet."""
        return self._receive(0) if self._pipe.poll(0) else None

    def close(self) -> None:
        self._pipe.close()

    def members(self) -> list[psutil.Process]:
        """Processes of the group that are alive."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.pid and process.status() != "zombie":
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue  # it ended while we looked
        return found

    def kill(self) -> None:
        """End the whole group, whatever state it is in."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all gone already
        finally:
            self._pipe.close()

    def _receive(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self._pipe.poll(0.5):
            if hasattr(self, "pid"):
                assert psutil.pid_exists(self.pid), f"the child ended:\n{_tail(self._log)}"
            if time.monotonic() > deadline:
                text = f"no answer in {timeout_s} s:\n{_tail(self._log)}"
                self.kill()
                raise AssertionError(text)
        try:
            answer = self._pipe.recv()
        except EOFError as error:
            raise AssertionError(f"the child ended:\n{_tail(self._log)}") from error
        if isinstance(answer, Exception):
            raise AssertionError(f"{answer}\n{_tail(self._log)}")
        return answer


class Process:
    """A forked `python ARGV...`, with as much of subprocess.Popen as the tests use."""

    def __init__(self, zygote: Zygote, command: Command) -> None:
        self.args = list(command.argv)
        self.returncode: int | None = None
        command.log.touch()
        self._child = Child(zygote, command.log)
        self.pid = int(self._child.ask(command, CALL_TIMEOUT_S))

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._child.answer_if_there()
            if self.returncode is not None:
                self._child.close()
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired
        """
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout_s)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Engine:
    """A running engine, as a context; its regular end proves that nothing is left of it."""

    def __init__(self, zygote: Zygote, spec: EngineSpec) -> None:
        self.log = spec.log
        self._child = Child(zygote, spec.log)
        try:
            self._child.ask(spec, START_TIMEOUT_S)
        except BaseException:
            self._child.kill()
            raise

    def run(self, job: Job) -> list[Answer]:
        answers: list[Answer] = self._child.ask(job, job.timeout_s + _GRACE_S)
        return answers

    def state(self) -> list[dict[str, Any]]:
        """The `afd` entry of each attention rank, once heartbeats told all steps of FFN ranks."""
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
        while True:
            internal = self._child.ask("state", CALL_TIMEOUT_S)
            states = sorted((s["afd"] for s in internal), key=lambda state: int(state["rank"]))
            behind = [r for r in states[0]["ffn"] if r["steps"] != states[0]["steps"]]
            if not behind or time.monotonic() > deadline:
                return states
            time.sleep(0.3)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is not None:
            self._child.kill()
            return
        try:
            self._child.ask("stop", STOP_TIMEOUT_S)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while (left := self._child.members()) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not left, f"left running: {left}"
        finally:
            self._child.kill()


def _tail(log: Path, lines: int = 60) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
