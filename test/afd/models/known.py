"""Families whose tiny checkpoint transformers itself lays out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoints import VOCAB, write_transformers
from models.families import RECURRENT, TRITON, Family

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Widths for which upstream's Triton kernel has a latent-attention form: 256 + 32.
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
WINDOWED = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
}


def _row(
    name: str,
    classes: str,
    settings: dict[str, Any],
    *,
    architecture: str | None = None,
    extra: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    renamed: tuple[str, str] | None = None,
    unpublished: str = "",
    as_architecture: str | None = None,
    **traits: Any,
) -> Family:
    """`classes` is "Model/Config" in transformers; `architecture` if upstream spells it differently.

    `renamed` is a part of tensor names that transformers writes, and how it is published;
    `unpublished` a regular expression of names that it writes and nobody publishes.
    `as_architecture` is what upstream makes of the checkpoint, if that is not what it is.
    """
    model, config = classes.split("/")
    own = {**(extra or {}), "architectures": [architecture or model]}
    full = settings if "text_config" in settings else {**COMMON, **settings}

    def build(folder: Path) -> Path:
        return write_transformers(folder, model, config, full, own, renamed, unpublished)

    return Family(name, as_architecture or architecture or model, build, arguments or {}, **traits)


FAMILIES = (
    _row(
        "mixtral",
        "MixtralForCausalLM/MixtralConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    _row(
        "olmoe",
        "OlmoeForCausalLM/OlmoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    _row(
        "phimoe",
        "PhimoeForCausalLM/PhimoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        architecture="PhiMoEForCausalLM",
    ),
    _row(
        "qwen2_moe",
        "Qwen2MoeForCausalLM/Qwen2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    _row(
        "qwen3_moe",
        "Qwen3MoeForCausalLM/Qwen3MoeConfig",
        {**MOE, "norm_topk_prob": True},
    ),
    _row(
        "transformers",
        "Qwen3MoeForCausalLM/Qwen3MoeConfig",
        {**MOE, "norm_topk_prob": True},
        as_architecture="TransformersMoEForCausalLM",
        arguments={"model_impl": "transformers"},
        microbatches=1,
    ),
    _row(
        "qwen3_next",
        "Qwen3NextForCausalLM/Qwen3NextConfig",
        {
            **MOE,
            "shared_expert_intermediate_size": 48,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_hidden_layers": 4,
        },
        extra={"full_attention_interval": 4},
        arguments=RECURRENT,
    ),
    _row(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM/Qwen3_5MoeTextConfig",
        {
            **MOE,
            "shared_expert_intermediate_size": 48,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_hidden_layers": 4,
        },
        extra={"full_attention_interval": 4},
        arguments=RECURRENT,
    ),
    _row(
        "deepseek_v2",
        "DeepseekV2ForCausalLM/DeepseekV2Config",
        {
            **MLA,
            **ROUTED,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
        extra={"moe_layer_freq": 1, "scoring_func": "softmax"},
        arguments=TRITON,
    ),
    _row(
        "deepseek_v3",
        "DeepseekV3ForCausalLM/DeepseekV3Config",
        {
            **MLA,
            **ROUTED,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        extra={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        arguments=TRITON,
    ),
    _row(
        "glm4_moe",
        "Glm4MoeForCausalLM/Glm4MoeConfig",
        {
            **ROUTED,
            "head_dim": 16,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    _row(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM/Glm4MoeLiteConfig",
        {**MLA, **ROUTED, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1},
        arguments=TRITON,
    ),
    _row(
        "gpt_oss",
        "GptOssForCausalLM/GptOssConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "sliding_window": 16,
            "num_hidden_layers": 4,
        },
        extra={"swiglu_limit": 7.0},
        arguments={**TRITON, "moe_runner_backend": "triton"},
        fused_experts=True,
    ),
    _row(
        "granitemoe",
        "GraniteMoeForCausalLM/GraniteMoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        fused_experts=True,
    ),
    _row(
        "ernie4",
        "Ernie4_5_MoeForCausalLM/Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "head_dim": 16,
        },
    ),
    _row(
        "hunyuan",
        "HunYuanMoEV1ForCausalLM/HunYuanMoEV1Config",
        {"num_experts": 8, "moe_topk": 2, "head_dim": 16},
        extra={
            "num_shared_expert": [1] * 3,
            "use_cla": False,
            "use_qk_norm": True,
            "use_mixed_mlp_moe": True,
            "moe_intermediate_size": 96,
        },
    ),
    _row(
        "hunyuan_v3",
        "HYV3ForCausalLM/HYV3Config",
        MOE,
        extra={"route_norm": True, "first_k_dense_replace": 1, "qk_norm": True},
    ),
    _row(
        "lfm2_moe",
        "Lfm2MoeForCausalLM/Lfm2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        arguments=RECURRENT,
    ),
    _row(
        "llama4",
        "Llama4ForConditionalGeneration/Llama4Config",
        {
            "text_config": {
                **COMMON,
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "intermediate_size": 32,
                "intermediate_size_mlp": 96,
                "head_dim": 16,
                "interleave_moe_layer_step": 2,
                "num_hidden_layers": 4,
                # Off a GPU upstream takes this norm in BF16.
                "use_qk_norm": False,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
        arguments=TRITON,
        fused_experts=True,
    ),
    _row(
        "minimax_m2",
        "MiniMaxM2ForCausalLM/MiniMaxM2Config",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": 16,
            "rotary_dim": 8,
        },
        extra={
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
        },
    ),
    _row(
        "nemotron_h",
        "NemotronHForCausalLM/NemotronHConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 8,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "use_mamba_kernels": False,
            "chunk_size": 16,
        },
        arguments=RECURRENT,
        renamed=("backbone.embedding.", "backbone.embeddings."),
    ),
    _row(
        "laguna",
        "LagunaForCausalLM/LagunaConfig",
        {**MOE, **WINDOWED, "shared_expert_intermediate_size": 48},
    ),
    _row(
        "cohere2_moe",
        "Cohere2MoeForCausalLM/Cohere2MoeConfig",
        {**WINDOWED, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    _row(
        "exaone_moe",
        "ExaoneMoeForCausalLM/ExaoneMoeConfig",
        {**MOE, "n_group": 1, "topk_group": 1, "layer_types": ["full_attention"] * 3},
        architecture="ExaoneMoEForCausalLM",
        extra={"is_moe_layer": [False, True, True], "num_nextn_predict_layers": 0},
        arguments=TRITON,
    ),
    _row(
        "longcat_flash",
        "LongcatFlashForCausalLM/LongcatFlashConfig",
        {
            **MLA,
            "n_routed_experts": 8,
            "moe_topk": 2,
            "zero_expert_num": 4,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 96,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "routed_scaling_factor": 2.0,
        },
        extra={
            "num_hidden_layers": None,
            "disable_quant_module": [],
            "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
            "zero_expert_type": "identity",
        },
        arguments=TRITON,
        unpublished=r"\.experts\.(8|9|1\d)\.",  # of experts that only pass rows through
    ),
    _row(
        "gemma4",
        "Gemma4ForCausalLM/Gemma4TextConfig",
        {
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "enable_moe_block": True,
            "head_dim": 16,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 16,
        },
        extra={"swa_num_key_value_heads": 2},
        arguments=TRITON,
        fused_experts=True,
    ),
    _row(
        "mellum",
        "MellumForCausalLM/MellumConfig",
        {**MOE, **WINDOWED},
    ),
)
