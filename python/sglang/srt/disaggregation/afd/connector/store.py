"""The key-value store through which the ranks of a networked connector find each other."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.errors import AFDConfigError


def host_store(host: str, timeout_s: float) -> TCPStore:
    """Host a store on a free port of `host`, an address of this machine; `.port` is where.

    The port is bound before anybody is told, so nobody else can take it in between. On a loopback
    address nobody outside this machine reaches the store.
    Raises:
        AFDConfigError: `host` is not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as exc:
        raise AFDConfigError(
            f"--afd-bootstrap-addr names host {host}, where attn 0 cannot listen: {exc}; "
            "name an address of its own host"
        ) from exc
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(rendezvous: Rendezvous) -> TCPStore:
    """Connect to the store that attention rank 0 hosts; waits at most `timeout_s`."""
    return TCPStore(
        rendezvous.store_host,
        rendezvous.store_port,
        is_master=False,
        timeout=timedelta(seconds=rendezvous.timeout_s),
    )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
