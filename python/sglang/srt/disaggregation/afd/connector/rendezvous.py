"""Where the ranks of one link find each other. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address of the key-value store that attention rank 0 hosts for networked connectors.

    Attributes:
        store_host: name or address of attention rank 0, reachable from every rank. A loopback
            address keeps all traffic of the link on the loopback interface.
        store_port: TCP port on that host, see `store.host_store`.
        timeout_s: longest wait for all ranks to appear, seconds.
        namespace: prefix of all keys. A link that is built again needs a fresh one.
    """

    store_host: str
    store_port: int
    timeout_s: float
    namespace: str = "afd"
