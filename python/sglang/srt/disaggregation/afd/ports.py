"""TCP ports that are chosen, or named by the user, long before a server listens on them.

A held port is bound without listening: the kernel gives it to nobody who asks for any port, and a
listener that sets SO_REUSEADDR, as asyncio's and our control plane's do, may still take it.
"""

from __future__ import annotations

import errno
import socket

from sglang.srt.disaggregation.afd.errors import AFDConfigError


def hold(host: str, port: int, flag: str) -> socket.socket:
    """Hold `port` of this host (0: any free one) until the socket is closed.

    Raises:
        AFDConfigError: somebody listens on it; names `flag`.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    held = socket.socket(family, kind, protocol)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(address)
    except OSError as error:
        held.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        raise AFDConfigError(
            f"{flag} {port}: cannot listen on {host}:{port} ({error.strerror}); choose another, "
            "or end the process that has it"
        ) from error
    return held
