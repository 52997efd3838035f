"""What reaches upstream's runners from a batch that is sorted by expert; see test_experts_gpu."""

from __future__ import annotations

import types

import pytest
import torch

from sglang.srt.disaggregation.afd import envs
from sglang.srt.disaggregation.afd.connector.base import (
    BLOCK_ROWS,
    ExpertMajorBatch,
    LinkSpec,
    Transfer,
)
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.ffn import deep_gemm, experts
from sglang.srt.disaggregation.afd.ffn.experts import LocalExperts
from sglang.srt.disaggregation.afd.topology import Topology

E4M3 = torch.float8_e4m3fn
SLOTS, HIDDEN = 3, 256


class Module:
    """Stands for upstream's `FusedMoE`; notes what it gets and empties it, as DeepGEMM's runner does."""

    def __init__(self, runner: str, dtype: torch.dtype, factor: float | None = None) -> None:
        backend = types.SimpleNamespace(value=runner)
        self.quant_method = types.SimpleNamespace(
            runner=types.SimpleNamespace(runner_backend=backend)
        )
        self.w13_weight = torch.empty(SLOTS, 512, HIDDEN, dtype=dtype)
        self.intermediate_size_per_partition, self.hidden_size, self.layer_id = 256, HIDDEN, 7
        self.moe_runner_config = types.SimpleNamespace(
            routed_scaling_factor=factor,
            activation="silu",
            is_gated=True,
            gemm1_alpha=None,
            gemm1_clamp_limit=None,
            swiglu_limit=None,
            gate_up_interleaved=True,
        )
        self.got = []

    def run_moe_core(self, dispatched):
        hidden, scale = dispatched.hidden_states, dispatched.hidden_states_scale
        self.got.append(
            dispatched._replace(
                hidden_states=hidden.detach(),
                hidden_states_scale=None if scale is None else scale.detach(),
            )
        )
        for each in (hidden, scale):
            if each is not None:
                each.set_(torch.empty(0, dtype=each.dtype))
        shape = self.got[-1].hidden_states.shape
        return types.SimpleNamespace(hidden_states=torch.ones(shape, dtype=torch.bfloat16))


