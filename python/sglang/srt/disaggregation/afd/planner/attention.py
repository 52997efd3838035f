"""Sizes of attention: weights, KV cache and arithmetic of grouped-query and latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import checks

_STATEFUL = ("linear_attn_config", "ssm_state_size", "mamba_num_heads", "linear_num_key_heads")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """All layers of a model.

    Attributes:
        params: projections, all layers.
        kv_width: elements of the KV cache per token and layer.
        score_flops: FLOP per token in the context, layer and generated token.
        full_layers: layers that see the whole context.
        window_layers, window: layers that see only the last `window` tokens.
    """

    params: int
    kv_width: int
    score_flops: int
    full_layers: int
    window_layers: int
    window: int

    def token_layers(self, context: int) -> int:
        """Sum over layers of the tokens that each one sees."""
        return self.full_layers * context + self.window_layers * min(context, self.window)

    def kv_elements(self, context: int) -> int:
        """Elements of the KV cache of one request."""
        return self.kv_width * self.token_layers(context)

    def flops(self, context: int) -> int:
        """FLOP of scores and values for one generated token, all layers."""
        return self.score_flops * self.token_layers(context)


def parse(where: str, config: Mapping[str, Any], layers: int, hidden: int) -> Attention:
    """From a Hugging Face text config.

    Raises:
        AFDConfigError: a kind of attention that is not modelled.
    """
    for key in _STATEFUL:
        if config.get(key):
            raise AFDConfigError(f"{where}: {key}: layers with a state are not modelled")
    if config.get("index_topk"):
        raise AFDConfigError(f"{where}: index_topk: sparse attention is not modelled")
    full, windowed, window = _windows(where, config, layers)
    heads = checks.count(f"{where}: num_attention_heads", config.get("num_attention_heads"))
    rank = config.get("kv_lora_rank")
    if rank:
        rope = checks.count(f"{where}: qk_rope_head_dim", config.get("qk_rope_head_dim"))
        nope = checks.count(f"{where}: qk_nope_head_dim", config.get("qk_nope_head_dim"))
        value = checks.count(f"{where}: v_head_dim", config.get("v_head_dim"))
        query_rank = config.get("q_lora_rank")
        query = heads * (nope + rope)
        params = hidden * query_rank + query_rank * query if query_rank else hidden * query
        params += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        # Decode works on the latent: scores over rank + rope, values over rank.
        score = 2 * heads * (2 * rank + rope)
        width = rank + rope
    else:
        groups = config.get("num_key_value_heads") or heads
        head = config.get("head_dim") or hidden // heads
        params = 2 * hidden * head * (heads + groups)
        score = 4 * heads * head
        width = 2 * groups * head
    return Attention(
        params=params * layers,
        kv_width=width,
        score_flops=score,
        full_layers=full,
        window_layers=windowed,
        window=window,
    )


def _windows(where: str, config: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Layers with the whole context, layers with a window, and the window."""
    kinds = config.get("layer_types") or config.get("attn_type_list")
    window = config.get("sliding_window") or 0
    if isinstance(kinds, list):
        # MiniMax lists 1 for softmax attention and 0 for linear attention.
        unknown = set(kinds) - {"full_attention", "sliding_attention", 1}
        if unknown:
            raise AFDConfigError(
                f"{where}: layers of type {sorted(map(str, unknown))[0]!r} are not modelled"
            )
        sliding = kinds.count("sliding_attention")
        return layers - sliding, sliding, window
    if window and config.get("use_sliding_window", True):
        return 0, layers, window
    return layers, 0, 0
