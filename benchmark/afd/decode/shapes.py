"""Named model shapes, written as folders that SGLang can load with `--load-format dummy`.

Sizes are the planner's (`planner/data/models`), so that a prediction and a measurement are about
the same model. What a model class wants to know beyond sizes stands here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIZES = (
    Path(__file__).resolve().parents[3] / "python/sglang/srt/disaggregation/afd/planner/data/models"
)

_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_MORE: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN,
    "Qwen3-30B-A3B-FP8": _QWEN,
    "Qwen3-235B-A22B": _QWEN,
    "Qwen3-235B-A22B-FP8": _QWEN,
    "MiniMax-M2.5": {
        "model_type": "minimax_m2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": False,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
}
# For the CPU: every path of the benchmark in seconds, and no number that means anything.
_TINY: dict[str, Any] = {
    **_QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 320,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
TINY = "tiny"


def names() -> tuple[str, ...]:
    return (*_MORE, TINY)


def config(name: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a shape, cut to `layers` if given.

    Raises:
        KeyError: no such shape.
    """
    if name == TINY:
        found = dict(_TINY)
    else:
        sizes = json.loads((_SIZES / f"{name}.json").read_text())
        found = {key: value for key, value in sizes.items() if not key.startswith("_")}
        found |= _MORE[name]
    if layers is not None:
        found["num_hidden_layers"] = layers
        if "layer_types" in found:
            found["layer_types"] = found["layer_types"][:layers]
    quantization = found.get("quantization_config")
    if quantization is not None and quantization["quant_method"] == "fp8":
        quantization.update(activation_scheme="dynamic", fmt="e4m3")
    return found


def quant(name: str) -> str:
    """What a row says of the weights: fp8, mxfp4, or the dtype."""
    found = config(name)
    quantization = found.get("quantization_config", {})
    return str(quantization.get("quant_method", found["torch_dtype"]))


def kv_bytes_per_token(config: dict[str, Any], kv_dtype: str) -> int:
    """Most bytes that a token takes in a rank's KV cache: all heads, every layer in full."""
    width = 1 if kv_dtype.startswith("fp8") else 4 if config["torch_dtype"] == "float32" else 2
    if "kv_lora_rank" in config:
        values = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        values = 2 * config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * values * width)


def write(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write the folder that `--model-path` takes; there are no weights and no tokenizer in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name, layers), indent=1))
    return folder
