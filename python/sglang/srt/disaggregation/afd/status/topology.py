"""The two pools as one JSON document, from what the attention ranks report. No I/O."""

from __future__ import annotations

from typing import Any

_SERVER = ("connector", "capacity", "microbatches", "afd_version", "sglang_version", "moe_layers")
_RANK = ("rank", "host", "pid", "device", "steps", "tokens", "param_bytes")
_LOAD = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")


def build(states: list[dict[str, Any]], loads: list[Any]) -> dict[str, Any]:
    """What /afd/topology answers.

    Args:
        states: upstream's internal state of each attention rank, with our entries `afd` and
            `afd_live`.
        loads: upstream's load snapshots, one per attention rank.
    """
    ranks = sorted(states, key=lambda state: int(state["afd"]["rank"]))
    leader = ranks[0]["afd"]
    silences: dict[str, float] = ranks[0]["afd_live"]["heartbeat_age_s"]
    load_of = {load.dp_rank: load for load in loads}
    attention = []
    for state in ranks:
        own = state["afd"]
        load = load_of.get(own["rank"])
        attention.append(
            {
                **{key: own[key] for key in _RANK},
                # The leader is the one who says it.
                "heartbeat_age_s": silences.get(f"attn {own['rank']}", 0.0),
                **{key: getattr(load, key, 0) for key in _LOAD},
            }
        )
    ffn = [
        {
            **{key: row[key] for key in (*_RANK, "experts")},
            "heartbeat_age_s": silences.get(f"ffn {row['rank']}", 0.0),
        }
        for row in leader["ffn"]
    ]
    return {**{key: leader[key] for key in _SERVER}, "attention": attention, "ffn": ffn}
