"""What upstream runs on a GPU only: families without a CPU path, and formats of expert weights.

Sizes are those that upstream's kernels take: latent attention of 512 + 64, an index of 128 per head
and 2048 tokens, quantised blocks of 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import packing, spelled
from models.checkpoints import VOCAB, Layout, write
from models.layouts import attention, decoder, experts, latent_attention, linear, mlp, vectors

HIDDEN, INNER, EXPERT_INNER, EXPERTS = 512, 512, 256, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
LATENT_HEADS = 16
Q_LORA = 512
LAYERS = 3

COMMON: dict[str, Any] = {
    **spelled.COMMON,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": EXPERT_INNER,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
TRITON = ("--attention-backend", "triton")


@dataclass(frozen=True)
class GpuRow:
    """One tiny model and how both sides serve it.

    Attributes:
        build: writes the checkpoint into a folder.
        flags, environment: of the colocated and of the AFD server.
        ours: flags of the AFD server only.
        format: of the expert weights, as the generated page calls it.
        methods: names of that format in `models/formats.py`; empty if the row is about the family.
    """

    name: str
    architecture: str
    build: Callable[[Path], Path]
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    ours: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    format: str = "BF16"
    methods: tuple[str, ...] = ()


# --- sparse attention over a learned index: DeepSeek-V3.2, GLM-5 ----------------------------------

_SPARSE = (
    # FlashAttention 3, upstream's default for these two, is not on every GPU host that we test on.
    *("--dsa-prefill-backend", "flashmla_sparse", "--dsa-decode-backend", "flashmla_sparse"),
    *("--kv-cache-dtype", "bfloat16"),
)
# Short prompts would be attended densely otherwise, by FlashAttention 3.
_NEVER_DENSE = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
_INDEX_DIM = 128


def _sparse(name: str, architecture: str, model_type: str, own: dict[str, Any]) -> GpuRow:
    nope, value, index_heads = (
        own[key] for key in ("qk_nope_head_dim", "v_head_dim", "index_n_heads")
    )

    def layer(prefix: str, index: int) -> Layout:
        below = f"{prefix}.self_attn"
        indexer = f"{below}.indexer"
        attn = {
            **latent_attention(below, HIDDEN, LATENT_HEADS, 512, nope, 64, value, Q_LORA),
            **linear(f"{indexer}.wq_b", index_heads * _INDEX_DIM, Q_LORA),
            **linear(f"{indexer}.wk", _INDEX_DIM, HIDDEN),
            **linear(f"{indexer}.weights_proj", index_heads, HIDDEN),
            f"{indexer}.k_norm.weight": (_INDEX_DIM,),
            f"{indexer}.k_norm.bias": (_INDEX_DIM,),
        }
        if index == 0:
            return {**attn, **mlp(f"{prefix}.mlp", HIDDEN, INNER)}
        return {
            **attn,
            **linear(f"{prefix}.mlp.gate", EXPERTS, HIDDEN),
            f"{prefix}.mlp.gate.e_score_correction_bias": (EXPERTS,),
            **experts(f"{prefix}.mlp.experts", EXPERTS, HIDDEN, EXPERT_INNER),
            **mlp(f"{prefix}.mlp.shared_experts", HIDDEN, EXPERT_INNER),
        }

    config = {
        **COMMON,
        "model_type": model_type,
        "architectures": [architecture],
        "num_attention_heads": LATENT_HEADS,
        "num_key_value_heads": LATENT_HEADS,
        "head_dim": 64,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": False,
        "index_head_dim": _INDEX_DIM,
        "index_topk": 2048,
        **own,
    }
    layout = decoder(LAYERS, HIDDEN, VOCAB, layer)

    def build(folder: Path) -> Path:
        return write(folder, config, layout, pack=packing.bf16)

    return GpuRow(name, architecture, build, _SPARSE, _NEVER_DENSE)


# --- Lightning attention beside latent attention: Ling / Ring 2.5 --------------------------------

_BAILING = {
    **COMMON,
    **spelled.BAILING,
    "model_type": "bailing_hybrid",
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "group_norm_size": 4,
    "num_attention_heads": LATENT_HEADS,
    "num_key_value_heads": LATENT_HEADS,
    "head_dim": HEAD_DIM,
    "q_lora_rank": Q_LORA,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _bailing(prefix: str, index: int) -> Layout:
    below, inner = f"{prefix}.attention", LATENT_HEADS * HEAD_DIM
    if index % 2:
        attn: Layout = latent_attention(
            below, HIDDEN, LATENT_HEADS, 512, 128, 64, 128, Q_LORA, out="dense"
        )
    else:
        attn = {
            **linear(f"{below}.query_key_value", 3 * inner, HIDDEN),
            **linear(f"{below}.g_proj", inner, HIDDEN),
            **linear(f"{below}.dense", HIDDEN, inner),
            **vectors(below, query_layernorm=HEAD_DIM, key_layernorm=HEAD_DIM, g_norm=inner),
        }
    if index == 0:
        return {**attn, **mlp(f"{prefix}.mlp", HIDDEN, INNER)}
    return {
        **attn,
        **linear(f"{prefix}.mlp.gate", EXPERTS, HIDDEN),
        f"{prefix}.mlp.gate.expert_bias": (EXPERTS,),
        **experts(f"{prefix}.mlp.experts", EXPERTS, HIDDEN, EXPERT_INNER),
        **mlp(f"{prefix}.mlp.shared_experts", HIDDEN, EXPERT_INNER),
    }


def _build_bailing(folder: Path) -> Path:
    layout = decoder(4, HIDDEN, VOCAB, _bailing, embedding="word_embeddings")
    return write(folder, _BAILING, layout, pack=packing.bf16)


# --- formats of expert weights -------------------------------------------------------------------


def _qwen(prefix: str, index: int) -> Layout:
    return {
        **attention(f"{prefix}.self_attn", HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
        **vectors(f"{prefix}.self_attn", q_norm=HEAD_DIM, k_norm=HEAD_DIM),
        **linear(f"{prefix}.mlp.gate", EXPERTS, HIDDEN),
        **experts(f"{prefix}.mlp.experts", EXPERTS, HIDDEN, EXPERT_INNER),
    }


_QWEN = {
    **COMMON,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _format(
    name: str,
    text: str,
    methods: tuple[str, ...],
    quantization: dict[str, Any],
    pack: packing.Packer,
    dtype: str = "bfloat16",
) -> GpuRow:
    rest = packing.bf16 if dtype == "bfloat16" else packing.fp16
    config = {**_QWEN, "dtype": dtype, "quantization_config": quantization}

    def build(folder: Path) -> Path:
        layout = decoder(LAYERS, HIDDEN, VOCAB, _qwen)
        return write(folder, config, layout, pack=packing.projections(pack, rest))

    return GpuRow(
        name,
        "Qwen3MoeForCausalLM",
        build,
        TRITON,
        # DeepGEMM compiles a kernel per shape, for minutes; the other kernels read the same bytes.
        {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
        ("--afd-allow-untested",),
        dtype,
        text,
        methods,
    )


def _per_channel_fp8() -> dict[str, Any]:
    values = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**values, "strategy": "channel", "dynamic": False},
        "input_activations": {**values, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


_GPT_OSS = {
    **COMMON,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "intermediate_size": EXPERT_INNER,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def _gpt_oss(prefix: str, index: int) -> Layout:
    below, experts_below = f"{prefix}.self_attn", f"{prefix}.mlp.experts"
    return {
        **linear(f"{below}.q_proj", 8 * 64, HIDDEN, bias=True),
        **linear(f"{below}.k_proj", KV_HEADS * 64, HIDDEN, bias=True),
        **linear(f"{below}.v_proj", KV_HEADS * 64, HIDDEN, bias=True),
        **linear(f"{below}.o_proj", HIDDEN, 8 * 64, bias=True),
        f"{below}.sinks": (8,),
        **linear(f"{prefix}.mlp.router", EXPERTS, HIDDEN, bias=True),
        f"{experts_below}.gate_up_proj": (EXPERTS, HIDDEN, 2 * EXPERT_INNER),
        f"{experts_below}.gate_up_proj_bias": (EXPERTS, 2 * EXPERT_INNER),
        f"{experts_below}.down_proj": (EXPERTS, EXPERT_INNER, HIDDEN),
        f"{experts_below}.down_proj_bias": (EXPERTS, HIDDEN),
    }


def _build_gpt_oss(folder: Path) -> Path:
    layout = decoder(4, HIDDEN, VOCAB, _gpt_oss)
    return write(folder, _GPT_OSS, layout, pack=packing.mxfp4_experts)


_FOUR_BITS = {"bits": 4, "group_size": packing.GROUP}

ROWS = (
    _sparse(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        {
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "index_n_heads": 64,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    _sparse(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "index_n_heads": 32,
            "indexer_rope_interleave": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    GpuRow(
        "bailing_moe_linear",
        "BailingMoeV2_5ForCausalLM",
        _build_bailing,
        # Upstream's Triton attention asks layer 0 for its values, and that layer keeps none.
        (
            *("--attention-backend", "flashinfer", "--disable-radix-cache"),
            *("--max-mamba-cache-size", "64"),
        ),
    ),
    _format(
        "fp8_block",
        "FP8 in blocks",
        ("fp8",),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        packing.fp8_blocks,
    ),
    _format(
        "fp8_channel",
        "FP8 per channel",
        ("compressed-tensors",),
        _per_channel_fp8(),
        packing.fp8_channels,
    ),
    GpuRow(
        "mxfp4",
        "GptOssForCausalLM",
        _build_gpt_oss,
        # FFN ranks have no rows for upstream's own choice, triton_kernel, which rounds elsewhere.
        (*TRITON, "--moe-runner-backend", "triton"),
        {},
        ("--afd-allow-untested",),
        format="MXFP4",
        methods=("mxfp4",),
    ),
    _format(
        "awq",
        "AWQ",
        ("awq", "awq_marlin"),
        {"quant_method": "awq", **_FOUR_BITS, "zero_point": True, "version": "gemm"},
        packing.awq,
        "float16",
    ),
    _format(
        "gptq",
        "GPTQ",
        ("gptq", "gptq_marlin"),
        {"quant_method": "gptq", **_FOUR_BITS, "desc_act": False, "sym": True},
        packing.gptq,
        "float16",
    ),
    _format("int8", "INT8", ("w8a8_int8",), {"quant_method": "w8a8_int8"}, packing.int8_channels),
)
