"""Wire format: golden bytes, strict decoding, readable refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.afd.errors import AFDError, HandshakeRefused, PlanMismatch
from sglang.srt.disaggregation.afd.messages import (
    MODES,
    PROTOCOL,
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

GOLDEN = Path(__file__).parent / "golden"

FACTS = Facts(
    afd_version="0.1.0",
    sglang_version="0.5.17",
    model_digest="5d41402a",
    moe_layers=48,
    num_experts=128,
    hidden_size=2048,
    topk=8,
    dtype="bfloat16",
    wire_dtype="float8_e4m3fn",
    capacity=256,
    microbatches=2,
    connector="nvlink",
    attn_ranks=2,
    ffn_ranks=1,
)

SAMPLES: tuple[Message, ...] = (
    Hello(role="ffn", rank=0, pid=4711, host="node-a", facts=FACTS),
    Welcome(store_host="10.0.0.1", store_port=29500, plan_endpoint="tcp://*:40001", capacity=256),
    Refuse(reason="hidden_size differs"),
    Ready(
        role="ffn",
        rank=0,
        param_bytes=1 << 33,
        checkpoint_bytes=1 << 34,
        tensors_read=18432,
        tensors_skipped=435,
        device="cuda:0 NVIDIA H200",
    ),
    Failed(role="ffn", rank=0, text="out of memory"),
    Heartbeat(role="attn", rank=1, steps=100_000, rows=1 << 32),
    Stop(reason="server shutdown"),
    Trace(on=True, folder="/tmp/trace"),
    StepPlan(step_id=7, mode="decode", microbatches=2, bucket=64, tokens=(120, 0), rounds=1),
)


@pytest.mark.pain(9)
@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_golden_bytes(message: Message) -> None:
    """A changed golden file is a changed wire format: raise PROTOCOL with it."""
    golden = (GOLDEN / f"{type(message).__name__.lower()}.bin").read_bytes()
    assert encode(message) == golden
    assert decode(golden) == message


def test_every_struct_of_the_union_has_a_golden() -> None:
    names = {kind.__name__ for kind in get_args(Message)}
    assert names == {type(message).__name__ for message in SAMPLES}
    assert {name.lower() for name in names} == {path.stem for path in GOLDEN.glob("*.bin")}


@pytest.mark.parametrize("kind", [*get_args(Message), Facts], ids=lambda k: k.__name__)
def test_struct_options(kind: type[msgspec.Struct]) -> None:
    config = kind.__struct_config__
    assert config.frozen and config.forbid_unknown_fields
    assert config.tag is not None
    with pytest.raises(TypeError, match="positional"):
        kind(0)


def _raw(**fields: object) -> bytes:
    return bytes([PROTOCOL]) + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_raw(type="stop", reason="x", extra=1), "unknown field `extra`"),
        (_raw(type="resume", reason="x"), "resume"),
        (_raw(type="stop"), "missing required field `reason`"),
        (_raw(type="stop", reason=3), "Expected `str`"),
        (_raw(type="heartbeat", role="ffn", rank=-1, steps=0, rows=0), "Heartbeat.rank is -1"),
        (_raw(type="heartbeat", role="gate", rank=0, steps=0, rows=0), "gate"),
        (bytes([PROTOCOL]), "truncated"),
        (bytes([PROTOCOL]) + b"\xff\xff", "cannot read a control message of 3 bytes"),
    ],
)
def test_malformed_message_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(PlanMismatch, match=re.escape(words)):
        decode(data)


@pytest.mark.parametrize(("data", "theirs"), [(b"\x63rest", "99"), (b"", "nothing")])
def test_other_protocol_names_both(data: bytes, theirs: str) -> None:
    with pytest.raises(HandshakeRefused, match=f"protocol {theirs}, this side speaks {PROTOCOL}"):
        decode(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "train"}, "StepPlan.mode is 'train', must be one of extend, decode"),
        ({"microbatches": 3}, "StepPlan.microbatches is 3, must be 1 or 2"),
        ({"tokens": ()}, "StepPlan.tokens is ()"),
        ({"tokens": (3, -1)}, "StepPlan.tokens is (3, -1)"),
        ({"rounds": 0}, "StepPlan.rounds is 0, must be at least 1"),
        ({"bucket": -1}, "StepPlan.bucket is -1, must be at least 0"),
        ({"step_id": -1}, "StepPlan.step_id is -1"),
    ],
)
def test_constructor_checks_ranges(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        msgspec.structs.replace(SAMPLES[-1], **change)


@pytest.mark.pain(12)
@pytest.mark.parametrize("field", Facts.__struct_fields__)
def test_first_difference_names_field_and_values(field: str) -> None:
    assert first_difference(FACTS, FACTS) is None
    ours = getattr(FACTS, field)
    value = f"{ours}x" if isinstance(ours, str) else 1 if field == "microbatches" else ours + 1
    theirs = msgspec.structs.replace(FACTS, **{field: value})
    assert first_difference(FACTS, theirs) == (field, ours, value)


def test_a_member_without_a_capacity_takes_the_leaders() -> None:
    assert first_difference(FACTS, msgspec.structs.replace(FACTS, capacity=0)) is None


counts = st.integers(0, 2**40)
plans = st.builds(
    StepPlan,
    step_id=counts,
    mode=st.sampled_from(MODES),
    microbatches=st.sampled_from((1, 2)),
    bucket=st.integers(0, 4096),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=64).map(tuple),
    rounds=st.integers(1, 1000),
)


@pytest.mark.pain(9)
@given(plans)
def test_plan_round_trip(plan: StepPlan) -> None:
    assert decode(encode(plan)) == plan


@given(st.binary(max_size=200), st.booleans())
def test_decode_of_any_bytes_raises_only_afd_errors(data: bytes, prefixed: bool) -> None:
    try:
        decode(bytes([PROTOCOL]) + data if prefixed else data)
    except AFDError as error:
        assert "sglang-afd" in str(error)


def test_plan_of_32_ranks_is_small() -> None:
    plan = StepPlan(
        step_id=10**6, mode="decode", microbatches=2, bucket=64, tokens=(120,) * 32, rounds=1
    )
    assert len(encode(plan)) <= 160
