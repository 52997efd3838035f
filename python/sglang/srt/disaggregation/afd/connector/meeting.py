"""All ranks of one link at one point of their start or end, through the key-value store.

And the same for the device: what a GPU connector enqueues while it is built ends within a deadline.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore

from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.store import join_store
from sglang.srt.disaggregation.afd.errors import DeadlineExceeded
from sglang.srt.disaggregation.afd.topology import Topology

_POLL_S = 1e-3


class Meeting:
    """Exchanges small values between all ranks; every rank makes the same calls in the same order.

    Args:
        purpose: what is being built, for the errors; also sets its keys apart.
    """

    def __init__(
        self, topology: Topology, world_rank: int, rendezvous: Rendezvous, purpose: str
    ) -> None:
        self._topology = topology
        self._world_rank = world_rank
        self._name = topology.rank_name(world_rank)
        self._purpose = purpose
        self._rendezvous = rendezvous
        self._calls = 0
        try:
            self._store = PrefixStore(f"{rendezvous.namespace}/{purpose}", join_store(rendezvous))
        except RuntimeError as exc:
            raise DeadlineExceeded(
                f"{self._name} did not reach the store of attn 0 at {rendezvous.store_host}:"
                f"{rendezvous.store_port} within {rendezvous.timeout_s:g} s: {exc}. Check "
                "--afd-bootstrap-addr"
            ) from exc

    def gather(self, value: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Values of all ranks in world order. `value` must not be empty.

        Args:
            timeout_s: for all ranks together; that of the rendezvous if None.
        Raises:
            DeadlineExceeded: names the first rank that did not come.
        """
        timeout_s = self._rendezvous.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        call, self._calls = self._calls, self._calls + 1
        values = []
        rank = self._world_rank
        try:
            self._store.set(f"{call}/{rank}", value)
            for rank in range(self._topology.world_size):
                left = max(deadline - time.monotonic(), _POLL_S)
                self._store.wait([f"{call}/{rank}"], timedelta(seconds=left))
                values.append(self._store.get(f"{call}/{rank}"))
        except RuntimeError as exc:
            raise DeadlineExceeded(
                f"{self._name} waited {timeout_s:g} s for {self._topology.rank_name(rank)} at "
                f"{self._purpose}, call {call}: {exc}. Check that every rank runs and look at "
                "that rank's log"
            ) from exc
        return values

    def finish_device(self, timeout_s: float | None = None) -> None:
        """Wait until the current stream has done all that it was given.

        Args:
            timeout_s: that of the rendezvous if None.
        Raises:
            DeadlineExceeded
        """
        timeout_s = self._rendezvous.timeout_s if timeout_s is None else timeout_s
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._name} waited {timeout_s:g} s for its GPU to finish what it exchanges "
                    f"with its peers over {self._purpose}. Look at the logs of the other ranks"
                )
            time.sleep(_POLL_S)
