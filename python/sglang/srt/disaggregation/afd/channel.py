"""One end of the control channel: its thread, event loop, connection and first failure.

What is said over it belongs to `control`. A closed connection means a lost rank: the monitor of
the socket tells at once, heartbeats tell when a host or a network ends without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from sglang.srt.disaggregation.afd.errors import AFDConfigError, AFDError, DeadlineExceeded
from sglang.srt.disaggregation.afd.messages import Message

logger = logging.getLogger(__name__)

LEADER = "attn 0"
MAX_TEXT = 1 << 16  # of a Failed or Stop, characters
_LOG_EVERY_S = 10.0
_LINGER_S = 1.0  # longest that a close waits for what is still to be sent
_SETTLE_S = 0.02  # from the end of a connection until ZMQ has forgotten its name
_MONITOR = "inproc://monitor"  # each channel has a context, and so its names, for itself
_MAX_MESSAGE_BYTES = 1 << 20
# Plans that wait for an FFN rank. The buffers are small so that a stuck rank fills them soon.
_PLAN_QUEUE = 1000
_PLAN_BUFFER_BYTES = 1 << 16


def parse_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPv6]:PORT` as (host, port)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise AFDConfigError(f"--afd-bootstrap-addr is {address!r}, must be HOST:PORT")
    return host.strip("[]"), int(port)


def url(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Channel(ABC):
    """The thread, event loop and connection of one side.

    `check`, `set_on_failure` and `close` may be called from any thread but the channel's own.
    """

    def __init__(self, name: str, socket_type: int, host: str, peer_timeout_s: float) -> None:
        self.name = name
        self._beat_every_s = min(peer_timeout_s / 5, 2.0)
        self._peer_timeout_s = peer_timeout_s
        self._context = zmq.Context()
        self._ipv6 = ":" in host
        self._socket = zmq.asyncio.Socket(self._context, socket_type)
        self._prepare(self._socket)
        self._changed = threading.Condition()  # guards what the thread tells the callers
        self._failure: AFDError | None = None
        self._on_failure: Callable[[AFDError], None] | None = None
        self._ending = False  # a Stop was said or heard, or we close: no loss is a failure
        self._closed = False

    def check(self) -> None:
        """Raise what went wrong, if anything did. Costs one attribute read."""
        failure = self._failure
        if failure is not None:
            raise type(failure)(*failure.args)

    def set_on_failure(self, callback: Callable[[AFDError], None]) -> None:
        """`callback` runs once, on the channel's thread, at the first failure.

        It must return soon, and must not call `stop`, `failed` or `close`.
        """
        with self._changed:
            self._on_failure = callback
            if self._failure is not None and not self._closed:
                self._loop.call_soon_threadsafe(callback, self._failure)

    def close(self) -> None:
        """End the thread and the sockets; sends what is queued, for at most a second."""
        with self._changed:
            if self._closed:
                return
            self._closed = self._ending = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(_LINGER_S)
        self._close_plans()
        if self._thread.is_alive():
            # Waiting for its sockets would hang this thread as well.
            logger.warning("%s: the control thread hangs in a callback; left behind", self.name)
            return
        self._context.term()

    def _wait(self, missing: Callable[[], str], timeout_s: float, way_out: str) -> None:
        """Wait until `missing()` is empty; log every 10 s what it says."""
        now = time.monotonic()
        deadline, next_log = now + timeout_s, now + _LOG_EVERY_S
        with self._changed:
            self.check()
            while text := missing():
                now = time.monotonic()
                if now >= deadline:
                    raise DeadlineExceeded(
                        f"{self.name}: waiting for {text}; gave up after {timeout_s:g} s: {way_out}"
                    )
                if now >= next_log:
                    next_log = now + _LOG_EVERY_S
                    logger.info("%s: waiting for %s", self.name, text)
                self._changed.wait(min(deadline, next_log) - now)
                self.check()

    def _start(self) -> None:
        """Last act of a constructor, so that one that raises leaves no event loop open."""
        self._loop = uvloop.new_event_loop()
        self._task = self._loop.create_task(self._serve())
        self._thread = threading.Thread(
            target=self._run, name=f"afd-control {self.name}", daemon=True
        )
        self._thread.start()

    def _prepare(self, new: zmq.Socket[Any]) -> None:
        new.linger = int(_LINGER_S * 1000)
        new.set(zmq.IPV6, self._ipv6)
        new.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)

    def _new_plan_socket(self, socket_type: int) -> zmq.Socket[bytes]:
        new = self._context.socket(socket_type)
        self._prepare(new)
        new.set_hwm(_PLAN_QUEUE)
        new.set(zmq.SNDBUF, _PLAN_BUFFER_BYTES)
        new.set(zmq.RCVBUF, _PLAN_BUFFER_BYTES)
        return new

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        except Exception as error:
            self._fail(AFDError(f"{self.name}: the control thread ended: {error!r}"))
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._socket.monitor(_MONITOR, zmq.EVENT_DISCONNECTED)
        monitor = zmq.asyncio.Socket(self._context, zmq.PAIR)
        monitor.connect(_MONITOR)
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        next_beat = time.monotonic()
        try:
            while True:
                await poller.poll(max(0, int((next_beat - time.monotonic()) * 1000) + 1))
                # Events before messages: what a peer said before it left is then heard first.
                disconnected = await _drain(monitor)
                for frames in await _drain(self._socket):
                    await self._on_message(frames)
                if disconnected:
                    await self._on_disconnect()
                    next_beat = min(next_beat, time.monotonic() + _SETTLE_S)
                if time.monotonic() >= next_beat:
                    await self._beat()
                    next_beat = time.monotonic() + self._beat_every_s
        finally:
            self._socket.disable_monitor()
            monitor.close()
            self._socket.close()

    def _fail(self, error: AFDError) -> None:
        """Record the first failure. On the channel's thread only."""
        with self._changed:
            if self._failure is not None or self._ending:
                return
            self._failure = error
            callback = self._on_failure
            self._changed.notify_all()
        logger.error("%s: %s", self.name, error)
        if callback is not None:
            callback(error)

    def _post(self, send: Callable[[Message], Awaitable[None]], message: Message) -> None:
        """Run `send` on the channel's thread; returns when ZMQ holds the message."""
        if self._closed or not self._thread.is_alive():
            raise AFDError(f"{self.name}: the control channel is closed")

        async def run() -> None:
            await send(message)

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            future.result(_LINGER_S)
        except TimeoutError as error:
            kind = type(message).__name__
            raise DeadlineExceeded(f"{self.name}: {kind} not sent in {_LINGER_S} s") from error

    @abstractmethod
    async def _on_message(self, frames: list[bytes]) -> None: ...

    @abstractmethod
    async def _on_disconnect(self) -> None:
        """Somebody's connection ended; a beat follows 20 ms later."""

    @abstractmethod
    async def _beat(self) -> None:
        """Send heartbeats and judge those of the others."""

    @abstractmethod
    def _close_plans(self) -> None: ...


async def _drain(source: zmq.asyncio.Socket) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while True:
            messages.append(await source.recv_multipart(zmq.NOBLOCK))
    return messages
