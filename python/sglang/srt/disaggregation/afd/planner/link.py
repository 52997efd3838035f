"""Time of dispatch and combine: how many copies of a token travel, and how fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import checks

COPIES = ("rank", "expert")
# An id and a weight per chosen expert travel with a token (connector/base.py); DeepEP puts one
# 16-byte header before each copy.
_ROUTING_BYTES, _HEADER_BYTES = 8, 16
_BF16 = 2.0
FP8_BYTES = 1 + 4 / 128  # a value, and its share of the scale of 128


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a connector makes of the hardware's link.

    Attributes:
        copies: "rank": one row per (token, FFN rank), and one back. "expert": one row per
            (token, expert), as DeepEP's low-latency kernels send.
        round_trip_s: dispatch and combine of almost nothing between two ranks, seconds.
        rank_s: what each further rank of the larger side adds to a round trip: messages, and the
            wait for the slowest.
        rate: bytes/s that one rank sends or receives.
        dispatch_bytes, combine_bytes: per hidden element.
    """

    name: str
    copies: str
    round_trip_s: float
    rank_s: float
    rate: float
    source: str
    dispatch_bytes: float = _BF16
    combine_bytes: float = _BF16

    def with_dispatch_bytes(self, size: float) -> Link:
        """The same link with another format of dispatched hidden states."""
        return replace(self, dispatch_bytes=size)


class Transfer(NamedTuple):
    """One dispatch and its combine.

    Attributes:
        copies: rows that a token becomes.
        dispatch_bytes, combine_bytes: at the busier end of the link, one rank.
        dispatch_s, combine_s: seconds.
    """

    copies: float
    dispatch_bytes: float
    combine_bytes: float
    dispatch_s: float
    combine_s: float

    @property
    def one_way_s(self) -> float:
        """Mean of the two directions: T_c."""
        return (self.dispatch_s + self.combine_s) / 2


def ranks_hit(experts: int, topk: int, ffn_ranks: int) -> float:
    """FFN ranks that a token reaches on average, if each choice of experts is as likely."""
    elsewhere = experts - experts / ffn_ranks
    # Hypergeometric, through gamma functions since experts / ranks need not be whole.
    if elsewhere < topk:
        return float(ffn_ranks)
    missed = math.exp(
        math.lgamma(elsewhere + 1)
        - math.lgamma(elsewhere - topk + 1)
        - math.lgamma(experts + 1)
        + math.lgamma(experts - topk + 1)
    )
    return ffn_ranks * (1 - missed)


def transfer(
    link: Link, hidden: int, experts: int, topk: int, tokens: float, attn_ranks: int, ffn_ranks: int
) -> Transfer:
    """Time of one MoE layer and microbatch.

    Both ends of the link are counted and the busier one sets the time: with M > N that is the FFN
    rank, which receives the rows of M ranks.

    Args:
        tokens: tokens of one attention rank.
    """
    if link.copies == "expert":
        copies, routing = float(topk), float(_HEADER_BYTES)
    else:
        copies = ranks_hit(experts, topk, ffn_ranks)
        routing = _ROUTING_BYTES * topk / copies
    rows = tokens * copies * max(1.0, attn_ranks / ffn_ranks)
    dispatch = rows * (hidden * link.dispatch_bytes + routing)
    combine = rows * hidden * link.combine_bytes
    fixed = (link.round_trip_s + link.rank_s * (max(attn_ranks, ffn_ranks) - 1)) / 2
    return Transfer(
        copies, dispatch, combine, fixed + dispatch / link.rate, fixed + combine / link.rate
    )


def named(name: str, entry: Mapping[str, Any], link_rate: float) -> Link:
    """A link from an entry of `links` in data/estimates.json.

    Args:
        link_rate: bytes/s of the hardware, one direction.
    Raises:
        AFDConfigError
    """
    where = f"links.{name}"
    checks.keys(where, entry, ("copies", "round_trip_us", "rank_us", "link_share", "source"), ())
    if entry["copies"] not in COPIES:
        raise AFDConfigError(
            f"{where}.copies is {entry['copies']!r}, must be one of {', '.join(COPIES)}"
        )
    share = checks.number(f"{where}.link_share", entry["link_share"], 0.001, 1)
    return Link(
        name=name,
        copies=entry["copies"],
        round_trip_s=checks.number(f"{where}.round_trip_us", entry["round_trip_us"], 0, 1e5) * 1e-6,
        rank_s=checks.number(f"{where}.rank_us", entry["rank_us"], 0, 1e3) * 1e-6,
        rate=share * link_rate,
        source=str(entry["source"]),
    )
