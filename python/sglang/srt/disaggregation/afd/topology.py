"""Who is who: ranks, roles, and which FFN rank owns which expert. Integers only.

Attention ranks come first in the joint world: attention rank i is world rank i, FFN rank j is
world rank M + j. Experts are spread as evenly as they go, in contiguous ranges, so that any N
up to the number of experts works.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sglang.srt.disaggregation.afd.errors import AFDConfigError


@dataclass(frozen=True)
class Topology:
    """M attention ranks, N FFN ranks, E routed experts.

    Attributes:
        attn_ranks: M, at least 1.
        ffn_ranks: N, from 1 to E.
        num_experts: E, routed experts of one layer.
    """

    attn_ranks: int
    ffn_ranks: int
    num_experts: int

    def __post_init__(self) -> None:
        if self.attn_ranks < 1 or self.ffn_ranks < 1 or self.num_experts < 1:
            raise ValueError(f"all of {self} must be at least 1")
        if self.ffn_ranks > self.num_experts:
            raise AFDConfigError(
                f"--afd-ffn-ranks {self.ffn_ranks} is more than the {self.num_experts} routed experts "
                f"of the model, so a rank would hold none; choose at most {self.num_experts}"
            )

    @property
    def world_size(self) -> int:
        return self.attn_ranks + self.ffn_ranks

    @property
    def slots_per_rank(self) -> int:
        """Expert slots of each rank in an expert-parallel world: the largest share, rounded up."""
        return -(-self.num_experts // self.ffn_ranks)

    def ffn_world_rank(self, ffn_rank: int) -> int:
        return self.attn_ranks + ffn_rank

    def rank_name(self, world_rank: int) -> str:
        """`attn 1` or `ffn 0`: the name used in logs and errors."""
        if not 0 <= world_rank < self.world_size:
            raise ValueError(f"world rank {world_rank} is outside 0..{self.world_size - 1}")
        if world_rank < self.attn_ranks:
            return f"attn {world_rank}"
        return f"ffn {world_rank - self.attn_ranks}"

    def expert_range(self, ffn_rank: int) -> range:
        """Global ids of the experts that FFN rank `ffn_rank` holds."""
        if not 0 <= ffn_rank < self.ffn_ranks:
            raise ValueError(f"FFN rank {ffn_rank} is outside 0..{self.ffn_ranks - 1}")
        first = ffn_rank * self.num_experts // self.ffn_ranks
        return range(first, (ffn_rank + 1) * self.num_experts // self.ffn_ranks)

    @cached_property
    def owner_of(self) -> tuple[int, ...]:
        """FFN rank of each expert, by global expert id."""
        return tuple(j for j in range(self.ffn_ranks) for _ in self.expert_range(j))

    @cached_property
    def local_of(self) -> tuple[int, ...]:
        """Index of each expert within its owner, by global expert id."""
        return tuple(i for j in range(self.ffn_ranks) for i in range(len(self.expert_range(j))))

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """Slot of each expert in a uniform expert-parallel world of M + N ranks.

        Attention ranks own the first M * slots_per_rank slots, which the router never selects.
        """
        pairs = zip(self.owner_of, self.local_of, strict=True)
        return tuple(self.ffn_world_rank(j) * self.slots_per_rank + i for j, i in pairs)
