"""Which tensors a role reads: names of many families, and real files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from sglang.srt.disaggregation.afd.models import weights
from sglang.srt.disaggregation.afd.topology import Topology

EXPERTS = {
    "model.layers.3.mlp.experts.17.gate_proj.weight": 17,
    "model.layers.3.mlp.experts.0.down_proj.weight_scale_inv": 0,
    "model.layers.0.block_sparse_moe.experts.5.w1.weight": 5,
    "language_model.model.layers.9.mlp.experts.255.up_proj.qweight": 255,
    "model.layers.1.zaya_block.experts.local_experts.3.linear_fc1.weight": 3,
    "model.layers.1.mlp.experts.gate_up_proj": None,
    "model.layers.1.mlp.experts.gate_up_proj_blocks": None,
    "model.layers.1.mlp.experts.down_proj_bias": None,
    "model.layers.1.feed_forward.experts.gate_up_proj": None,
    "model.layers.4.moe.gate_proj.weight": None,
    "model.layers.4.block_sparse_moe.input_linear.weight": None,
}
OTHERS = [
    "model.embed_tokens.weight",
    "model.layers.3.mlp.gate.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
    "model.layers.3.mlp.experts.e_score_correction_bias",
    "model.layers.3.mlp.shared_experts.up_proj.weight",
    "model.layers.3.mlp.shared_expert.gate_proj.weight",
    "model.layers.3.mlp.shared_expert_gate.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.4.moe.gate.weight",
    "model.layers.4.block_sparse_moe.router.layer.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", EXPERTS)
def test_expert_names(name):
    assert weights.is_expert(name)
    assert weights.expert_index(name) == EXPERTS[name]
    assert not weights.wanted_by_attention(name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_names(name):
    assert not weights.is_expert(name)
    assert weights.wanted_by_attention(name)


@pytest.mark.pain(62)
@pytest.mark.parametrize("ffn_ranks", [1, 2, 3, 5, 8])
def test_roles_partition_the_checkpoint(ffn_ranks):
    topology = Topology(2, ffn_ranks, 8)
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(2) for e in range(8)]
    names += OTHERS
    readers = [weights.wanted_by_attention]
    readers += [weights.wanted_by_ffn(topology, rank) for rank in range(ffn_ranks)]
    for name in names:
        assert sum(wanted(name) for wanted in readers) == 1, name


@pytest.fixture
def checkpoint(tmp_path):
    """Two shards: experts, and the rest; with an index."""
    experts = {f"layers.0.mlp.experts.{e}.w.weight": torch.full((2, 2), float(e)) for e in range(4)}
    rest = {"layers.0.mlp.gate.weight": torch.ones(3)}
    save_file(experts, tmp_path / "experts.safetensors")
    save_file(rest, tmp_path / "rest.safetensors")
    index = {n: "experts.safetensors" for n in experts} | {n: "rest.safetensors" for n in rest}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@pytest.mark.pain(62)
def test_only_wanted_tensors_are_read(checkpoint, monkeypatch):
    monkeypatch.setattr(weights, "_report", weights.LoadReport())
    files = [str(path) for path in checkpoint.glob("*.safetensors")]
    wanted = weights.wanted_by_ffn(Topology(1, 2, 4), 1)
    read = dict(weights.read_tensors(files, wanted))
    assert sorted(read) == ["layers.0.mlp.experts.2.w.weight", "layers.0.mlp.experts.3.w.weight"]
    assert read["layers.0.mlp.experts.3.w.weight"].eq(3).all()
    assert weights.report() == weights.LoadReport(bytes_read=32, tensors_read=2, tensors_skipped=3)


def test_shards_without_wanted_tensors_are_not_opened(checkpoint):
    (checkpoint / "experts.safetensors").write_bytes(b"not a safetensors file")
    files = [str(path) for path in checkpoint.glob("*.safetensors")]
    read = dict(weights.read_tensors(files, weights.wanted_by_attention))
    assert list(read) == ["layers.0.mlp.gate.weight"]


def test_parameter_bytes_ignores_meta_and_shared_tensors():
    real = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.ModuleList([real, torch.nn.Linear(8, 8, device="meta")])
    model.shared = real
    assert weights.parameter_bytes(model) == 4 * 4 * 4
