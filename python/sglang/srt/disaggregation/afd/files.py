"""Sockets and shared memory that a server leaves in the file system, and their removal.

Upstream gives its sockets temporary names and ends its processes with SIGKILL, so the names stay.
A server in AFD mode keeps them in one folder of its own, which goes when the server ends; what
only a killed launcher could leave, the next start of the same user removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.afd.errors import DeadlineExceeded, PeerLost

logger = logging.getLogger(__name__)

_PREFIX = "sglang-afd-"
_LOCK, _OUTSIDE = "lock", "outside"
_REASON, _FOLLOWS = "reason-", "follows-"  # and the pid
_LONGEST_SOCKET_PATH = 107
_IPC = "ipc://"


class RunFolder:
    """The folder of one server. An open lock on a file in it says that the server lives.

    A lock, unlike a pid, tells the truth in a container that shares the temporary folder too.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > _LONGEST_SOCKET_PATH // 2:
            base = "/tmp"  # where a socket's path is still short enough
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._outside: list[Path] = []
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def adopt(self, port_args: Any) -> None:
        """Move the sockets that `port_args` names, none of which is bound yet, into the folder."""
        from sglang.srt.managers.load_snapshot import shm_path_for

        for field in fields(port_args):
            value = getattr(port_args, field.name)
            if isinstance(value, str) and value.startswith(_IPC):
                reserved = Path(value.removeprefix(_IPC))
                setattr(port_args, field.name, f"{_IPC}{self.path / reserved.name}")
                reserved.unlink(missing_ok=True)
        self._outside.append(Path(shm_path_for(port_args.instance_id)))
        (self.path / _OUTSIDE).write_text("\n".join(map(str, self._outside)))

    def reason(self) -> str:
        """Why the first rank ended that said so; empty if none did.

        A rank that lost another one says so only if none says why that one was lost.
        """
        for kind in (_REASON, _FOLLOWS):
            said = sorted(self.path.glob(f"{kind}*"), key=lambda path: path.stat().st_mtime_ns)
            if said:
                return said[0].read_text()
        return ""

    def remove(self) -> None:
        """Remove everything. Safe to call twice, and while processes still have it open."""
        _remove(self.path)


def leave_reason(folder: str | None, text: str, error: BaseException) -> None:
    """Say in the server's folder that this process ends of `error`, for the main process's clients.

    The first reason of a process stays: what its other threads fail of then follows from it.
    `folder` is None in a process that no main process with an API started.
    """
    if folder is not None:
        kind = _FOLLOWS if isinstance(error, PeerLost | DeadlineExceeded) else _REASON
        # The disk is full, the server gone, or a reason is there: the log has it.
        with contextlib.suppress(OSError), Path(folder, f"{kind}{os.getpid()}").open("x") as new:
            new.write(text)


def sweep() -> None:
    """Remove the folders of this user's servers that were killed before they could do it."""
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(base).glob(f"{_PREFIX}*"):
            if _is_orphan(folder):
                logger.info("AFD: removing %s, left by a server that was killed", folder)
                _remove(folder)


def _is_orphan(folder: Path) -> bool:
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return False  # removed in between, or so new that its lock is not there yet
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its server lives
    finally:
        os.close(lock)
    return True


def _remove(folder: Path) -> None:
    outside = folder / _OUTSIDE
    if outside.exists():
        for name in outside.read_text().splitlines():
            Path(name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
