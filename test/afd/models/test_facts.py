"""What the server knows of architectures, and that the generated files say the same."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.models import families, formats, loaders, verified

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_models", ROOT / "scripts" / "gen_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(generator):
    return generator.architectures(generator.read_upstream())


@pytest.fixture
def arguments(tmp_path):
    def get(name: str, quantized: str | None = None, **other) -> SimpleNamespace:
        config = {"architectures": [name]}
        if quantized is not None:
            config["quantization_config"] = {"quant_method": quantized}
        (tmp_path / "config.json").write_text(json.dumps(config))
        usual = {
            "model_path": str(tmp_path),
            "revision": None,
            "model_impl": "auto",
            "quantization": None,
            "afd_allow_untested": False,
        }
        return SimpleNamespace(**{**usual, **other})

    return get


@pytest.mark.parametrize("name", families.REFUSED)
def test_what_cannot_work_is_refused_by_name(arguments, name):
    with pytest.raises(
        AFDConfigError, match=rf"is a {name}, which .* does not serve: .*docs/models"
    ):
        families.check(arguments(name), microbatches=1)


def test_two_microbatches_are_refused_where_attention_looks_ahead(arguments):
    args = arguments("LLaDA2MoeModelLM")
    families.check(args, microbatches=1)
    with pytest.raises(AFDConfigError, match="--afd-microbatches 2 .* looks ahead"):
        families.check(args, microbatches=2)


def test_two_microbatches_are_refused_where_upstream_cannot_split_attention(arguments):
    args = arguments("MiniMaxM3SparseForCausalLM")
    families.check(args, microbatches=1)
    with pytest.raises(AFDConfigError, match="--afd-microbatches 2 .* attention backend"):
        families.check(args, microbatches=2)


def test_two_microbatches_are_refused_with_the_transformers_backend(arguments):
    args = arguments("Qwen3MoeForCausalLM", model_impl="transformers")
    families.check(args, microbatches=1)
    with pytest.raises(AFDConfigError, match="--model-impl transformers"):
        families.check(args, microbatches=2)


def test_architecture_that_nobody_compared_gets_a_warning(arguments, caplog, monkeypatch):
    monkeypatch.setattr(verified, "EQUAL", {"Qwen3MoeForCausalLM", "OlmoeForCausalLM"})
    monkeypatch.setattr(verified, "EQUAL_WITH_TWO_MICROBATCHES", {"Qwen3MoeForCausalLM"})
    with caplog.at_level(logging.WARNING):
        families.check(arguments("OlmoeForCausalLM"), microbatches=1)
        families.check(arguments("Qwen3MoeForCausalLM"), microbatches=2)
        assert not caplog.records
        families.check(arguments("NobodysForCausalLM"), microbatches=1)
        families.check(arguments("OlmoeForCausalLM"), microbatches=2)
    assert "NobodysForCausalLM" in caplog.text
    assert "OlmoeForCausalLM, --afd-microbatches 2" in caplog.text


@pytest.mark.parametrize("name", [*formats.UNTESTED, "nobodys"])
def test_format_that_nobody_tried_is_refused_by_name(arguments, name, caplog, monkeypatch):
    monkeypatch.setattr(verified, "FORMATS", frozenset())
    for given in ("quantized", "quantization"):  # in config.json, and as a flag
        args = arguments("Qwen3MoeForCausalLM", **{given: name})
        with pytest.raises(AFDConfigError, match=rf"experts as {name} .*--afd-allow-untested"):
            families.check(args, microbatches=1)
        args.afd_allow_untested = True
        with caplog.at_level(logging.WARNING):
            families.check(args, microbatches=1)
        assert name in caplog.text


@pytest.mark.parametrize("quantized", [None, "fp8"])
def test_formats_that_are_served(arguments, quantized):
    families.check(arguments("Qwen3MoeForCausalLM", quantized=quantized), microbatches=1)


def test_format_that_a_gpu_run_showed_is_served(arguments, monkeypatch):
    monkeypatch.setattr(verified, "FORMATS", {"awq"})
    families.check(arguments("Qwen3MoeForCausalLM", quantized="awq"), microbatches=1)


@pytest.mark.parametrize(("kind", "served"), [("float-quantized", True), ("pack-quantized", False)])
def test_a_method_of_many_formats_is_served_in_the_one_that_ran(
    arguments, monkeypatch, kind, served
):
    monkeypatch.setattr(verified, "FORMATS", {"compressed-tensors"})
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": kind}}
    args = arguments("Qwen3MoeForCausalLM")
    if served:
        formats.check(args, config)
        return
    with pytest.raises(AFDConfigError, match="untested"):
        formats.check(args, config)


def test_every_format_of_upstream_is_named():
    """Read from its file, whose import takes long."""
    spec = importlib.util.find_spec("sglang")
    text = (
        Path(spec.origin).parent / "srt" / "layers" / "quantization" / "__init__.py"
    ).read_text()
    table = text[text.index("BASE_QUANTIZATION_METHODS") : text.index("\n}")]
    upstream = set(re.findall(r'^    "([\w-]+)": \w+,$', table, re.MULTILINE)) | {"mxfp4"}
    assert len(upstream) > 20
    assert upstream <= set(formats.SERVED) | set(formats.UNTESTED)


def test_form_of_attention_ranks(arguments):
    assert families.has_dp_form(arguments("Qwen3MoeForCausalLM"))
    assert not families.has_dp_form(arguments("Qwen3MoeForCausalLM", model_impl="transformers"))
    assert not families.has_dp_form(arguments("MixtralForCausalLM"))
    assert not families.has_dp_form(arguments("NobodysForCausalLM"))


def test_who_multiplies_by_the_routed_scaling_factor(arguments):
    """As upstream's model files say: a branch for expert parallelism with the factor in it."""
    assert families.SCALES_ITSELF <= families.WITH_DP_FORM
    assert families.scales_itself(arguments("DeepseekV3ForCausalLM"))
    assert not families.scales_itself(arguments("DeepseekV3ForCausalLM", model_impl="transformers"))
    assert not families.scales_itself(arguments("BailingMoeV2ForCausalLM"))
    spec = importlib.util.find_spec("sglang")
    models = Path(spec.origin).parent / "srt" / "models"
    for name, scales in (("deepseek_v2", True), ("glm4_moe", True), ("bailing_moe", False)):
        text = (models / f"{name}.py").read_text()
        branch = text[text.index("def forward_deepep") :]
        branch = branch[: branch.index("\n    def ", 1)] if "\n    def " in branch[1:] else branch
        assert ("self.routed_scaling_factor" in branch) == scales, name


