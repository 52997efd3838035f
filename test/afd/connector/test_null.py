"""The connector that moves nothing: what a benchmark times, and that no server gets it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sglang.srt.disaggregation.afd import config, envs
from sglang.srt.disaggregation.afd.connector import null, registry
from sglang.srt.disaggregation.afd.connector.base import (
    ExpertMajorBatch,
    LinkSpec,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.errors import AFDConfigError, CapacityExceeded
from sglang.srt.disaggregation.afd.topology import Topology

NOWHERE = Rendezvous(store_host="127.0.0.1", store_port=1, timeout_s=1)
CPU = torch.device("cpu")


def spec(attn: int = 2, ffn: int = 2, experts: int = 8, **changes) -> LinkSpec:
    defaults = {"hidden_size": 256, "topk": 3, "dtype": torch.bfloat16, "capacity": 6}
    return LinkSpec(topology=Topology(attn, ffn, experts), timeout_s=1, **{**defaults, **changes})


def ffn(link: LinkSpec, rank: int = 0, form: str = null.ROWS) -> null.NullFFN:
    return null.NullFFN(link, rank, null.Arrivals(link), CPU, form)


def test_combine_returns_what_was_dispatched():
    link = spec()
    attn = registry.create_attn("null", link, 1, NOWHERE)
    hidden = torch.randn(4, 256).bfloat16()
    ids, weights = torch.zeros(4, 3, dtype=torch.int32), torch.ones(4, 3)
    handles = [attn.dispatch(Transfer(0, 0, mb), hidden, ids, weights, (6, 4)) for mb in (0, 1)]
    assert all(attn.combine(handle) is hidden for handle in handles)
    with pytest.raises(CapacityExceeded, match="attn 1 has 4 tokens"):
        attn.dispatch(Transfer(1, 0, 0), hidden, ids, weights, (6, 3))
    attn.close()


def test_each_rank_has_the_entries_of_its_experts():
    link = spec()
    shares = []
    for rank in range(2):
        batch = ffn(link, rank).receive(Transfer(0, 1, 0), (6, 3))
        assert isinstance(batch, ReceivedBatch)
        assert batch.rows_per_rank == (6, 3)
        assert batch.hidden_RH.shape == (9, 256)
        assert batch.topk_ids_RK.dtype == torch.int32
        assert batch.topk_weights_RK.dtype == torch.float32
        assert int(batch.topk_ids_RK.max()) < 4
        assert torch.equal(batch.topk_ids_RK >= 0, batch.topk_weights_RK > 0)
        shares.append((batch.topk_ids_RK >= 0).int())
    assert torch.equal(shares[0] + shares[1], torch.ones(9, 3, dtype=torch.int32))


def test_layers_differ_and_a_layer_stays():
    """A graph reads the tensors that its warm-up made."""
    link = ffn(spec())
    first, again, other = (
        link.receive(Transfer(step, layer, 0)) for step, layer in ((0, 0), (1, 0), (1, 1))
    )
    assert first.topk_ids_RK is again.topk_ids_RK
    assert not torch.equal(first.topk_ids_RK, other.topk_ids_RK)
    link.send(first, first.hidden_RH)
    with pytest.raises(AssertionError):
        link.send(first, first.hidden_RH[:1])


@pytest.mark.parametrize("fp8", [False, True])
def test_expert_major(fp8):
    link = spec(fp8=fp8)
    rows = ffn(spec(), 1).receive(Transfer(0, 0, 0), (5, 4))
    batch = ffn(link, 1, null.EXPERT_MAJOR).receive(Transfer(0, 0, 0), (5, 4))
    assert isinstance(batch, ExpertMajorBatch)
    assert batch.hidden_ELH.shape == (4, 128, 256)  # 4 ranks with 6 rows each, in whole blocks
    counts = [int((rows.topk_ids_RK == expert).sum()) for expert in range(4)]
    assert batch.rows_per_expert_E.tolist() == counts
    assert batch.rows_per_expert_E.dtype == torch.int32
    assert batch.expected_rows == -(-9 * 3 // 8)
    if fp8:
        assert batch.hidden_ELH.dtype == torch.float8_e4m3fn
        assert batch.scales_ELG.shape == (4, 128, 2)
        assert batch.scales_ELG.stride() == (256, 1, 128)
        values = batch.hidden_ELH.float().view(4, 128, 2, 128) * batch.scales_ELG[..., None]
        assert 0.9 < values.std() < 1.1
    else:
        assert batch.scales_ELG is None


def test_recorded_arrivals(tmp_path, monkeypatch):
    ids = torch.tensor([[[0, 1, 2], [5, 6, 7]]], dtype=torch.int32)
    save_file({"ids": ids, "weights": torch.full((1, 2, 3), 0.25)}, tmp_path / "a.safetensors")
    monkeypatch.setenv(envs.NULL_ARRIVALS, str(tmp_path / "a.safetensors"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    batch = registry.create_ffn("null", spec(), 1, NOWHERE).receive(Transfer(0, 7, 0), (3, 0))
    assert batch.topk_ids_RK.tolist() == [[-1, -1, -1], [1, 2, 3], [-1, -1, -1]]
    assert batch.topk_weights_RK[1].tolist() == [0.25] * 3


def test_arrivals_of_another_model_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_file(
        {"ids": torch.zeros(1, 2, 8, dtype=torch.int32), "weights": torch.zeros(1, 2, 8)}, path
    )
    monkeypatch.setenv(envs.NULL_ARRIVALS, str(path))
    with pytest.raises(AFDConfigError, match=r"ids and weights of shape \[layers, rows, 3\]"):
        registry.create_ffn("null", spec(), 0, NOWHERE)
    monkeypatch.setenv(envs.NULL_FORM, "columns")
    with pytest.raises(
        AFDConfigError, match="NULL_FORM=columns is unknown; use rows or expert-major"
    ):
        registry.create_ffn("null", spec(), 0, NOWHERE)


def test_only_a_benchmark_gets_it(monkeypatch, tmp_path):
    from served.models import tiny_model

    from sglang.srt.server_args import ServerArgs

    flags = {"device": "cpu", "disaggregation_mode": "afd", "afd_connector": "null"}
    model = str(tiny_model(tmp_path / "tiny"))
    assert "null" not in registry.available()
    with pytest.raises(AFDConfigError, match="--afd-connector null moves nothing"):
        ServerArgs(model_path=model, **flags)
    monkeypatch.setenv(envs.BENCHMARK, "1")
    assert config.build(ServerArgs(model_path=model, **flags)).connector == "null"
