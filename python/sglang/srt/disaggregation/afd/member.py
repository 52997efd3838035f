"""The control channel of every rank but attention rank 0, which leads. See `control`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

import zmq

from sglang.srt.disaggregation.afd.channel import LEADER, MAX_TEXT, Channel, parse_address, url
from sglang.srt.disaggregation.afd.errors import AFDError, HandshakeRefused, PeerLost
from sglang.srt.disaggregation.afd.messages import (
    Facts,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Refuse,
    Role,
    StepPlan,
    Stop,
    Trace,
    Welcome,
    decode,
    encode,
)

_STOP_GRACE_MS = 100  # for the Stop behind the last plan, once the other connection told it


class MemberControl(Channel):
    """The side of every rank but attention rank 0. Order: `join`, `ready`, then `recv_plan`.

    Args:
        address: HOST:PORT of the leader; it need not run yet.
        load_timeout_s: longest wait for the leader, and its silence before `ready`, seconds.
        peer_timeout_s: longest silence of the leader after that, seconds.
    """

    def __init__(
        self,
        address: str,
        role: Role,
        rank: int,
        facts: Facts,
        load_timeout_s: float,
        peer_timeout_s: float,
    ) -> None:
        self._host, port = parse_address(address)
        super().__init__(f"{role} {rank}", zmq.DEALER, self._host, peer_timeout_s)
        self._role = role
        self._rank = rank
        self._leader = f"the leader ({LEADER}) at {address}"
        self._load_timeout_s = load_timeout_s
        self._silence_limit_s = load_timeout_s
        self._hello = Hello(
            role=role, rank=rank, pid=os.getpid(), host=socket.gethostname(), facts=facts
        )
        self._said_hello = False
        self._welcome: Welcome | None = None
        self._stop: Stop | None = None
        self._counters = (0, 0)
        self._on_trace: Callable[[Trace], None] | None = None
        self._last_seen = 0.0
        self._plans: zmq.Socket[bytes] | None = None
        self._wake_read, self._wake_write = os.pipe()  # ends the poll of `recv_plan`
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._socket.connect(url(self._host, port))
        self._start()

    def join(self) -> Welcome:
        """Say hello until answered. FFN ranks call this on the thread that calls `recv_plan`.

        Raises:
            HandshakeRefused: the text names what differs and both values.
            DeadlineExceeded: no answer within `load_timeout_s`.
        """
        self._post(self._say_hello, self._hello)
        way_out = "is it running, and is --afd-bootstrap-addr the same on both sides?"
        self._wait(lambda: "" if self._welcome else self._leader, self._load_timeout_s, way_out)
        assert self._welcome is not None
        if self._welcome.plan_endpoint and self._plans is None:
            self._plans = self._new_plan_socket(zmq.PULL)
            self._plans.connect(url(self._host, self._welcome.plan_endpoint.rpartition(":")[2]))
            self._poller.register(self._plans, zmq.POLLIN)
        return self._welcome

    def ready(self, message: Ready) -> None:
        """Report loaded weights. From now on `peer_timeout_s` bounds the leader's silence."""
        self.check()
        self._last_seen = time.monotonic()
        self._silence_limit_s = self._peer_timeout_s
        self._post(self._send, message)

    def failed(self, text: str) -> None:
        """Tell the leader why this rank ends, then close. Keeps the end of a very long text."""
        if self._closed:
            return
        try:
            message = Failed(role=self._role, rank=self._rank, text=text[-MAX_TEXT:])
            self._post(self._send, message)
        finally:
            self.close()

    def recv_plan(self) -> StepPlan | Stop:
        """The next plan, in the order published; Stop comes after the last one. FFN ranks only.

        Waits as long as the leader lives.
        Raises:
            PeerLost: the leader closed its connection or is silent.
        """
        if self._plans is None or self._closed:
            raise AFDError(
                f"{self.name}: recv_plan before join, after close, or not on an FFN rank"
            )
        while True:
            readable = dict(self._poller.poll())
            self.check()
            if self._plans not in readable and self._plans.poll(_STOP_GRACE_MS) == 0:
                if self._stop is not None:
                    return self._stop
                continue
            message = decode(self._plans.recv(zmq.NOBLOCK))
            if isinstance(message, Stop):
                self._stop, self._ending = message, True
            elif not isinstance(message, StepPlan):
                raise AFDError(f"{self.name}: {type(message).__name__} among the plans")
            return message

    def count(self, steps: int, rows: int) -> None:
        """Steps and rows done since the start, for the next heartbeat."""
        self._counters = (steps, rows)

    def set_on_trace(self, callback: Callable[[Trace], None]) -> None:
        """`callback` runs on the channel's thread for each `Trace`, and must return soon."""
        self._on_trace = callback

    @property
    def counters(self) -> tuple[int, int]:
        """Steps and rows, as `count` was told last."""
        return self._counters

    @property
    def is_healthy(self) -> bool:
        return self._failure is None

    def silences(self) -> dict[str, float]:
        """Seconds since the leader's last sign of life, by the leader's name."""
        return {LEADER: time.monotonic() - self._last_seen}

    def stopped(self) -> Stop | None:
        """The leader's Stop, if it was said: how an attention rank learns of it."""
        return self._stop

    def _close_plans(self) -> None:
        if self._plans is not None:
            self._plans.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _fail(self, error: AFDError) -> None:
        super()._fail(error)
        self._wake()

    def _wake(self) -> None:
        if not self._closed:
            os.write(self._wake_write, b"!")

    async def _send(self, message: Message) -> None:
        with contextlib.suppress(zmq.Again):  # full only when the leader has long been silent
            await self._socket.send(encode(message), zmq.NOBLOCK)

    async def _say_hello(self, message: Message) -> None:
        self._said_hello = True
        await self._send(message)

    async def _on_message(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[-1])
        except AFDError as error:
            self._fail(type(error)(f"{self._leader}: {error}"))
            return
        self._last_seen = time.monotonic()
        if isinstance(message, Refuse):
            self._fail(HandshakeRefused(message.reason))
        elif isinstance(message, Stop):
            with self._changed:
                self._stop, self._ending = message, True
            self._wake()
        elif isinstance(message, Trace):
            if self._on_trace is not None:
                self._on_trace(message)
        elif isinstance(message, Welcome):
            with self._changed:
                self._welcome = message
                self._changed.notify_all()

    async def _on_disconnect(self) -> None:
        if self._welcome is not None:
            self._fail(PeerLost(f"{self._leader} closed its connection: it ended; see its log"))
        elif self._said_hello and self._failure is None:
            await self._say_hello(self._hello)  # the first may have gone to a leader that ended

    async def _beat(self) -> None:
        if self._welcome is None or self._ending or self._failure is not None:
            return  # after the end there is nobody to read it, and `close` would wait for it
        steps, rows = self._counters
        await self._send(Heartbeat(role=self._role, rank=self._rank, steps=steps, rows=rows))
        silent_s = time.monotonic() - self._last_seen
        if silent_s > self._silence_limit_s:
            self._fail(PeerLost(f"{self._leader}: no heartbeat for {silent_s:.1f} s"))
