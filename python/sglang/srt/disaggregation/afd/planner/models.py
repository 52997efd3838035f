"""What the planner must know of a model: sizes, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import attention, checks, quantization

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a mixture-of-experts decoder.

    Attributes:
        source: where the numbers are from.
        path: what --model-path takes.
        hidden: elements of a hidden state.
        layers, moe_layers: decoder layers, and those of them with routed experts.
        experts, topk: routed experts of a layer, and how many a token takes.
        expert_width: intermediate size of one routed expert.
        attn: sizes of attention.
        other_params: dense MLPs, shared experts and routers, all layers.
        embed_params, head_params: embedding and LM head; head_params is 0 if they share weights.
        linear_bytes, expert_bytes: bytes per weight of linear layers, and of routed experts.
        kv_bytes: bytes per element of the KV cache.
        max_context: longest context of the config, None if it names none.
    """

    name: str
    source: str
    path: str
    hidden: int
    layers: int
    moe_layers: int
    experts: int
    topk: int
    expert_width: int
    attn: attention.Attention
    other_params: int
    embed_params: int
    head_params: int
    linear_bytes: float
    expert_bytes: float
    kv_bytes: float
    max_context: int | None

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width

    @property
    def routed_params(self) -> int:
        return self.moe_layers * self.experts * self.expert_params

    @property
    def dense_params(self) -> int:
        """What every token passes in each step, all layers and the LM head."""
        return self.attn.params + self.other_params + (self.head_params or self.embed_params)

    @property
    def total_params(self) -> int:
        return (
            self.attn.params
            + self.other_params
            + self.embed_params
            + self.head_params
            + self.routed_params
        )

    @property
    def active_params(self) -> int:
        """Per token, embedding included, as model names count."""
        unused = (self.experts - self.topk) * self.moe_layers * self.expert_params
        return self.total_params - unused

    @property
    def routed_weight_bytes(self) -> float:
        """What all FFN ranks hold together."""
        return self.routed_params * self.expert_bytes

    @property
    def attn_weight_bytes(self) -> float:
        """What one attention rank holds. Embedding and LM head stay in BF16 in FP8 checkpoints."""
        head = self.embed_params + self.head_params
        return (self.attn.params + self.other_params) * self.linear_bytes + head * max(
            2.0, self.linear_bytes
        )

    def kv_request_bytes(self, context: int) -> float:
        """KV cache of one request of `context` tokens."""
        return self.attn.kv_elements(context) * self.kv_bytes


def names() -> tuple[str, ...]:
    """Models whose sizes come with the planner."""
    return tuple(sorted(path.stem for path in (checks.DATA / "models").glob("*.json")))


def load(
    which: str,
    linear_bits: float | None = None,
    expert_bits: float | None = None,
    kv_bits: float | None = None,
) -> ModelShape:
    """A model by name, or from a folder with a config.json, or from such a file.

    Args:
        linear_bits, expert_bits, kv_bits: override what the config says.
    Raises:
        AFDConfigError: not found, no mixture of experts, or a part that is not modelled.
    """
    if which in names():
        path = checks.DATA / "models" / f"{which}.json"
    else:
        path = Path(which)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise AFDConfigError(
                f"--model {which} is neither a folder with a config.json nor one of "
                f"{', '.join(names())}"
            )
    config = checks.read_json(path, "--model")
    return parse(config, which, linear_bits, expert_bits, kv_bits)


def parse(
    config: Mapping[str, Any],
    which: str,
    linear_bits: float | None = None,
    expert_bits: float | None = None,
    kv_bits: float | None = None,
    flag: str = "--model",
) -> ModelShape:
    """As `load`, from the content of a config.json that the user named `which` with `flag`."""
    where = f"{flag} {which}"
    text = config.get("text_config") or config
    # Nested configurations keep the quantisation at the top.
    quantized = text.get("quantization_config") or config.get("quantization_config")
    linear_bytes, expert_bytes = quantization.weight_bytes(
        where, text, quantized, linear_bits, expert_bits
    )
    if kv_bits is not None:
        checks.number("--kv-bits", kv_bits, 2, 32)
    layers = _count(where, text, ("num_hidden_layers",))
    hidden = _count(where, text, ("hidden_size",))
    experts = _count(where, text, _EXPERTS, "it is dense, and AFD moves routed experts")
    topk = _count(where, text, _TOPK)
    if topk > experts:
        raise AFDConfigError(f"{where}: a token takes {topk} of {experts} experts")
    width = _count(where, text, _EXPERT_WIDTH)
    moe = _moe_layers(where, text, layers)
    dense_mlp = 0
    if moe < layers:
        dense_mlp = 3 * hidden * _count(where, text, ("intermediate_size",))
    vocab = _count(where, text, ("vocab_size",)) * hidden
    shared = _shared_width(text, width)
    longest = text.get("max_position_embeddings")
    return ModelShape(
        name=Path(which).name or which,
        source=str(config.get("_source", f"{which}: config.json")),
        path=str(config.get("_path", which)),
        hidden=hidden,
        layers=layers,
        moe_layers=moe,
        experts=experts,
        topk=topk,
        expert_width=width,
        attn=attention.parse(where, text, layers, hidden),
        other_params=(layers - moe) * dense_mlp + moe * hidden * (3 * shared + experts),
        embed_params=vocab,
        head_params=0 if text.get("tie_word_embeddings") else vocab,
        linear_bytes=linear_bytes,
        expert_bytes=expert_bytes,
        kv_bytes=2.0 if kv_bits is None else kv_bits / 8,
        max_context=longest if isinstance(longest, int) else None,
    )


def _count(where: str, config: Mapping[str, Any], keys: tuple[str, ...], why: str = "") -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if value is not None:
            return checks.count(f"{where}: {key}", value)
    raise AFDConfigError(
        f"{where}: config.json has no {' or '.join(keys)}" + (f"; {why}" if why else "")
    )


def _moe_layers(where: str, config: Mapping[str, Any], layers: int) -> int:
    """Number of layers with routed experts, by the rules of the families that we know."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum(kind != "dense" for kind in kinds)
    dense = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or 1
    frequency = config.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return sum(bool(flag) for flag in frequency)
    only_dense = set(config.get("mlp_only_layers") or ())
    moe = sum(
        layer >= dense
        and layer % frequency == 0
        and (layer + 1) % step == 0
        and layer not in only_dense
        for layer in range(layers)
    )
    if not moe:
        raise AFDConfigError(f"{where}: no layer has routed experts")
    return moe


def _shared_width(config: Mapping[str, Any], expert_width: int) -> int:
    """Intermediate size of all shared experts of one layer together."""
    for key in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        if config.get(key) is not None:
            return int(config[key])
    number = config.get("n_shared_experts") or config.get("num_shared_experts") or 0
    return int(number) * expert_width
