"""Tensor names and shapes of published checkpoints, for families that transformers does not know.

Each function gives the part of a layout below `prefix`, as the family's own repository names it.
"""

from __future__ import annotations

from collections.abc import Callable

from models.checkpoints import Layout

Shapes = dict[str, tuple[int, ...]]
GATED = ("gate_proj", "up_proj", "down_proj")


def linear(name: str, out_dim: int, in_dim: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out_dim, in_dim)}
    return {**shapes, f"{name}.bias": (out_dim,)} if bias else shapes


def vectors(prefix: str, **sizes: int) -> Shapes:
    """One-dimensional tensors `prefix.NAME.weight`."""
    return {f"{prefix}.{name}.weight": (size,) for name, size in sizes.items()}


def mlp(prefix: str, hidden: int, inner: int, names: tuple[str, str, str] = GATED) -> Shapes:
    gate, up, down = names
    return {
        **linear(f"{prefix}.{gate}", inner, hidden),
        **linear(f"{prefix}.{up}", inner, hidden),
        **linear(f"{prefix}.{down}", hidden, inner),
    }


def experts(
    prefix: str, count: int, hidden: int, inner: int, names: tuple[str, str, str] = GATED
) -> Shapes:
    """One MLP per expert below `prefix.INDEX`."""
    shapes: Shapes = {}
    for index in range(count):
        shapes |= mlp(f"{prefix}.{index}", hidden, inner, names)
    return shapes


def stacked_experts(prefix: str, count: int, hidden: int, inner: int) -> Shapes:
    """All experts of a layer in three tensors, with the expert first (Step)."""
    return {
        f"{prefix}.gate_proj.weight": (count, inner, hidden),
        f"{prefix}.up_proj.weight": (count, inner, hidden),
        f"{prefix}.down_proj.weight": (count, hidden, inner),
    }


def attention(
    prefix: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    out: str = "o_proj",
) -> Shapes:
    value_dim = v_head_dim or head_dim
    return {
        **linear(f"{prefix}.q_proj", heads * head_dim, hidden),
        **linear(f"{prefix}.k_proj", kv_heads * head_dim, hidden),
        **linear(f"{prefix}.v_proj", kv_heads * value_dim, hidden),
        **linear(f"{prefix}.{out}", hidden, heads * value_dim),
    }


def latent_attention(
    prefix: str,
    hidden: int,
    heads: int,
    kv_lora: int,
    nope: int,
    rope: int,
    value: int,
    q_lora: int = 0,
    out: str = "o_proj",
) -> Shapes:
    """Multi-head latent attention, its queries through a low rank or not."""
    query = (
        {
            **linear(f"{prefix}.q_a_proj", q_lora, hidden),
            **vectors(prefix, q_a_layernorm=q_lora),
            **linear(f"{prefix}.q_b_proj", heads * (nope + rope), q_lora),
        }
        if q_lora
        else linear(f"{prefix}.q_proj", heads * (nope + rope), hidden)
    )
    return {
        **query,
        **linear(f"{prefix}.kv_a_proj_with_mqa", kv_lora + rope, hidden),
        **vectors(prefix, kv_a_layernorm=kv_lora),
        **linear(f"{prefix}.kv_b_proj", heads * (nope + value), kv_lora),
        **linear(f"{prefix}.{out}", hidden, heads * value),
    }


def decoder(
    layers: int,
    hidden: int,
    vocab: int,
    layer: Callable[[str, int], Layout],
    *,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    embedding: str = "embed_tokens",
    prefix: str = "model",
) -> Shapes:
    """Embedding, layers, last norm and head around what `layer(prefix, index)` gives."""
    shapes: Shapes = {f"{prefix}.{embedding}.weight": (vocab, hidden)}
    for index in range(layers):
        below = f"{prefix}.layers.{index}"
        shapes |= vectors(below, **dict.fromkeys(norms, hidden))
        shapes |= layer(below, index)
    return shapes | {f"{prefix}.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
