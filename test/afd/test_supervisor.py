"""The supervisor: notices an end and a stopped process, keeps still for a wanted end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sglang.srt.disaggregation.afd.supervisor import Supervisor, watch_launcher

STOPPED_LIMIT_S = 1.5


class FakeProcess:
    """As much of multiprocessing's process as the supervisor uses, around a real child."""

    def __init__(self, code: str) -> None:
        self._child = subprocess.Popen([sys.executable, "-c", code])
        self.pid = self._child.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def exitcode(self):
        return self._child.poll()

    def kill(self):
        self._child.kill()
        self._child.wait(5)


@pytest.fixture
def lost():
    """(event, texts): set when the supervisor reports a loss."""
    event, texts = threading.Event(), []

    def on_loss(text: str) -> None:
        texts.append(text)
        event.set()

    return event, texts, on_loss


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise SystemExit(3)", "rank X ended with exit code 3"),
        ("raise SystemExit(0)", "rank X ended with exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "rank X ended with exit code -9"),
    ],
)
def test_an_end_is_reported_once_with_its_exit_code(lost, code, text):
    event, texts, on_loss = lost
    process = FakeProcess(code)
    supervisor = Supervisor(on_loss, STOPPED_LIMIT_S)
    supervisor.add("rank X", process)
    supervisor.start()
    assert event.wait(5)
    assert texts == [text]


def test_a_wanted_end_is_not_reported(lost):
    event, _, on_loss = lost
    process = FakeProcess("import time; time.sleep(60)")
    supervisor = Supervisor(on_loss, STOPPED_LIMIT_S)
    supervisor.add("rank X", process)
    supervisor.start()
    supervisor.expect_end()
    process.kill()
    assert not event.wait(1.5)


@pytest.mark.pain(55)
def test_processes_known_by_pid_are_watched_too(lost):
    event, texts, on_loss = lost
    child = FakeProcess("import time; time.sleep(60)")
    keeper = FakeProcess("import time; time.sleep(60)")
    try:
        supervisor = Supervisor(on_loss, STOPPED_LIMIT_S)
        supervisor.add("keeper", keeper)
        supervisor.add_pids("attention process", [child.pid])
        supervisor.start()
        assert not event.wait(1)
        os.kill(child.pid, signal.SIGKILL)
        assert event.wait(5)
        assert texts == [f"attention process {child.pid} is gone"]
    finally:
        keeper.kill()


@pytest.mark.pain(36)
def test_a_stopped_process_is_a_loss_after_the_limit(lost):
    event, texts, on_loss = lost
    process = FakeProcess("import time; time.sleep(60)")
    try:
        supervisor = Supervisor(on_loss, STOPPED_LIMIT_S)
        supervisor.add("rank X", process)
        supervisor.start()
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert event.wait(10)
        assert time.monotonic() - began > STOPPED_LIMIT_S
        assert "rank X has been stopped" in texts[0]
    finally:
        process.kill()


def test_a_process_stopped_for_a_moment_is_not_lost(lost):
    event, _, on_loss = lost
    process = FakeProcess("import time; time.sleep(60)")
    try:
        supervisor = Supervisor(on_loss, STOPPED_LIMIT_S)
        supervisor.add("rank X", process)
        supervisor.start()
        for _ in range(3):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.7)
        assert not event.is_set()
    finally:
        process.kill()


def test_a_stopped_main_process_is_killed():
    process = FakeProcess("import time; time.sleep(60)")
    watch_launcher(process.pid, limit_s=1)
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.exitcode == -signal.SIGKILL


STUBBORN_SCRIPT = """
import subprocess, sys
import psutil
from sglang.srt.disaggregation.afd import shutdown
code = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "print(1, flush=True); time.sleep(60)"
)
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
child.terminate()
assert psutil.pid_exists(child.pid)
shutdown.kill_children()
print("CHILD GONE", not psutil.pid_exists(child.pid))
"""


@pytest.mark.pain(61)
def test_a_child_that_ignores_sigterm_ends_too():
    """In a process of its own, since all children of it are ended."""
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN_SCRIPT],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "CHILD GONE True" in done.stdout, done.stderr[-2000:]


@pytest.mark.pain(61)
def test_a_pid_that_was_given_to_another_process_is_a_loss(lost, monkeypatch):
    event, texts, on_loss = lost
    process = FakeProcess("import time; time.sleep(60)")
    keeper = FakeProcess("import time; time.sleep(60)")
    try:
        supervisor = Supervisor(on_loss, STOPPED_LIMIT_S)
        supervisor.add("keeper", keeper)
        supervisor.add_pids("attention process", [process.pid])
        (known,) = supervisor._others.values()
        supervisor.start()
        assert not event.wait(1)
        # As if it had ended and its pid been given away between two looks.
        monkeypatch.setattr(known, "_ident", (process.pid, 0.0))
        assert event.wait(5)
        assert texts == [f"attention process {process.pid} is gone"]
    finally:
        process.kill()
        keeper.kill()
