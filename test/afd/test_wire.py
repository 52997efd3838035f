"""Which dtype tokens travel in and which MoE runner follows: one choice for both roles."""

from __future__ import annotations

import dataclasses
import json
import pickle
import types

import pytest

from sglang.srt.disaggregation.afd import envs, facts, wire
from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.messages import first_difference
from sglang.srt.server_args import ServerArgs

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ROW_BLOCKS = {**BLOCKS, "weight_block_size": [1, 32]}
TENSORS = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch):
    monkeypatch.setattr(registry.ConnectorInfo, "installed", True)
    monkeypatch.delenv(envs.DEEP_GEMM, raising=False)


@pytest.fixture
def make(tmp_path):
    """Arguments as the functions read them, with a checkpoint's config.json."""

    def made(quantization=None, runner="auto", dtype="auto", resolved=None, **config):
        if quantization is not None:
            config["quantization_config"] = quantization
        (tmp_path / "config.json").write_text(json.dumps({"hidden_act": "silu", **config}))
        return types.SimpleNamespace(
            model_path=str(tmp_path),
            revision=None,
            quantization=None,
            afd_wire_dtype=dtype,
            afd_moe_runner_backend=runner,
            moe_runner_backend=resolved or runner,
        )

    return made


@pytest.mark.parametrize("connector", ["deepep", "nvlink", "null"])
def test_blocks_of_fp8_travel_as_fp8_where_the_connector_can(make, monkeypatch, connector):
    monkeypatch.setenv(envs.NULL_FORM, "expert-major")
    for runner in ("auto", "deep_gemm"):
        for dtype in ("auto", "fp8"):
            assert wire.fp8(make(BLOCKS, runner, dtype), connector)
        assert not wire.fp8(make(BLOCKS, runner, "bf16"), connector)


OBSTACLES = {
    "gloo": (
        {"quantization": BLOCKS},
        "gloo",
        "--afd-connector gloo carries the model's dtype only",
    ),
    "nccl": ({"quantization": BLOCKS}, "nccl", "--afd-connector nccl carries"),
    "null, rows": ({"quantization": BLOCKS}, "null", "--afd-connector null carries"),
    "BF16 checkpoint": ({}, "deepep", "holds no experts in FP8 blocks of 128 x 128"),
    "whole tensors": ({"quantization": TENSORS}, "deepep", "holds no experts in FP8 blocks"),
    "other blocks": ({"quantization": ROW_BLOCKS}, "deepep", "holds no experts in FP8 blocks"),
    "runner": (
        {"quantization": BLOCKS, "runner": "triton"},
        "deepep",
        "--moe-runner-backend triton takes no FP8 tokens",
    ),
    "activation": (
        {"quantization": BLOCKS, "hidden_act": "gelu"},
        "deepep",
        "--moe-runner-backend deep_gemm lacks the activation",
    ),
    "clamp": (
        {"quantization": BLOCKS, "text_config": {"hidden_act": "silu", "swiglu_limit": 7.0}},
        "deepep",
        "--moe-runner-backend deep_gemm lacks the activation",
    ),
}


