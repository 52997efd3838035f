"""Models, machines and how many requests fit."""

from __future__ import annotations

import json

import pytest
from planner.harness import PUBLISHED, cost, near

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import capacity, hardware, models, offload

# Billions of parameters, all and active, as each model card states them; None: not stated.
CARDS = {
    "Qwen3-235B-A22B": (235, 22),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "MiniMax-M2.5": (230, 10),
    "DeepSeek-V3": (671, 37),
    "GLM-4.5-Air": (106, 12),
    "gpt-oss-120b": (116.8, 5.1),
}
FASTAFD = PUBLISHED["fastafd"]
NAMES = [row["name"] for row in FASTAFD["workloads"]]


@pytest.mark.parametrize("name", CARDS)
def test_parameters_as_on_the_model_card(name):
    """Model cards on Hugging Face. Active: some cards leave out embeddings or round down."""
    shape = models.load(name)
    total, active = CARDS[name]
    assert near(shape.total_params / 1e9, total, 0.01)
    assert near(shape.active_params / 1e9, active, 0.15)


def test_model_memory_by_ep_width():
    """linsj20/FastAFD: GiB of Qwen3-235B FP8 per GPU as vLLM loads it at EP8 to EP64."""
    shape = models.load("Qwen3-235B-A22B-FP8")
    for ep, gib in PUBLISHED["wide_ep"]["model_gib"].items():
        found = shape.attn_weight_bytes + capacity.ffn_weight_bytes(shape, int(ep))
        assert near(found / 2**30, gib, 0.05), ep


@pytest.mark.parametrize("row", FASTAFD["workloads"], ids=NAMES)
def test_resident_batches(row):
    """FastAFD blog, GB200: absolute batches of both sides, from config, HBM and the 0.85 rule."""
    known = cost(row["model"], "gb200-nvl72")
    afd = known.attn_room(row["context"]).batch
    colocated = known.colocated_room(row["context"], 4).batch
    assert near(afd, row["afd_batch"], 0.10)
    assert near(colocated, row["colocated_batch"], 0.10)
    assert near(afd / colocated, 1.5, 0.10)


@pytest.mark.parametrize("row", FASTAFD["workloads"], ids=NAMES)
def test_batch_expansion_on_rubin(row):
    """FastAFD blog: with 288 GB per GPU the expansion over EP4 shrinks to about 1.25."""
    known = cost(row["model"], "rubin-nvl72")
    shape, context = known.model, row["context"]
    # Without rounding to whole requests, which moves a batch of 60 by 2 %.
    free = known.hardware.memory_bytes - shape.attn_weight_bytes
    ratio = free / (free - capacity.ffn_weight_bytes(shape, 4))
    assert near(ratio, 1.25, 0.01)
    found = known.attn_room(context).batch / known.colocated_room(context, 4).batch
    assert near(found, ratio, 0.02)


@pytest.mark.parametrize("model", PUBLISHED["wide_ep"]["kv_tokens"])
def test_kv_room_grows_with_ep_width_as_measured(model):
    """Held out, linsj20/FastAFD: KV tokens of vLLM at EP16, 32, 64 over those at EP8.

    The level is not compared: vLLM ran at 0.94 of the memory, with reserves of its own.
    """
    measured = PUBLISHED["wide_ep"]["kv_tokens"][model]
    known = cost(model, "gb200-nvl72")
    base = known.colocated_room(8192, 8).kv
    for ep in ("16", "32", "64"):
        found = known.colocated_room(8192, int(ep)).kv / base
        assert near(found, measured[ep] / measured["8"], 0.015), ep


def test_lpx():
    """FastAFD blog: MoE at the peak of two LPX racks, and the transport of one Rubin GPU.

    The post does not say which weights it counts. Its range lies between the routed experts alone
    and all active parameters, at both ends.
    """
    published = FASTAFD["lpx"]
    rack = hardware.load("lpx-rack")
    assert rack.fp8_rate * published["racks"] == published["pflops"] * 1e15
    priced = []
    for row in FASTAFD["workloads"]:
        known = cost(row["model"], "rubin-nvl72")
        batch = known.attn_room(row["context"]).batch
        priced.append(
            offload.offload(
                known.model, rack, None, published["gpus"], batch, published["element_bytes"]
            )
        )
    assert {one.units for one in priced} == {published["racks"]}
    low, high = published["moe_ms"]
    assert min(one.moe_s for one in priced) * 1e3 < low < min(one.active_s for one in priced) * 1e3
    assert max(one.moe_s for one in priced) * 1e3 < high < max(one.active_s for one in priced) * 1e3
    assert max(one.active_s / one.moe_s for one in priced) < 1.7
    assert near(max(one.transport_bytes for one in priced) / 1e6, published["transport_mb"], 0.05)


def test_latent_attention_caches_the_latent():
    """DeepSeek-V3 config: 512 + 64 elements per token and layer, whatever the heads."""
    shape = models.load("DeepSeek-V3")
    assert shape.kv_request_bytes(1) == 61 * 576 * 2
    assert shape.moe_layers == 58


def test_window_layers_stop_growing():
    """gpt-oss config: every other layer sees 128 tokens."""
    shape = models.load("gpt-oss-120b")
    width = 2 * 8 * 64 * 2
    assert shape.kv_request_bytes(100) == 36 * 100 * width
    assert shape.kv_request_bytes(8192) == (18 * 8192 + 18 * 128) * width


def test_uneven_experts_count_the_fullest_rank():
    shape = models.load("Qwen3-30B-A3B")
    assert capacity.ffn_weight_bytes(shape, 3) == capacity.ffn_weight_bytes(shape, 1) * 43 / 128


