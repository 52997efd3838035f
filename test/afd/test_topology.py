"""Properties of the expert split, for any sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.afd.topology import Topology


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    num_experts = draw(st.integers(1, 512))
    return Topology(
        attn_ranks=draw(st.integers(1, 64)),
        ffn_ranks=draw(st.integers(1, min(num_experts, 64))),
        num_experts=num_experts,
    )


@given(topologies())
def test_ranges_partition_the_experts(topology):
    ranges = [topology.expert_range(j) for j in range(topology.ffn_ranks)]
    assert [e for r in ranges for e in r] == list(range(topology.num_experts))
    sizes = {len(r) for r in ranges}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == topology.slots_per_rank


@given(topologies())
def test_owner_local_and_slot_agree(topology):
    assert len(topology.owner_of) == len(topology.local_of) == topology.num_experts
    for expert in range(topology.num_experts):
        owner, local = topology.owner_of[expert], topology.local_of[expert]
        assert topology.expert_range(owner)[local] == expert
        slot = topology.slot_of[expert]
        assert divmod(slot, topology.slots_per_rank) == (topology.ffn_world_rank(owner), local)


@given(topologies())
def test_dummy_slots_are_never_selected(topology):
    slots = topology.slot_of
    assert len(set(slots)) == topology.num_experts
    assert min(slots) >= topology.attn_ranks * topology.slots_per_rank
    assert max(slots) < topology.world_size * topology.slots_per_rank


@pytest.mark.pain(5)
@given(topologies())
def test_every_rank_has_one_name(topology):
    names = [topology.rank_name(rank) for rank in range(topology.world_size)]
    assert names[0] == "attn 0"
    assert names[topology.ffn_world_rank(0)] == "ffn 0"
    assert len(set(names)) == topology.world_size
    for outside in (-1, topology.world_size):
        with pytest.raises(ValueError, match="outside"):
            topology.rank_name(outside)
    for outside in (-1, topology.ffn_ranks):
        with pytest.raises(ValueError, match="outside"):
            topology.expert_range(outside)


@pytest.mark.pain(66)
@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 3, 2)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError):
        Topology(*sizes)
