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
STEP3_QUERY, STEP3_VISION = 32, 32
ZAYA_ROUTER = 24
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


def _minimax_m3(prefix: str, index: int) -> Layout:
    """Dense attention everywhere: upstream's sparse one takes no FP32, on_gpu.py has it."""
    below = f"{prefix}.block_sparse_moe"
    shapes = {
        **attention(f"{prefix}.self_attn", HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
        **vectors(f"{prefix}.self_attn", q_norm=HEAD_DIM, k_norm=HEAD_DIM),
    }
    if index == 0:
        return {**shapes, **mlp(f"{prefix}.mlp", HIDDEN, INNER)}
    return {
        **shapes,
        **linear(f"{below}.gate", EXPERTS, HIDDEN),
        f"{below}.e_score_correction_bias": (EXPERTS,),
        **experts(f"{below}.experts", EXPERTS, HIDDEN, EXPERT_INNER, ("w1", "w3", "w2")),
        **mlp(f"{below}.shared_experts", HIDDEN, EXPERT_INNER),
    }


def _zaya(prefix: str, index: int) -> Layout:
    """Attention and experts take turns; a router passes its state on to the next one."""
    shapes = {f"{prefix}.res_scale.hidden_states_{kind}": (HIDDEN,) for kind in ("scale", "bias")}
    if index:
        shapes |= {f"{prefix}.res_scale.residual_{kind}": (HIDDEN,) for kind in ("scale", "bias")}
    if index % 2 == 0:
        below, channels = f"{prefix}.self_attn.qkv", (HEADS + KV_HEADS) * HEAD_DIM
        return {
            **shapes,
            **linear(f"{below}.linear_q", HEADS * HEAD_DIM, HIDDEN),
            **linear(f"{below}.linear_k", KV_HEADS * HEAD_DIM, HIDDEN),
            **linear(f"{below}.val_proj1", KV_HEADS * HEAD_DIM // 2, HIDDEN),
            **linear(f"{below}.val_proj2", KV_HEADS * HEAD_DIM // 2, HIDDEN),
            f"{below}.conv_qk.0.weight": (channels, 1, 2),
            f"{below}.conv_qk.0.bias": (channels,),
            f"{below}.conv_qk.1.weight": (channels, HEAD_DIM, 2),
            f"{below}.conv_qk.1.bias": (channels,),
            f"{below}.temp": (KV_HEADS,),
            **linear(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
        }
    below, router = f"{prefix}.zaya_block.experts.local_experts", f"{prefix}.zaya_block.router"
    for expert in range(EXPERTS):
        shapes |= linear(f"{below}.{expert}.linear_fc1", 2 * EXPERT_INNER, HIDDEN)
        shapes |= linear(f"{below}.{expert}.linear_fc2", HIDDEN, EXPERT_INNER)
    return {
        **shapes,
        **linear(f"{router}.down_proj", ZAYA_ROUTER, HIDDEN, bias=True),
        **vectors(router, rmsnorm_eda=ZAYA_ROUTER),
        f"{router}.router_states_scale": (ZAYA_ROUTER,),
        **linear(f"{router}.router_mlp.0", ZAYA_ROUTER, ZAYA_ROUTER, bias=True),
        **linear(f"{router}.router_mlp.2", ZAYA_ROUTER, ZAYA_ROUTER, bias=True),
        **linear(f"{router}.router_mlp.4", EXPERTS + 1, ZAYA_ROUTER),
        f"{router}.balancing_biases": (EXPERTS + 1,),
    }


def _zaya_model() -> Layout:
    shapes = decoder(4, HIDDEN, VOCAB, _zaya, norms=("input_norm",))
    del shapes["model.norm.weight"], shapes["lm_head.weight"]
    ends = {
        f"{part}_{kind}" for part in ("hidden_states", "residual") for kind in ("scale", "bias")
    }
    return {
        **shapes,
        "model.final_norm.weight": (HIDDEN,),
        **{f"model.res_scale.{name}": (HIDDEN,) for name in sorted(ends)},
    }


def _step3(prefix: str, index: int) -> Layout:
    """Queries through a low rank, one key-value head, all experts of a layer in three tensors."""
    shapes = {
        **linear(f"{prefix}.self_attn.q_proj", STEP3_QUERY, HIDDEN),
        **linear(f"{prefix}.self_attn.k_proj", HEAD_DIM, HIDDEN),
        **linear(f"{prefix}.self_attn.v_proj", HEAD_DIM, HIDDEN),
        **vectors(f"{prefix}.self_attn", inter_norm=STEP3_QUERY),
        **linear(f"{prefix}.self_attn.wq", HEADS * HEAD_DIM, STEP3_QUERY),
        **linear(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    }
    if index == 0:
        return {**shapes, **mlp(f"{prefix}.mlp", HIDDEN, INNER)}
    return {
        **shapes,
        **linear(f"{prefix}.moe.gate", EXPERTS, HIDDEN),
        **layouts.stacked_experts(f"{prefix}.moe", EXPERTS, HIDDEN, EXPERT_INNER),
        **mlp(f"{prefix}.share_expert", HIDDEN, EXPERT_INNER),
    }


def _step3_vision() -> Layout:
    """One layer of the tower and what joins it to the language model."""
    layer, size = "vision_model.transformer.layers.0", STEP3_VISION
    return {
        "vision_model.embeddings.class_embedding": (1, size),
        **linear("vision_model.embeddings.position_embedding", 5, size),
        "vision_model.embeddings.patch_embedding.weight": (size, 3, 14, 14),
        "vision_model.embeddings.patch_embedding.bias": (size,),
        **linear(f"{layer}.self_attn.qkv_proj", 3 * size, size, bias=True),
        **linear(f"{layer}.self_attn.out_proj", size, size, bias=True),
        **linear(f"{layer}.mlp.fc1", 2 * size, size, bias=True),
        **linear(f"{layer}.mlp.fc2", size, 2 * size, bias=True),
        **{
            f"{layer}.layer_norm{index}.{kind}": (size,)
            for index in (1, 2)
            for kind in ("weight", "bias")
        },
        "vit_downsampler.weight": (size, size, 2, 2),
        "vit_downsampler.bias": (size,),
        "vit_downsampler2.weight": (2 * size, size, 3, 3),
        "vit_downsampler2.bias": (2 * size,),
        **linear("vit_large_projector", HIDDEN, 2 * size),
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
        "minimax_m3",
        "minimax_m3",
        "MiniMaxM3SparseForCausalLM",
        {
            "num_hidden_layers": 3,
            "intermediate_size": EXPERT_INNER,
            "dense_intermediate_size": INNER,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_layer_freq": [0, 1, 1],
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "use_gemma_norm": True,
            "rotary_dim": 8,
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 0, 0],
                "sparse_num_index_heads": 2,
                "sparse_index_dim": HEAD_DIM,
                "sparse_block_size": 16,
                "sparse_topk_blocks": 2,
                "sparse_init_block": 0,
                "sparse_local_block": 1,
            },
        },
        decoder(3, HIDDEN, VOCAB, _minimax_m3),
        microbatches=1,
    ),
    _row(
        "zaya",
        "zaya",
        "ZayaForCausalLM",
        {
            "num_hidden_layers": 4,
            "ffn_hidden_size": 2 * EXPERT_INNER,
            "num_experts": EXPERTS,
            "num_query_groups": KV_HEADS,
            "moe_router_topk": 1,
            "zaya_mlp_expansion": ZAYA_ROUTER,
            "zaya_use_mod": True,
            "zaya_use_eda": True,
            "zaya_high_prec": True,
            "scale_residual_merge": True,
            "norm_epsilon": 1e-5,
            "activation_func": "swiglu",
            "gated_linear_unit": True,
            "cca_time0": 2,
            "cca_time1": 2,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
            "rope_parameters": None,
        },
        _zaya_model(),
        registered=True,
        arguments=RECURRENT,
    ),
    _row(
        "step3",
        "step3_vl",
        "Step3VLForConditionalGeneration",
        {
            "text_config": {
                **COMMON,
                "model_type": "step3_text",
                "architectures": ["Step3TextForCausalLM"],
                "num_hidden_layers": 3,
                "num_attention_groups": 1,
                "num_key_value_heads": 1,
                "share_q_dim": STEP3_QUERY,
                "moe_num_experts": EXPERTS,
                "moe_top_k": 2,
                "moe_layers_enum": "1,2",
                "share_expert_dim": EXPERT_INNER,
                "norm_expert_weight": True,
            },
            "vision_config": {
                "hidden_size": STEP3_VISION,
                "intermediate_size": 2 * STEP3_VISION,
                "output_hidden_size": STEP3_VISION,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "projector_bias": False,
            "understand_projector_stride": 2,
            "image_token_id": 300,
        },
        {**decoder(3, HIDDEN, VOCAB, _step3), **_step3_vision()},
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