def make_batch(length: int, fp8: bool, counts=(5, 0, 2)) -> ExpertMajorBatch:
    hidden = torch.randn(SLOTS, length, HIDDEN, dtype=torch.bfloat16)
    scales = None
    if fp8:
        hidden = hidden.to(E4M3)
        scales = torch.rand(SLOTS, HIDDEN // 128, length).mT
    return ExpertMajorBatch(
        transfer=Transfer(0, 0, 0),
        hidden_ELH=hidden,
        scales_ELG=scales,
        rows_per_expert_E=torch.tensor(counts, dtype=torch.int32),
        expected_rows=4,
    )


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
def test_masked_runner_gets_the_connectors_memory_and_leaves_the_batch_whole(fp8):
    module = Module("deep_gemm", E4M3 if fp8 else torch.bfloat16)
    batch = make_batch(BLOCK_ROWS, fp8)
    out = LocalExperts(module, torch.device("cpu"))(batch)
    (got,) = module.got
    assert got.format.value == "deepep_ll"
    assert got.hidden_states.data_ptr() == batch.hidden_ELH.data_ptr()
    assert got.masked_m is batch.rows_per_expert_E
    assert got.expected_m == 4
    if fp8:
        assert got.hidden_states_scale.data_ptr() == batch.scales_ELG.data_ptr()
        assert got.hidden_states_scale.stride() == batch.scales_ELG.stride() == (256, 1, 128)
        assert batch.scales_ELG.shape == (SLOTS, BLOCK_ROWS, 2)
    else:
        assert got.hidden_states_scale is None
    assert batch.hidden_ELH.shape == out.shape == (SLOTS, BLOCK_ROWS, HIDDEN)
    assert out.unique().tolist() == [1.0]


@torch.inference_mode()
@pytest.mark.parametrize("fp8", [False, True])
def test_room_that_is_no_whole_block_is_widened(fp8):
    """A block that is written behind an expert's room would be the next expert's rows."""
    module = Module("deep_gemm", E4M3 if fp8 else torch.bfloat16)
    batch = make_batch(20, fp8)
    out = LocalExperts(module, torch.device("cpu"))(batch)
    (got,) = module.got
    assert got.hidden_states.shape == (SLOTS, BLOCK_ROWS, HIDDEN)
    assert out.shape == batch.hidden_ELH.shape
    bits = torch.uint8 if fp8 else torch.int16
    assert torch.equal(got.hidden_states[:, :20].view(bits), batch.hidden_ELH.view(bits))
    if fp8:
        assert got.hidden_states_scale.stride() == (2 * BLOCK_ROWS, 1, BLOCK_ROWS)
        assert torch.equal(got.hidden_states_scale[:, :20], batch.scales_ELG)


@torch.inference_mode()
def test_bf16_tokens_are_quantised_for_fp8_experts(monkeypatch):
    called = []

    def to_fp8(hidden_ELH, counts_E, expected_rows):
        called.append((counts_E, expected_rows))
        scales = torch.ones(SLOTS, HIDDEN // 128, hidden_ELH.shape[1]).mT
        return hidden_ELH.to(E4M3), scales

    monkeypatch.setattr(experts, "_to_fp8", to_fp8)
    module, batch = Module("deep_gemm", E4M3), make_batch(BLOCK_ROWS, fp8=False)
    LocalExperts(module, torch.device("cpu"))(batch)
    (got,) = module.got
    assert got.hidden_states.dtype == E4M3
    assert got.hidden_states_scale.shape == (SLOTS, BLOCK_ROWS, 2)
    assert called == [(batch.rows_per_expert_E, 4)]
    assert batch.hidden_ELH.dtype == torch.bfloat16


@torch.inference_mode()
def test_factor_that_this_runner_leaves_out():
    module = Module("deep_gemm", torch.bfloat16, factor=2.5)
    out = LocalExperts(module, torch.device("cpu"))(make_batch(BLOCK_ROWS, fp8=False))
    assert out.unique().tolist() == [2.5]


@torch.inference_mode()
def test_triton_runner_gets_a_token_per_row():
    module, batch = Module("triton", torch.bfloat16), make_batch(4, fp8=False, counts=(1, 0, 4))
    out = LocalExperts(module, torch.device("cpu"))(batch)
    (got,) = module.got
    assert got.hidden_states.shape == (SLOTS * 4, HIDDEN)
    ids = got.topk_output.topk_ids.view(SLOTS, 4).tolist()
    assert ids == [[0, -1, -1, -1], [-1] * 4, [2] * 4]
    assert out.shape == batch.hidden_ELH.shape


def test_fp8_rows_never_reach_the_triton_runner():
    layer = LocalExperts(Module("triton", E4M3), torch.device("cpu"))
    with pytest.raises(AssertionError, match="takes no FP8 rows"):
        layer(make_batch(BLOCK_ROWS, fp8=True))


@pytest.mark.parametrize("capacity", [16, 1024])
@pytest.mark.parametrize("fp8", [False, True])
def test_kernels_are_compiled_for_every_number_of_blocks(monkeypatch, fp8, capacity):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    spec = LinkSpec(
        topology=Topology(2, 1, 3),
        hidden_size=HIDDEN,
        topk=1,
        dtype=torch.bfloat16,
        capacity=capacity,
        timeout_s=1,
        fp8=fp8,
    )
    modules = [Module("deep_gemm", E4M3 if fp8 else torch.bfloat16) for _ in range(2)]
    layers = [LocalExperts(module, torch.device("cpu")) for module in modules]
    deep_gemm.compile_ahead(layers, spec)
    calls = [*modules[0].got, *modules[1].got]
    most = -(-2 * capacity // 3)
    assert [each.expected_m for each in calls] == list(range(1, most + 1, 64))
    assert {each.masked_m.sum().item() for each in calls} == {0}
    monkeypatch.setenv(envs.DEEP_GEMM_PRECOMPILE, "0")
    deep_gemm.compile_ahead(layers, spec)
    assert len(modules[0].got) + len(modules[1].got) == len(calls) + 1


@pytest.mark.parametrize(
    ("dtype", "changes", "words"),
    [
        (E4M3, {}, ""),
        (torch.bfloat16, {}, ""),
        (E4M3, {"swiglu_limit": 10}, ""),
        (torch.bfloat16, {"swiglu_limit": 10}, "a clamped activation of BF16 experts"),
        (torch.bfloat16, {"gemm1_alpha": 1.7}, "a clamped activation of BF16 experts"),
        (torch.bfloat16, {"activation": "situ"}, "activation situ of BF16 experts"),
        (E4M3, {"gemm1_clamp_limit": 7.0}, "a clamped activation"),
        (E4M3, {"gemm1_alpha": 1.7}, "gate and up projections in turn"),
    ],
)
def test_experts_that_the_runner_would_compute_wrongly_are_refused(dtype, changes, words):
    module = Module("deep_gemm", dtype)
    for name, value in changes.items():
        setattr(module.moe_runner_config, name, value)
    if not words:
        deep_gemm.check([module], fp8=dtype == E4M3)
        return
    with pytest.raises(AFDConfigError, match=f"MoE layer 7 needs: {words}; add --moe-runner-back"):
        deep_gemm.check([module], fp8=False)


def test_other_refusals_of_the_runner():
    module = Module("deep_gemm", torch.bfloat16)
    with pytest.raises(AFDConfigError, match="--afd-wire-dtype fp8 does not work with MoE layer 7"):
        deep_gemm.check([module], fp8=True)
    module.w13_weight_bias = torch.zeros(1)
    with pytest.raises(AFDConfigError, match="needs: a bias"):
        deep_gemm.check([module], fp8=False)
    module = Module("deep_gemm", E4M3)
    module.intermediate_size_per_partition = 192
    with pytest.raises(AFDConfigError, match="no multiples of 128"):
        deep_gemm.check([module], fp8=True)
    assert deep_gemm.obstacle(torch.device("cpu")) == "it needs a CUDA device"


def test_upstreams_own_warm_up_is_off(monkeypatch):
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils

    monkeypatch.setattr(compile_utils, "_ENABLE_JIT_DEEPGEMM_PRECOMPILE", True)
    deep_gemm.skip_upstreams_warm_up()
    assert compile_utils._ENABLE_JIT_DEEPGEMM_PRECOMPILE is False
