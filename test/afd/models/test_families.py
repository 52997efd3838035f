"""Every MoE family answers on attention and FFN ranks as upstream's colocated engine does.

A row per distinct expert block: FP32, log probabilities of given sequences within 1e-4 at every
position, and the same greedy tokens. The families of `SUBSET` run in `make test`, all of them in
`make test-models`, which writes test/results/models.json.
"""

from __future__ import annotations

import re

import pytest
from models import absent
from models.families import Family, by_name
from models.harness import Topology, disaggregated, topologies

# The blocks that differ most, and need no interpreted attention: a plain block, gated shared experts
# beside linear attention, biased group routing, experts fused in the checkpoint in two ways, and
# clamped activations with a window.
# Each in one topology, since six engines of each would take minutes.
SUBSET = {
    "mixtral": Topology(1, 2),
    "qwen3_next": Topology(2, 1, 2),
    "bailing_moe": Topology(2, 1),
    "granitemoe": Topology(1, 2),
    "step3p5": Topology(2, 1),
    "minimax_m2": Topology(2, 1, 2),
}

CASES = [
    pytest.param(
        family,
        topology,
        id=f"{name}-{topology}",
        marks=() if SUBSET.get(name) == topology else (pytest.mark.models,),
    )
    for name, family in by_name().items()
    for topology in topologies(family)
]


@pytest.mark.pain(62)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "topology"), CASES)
def test_family_is_equal(
    family: Family, topology: Topology, reference, family_zygote, families_folder, record_property
):
    expected = reference(family)
    outcome = disaggregated(family_zygote, family, expected, topology, families_folder)
    attn, ffn = outcome.state, outcome.state[0]["ffn"]
    record_property("architecture", family.architecture)
    record_property("block", expected.block.removeprefix("sglang.srt.models."))
    record_property("topology", str(topology))
    record_property("format", family.format)
    record_property("device", "CPU")
    record_property("positions", outcome.forced.num_positions)
    record_property("largest", f"{outcome.forced.largest:.0e}")
    outcome.forced.check()
    outcome.free.check()
    assert attn[0]["microbatches"] == topology.microbatches
    assert all(rank["moe_layers"] > 0 for rank in (*attn, *ffn))
    assert all(rank["tokens"] > 0 for rank in ffn)
    _check_reads(attn, ffn, family)


def _check_reads(attn: list[dict], ffn: list[dict], family: Family) -> None:
    """Every tensor is read by the role it belongs to, and by no other rank of another role."""
    total = {rank["tensors_read"] + rank["tensors_skipped"] for rank in (*attn, *ffn)}
    assert len(total) == 1, f"ranks disagree about the checkpoint: {total}"
    (tensors,) = total
    ours = {rank["tensors_read"] for rank in attn}
    assert len(ours) == 1, "attention ranks are alike"
    experts = tensors - ours.pop()
    assert experts > 0
    if family.fused_experts:  # tensors that hold all experts of a layer go to every FFN rank
        assert all(rank["tensors_read"] == experts for rank in ffn)
    else:
        assert sum(rank["tensors_read"] for rank in ffn) == experts
    assert all(rank["checkpoint_bytes"] > 0 for rank in (*attn, *ffn))


@pytest.mark.models
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", absent.ROWS, ids=[row.name for row in absent.ROWS])
def test_upstream_cannot_run_it_here(row, family_zygote, families_folder, record_property):
    """The colocated engine ends with the error that the row quotes; once it does not, the family
    moves to the rows above."""
    record_property("architecture", row.architecture)
    error = absent.start_error(family_zygote, row, families_folder)
    record_property("error", error)
    record_property("format", row.format)
    assert re.search(row.error, error), error
