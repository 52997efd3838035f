"""The gloo connections of one rank: posts messages, waits for them, explains failures.

Knows nothing of tokens; `gloo` does.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from sglang.srt.disaggregation.afd import envs
from sglang.srt.disaggregation.afd.connector.base import LinkSpec, Transfer
from sglang.srt.disaggregation.afd.connector.checks import Wait
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.store import is_loopback, join_store
from sglang.srt.disaggregation.afd.errors import AFDConfigError, AFDError, DeadlineExceeded

logger = logging.getLogger(__name__)

NUM_MICROBATCHES = 2


class Kind(IntEnum):
    """With the microbatch this makes gloo's tag, so that nothing queues behind anything else."""

    HEADER = 0
    TOKENS = 1
    RESULT = 2


_CUT_TAG = NUM_MICROBATCHES * len(Kind)  # never sent


class Pending(NamedTuple):
    """A posted message and what must outlive it. If posting failed, `work` is the error."""

    peer: int
    work: Work | RuntimeError
    buffer: torch.Tensor


class GlooLink:
    """The connections of one rank: posts messages, waits for them, explains failures.

    The first failure is final: gloo closes every connection of a rank whose wait times out, and
    after a mismatch nobody knows what the next message is. So this closes them all, by which the
    peers notice at once, and raises the same error for every later use.
    """

    def __init__(self, spec: LinkSpec, world_rank: int, rendezvous: Rendezvous) -> None:
        self.spec = spec
        self.world_rank = world_rank
        self.name = spec.topology.rank_name(world_rank)
        self._failure: AFDError | None = None
        self._on_wait: Callable[[int, float], None] | None = None
        timeout = timedelta(seconds=rendezvous.timeout_s)
        options = ProcessGroupGloo._Options()
        options._devices = [_listen(self.name, rendezvous)]
        options._timeout = timeout
        options._threads = 1  # runs collectives only, which nobody calls
        try:
            self._store: TCPStore | None = join_store(rendezvous)
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                PrefixStore(f"{rendezvous.namespace}/gloo", self._store),
                world_rank,
                spec.topology.world_size,
                options,
            )
        except RuntimeError as exc:
            raise DeadlineExceeded(
                f"{self.name} did not find all {spec.topology.world_size} ranks through "
                f"{rendezvous.store_host}:{rendezvous.store_port} within "
                f"{rendezvous.timeout_s:g} s: {exc}. Check that every rank runs and reaches "
                "--afd-bootstrap-addr"
            ) from exc

    def set_on_wait(self, on_wait: Callable[[int, float], None]) -> None:
        """See `TellsWaits`."""
        self._on_wait = on_wait

    def send(self, dest: int, kind: Kind, microbatch: int, data: torch.Tensor) -> Pending:
        """Post `data`, contiguous, which nobody may change until it is waited for."""
        buffer = data.view(-1).view(torch.uint8)
        group = self._usable()
        try:
            return Pending(dest, group.send([buffer], dest, _tag(kind, microbatch)), buffer)
        except RuntimeError as exc:
            return Pending(dest, exc, buffer)

    def recv(self, source: int, kind: Kind, microbatch: int, num_bytes: int) -> Pending:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        group = self._usable()
        try:
            return Pending(source, group.recv([buffer], source, _tag(kind, microbatch)), buffer)
        except RuntimeError as exc:
            return Pending(source, exc, buffer)

    def wait(
        self, pending: Pending, transfer: Transfer, expected: str, deadline: float
    ) -> torch.Tensor:
        """Wait until `time.monotonic()` reaches `deadline` and return the message's bytes.

        Raises:
            DeadlineExceeded, PeerLost
        """
        self._usable()
        try:
            if isinstance(pending.work, RuntimeError):
                raise pending.work
            began = time.monotonic()
            # A timeout of zero would mean gloo's default.
            pending.work.wait(timedelta(seconds=max(deadline - began, 1e-3)))
            if self._on_wait is not None:
                self._on_wait(pending.peer, time.monotonic() - began)
        except RuntimeError as exc:
            wait = self.describe(pending.peer, transfer, expected)
            if "Timed out" in str(exc):
                raise self.fail(wait.deadline_exceeded(self.spec.timeout_s, "nothing")) from exc
            raise self.fail(wait.peer_lost(f"gloo's error '{exc}'")) from exc
        return pending.buffer

    def describe(self, peer: int, transfer: Transfer, expected: str) -> Wait:
        return Wait(self.name, self.spec.topology.rank_name(peer), transfer, expected)

    def fail(self, error: AFDError) -> AFDError:
        """Close every connection now, keep `error` for later calls, and return it."""
        group, self._group, self._store = self._group, None, None
        self._failure = error
        scratch = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.spec.topology.world_size):
            if group is None or peer == self.world_rank:
                continue
            try:
                # gloo has no call that closes connections to which messages hold references,
                # but it closes all of them when a wait times out.
                group.recv([scratch], peer, _CUT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as exc:
                logger.debug("%s closes its connection to rank %d: %s", self.name, peer, exc)
        return error

    def close(self) -> None:
        if self._failure is None:
            self._failure = AFDError(f"{self.name} used its gloo connector after close()")
        self._group = self._store = None

    def _usable(self) -> ProcessGroupGloo:
        if self._failure is not None:
            raise self._failure
        assert self._group is not None
        return self._group


def _tag(kind: Kind, microbatch: int) -> int:
    return microbatch * len(Kind) + kind


def _listen(name: str, rendezvous: Rendezvous) -> ProcessGroupGloo.Device:
    """The network device for gloo: the loopback one if the store is there; else the interface
    of torch's GLOO_SOCKET_IFNAME, or the address from which this host reaches the store."""
    address = _local_address(rendezvous)
    interface = envs.text(envs.GLOO_INTERFACE)
    if is_loopback(address) or not interface:
        logger.info("%s: connector gloo over TCP listens on %s", name, address)
        return ProcessGroupGloo.create_device(hostname=address)
    logger.info("%s: connector gloo over TCP listens on interface %s", name, interface)
    try:
        return ProcessGroupGloo.create_device(interface=interface)
    except RuntimeError as exc:
        raise AFDConfigError(
            f"GLOO_SOCKET_IFNAME={interface}: {exc}; name one interface of this host"
        ) from exc


def _local_address(rendezvous: Rendezvous) -> str:
    """This host's address on the route to the store. Sends nothing."""
    host, port = rendezvous.store_host, rendezvous.store_port
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise AFDConfigError(
            f"--afd-bootstrap-addr {host}:{port} cannot be reached from this host: {exc}"
        ) from exc