def test_fewest_ffn_ranks():
    """227 GB of Qwen3-235B FP8 experts: two H200s of 141 GB at nine tenths, not one."""
    known = cost("Qwen3-235B-A22B-FP8", "h200")
    assert capacity.fewest_ffn_ranks(known.model, known.hardware, 0.9) == 2
    tiny = cost("DeepSeek-V3", "h100", ffn_share=0.9)
    assert capacity.fewest_ffn_ranks(tiny.model, tiny.hardware, 0.9) == 10


def test_reads_a_checkpoint_folder(tmp_path):
    config = json.loads(json.dumps(_config()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_folder = models.load(str(tmp_path))
    by_file = models.load(str(tmp_path / "config.json"))
    assert by_folder.total_params == by_file.total_params
    assert by_folder.experts == 8


def test_nested_text_config_with_quantization_at_the_top():
    config = {"text_config": _config(), "quantization_config": {"quant_method": "fp8"}}
    assert models.parse(config, "m").expert_bytes == 1


def test_shared_experts_stay_on_attention_ranks():
    plain, shared = models.parse(_config(), "m"), models.parse(_config(n_shared_experts=2), "m")
    assert shared.routed_params == plain.routed_params
    assert shared.other_params - plain.other_params == 4 * 3 * 64 * 2 * 32


@pytest.mark.parametrize(
    ("extra", "layers"),
    [
        ({}, 4),
        ({"first_k_dense_replace": 1}, 3),
        ({"decoder_sparse_step": 2}, 2),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 3),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, 3),
    ],
)
def test_which_layers_have_experts(extra, layers):
    assert models.parse(_config(**extra), "m").moe_layers == layers


def test_typed_widths_win():
    shape = models.load("Qwen3-235B-A22B", linear_bits=8, expert_bits=4, kv_bits=8)
    assert (shape.linear_bytes, shape.expert_bytes, shape.kv_bytes) == (1, 0.5, 1)


def _config(**extra):
    return {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 128,
        "vocab_size": 1000,
        **extra,
    }


BAD_MODELS = [
    ({"num_experts": None}, "it is dense, and AFD moves routed experts"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": "64"}, "hidden_size is '64', must be a whole number"),
    ({"num_experts_per_tok": 9}, "takes 9 of 8 experts"),
    ({"vocab_size": None}, "has no vocab_size"),
    ({"layer_types": ["linear_attention"] * 4}, "'linear_attention' are not modelled"),
    ({"index_topk": 2048}, "sparse attention is not modelled"),
    ({"first_k_dense_replace": 4}, "no layer has routed experts"),
    ({"quantization_config": {"quant_method": "new"}}, "quant_method 'new' is unknown"),
    ({"torch_dtype": "int3"}, "dtype int3 is unknown"),
]


@pytest.mark.parametrize(("extra", "text"), BAD_MODELS, ids=[text for _, text in BAD_MODELS])
def test_bad_model_configs(extra, text):
    with pytest.raises(AFDConfigError) as caught:
        models.parse(_config(**extra), "m")
    assert text in str(caught.value)
    assert "--model m" in str(caught.value)


def _machine(**extra):
    entry = {
        key: {"value": value, "source": "test"}
        for key, value in {
            "memory_gb": 100,
            "memory_gb_per_s": 4000,
            "bf16_tflops": 1000,
            "fp8_tflops": 2000,
            "link_gb_per_s": 450,
            "domain_gpus": 8,
            "host_gpus": 8,
        }.items()
    }
    return {**entry, **extra}


def _file(tmp_path, content) -> str:
    path = tmp_path / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_hardware_from_a_file(tmp_path):
    found = hardware.load(_file(tmp_path, _machine()))
    assert (found.name, found.memory_bytes, found.host_gpus) == ("machine", 100e9, 8)


BAD_MACHINES = [
    (_machine(memory_tb={"value": 1, "source": "x"}), "unknown key 'memory_tb'"),
    ({k: v for k, v in _machine().items() if k != "fp8_tflops"}, "key 'fp8_tflops' is missing"),
    (_machine(memory_gb={"value": 0, "source": "x"}), "memory_gb is 0"),
    (_machine(memory_gb={"value": 141e9, "source": "x"}), "memory_gb is 1.41e+11"),
    (_machine(memory_gb={"value": -5, "source": "x"}), "memory_gb is -5"),
    (_machine(memory_gb={"value": "141", "source": "x"}), "must be a number"),
    (_machine(memory_gb={"value": 141}), "key 'source' is missing"),
    (_machine(memory_gb={"value": 141, "source": " "}), "memory_gb has no source"),
    (_machine(memory_gb=141), "must be a JSON object"),
    (_machine(host_gpus={"value": 16, "source": "x"}), "host_gpus exceeds domain_gpus"),
    ("{", "is not JSON"),
    ("[]", "must be a JSON object"),
]


@pytest.mark.pain(73)
@pytest.mark.parametrize(("content", "text"), BAD_MACHINES, ids=[text for _, text in BAD_MACHINES])
def test_bad_hardware_files(tmp_path, content, text):
    with pytest.raises(AFDConfigError) as caught:
        hardware.load(_file(tmp_path, content))
    assert text in str(caught.value)


def test_every_packaged_number_has_a_source():
    for name in hardware.names():
        for key, number in hardware.load(name).numbers.items():
            assert len(number.source) > 10, f"{name}: {key}"
    for name in models.names():
        assert "Hugging Face" in models.load(name).source


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB300", "gb300-nvl72"),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_hardware_by_the_name_of_a_gpu(device, name):
    found = hardware.by_device_name(device)
    assert (found and found.name) == name
