"""The supervisor: notices an end, keeps still for a wanted one. And the launcher's choices."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import types

import pytest

from sglang.srt.disaggregation.afd import launch
from sglang.srt.disaggregation.afd.errors import AFDConfigError


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
    supervisor = launch.Supervisor(on_loss)
    supervisor.add("rank X", process)
    supervisor.start()
    assert event.wait(5)
    assert texts == [text]


def test_a_wanted_end_is_not_reported(lost):
    event, _, on_loss = lost
    process = FakeProcess("import time; time.sleep(60)")
    supervisor = launch.Supervisor(on_loss)
    supervisor.add("rank X", process)
    supervisor.start()
    supervisor.expect_end()
    process.kill()
    assert not event.wait(1.5)


def test_processes_known_by_pid_are_watched_too(lost):
    event, texts, on_loss = lost
    child = FakeProcess("import time; time.sleep(60)")
    keeper = FakeProcess("import time; time.sleep(60)")
    try:
        supervisor = launch.Supervisor(on_loss)
        supervisor.add("keeper", keeper)
        supervisor.add_pids("attention process", [child.pid])
        supervisor.start()
        assert not event.wait(1)
        os.kill(child.pid, signal.SIGKILL)
        assert event.wait(5)
        assert texts == [f"attention process {child.pid} is gone"]
    finally:
        keeper.kill()


def _args(**fields):
    args = types.SimpleNamespace(afd_role="all", afd_ffn_ranks=4, afd_bootstrap_addr=None)
    args.__dict__.update(fields)
    args.override = lambda source, **new: args.__dict__.update(new)
    args.afd_typed = lambda field: fields[field]
    return args


def test_chosen_address_stays_reserved_and_can_be_listened_on(monkeypatch):
    args = _args()
    launch.choose_address(args)
    host, _, port = args.afd_bootstrap_addr.rpartition(":")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((host, int(port)))
    with socket.create_server((host, int(port))):  # sets SO_REUSEADDR, as ZMQ does
        pass


def test_given_address_is_kept():
    args = _args(afd_bootstrap_addr="10.0.0.1:20000")
    launch.choose_address(args)
    assert args.afd_bootstrap_addr == "10.0.0.1:20000"


def test_ffn_ranks_are_split_over_nodes():
    assert launch.local_ffn_ranks(_args()) == range(4)
    shares = [
        launch.local_ffn_ranks(_args(afd_role="ffn", nnodes=2, node_rank=node)) for node in (0, 1)
    ]
    assert shares == [range(2), range(2, 4)]
    with pytest.raises(AFDConfigError, match="do not split evenly over --nnodes 3"):
        launch.local_ffn_ranks(_args(afd_role="ffn", nnodes=3, node_rank=0))
