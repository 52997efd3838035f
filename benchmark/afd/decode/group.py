"""The processes of one configuration, from the driver's side. One group is busy at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing  # noqa: F401 - lets GPU memory travel through Process arguments

from decode import attention_rank, ffn_rank
from decode.attention_rank import Job
from decode.configurations import Configuration, Settings, command_line

_STOP_S = 10.0
_DRAWS = random.SystemRandom()


class GroupFailed(RuntimeError):
    """A rank of a configuration died, or did not answer in time."""


@dataclass
class _Rank:
    """A process, its pipe, and answers that nobody asked for yet."""

    process: BaseProcess
    pipe: Connection
    inbox: list[Any] = field(default_factory=list)


class Group:
    """Starts the ranks of `configuration`; `wait_ready` comes before anything else.

    Args:
        memory: KV memory by GPU, see `arena`; none to let each rank allocate its own.
    """

    def __init__(
        self, configuration: Configuration, settings: Settings, memory: dict[int, Any]
    ) -> None:
        self.configuration = configuration
        self.facts: list[dict[str, Any]] = []
        self.ffn_facts: list[dict[str, Any]] = []
        self.ready_s = 0.0
        self._began = time.monotonic()
        line = tuple(command_line(configuration, settings, (_free_port(), _free_port())))
        context = multiprocessing.get_context("spawn")
        self._attn: list[_Rank] = []
        self._ffn: list[_Rank] = []
        for index in range(configuration.gpus):
            is_attn = index < configuration.attn_ranks
            gpu = configuration.first_gpu + index
            job = Job(
                command_line=line,
                rank=index if is_attn else index - configuration.attn_ranks,
                gpu=gpu,
                is_null=configuration.connector == "null",
                parent=os.getpid(),
            )
            ours, theirs = context.Pipe()
            process: BaseProcess
            if is_attn:
                arguments = (job, theirs, memory.get(gpu))
                process = context.Process(target=attention_rank.main, args=arguments)
            else:
                process = context.Process(target=ffn_rank.main, args=(job, theirs))
            process.start()
            theirs.close()
            (self._attn if is_attn else self._ffn).append(_Rank(process, ours))

    @property
    def name(self) -> str:
        return self.configuration.name

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all ranks are loaded and captured.

        Raises:
            GroupFailed
        """
        self.facts = self._answers(self._attn, timeout_s)
        self.ffn_facts = self._answers(self._ffn, timeout_s)
        ready_at = max(facts["ready_at"] for facts in (*self.facts, *self.ffn_facts))
        self.ready_s = ready_at - self._began

    def attn(self, method: str, timeout_s: float, **arguments: Any) -> list[Any]:
        """What each rank with KV cache answers.

        Raises:
            GroupFailed
        """
        return self._ask(self._attn, method, timeout_s, arguments)

    def ffn(self, method: str, timeout_s: float, **arguments: Any) -> list[Any]:
        """What each FFN rank answers."""
        return self._ask(self._ffn, method, timeout_s, arguments)

    def _ask(
        self, ranks: list[_Rank], method: str, timeout_s: float, arguments: dict[str, Any]
    ) -> list[Any]:
        for rank in ranks:
            try:
                rank.pipe.send((method, arguments))
            except OSError:
                continue  # its last message, which is read next, says why it died
        return self._answers(ranks, timeout_s)

    def _answers(self, ranks: list[_Rank], timeout_s: float) -> list[Any]:
        """The next answer of each rank. All are read: one that dies keeps others from answering."""
        deadline = time.monotonic() + timeout_s
        by_pipe = {rank.pipe: rank for rank in (*self._attn, *self._ffn)}
        while not all(rank.inbox for rank in ranks):
            ready = wait(list(by_pipe), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise GroupFailed(f"{self.name}: no answer in {timeout_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                by_pipe[pipe].inbox.append(self._receive(pipe))
        return [rank.inbox.pop(0) for rank in ranks]

    def _receive(self, pipe: Connection) -> Any:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            raise GroupFailed(f"{self.name}: a rank died; its log says why") from None
        if kind == "error":
            raise GroupFailed(f"{self.name}: {value}")
        return value

    def stop(self) -> None:
        """End all ranks; those that do not end by themselves are killed."""
        for rank in self._attn:
            with contextlib.suppress(OSError):
                rank.pipe.send(("stop", {}))
        deadline = time.monotonic() + _STOP_S
        for rank in (*self._attn, *self._ffn):
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join(_STOP_S)
            rank.pipe.close()


def _free_port() -> int:
    """One that nobody has, below those that the kernel gives away before a rank listens here."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _DRAWS.randrange(first // 2, first)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