def test_every_name_is_one_of_upstreams(found):
    assert set(families.WITH_DP_FORM) <= set(found)
    assert set(families.REFUSED) <= set(found)
    assert set(families.ONE_MICROBATCH) <= set(found)
    assert verified.EQUAL <= set(found)
    assert len(found) > 100


def test_experts_outside_fused_moe_are_all_known(found):
    """A new upstream with another such family turns this red."""
    outside = {name for name, blocks in found.items() if not any(fused for _, fused in blocks)}
    assert outside == set(families.WITHOUT_FUSED_MOE)


def test_blocks_are_found_through_bases_imports_and_tables(found):
    def classes(name: str) -> set[str]:
        return {str(block) for block, _ in found[name]}

    assert classes("GraniteMoeHybridForCausalLM") == {"granitemoe:GraniteMoeMoE"}
    assert classes("NemotronHForCausalLM") == {"nemotron_h:NemotronHMoE"}
    assert "deepseek_v2:DeepseekV2MoE" in classes("DeepseekV4ForCausalLM")
    assert "qwen2_moe:Qwen2MoeSparseMoeBlock" in classes("Qwen3NextForCausalLM")
    assert "LlamaForCausalLM" not in found


def test_generated_files_are_current(generator, found):
    shown = generator.read_results()
    assert generator.OUT.read_text() == generator.page(found, shown)
    assert generator.VERIFIED.read_text() == generator.verified_module(shown)


def test_status_follows_the_results(generator, found):
    shown = {
        "MixtralForCausalLM": generator.Shown(passed=[{"topology": "2A1F"}]),
        "OlmoeForCausalLM": generator.Shown(
            passed=[{"topology": "1A2F"}], failed=[{"topology": "2A1F"}]
        ),
        "DeepseekV32ForCausalLM": generator.Shown(error="RuntimeError: no CUDA"),
    }
    words = {name: generator.status_of(name, found[name], shown) for name in found}
    assert words["MixtralForCausalLM"].word == "equal"
    assert words["OlmoeForCausalLM"] == ("differs", "2A1F")
    assert words["DeepseekV32ForCausalLM"] == (
        "needs GPU",
        "upstream on CPU: `RuntimeError: no CUDA`",
    )
    assert words["DbrxForCausalLM"].word == "refused"
    assert words["Qwen3MoeForCausalLMMTP"].word == "refused"
    assert words["PhiMoEForCausalLM"].word == "not compared"


def test_loader_sees_only_what_exists():
    model = torch.nn.Module()
    model.here = torch.nn.Parameter(torch.zeros(1))
    model.elsewhere = torch.nn.Parameter(torch.zeros(1, device="meta"))
    loaders.hide_absent(model)
    assert [name for name, _ in model.named_parameters()] == ["here"]


def test_loader_that_counts_experts_is_kept_content():
    model = SimpleNamespace(config=SimpleNamespace(mlp_layer_types=["dense", "sparse"]))

    def load(self, weights):
        assert "sparse" not in self.config.mlp_layer_types
        raise RuntimeError("a loader's own error")

    with pytest.raises(RuntimeError, match="own error"):
        loaders.laguna(load, model, [])
    assert model.config.mlp_layer_types == ["dense", "sparse"]
