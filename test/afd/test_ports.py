"""A held port is nobody else's, and its owner may still listen on it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from sglang.srt.disaggregation.afd import ports
from sglang.srt.disaggregation.afd.errors import AFDConfigError


@pytest.mark.pain(47)
def test_held_port_is_refused_to_others_and_listened_on_by_its_owner():
    with ports.hold("127.0.0.1", 0, "--port") as held:
        port = held.getsockname()[1]
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))

        async def listen() -> None:  # the way uvicorn does
            server = await asyncio.get_running_loop().create_server(
                asyncio.Protocol, "127.0.0.1", port
            )
            server.close()
            await server.wait_closed()

        asyncio.run(listen())


def test_a_port_on_which_somebody_listens_is_an_error_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AFDConfigError, match=rf"--port {port}: cannot listen .*in use"):
            ports.hold("127.0.0.1", port, "--port")


def test_a_foreign_address_is_an_error():
    with pytest.raises(AFDConfigError, match="cannot listen on 192.0.2.1"):
        ports.hold("192.0.2.1", 0, "--port")
