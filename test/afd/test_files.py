"""A server's files go with it, and a killed server's with the next start."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.disaggregation.afd import files
from sglang.srt.disaggregation.afd.errors import PeerLost


@dataclasses.dataclass
class Ports:
    """As much of upstream's PortArgs as matters: names of sockets, and what is none."""

    scheduler_input_ipc_name: str
    instance_id: str
    nccl_port: int = 20000
    tcp_name: str = "tcp://127.0.0.1:20001"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def make_ports(folder: Path) -> Ports:
    reserved = folder / "tmpabc"
    reserved.touch()
    return Ports(f"ipc://{reserved}", f"test{os.getpid()}")


def test_sockets_move_into_the_folder_and_go_with_it(temporary):
    from sglang.srt.managers.load_snapshot import shm_path_for

    ports = make_ports(temporary)
    folder = files.RunFolder()
    folder.adopt(ports)
    assert ports.scheduler_input_ipc_name == f"ipc://{folder.path}/tmpabc"
    assert (ports.nccl_port, ports.tcp_name) == (20000, "tcp://127.0.0.1:20001")
    assert folder.path.stat().st_mode & 0o077 == 0, "others could connect to its sockets"
    shared = Path(shm_path_for(ports.instance_id))
    shared.touch()
    (folder.path / "tmpabc").touch()
    folder.remove()
    folder.remove()
    assert not list(temporary.iterdir())
    assert not shared.exists()


def test_a_living_servers_folder_is_kept(temporary):
    folder = files.RunFolder()
    files.sweep()
    assert folder.path.exists()


@pytest.mark.pain(57)
def test_a_killed_servers_folder_is_removed_at_the_next_start(temporary):
    code = (
        "import os, sys, tempfile\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from sglang.srt.disaggregation.afd import files\n"
        "folder = files.RunFolder()\n"
        "print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, temporary], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    left = Path(done.stdout.split()[-1])
    assert left.exists()
    files.sweep()
    assert not left.exists()


@pytest.mark.parametrize("first", ["cause", "follows"])
def test_the_cause_is_told_and_not_what_followed_from_it(first, monkeypatch):
    """Whoever writes first: a rank that lost a peer often notices before the peer has said why."""
    folder = files.RunFolder()
    try:
        said = {
            "cause": ("FFN rank 0 failed: out of memory", RuntimeError("out of memory")),
            "follows": ("Attention rank 0 failed: PeerLost", PeerLost("ffn 0")),
        }
        for pid, name in enumerate(sorted(said, key=lambda each: each != first)):
            monkeypatch.setattr(files.os, "getpid", lambda pid=pid: pid)
            files.leave_reason(str(folder.path), *said[name])
        assert folder.reason() == "FFN rank 0 failed: out of memory"
    finally:
        folder.remove()


def test_without_a_cause_the_first_that_followed_is_told():
    folder = files.RunFolder()
    try:
        files.leave_reason(str(folder.path), "Attention rank 0: ffn 0 is silent", PeerLost("ffn 0"))
        assert folder.reason() == "Attention rank 0: ffn 0 is silent"
    finally:
        folder.remove()
