"""Families whose tiny checkpoint is spelled out here, after their published repositories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models import layouts
from models.checkpoints import VOCAB, Layout, write
from models.families import RECURRENT, TRITON, Family
from models.layouts import attention, decoder, experts, latent_attention, linear, mlp, vectors

HIDDEN, INNER, EXPERT_INNER, EXPERTS = 64, 96, 32, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": EXPERT_INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": ROPE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
MLA = {"kv_lora": 256, "nope": 16, "rope": 32, "value": 16}
MLA_CONFIG = {
    "q_lora_rank": 32,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
}

# A prompt whose beginning comes from the cache, or in two halves, is another one to these models.
LOOKS_AHEAD = {"disable_radix_cache": True}


def _row(
    name: str,
    model_type: str,
    architecture: str,
    config: dict[str, Any],
    layout: Layout,
    *,
    registered: bool = False,
    arguments: dict[str, Any] | None = None,
    **traits: Any,
) -> Family:
    """`registered`: upstream or transformers knows a configuration class for `model_type`."""
    names = {"model_type": model_type, "architectures": [architecture]}

    def build(folder: Path) -> Path:
        return write(folder, {**COMMON, **config, **names}, layout, own_class=not registered)

    own = {} if registered else {"trust_remote_code": True}
    return Family(name, architecture, build, {**(arguments or {}), **own}, **traits)


# --- Bailing / Ling, Sarvam -------------------------------------------------------------------


def _bailing(prefix: str, index: int) -> Layout:
    shapes = {
        **linear(f"{prefix}.attention.query_key_value", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        **linear(f"{prefix}.attention.dense", HIDDEN, HEADS * HEAD_DIM),
        **vectors(f"{prefix}.attention", query_layernorm=HEAD_DIM, key_layernorm=HEAD_DIM),
    }
    return {**shapes, **_bailing_mlp(prefix, index)}


def _bailing_mlp(prefix: str, index: int) -> Layout:
    if index == 0:
        return mlp(f"{prefix}.mlp", HIDDEN, INNER)
    return {
        **linear(f"{prefix}.mlp.gate", EXPERTS, HIDDEN),
        f"{prefix}.mlp.gate.expert_bias": (EXPERTS,),
        **experts(f"{prefix}.mlp.experts", EXPERTS, HIDDEN, EXPERT_INNER),
        **mlp(f"{prefix}.mlp.shared_experts", HIDDEN, EXPERT_INNER),
    }


BAILING = {
    "num_hidden_layers": 3,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "partial_rotary_factor": 0.5,
}


def _sarvam(prefix: str, index: int) -> Layout:
    below = f"{prefix}.mlp"
    attn = latent_attention(f"{prefix}.self_attn", HIDDEN, HEADS, **MLA, q_lora=32)
    if index == 0:
        return {**attn, **mlp(below, HIDDEN, INNER)}
    return {
        **attn,
        **linear(f"{below}.gate", EXPERTS, HIDDEN),
        f"{below}.gate.e_score_correction_bias": (EXPERTS,),
        **experts(f"{below}.experts", EXPERTS, HIDDEN, EXPERT_INNER),
        **mlp(f"{below}.shared_experts", HIDDEN, EXPERT_INNER),
    }


# --- SDAR, MiMo-V2, Step-3.5, Grok -------------------------------------------------------------


def _sdar(prefix: str, index: int) -> Layout:
    return {
        **attention(f"{prefix}.self_attn", HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
        **vectors(f"{prefix}.self_attn", q_norm=HEAD_DIM, k_norm=HEAD_DIM),
        **linear(f"{prefix}.mlp.gate", EXPERTS, HIDDEN),
        **experts(f"{prefix}.mlp.experts", EXPERTS, HIDDEN, EXPERT_INNER),
    }


def _mimo(prefix: str, index: int) -> Layout:
    """Layer 1 has a window, sinks and other heads; values are narrower than keys."""
    shapes = attention(f"{prefix}.self_attn", HIDDEN, HEADS, 2 if index == 1 else 1, 32, 16)
    if index == 1:
        shapes[f"{prefix}.self_attn.attention_sink_bias"] = (HEADS,)
    if index == 0:
        return {**shapes, **mlp(f"{prefix}.mlp", HIDDEN, INNER)}
    return {
        **shapes,
        **linear(f"{prefix}.mlp.gate", EXPERTS, HIDDEN),
        f"{prefix}.mlp.gate.e_score_correction_bias": (EXPERTS,),
        **experts(f"{prefix}.mlp.experts", EXPERTS, HIDDEN, EXPERT_INNER),
    }


def _step35(prefix: str, index: int) -> Layout:
    shapes = {
        **attention(f"{prefix}.self_attn", HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
        **vectors(f"{prefix}.self_attn", q_norm=HEAD_DIM, k_norm=HEAD_DIM),
        **linear(f"{prefix}.self_attn.g_proj", HEADS, HIDDEN),
    }
    if index == 0:
        return {**shapes, **mlp(f"{prefix}.mlp", HIDDEN, INNER)}
    return {
        **shapes,
        **linear(f"{prefix}.moe.gate", EXPERTS, HIDDEN),
        f"{prefix}.moe.router_bias": (EXPERTS,),
        **layouts.stacked_experts(f"{prefix}.moe", EXPERTS, HIDDEN, EXPERT_INNER),
        **mlp(f"{prefix}.share_expert", HIDDEN, EXPERT_INNER),
    }


def _grok(prefix: str, index: int) -> Layout:
    return {
        **attention(f"{prefix}.self_attn", HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
        **linear(f"{prefix}.block_sparse_moe.gate", EXPERTS, HIDDEN),
        **experts(
            f"{prefix}.block_sparse_moe.experts", EXPERTS, HIDDEN, EXPERT_INNER, ("w1", "w3", "w2")
        ),
        **mlp(f"{prefix}.mlp", HIDDEN, INNER),
    }


# --- Kimi Linear -------------------------------------------------------------------------------


def _kimi_linear(prefix: str, index: int) -> Layout:
    below, inner = f"{prefix}.self_attn", HEADS * HEAD_DIM
    if index == 1:
        attn: Layout = latent_attention(below, HIDDEN, HEADS, **MLA)
    else:
        attn = {
            **attention(below, HIDDEN, HEADS, HEADS, HEAD_DIM),
            **linear(f"{below}.b_proj", HEADS, HIDDEN),
            **linear(f"{below}.f_a_proj", HEAD_DIM, HIDDEN),
            **linear(f"{below}.f_b_proj", inner, HEAD_DIM),
            **linear(f"{below}.g_a_proj", HEAD_DIM, HIDDEN),
            **linear(f"{below}.g_b_proj", inner, HEAD_DIM),
            **{f"{below}.{name}_conv1d.weight": (inner, 1, 4) for name in "qkv"},
            f"{below}.dt_bias": (inner,),
            f"{below}.A_log": (1, 1, HEADS, 1),
            **vectors(below, o_norm=HEAD_DIM),
        }
    if index == 0:
        return {**attn, **mlp(f"{prefix}.mlp", HIDDEN, INNER)}
    below = f"{prefix}.block_sparse_moe"
    return {
        **attn,
        **linear(f"{below}.gate", EXPERTS, HIDDEN),
        f"{below}.gate.e_score_correction_bias": (EXPERTS,),
        **experts(f"{below}.experts", EXPERTS, HIDDEN, EXPERT_INNER, ("w1", "w3", "w2")),
        **mlp(f"{below}.shared_experts", HIDDEN, EXPERT_INNER),
    }


FAMILIES = (
    _row(
        "bailing_moe",
        "bailing_moe",
        "BailingMoeV2ForCausalLM",
        BAILING,
        decoder(3, HIDDEN, VOCAB, _bailing, embedding="word_embeddings"),
    ),
    _row(
        "sarvam_mla",
        "sarvam_mla",
        "SarvamMLAForCausalLM",
        {**BAILING, **MLA_CONFIG, "num_key_value_heads": HEADS},
        decoder(3, HIDDEN, VOCAB, _sarvam),
        arguments=TRITON,
    ),
    _row(
        "llada2",
        "llada2_moe",
        "LLaDA2MoeModelLM",
        BAILING,
        decoder(3, HIDDEN, VOCAB, _bailing, embedding="word_embeddings"),
        arguments=LOOKS_AHEAD,
        microbatches=1,
    ),
    _row(
        "sdar_moe",
        "sdar_moe",
        "SDARMoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        decoder(3, HIDDEN, VOCAB, _sdar),
        arguments=LOOKS_AHEAD,
        microbatches=1,
    ),
    _row(
        "mimo_v2",
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "v_head_dim": 16,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 16,
            "swa_rope_theta": 10000.0,
            "sliding_window": 16,
            "sliding_window_size": 16,
            "hybrid_layer_pattern": [0, 1, 0],
            "hybrid_block_size": None,
            "moe_layer_freq": [0, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_bias": False,
            "layernorm_epsilon": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": None,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": None,
        },
        decoder(3, HIDDEN, VOCAB, _mimo),
        arguments=TRITON,
    ),
    _row(
        "step3p5",
        "step3p5",
        "Step3p5ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_attention_groups": KV_HEADS,
            "moe_num_experts": EXPERTS,
            "moe_top_k": 2,
            "moe_layers_enum": "1,2",
            "share_expert_dims": EXPERT_INNER,
            "need_fp32_gate": True,
            "use_moe_router_bias": True,
            "moe_router_activation": "sigmoid",
            "moe_router_scaling_factor": 2.0,
            "norm_expert_weight": True,
            "swiglu_limits": [0, 0, 1.0],
            "swiglu_limits_shared": [0, 0, 1.0],
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 16,
            "attention_other_setting": {
                "num_attention_heads": HEADS,
                "num_attention_groups": KV_HEADS,
            },
            "rope_theta": [10000.0] * 3,
            "partial_rotary_factors": [0.5, 1.0, 0.5],
            "use_head_wise_attn_gate": True,
            "rope_parameters": None,
        },
        decoder(3, HIDDEN, VOCAB, _step35),
        registered=True,
        fused_experts=True,
    ),
    _row(
        "grok",
        "grok-1",
        "Grok1ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "residual_moe": True,
            "embedding_multiplier_scale": 4.0,
            "output_multiplier_scale": 0.5,
            "attn_logit_softcapping": 30.0,
            "final_logit_softcapping": 50.0,
        },
        decoder(
            3,
            HIDDEN,
            VOCAB,
            _grok,
            norms=("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"),
        ),
        arguments=TRITON,
    ),
    _row(
        "kimi_linear",
        "kimi_linear",
        "KimiLinearForCausalLM",
        {
            **MLA_CONFIG,
            "q_lora_rank": None,
            "num_key_value_heads": HEADS,
            "num_hidden_layers": 3,
            "num_experts": EXPERTS,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.4,
            "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
                "num_heads": HEADS,
                "head_dim": HEAD_DIM,
                "short_conv_kernel_size": 4,
            },
        },
        decoder(3, HIDDEN, VOCAB, _kimi_linear),
        registered=True,
        arguments={**RECURRENT, **TRITON},
    ),
)
