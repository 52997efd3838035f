"""Families that upstream itself cannot run on a CPU: what its colocated engine says there.

Their models get random weights from the loader ("dummy"), since nothing is compared.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matrix.cases import start
from matrix.harness import Zygote
from models import known, spelled
from models.families import RECURRENT, TRITON

_ERROR = re.compile(r"^(?:\[[^\]]*\] )?(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt)\w*: .+)$")


@dataclass(frozen=True)
class Absent:
    """`error` is a regular expression that the last error in upstream's log matches; `format` is
    that of the experts, if it is what the row is about."""

    name: str
    architecture: str
    config: dict[str, Any]
    error: str
    arguments: dict[str, Any] = field(default_factory=dict)
    format: str = ""


def start_error(zygote: Zygote, row: Absent, folder: Path) -> str:
    """The last error of a start that must fail, as the log has it.

    Raises:
        AssertionError: the engine started.
    """
    checkpoint = folder / row.name
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(
        json.dumps({**row.config, "architectures": [row.architecture]})
    )
    log = folder / f"{row.name}.log"
    arguments = {"dtype": "float32", "load_format": "dummy", **row.arguments}
    try:
        with start(zygote, checkpoint, log, **arguments) as engine:
            answers = engine.run(_one_token())
            failed = any(answer.finish != "length" for answer in answers)
        if not failed:
            raise StillRuns(f"{row.name} runs on CPU: give it a row in known.py or spelled.py")
    except StillRuns:
        raise
    except AssertionError as error:
        return last_error(log.read_text(errors="replace") + str(error))
    return last_error(log.read_text(errors="replace"))


class StillRuns(AssertionError):
    """The row's claim is no longer true."""


def _one_token() -> Any:
    from matrix.jobs import Job, Request

    return Job((Request((1, 2, 3), 2),), timeout_s=60)


def last_error(log: str) -> str:
    found = [match[1] for line in log.splitlines() if (match := _ERROR.match(line.strip()))]
    assert found, log[-2000:]
    return found[-1][:300]


_DSA = {
    **known.COMMON,
    **known.MLA,
    **known.ROUTED,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 64,
}

_QWEN = {
    **known.COMMON,
    **known.MOE,
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _format(name: str, text: str, quantization: dict[str, Any], error: str, dtype: str) -> Absent:
    config = {**_QWEN, "quantization_config": quantization}
    return Absent(name, "Qwen3MoeForCausalLM", config, error, {"dtype": dtype}, text)


def _per_channel(kind: str) -> dict[str, Any]:
    values = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**values, "strategy": "channel", "dynamic": False},
        "input_activations": {**values, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


_INKLING = {
    "vocab_size": known.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_rel": 16,
    "rel_extent": 64,
    "local_layer_ids": [1],
    "sliding_window_size": 16,
    "use_embed_norm": True,
    "use_sconv": True,
    "dense_mlp_idx": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "shared_expert_sink": True,
    "use_gate_bias": True,
    "use_global_scale": True,
}

ROWS = (
    _format(
        "fp8_block",
        "FP8 in blocks (`fp8`)",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        ".",
        "bfloat16",
    ),
    _format(
        "fp8_channel",
        "FP8 per channel (`compressed-tensors`)",
        _per_channel("float"),
        "CUDA|NVIDIA",
        "bfloat16",
    ),
    _format("int8", "INT8 (`compressed-tensors`)", _per_channel("int"), "CUDA|NVIDIA", "bfloat16"),
    _format(
        "awq",
        "AWQ (`awq`)",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
        },
        "awq_dequantize",
        "float16",
    ),
    _format(
        "gptq",
        "GPTQ (`gptq`)",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "GPTQ Method does not support MoE",
        "float16",
    ),
    _format("mxfp4", "MXFP4 (`mxfp4`)", {"quant_method": "mxfp4"}, "Mxfp4", "bfloat16"),
    Absent(
        "bailing_moe_linear",
        "BailingMoeV2_5ForCausalLM",
        {
            **spelled.COMMON,
            **spelled.BAILING,
            **spelled.MLA_CONFIG,
            "model_type": "bailing_hybrid",
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "group_norm_size": 4,
            "head_dim": 128,
        },
        "not in full attention layers",
        {**RECURRENT, **TRITON},
    ),
    Absent(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        {**_DSA, "model_type": "deepseek_v32"},
        "CUDA|NVIDIA",
    ),
    Absent(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        {**_DSA, "model_type": "glm_moe_dsa"},
        "CUDA|NVIDIA",
    ),
    Absent(
        "kimi_k3",
        "KimiK3ForConditionalGeneration",
        {
            "model_type": "kimi_k3",
            "text_config": {
                **spelled.COMMON,
                **spelled.MLA_CONFIG,
                "model_type": "kimi_linear",
                "num_key_value_heads": 4,
                "num_hidden_layers": 3,
                "num_experts": 8,
                "num_experts_per_token": 2,
                "num_shared_experts": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.4,
                "mla_use_nope": True,
                "mla_use_output_gate": True,
                "routed_expert_hidden_size": 32,
                "latent_moe_use_norm": True,
                "hidden_act": "situ",
                "activation_situ_beta": 4.0,
                "activation_situ_linear_beta": 25.0,
                "attn_res_block_size": 2,
                "linear_attn_config": {
                    "kda_layers": [1, 3],
                    "full_attn_layers": [2],
                    "num_heads": 4,
                    "head_dim": 16,
                    "short_conv_kernel_size": 4,
                    "use_full_rank_gate": True,
                    "gate_lower_bound": -5.0,
                },
            },
            "vision_config": {
                "vt_num_hidden_layers": 1,
                "vt_hidden_size": 64,
                "vt_intermediate_size": 64,
                "vt_num_attention_heads": 4,
                "qkv_hidden_size": 64,
                "init_pos_emb_height": 4,
                "init_pos_emb_width": 4,
            },
        },
        "CUDA|NVIDIA",
        {**RECURRENT, **TRITON},
    ),
    Absent(
        "inkling",
        "InklingForConditionalGeneration",
        {"model_type": "inkling_mm_model", "text_config": _INKLING},
        "graph_pool_handle",
        {**TRITON, "max_mamba_cache_size": 64, "disable_cuda_graph": True},
    ),
)
