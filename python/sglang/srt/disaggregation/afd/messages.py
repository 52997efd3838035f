"""Every control message, and the one codec that writes and reads them. No sockets, no tensors.

A message on the wire is one byte, `PROTOCOL`, then msgpack. The byte comes first so that two
builds whose message fields differ still learn from each other which protocol each one speaks.
Constructors check ranges; `decode` checks types, field names and ranges.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from sglang.srt.disaggregation.afd.errors import HandshakeRefused, PlanMismatch

PROTOCOL = 3

Role = Literal["attn", "ffn"]
Mode = Literal["extend", "decode", "mixed", "idle", "warmup", "capture", "drain"]
ROLES: tuple[Role, ...] = get_args(Role)
MODES: tuple[Mode, ...] = get_args(Mode)
_ANY_MODE = f"one of {', '.join(MODES)}"


class _Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of all structs below; `_check` names the field and its value."""

    def _check(self, field: str, allowed: bool, rule: str) -> None:
        if not allowed:
            value = getattr(self, field)
            raise ValueError(f"{type(self).__name__}.{field} is {value!r}, must be {rule}")

    def _at_least(self, least: int, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) < least:
                self._check(field, False, f"at least {least}")


class Facts(_Base, frozen=True, kw_only=True, tag="facts"):
    """What all ranks must agree on before any tensor moves.

    Attributes:
        protocol: `PROTOCOL` of the sender.
        model_digest: names the weights; equal digests mean equal checkpoints.
        moe_layers: number of MoE layers.
        dtype: of expert outputs on their way back, for example "bfloat16".
        wire_dtype: of hidden states on their way out: `dtype`, or "float8_e4m3fn".
        capacity: most tokens of one attention rank in one dispatch; 0 takes the leader's.
        microbatches: the largest number that a step may have, 1 or 2.
    """

    protocol: int = PROTOCOL
    afd_version: str
    sglang_version: str
    model_digest: str
    moe_layers: int
    num_experts: int
    hidden_size: int
    topk: int
    dtype: str
    wire_dtype: str
    capacity: int
    microbatches: int
    connector: str
    attn_ranks: int
    ffn_ranks: int

    def __post_init__(self) -> None:
        self._at_least(1, "moe_layers", "num_experts", "hidden_size", "topk")
        self._at_least(0, "capacity")
        self._at_least(1, "attn_ranks", "ffn_ranks")
        self._check("microbatches", self.microbatches in (1, 2), "1 or 2")


def first_difference(ours: Facts, theirs: Facts) -> tuple[str, Any, Any] | None:
    """The first field that differs, as (field, our value, their value); None if all agree."""
    for field in Facts.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if field == "capacity" and other == 0:
            continue
        if mine != other:
            return field, mine, other
    return None


class _FromRank(_Base, frozen=True, kw_only=True):
    """A message whose sender is rank `rank` of the pool `role`."""

    role: Role
    rank: int

    def __post_init__(self) -> None:
        self._check("role", self.role in ROLES, "'attn' or 'ffn'")
        self._at_least(0, "rank")


class Hello(_FromRank, frozen=True, kw_only=True, tag="hello"):
    """Member to leader: let me join."""

    pid: int
    host: str
    facts: Facts


class Welcome(_Base, frozen=True, kw_only=True, tag="welcome"):
    """Leader to member: you have joined.

    Attributes:
        store_host, store_port: where torch's store of the data plane listens.
        plan_endpoint: `tcp://*:PORT` of this member's plans, `*` being the host at which the
            member reached the leader; empty for an attention rank, which gets no plans.
        capacity: the leader's, see `Facts`.
    """

    store_host: str
    store_port: int
    plan_endpoint: str
    capacity: int

    def __post_init__(self) -> None:
        self._at_least(1, "capacity")
        self._check("store_port", 0 <= self.store_port < 65536, "in 0..65535")


class Refuse(_Base, frozen=True, kw_only=True, tag="refuse"):
    """Leader to member: you cannot join. `reason` holds both values and who said which."""

    reason: str


class Ready(_FromRank, frozen=True, kw_only=True, tag="ready"):
    """Member to leader: my weights are loaded. Bytes on the device, bytes and tensors on disk, and
    what device it is, for people."""

    param_bytes: int
    checkpoint_bytes: int
    tensors_read: int
    tensors_skipped: int
    device: str = ""

    def __post_init__(self) -> None:
        _FromRank.__post_init__(self)
        self._at_least(0, "param_bytes", "checkpoint_bytes", "tensors_read", "tensors_skipped")


class Failed(_FromRank, frozen=True, kw_only=True, tag="failed"):
    """Member to leader: I am about to exit, and this is why."""

    text: str


class Heartbeat(_FromRank, frozen=True, kw_only=True, tag="heartbeat"):
    """Both ways: I am alive, and have done so many steps and rows since the start."""

    steps: int
    rows: int

    def __post_init__(self) -> None:
        _FromRank.__post_init__(self)
        self._at_least(0, "steps", "rows")


class Stop(_Base, frozen=True, kw_only=True, tag="stop"):
    """Leader to all: finish what was planned, then exit."""

    reason: str


class Trace(_Base, frozen=True, kw_only=True, tag="trace"):
    """Leader to members: keep spans from now on, or (not `on`) write those kept into `folder`."""

    on: bool
    folder: str


class StepPlan(_Base, frozen=True, kw_only=True, tag="plan"):
    """Leader to FFN ranks: one forward step, the same in eager, capture and replay.

    Attributes:
        microbatches: 1 or 2.
        bucket: padded tokens per attention rank and microbatch of the graph; 0 means eager.
        tokens: of each attention rank in this step, all microbatches together.
        rounds: transfers per layer and microbatch.
    """

    step_id: int
    mode: Mode
    microbatches: int
    bucket: int
    tokens: tuple[int, ...]
    rounds: int

    def __post_init__(self) -> None:
        self._check("mode", self.mode in MODES, _ANY_MODE)
        self._check("microbatches", self.microbatches in (1, 2), "1 or 2")
        allowed = len(self.tokens) > 0 and min(self.tokens) >= 0
        self._check("tokens", allowed, "one number >= 0 per attention rank")
        self._at_least(0, "step_id", "bucket")
        self._at_least(1, "rounds")


Message = Hello | Welcome | Refuse | Ready | Failed | Heartbeat | Stop | Trace | StepPlan

_PREFIX = bytes([PROTOCOL])
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _PREFIX + _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read one message.

    Raises:
        HandshakeRefused: the sender speaks another protocol.
        PlanMismatch: not a message: unknown tag or field, wrong type, value out of range.
    """
    if data[:1] != _PREFIX:
        theirs = data[0] if data else "nothing"
        raise HandshakeRefused(
            f"the peer speaks AFD protocol {theirs}, this side speaks {PROTOCOL}: "
            "install the same sglang-afd on both"
        )
    try:
        return _decoder.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise PlanMismatch(
            f"cannot read a control message of {len(data)} bytes: {error}; "
            "install the same sglang-afd on both sides"
        ) from error
