"""CPU enablement: core shares, the stub, and that nothing of it is active beside a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.disaggregation.afd import cpu, envs
from sglang.srt.disaggregation.afd.errors import AFDConfigError


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([0, 1], 1, "0,1"),
        ([0, 1], 2, "0|1"),
        ([0, 1], 3, "0|1|0"),
        ([2, 3, 4, 5, 6], 2, "2,3|4,5"),
        (list(range(8)), 4, "0,1|2,3|4,5|6,7"),
    ],
)
def test_cores_are_shared_out(cores, ranks, expected):
    assert cpu.bind_cores(cores, ranks) == expected


def test_absent_kernel_raises_with_its_name():
    stub = cpu._AbsentKernels("sgl_kernel")
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.fused_thing needs a GPU"):
        stub.fused_thing(1)
    assert not hasattr(stub, "__path__")


def test_gpu_machine_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu.is_cpu_only()


def test_memcpy_copies_the_rows_that_upstreams_kernel_copies():
    source = torch.arange(12.0).view(6, 2)
    target = torch.zeros(6, 2)
    cpu.memcpy(target, source, 0, torch.tensor(2), torch.tensor(3), offset_src=False)
    assert torch.equal(target[2:5], source[:3])
    assert target[:2].eq(0).all()
    target.zero_()
    cpu.memcpy(target, source, 0, torch.tensor(2), torch.tensor(3), offset_src=True)
    assert torch.equal(target[:3], source[2:5])


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("0", False), ("", False)])
def test_boolean_variables(monkeypatch, text, value):
    monkeypatch.setenv(envs.LOG_PLANS, text)
    assert envs.flag(envs.LOG_PLANS) is value


def test_malformed_variable_is_an_error(monkeypatch):
    monkeypatch.setenv(envs.LOG_PLANS, "maybe")
    with pytest.raises(AFDConfigError, match="SGLANG_AFD_LOG_PLANS='maybe' is not a boolean"):
        envs.flag(envs.LOG_PLANS)


def test_top_k_without_groups_scales_its_weights():
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKConfig

    def native(*, topk_config):
        assert not topk_config.apply_routed_scaling_factor_on_output
        return StandardTopKOutput(torch.ones(2, 1), torch.zeros(2, 1), torch.zeros(2, 4))

    config = TopKConfig(
        top_k=1, routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True
    )
    assert cpu.select_experts(native, topk_config=config).topk_weights.eq(2.5).all()
