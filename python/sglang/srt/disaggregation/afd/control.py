"""The control channel over ZMQ: handshake, step plans, heartbeats, loss of a peer. No tensors.

`LeaderControl` is the side of attention rank 0, `MemberControl` (in `member`) that of all other
ranks; each member has one connection to the leader. Plans take a socket of their own for each FFN
rank, which the calling threads write and read, without a hand-off.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from sglang.srt.disaggregation.afd.channel import LEADER, MAX_TEXT, Channel, parse_address, url
from sglang.srt.disaggregation.afd.errors import (
    AFDConfigError,
    AFDError,
    DeadlineExceeded,
    HandshakeRefused,
    PeerLost,
)
from sglang.srt.disaggregation.afd.member import MemberControl
from sglang.srt.disaggregation.afd.messages import (
    Facts,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Refuse,
    StepPlan,
    Stop,
    Trace,
    Welcome,
    decode,
    encode,
    first_difference,
)

__all__ = ["LeaderControl", "MemberControl", "PeerStatus"]

logger = logging.getLogger(__name__)


class PeerStatus(NamedTuple):
    """What the leader knows of one member."""

    name: str  # `attn 1` or `ffn 0`
    ready: Ready | None
    heartbeat: Heartbeat | None  # the last one
    silent_s: float  # since its last message; 0 before the first
    pid: int  # 0 before it said hello
    host: str


@dataclass
class _Peer:
    name: str
    plans: zmq.Socket[bytes] | None  # FFN ranks only
    identity: bytes | None = None
    hello: Hello | None = None
    ready: Ready | None = None
    heartbeat: Heartbeat | None = None
    last_seen: float = 0.0

    def __str__(self) -> str:
        if self.hello is None:
            return self.name
        return f"{self.name} (pid {self.hello.pid} on {self.hello.host})"


class LeaderControl(Channel):
    """The side of attention rank 0. It accepts members as soon as it is constructed.

    Args:
        bind_addr: HOST:PORT of this host; 0.0.0.0 for all interfaces, port 0 for a free one.
        facts: those of this rank; the number of members follows from them.
        store_host, store_port: told to members that join.
        load_timeout_s: longest silence of a member before it is ready, seconds.
        peer_timeout_s: longest silence of a member after that, seconds.
    Raises:
        AFDConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        bind_addr: str,
        facts: Facts,
        store_host: str,
        store_port: int,
        load_timeout_s: float,
        peer_timeout_s: float,
    ) -> None:
        host, port = parse_address(bind_addr)
        try:  # ZMQ binds numeric addresses only
            ip = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            raise AFDConfigError(f"--afd-bootstrap-addr: unknown host {host!r}: {error}") from error
        super().__init__(LEADER, zmq.ROUTER, ip, peer_timeout_s)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(url(ip, port or "*"))
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise AFDConfigError(
                f"--afd-bootstrap-addr is {bind_addr}, which attn 0 cannot bind: {error}; name an "
                "address of its own host and a free port, or 0.0.0.0:PORT for all interfaces"
            ) from error
        self.address = f"{bind_addr.rpartition(':')[0]}:{_bound_port(self._socket)}"
        self._facts = facts
        self._store = (store_host, store_port)
        self._load_timeout_s = load_timeout_s
        self._num_published = 0
        self._plan_lock = threading.Lock()  # `stop` may come from another thread than `publish`
        self._plan_sockets: list[zmq.Socket[bytes]] = []
        for _ in range(facts.ffn_ranks):
            self._plan_sockets.append(self._new_plan_socket(zmq.PUSH))
            self._plan_sockets[-1].bind(url(ip, "*"))
        names = [f"attn {i}" for i in range(1, facts.attn_ranks)]
        peers = [_Peer(name, None) for name in names]
        peers += [_Peer(f"ffn {j}", plans) for j, plans in enumerate(self._plan_sockets)]
        self._peers = {peer.name: peer for peer in peers}
        self._joined: dict[bytes, _Peer] = {}  # by the name that ZMQ gave the connection
        self._start()

    def wait_ready(self, timeout: float) -> tuple[Ready, ...]:
        """Wait for all members: attention ranks, then FFN ranks, in rank order.

        Raises:
            HandshakeRefused: somebody serves something else.
            PeerLost: a member failed, or its process ended.
            DeadlineExceeded: names all that are missing after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        way_out = "see the logs of these ranks, or raise --afd-load-timeout"
        self._wait(self._missing, timeout, way_out)
        with self._plan_lock:
            for peer in self._peers.values():
                left_ms = max(1000, int((deadline - time.monotonic()) * 1000))
                if peer.plans is not None and not peer.plans.poll(left_ms, zmq.POLLOUT):
                    raise DeadlineExceeded(
                        f"{peer} is ready but did not connect to port {_bound_port(peer.plans)} of "
                        "the leader for its plans: does a firewall block it?"
                    )
        return tuple(peer.ready for peer in self._peers.values() if peer.ready is not None)

    def publish(self, plan: StepPlan) -> None:
        """Send one plan to all FFN ranks; never waits.

        Raises:
            PeerLost: an FFN rank is gone, or does not take its plans.
        """
        self.check()
        data = encode(plan)
        with self._plan_lock:
            if self._closed:
                raise AFDError(f"{self.name}: step {plan.step_id} published after the stop")
            for peer in self._peers.values():
                if peer.plans is None:
                    continue
                try:
                    peer.plans.send(data, zmq.NOBLOCK)
                except zmq.Again:
                    error = PeerLost(
                        f"{peer} does not take its plans, step {plan.step_id} could not be sent: "
                        "its process hangs or ended; see its log"
                    )
                    self._loop.call_soon_threadsafe(self._fail, error)
                    raise error from None
        self._num_published += 1

    def peers(self) -> tuple[PeerStatus, ...]:
        """All members: attention ranks, then FFN ranks, in rank order."""
        now = time.monotonic()
        return tuple(
            PeerStatus(
                name=p.name,
                ready=p.ready,
                heartbeat=p.heartbeat,
                silent_s=now - p.last_seen if p.last_seen else 0.0,
                pid=p.hello.pid if p.hello else 0,
                host=p.hello.host if p.hello else "",
            )
            for p in self._peers.values()
        )

    def trace(self, message: Trace) -> None:
        """Tell all members that a trace begins or ends."""
        self._post(self._send_to_all, message)

    def silences(self) -> dict[str, float]:
        """Seconds since the last sign of life of each member, by name."""
        return {peer.name: peer.silent_s for peer in self.peers()}

    def stop(self, reason: str) -> None:
        """Tell all members to stop, then close; an FFN rank gets it behind its last plan."""
        if self._closed:
            return
        self._ending = True
        message = Stop(reason=reason[:MAX_TEXT])
        try:
            self._post(self._send_to_all, message)
            with self._plan_lock:
                for plans in self._plan_sockets:
                    with contextlib.suppress(zmq.Again):  # stuck: it has the other connection
                        plans.send(encode(message), zmq.NOBLOCK)
        finally:
            self.close()

    def _missing(self) -> str:
        never, loading = "never said hello", "joined, still loading"
        return "; ".join(
            f"{peer} at {self.address}: {never}" if peer.hello is None else f"{peer}: {loading}"
            for peer in self._peers.values()
            if peer.ready is None
        )

    def _close_plans(self) -> None:
        with self._plan_lock:
            for plans in self._plan_sockets:
                plans.close()

    async def _send(self, identity: bytes, message: Message) -> bool:
        """False if the connection is gone, or its queue full."""
        try:
            await self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    async def _send_to_all(self, message: Message) -> None:
        for identity in tuple(self._joined):
            await self._send(identity, message)

    async def _on_message(self, frames: list[bytes]) -> None:
        identity, data = frames[0], frames[-1]
        peer = self._joined.get(identity)
        try:
            message = decode(data)
        except AFDError as error:
            sender = str(peer) if peer else "a rank that has not joined"
            text = f"{sender} was not understood: {error}"
            await self._refuse(identity, text)
            if peer is not None or isinstance(error, HandshakeRefused):
                self._fail(type(error)(text))
            return
        if isinstance(message, Hello):
            await self._on_hello(identity, message)
        elif peer is None:
            kind = type(message).__name__
            await self._refuse(identity, f"{kind} from a rank that has not joined")
        else:
            with self._changed:
                peer.last_seen = time.monotonic()
                if isinstance(message, Ready):
                    peer.ready = message
                elif isinstance(message, Heartbeat):
                    peer.heartbeat = message
                self._changed.notify_all()
            if isinstance(message, Failed):
                self._fail(PeerLost(f"{peer} failed: {message.text}"))

    async def _on_hello(self, identity: bytes, hello: Hello) -> None:
        name = f"{hello.role} {hello.rank}"
        sender = f"{name} (pid {hello.pid} on {hello.host})"
        difference = first_difference(self._facts, hello.facts)
        peer = self._peers.get(name)
        if difference is not None:
            field, ours, theirs = difference
            text = (
                f"{field} differs: {LEADER} says {ours!r}, {sender} says {theirs!r}; "
                "start both with the same model, versions and flags"
            )
            await self._refuse(identity, text)
            self._fail(HandshakeRefused(text))
        elif peer is None:
            text = f"{sender} is not a member here; members: {', '.join(self._peers)}"
            await self._refuse(identity, text)
        elif peer.identity not in (None, identity):
            await self._refuse(identity, f"{sender}: {peer} has already joined as {name}")
        else:
            with self._changed:
                peer.identity, peer.hello, peer.last_seen = identity, hello, time.monotonic()
                self._joined[identity] = peer
            host, port = self._store
            plans = "" if peer.plans is None else f"tcp://*:{_bound_port(peer.plans)}"
            welcome = Welcome(
                store_host=host,
                store_port=port,
                plan_endpoint=plans,
                capacity=self._facts.capacity,
            )
            await self._send(identity, welcome)

    async def _refuse(self, identity: bytes, reason: str) -> None:
        logger.warning("%s: refused: %s", self.name, reason)
        await self._send(identity, Refuse(reason=reason))

    async def _on_disconnect(self) -> None:
        """Whose connection it was, the next beat finds out: ZMQ does not know its name then."""

    async def _beat(self) -> None:
        beat = Heartbeat(role="attn", rank=0, steps=self._num_published, rows=0)
        for identity, peer in self._joined.items():
            limit = self._load_timeout_s if peer.ready is None else self._peer_timeout_s
            silent_s = time.monotonic() - peer.last_seen
            if not await self._send(identity, beat):
                self._fail(PeerLost(f"{peer} closed its connection: it ended; see its log"))
            elif silent_s > limit:
                self._fail(PeerLost(f"{peer}: no heartbeat for {silent_s:.1f} s"))


def _bound_port(bound: zmq.Socket[Any]) -> str:
    return bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