@pytest.mark.parametrize(("how", "connector", "text"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_is_in_the_way_is_named_if_fp8_was_asked_for(make, how, connector, text):
    assert not wire.fp8(make(**how), connector)
    with pytest.raises(AFDConfigError) as caught:
        wire.fp8(make(**how, dtype="fp8"), connector)
    assert "--afd-wire-dtype fp8 does not work here" in str(caught.value)
    assert text in str(caught.value)


def test_without_deep_gemm_tokens_travel_in_the_models_dtype(make, monkeypatch):
    monkeypatch.setenv(envs.DEEP_GEMM, "0")
    assert not wire.fp8(make(BLOCKS), "deepep")
    monkeypatch.delenv(envs.DEEP_GEMM)
    monkeypatch.setattr(wire.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AFDConfigError, match="deep_gemm is not installed"):
        wire.fp8(make(BLOCKS, dtype="fp8"), "deepep")


@pytest.mark.parametrize(
    ("how", "connector", "works", "backend"),
    [
        ({"quantization": BLOCKS}, "deepep", True, "deep_gemm"),
        ({"quantization": BLOCKS, "dtype": "bf16"}, "deepep", True, "deep_gemm"),
        ({}, "deepep", True, "deep_gemm"),
        ({}, "deepep", False, "auto"),
        ({"quantization": TENSORS}, "deepep", True, "auto"),
        ({"hidden_act": "gelu"}, "deepep", True, "auto"),
        ({"resolved": "triton_kernel", "hidden_act": "gelu"}, "deepep", True, "triton"),
        ({"quantization": BLOCKS}, "nccl", True, "auto"),
        ({"quantization": BLOCKS}, "nvlink", True, "deep_gemm"),
        ({"quantization": BLOCKS, "dtype": "bf16"}, "nvlink", True, "auto"),
        ({}, "nvlink", True, "auto"),
        ({"resolved": "triton_kernel"}, "nccl", True, "triton"),
        ({"runner": "triton"}, "deepep", True, "triton"),
        ({"runner": "deep_gemm"}, "nccl", True, "deep_gemm"),
        ({"runner": "marlin"}, "nccl", True, "marlin"),
        ({"runner": "triton_kernel"}, "nccl", True, "triton_kernel"),
    ],
)
def test_runner_of_an_ffn_rank(make, how, connector, works, backend):
    assert wire.runner_backend(make(**how), connector, works) == backend


@pytest.mark.parametrize(
    ("how", "connector", "text"),
    [
        (
            {"runner": "marlin"},
            "deepep",
            "--moe-runner-backend marlin does not take rows that are sorted by expert",
        ),
        (
            {"runner": "deep_gemm", "hidden_act": "gelu"},
            "nccl",
            "--moe-runner-backend deep_gemm computes SiLU only",
        ),
        ({"dtype": "fp8"}, "nccl", "--afd-wire-dtype fp8 does not work here"),
    ],
)
def test_runners_that_cannot_work_are_refused(make, how, connector, text):
    with pytest.raises(AFDConfigError) as caught:
        wire.check(make(**how), connector)
    assert text in str(caught.value)


def test_every_name_has_a_form(monkeypatch):
    """FP8 rows come sorted by expert, whatever carries them; others as the connector says."""
    for form in ("rows", "expert-major"):
        monkeypatch.setenv(envs.NULL_FORM, form)
        chosen = {"null"} if form == "expert-major" else set()
        names = [row.name for row in registry.table() if row.available]
        assert {name for name in names if wire.expert_major(name, False)} == chosen | {"deepep"}
        assert {name for name in names if wire._carries_fp8(name)} == chosen | {
            "deepep",
            "nvlink",
        }
        assert all(wire.expert_major(name, True) for name in names)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    from served.models import tiny_model

    return str(tiny_model(tmp_path_factory.mktemp("wire") / "tiny"))


def test_what_was_typed_reaches_the_ffn_ranks(model):
    args = ServerArgs(
        model_path=model, device="cpu", disaggregation_mode="afd", moe_runner_backend="deep_gemm"
    )
    assert args.moe_runner_backend == "triton"  # of attention ranks, which have no experts
    again = type(args)(**dataclasses.asdict(pickle.loads(pickle.dumps(args))))
    for each in (args, again):
        assert each.for_ffn_rank(0).moe_runner_backend == "deep_gemm"
        assert each.for_ffn_rank(0).afd_moe_runner_backend == "deep_gemm"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"afd_wire_dtype": "int8"}, "--afd-wire-dtype 'int8' is unknown; choose one of auto"),
        ({"afd_wire_dtype": "fp8"}, "--afd-connector gloo carries the model's dtype only"),
        (
            {"afd_wire_dtype": "fp8", "disaggregation_mode": "null"},
            "--afd-wire-dtype fp8 has no effect",
        ),
    ],
)
def test_flags_are_refused_by_name(model, flags, text):
    with pytest.raises(AFDConfigError) as caught:
        ServerArgs(model_path=model, device="cpu", **{"disaggregation_mode": "afd", **flags})
    assert text in str(caught.value)


def test_roles_that_disagree_do_not_meet(model):
    """An attention rank that sends FP8 and an FFN rank that expects BF16 name the difference."""
    import torch

    args = ServerArgs(model_path=model, device="cpu", disaggregation_mode="afd")
    from sglang.srt.disaggregation.afd import config

    settings = config.build(args)
    shape = facts.ExpertShape(moe_layers=2, num_experts=8, hidden_size=256, topk=2)
    model_config = types.SimpleNamespace(dtype=torch.bfloat16, model_path=model, revision=None)
    ours, theirs = (facts.collect(settings, shape, model_config, 16, fp8) for fp8 in (True, False))
    assert first_difference(ours, theirs) == ("wire_dtype", "float8_e4m3fn", "bfloat16")
