"""Random Qwen3-MoE checkpoints for the gate, in Hugging Face layout: BF16, FP32, or 128x128 block FP8.

A shard for everything but the experts, and one per layer for them, so that a rank reads its own.
Weights are large enough that experts, and the router's choice among them, decide every token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCK = 128
FP8_MAX = 448.0
GAIN = 2.26  # standard deviation of what a matrix makes of a row of unit variance
STAMP = "gate_model.json"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model; `quant` is "bf16", "fp32" or "fp8".

    The default has 512 hidden units per expert, a size for which upstream has no tuned table of
    kernel shapes, so that the number of rows in a batch does not change the order of sums.
    """

    quant: str
    hidden: int = 2048
    layers: int = 4
    experts: int = 128
    topk: int = 8
    inner: int = 512
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 512

    @property
    def name(self) -> str:
        return f"qwen3-moe-h{self.hidden}-e{self.experts}-k{self.topk}-l{self.layers}-{self.quant}"


def write(shape: Shape, folder: Path, device: str) -> Path:
    """Make the checkpoint in `folder`, unless it is there already.

    Args:
        device: where the numbers are drawn; a GPU takes seconds for what takes a CPU minutes.
    """
    stamp = folder / STAMP
    wanted = {**asdict(shape), "device": device}
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(shape, folder)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    generator = torch.Generator(device).manual_seed(0)
    shards: dict[str, str] = {}
    total = 0
    for shard in range(shape.layers + 1):
        tensors = dict(
            _dense(shape, generator) if shard == 0 else _experts(shape, shard - 1, generator)
        )
        file = f"model-{shard + 1:05d}-of-{shape.layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shards.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    stamp.write_text(json.dumps(wanted))
    return folder


def _config(shape: Shape) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "decoder_sparse_step": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": 2 * shape.inner,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.inner,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.topk,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32" if shape.quant == "fp32" else "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }
    if shape.quant == "fp8":
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return config


def _write_tokenizer(shape: Shape, folder: Path) -> None:
    """A word per id: the gate sends ids and reads ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, shape.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def _dense(shape: Shape, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    dtype = torch.float32 if shape.quant == "fp32" else torch.bfloat16
    yield "model.embed_tokens.weight", _draw(shape.vocab, hidden, 1.0, generator).to(dtype).cpu()
    yield "lm_head.weight", _matrix(shape.vocab, hidden, generator).to(dtype).cpu()
    yield "model.norm.weight", torch.ones(hidden, dtype=dtype)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=dtype)
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{norm}.weight", torch.ones(shape.head_dim, dtype=dtype)
        yield f"{prefix}.mlp.gate.weight", _matrix(shape.experts, hidden, generator).to(dtype).cpu()
        for name, rows, columns in (
            ("q_proj", width, hidden),
            ("k_proj", narrow, hidden),
            ("v_proj", narrow, hidden),
            ("o_proj", hidden, width),
        ):
            weight = _matrix(rows, columns, generator)
            yield from _linear(f"{prefix}.self_attn.{name}", weight, shape.quant)


def _experts(
    shape: Shape, layer: int, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    for expert in range(shape.experts):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        for name, rows, columns in (
            ("gate_proj", shape.inner, shape.hidden),
            ("up_proj", shape.inner, shape.hidden),
            ("down_proj", shape.hidden, shape.inner),
        ):
            weight = _matrix(rows, columns, generator)
            yield from _linear(f"{prefix}.{name}", weight, shape.quant)


def _linear(name: str, weight: torch.Tensor, quant: str) -> Iterator[tuple[str, torch.Tensor]]:
    if quant != "fp8":
        dtype = torch.float32 if quant == "fp32" else torch.bfloat16
        yield f"{name}.weight", weight.to(dtype).cpu()
        return
    values, scales = to_block_fp8(weight)
    yield f"{name}.weight", values.cpu()
    yield f"{name}.weight_scale_inv", scales.cpu()


def to_block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values [rows, columns], and FP32 scales by block, which multiply the values."""
    rows, columns = weight.shape
    assert rows % BLOCK == 0 and columns % BLOCK == 0, weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(rows, columns), scales.float()


def _matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return _draw(rows, columns, GAIN / math.sqrt(columns), generator)


def _draw(rows: int, columns: int, std: float, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(rows, columns, device=generator.device)
    return values.normal_(0.0, std, generator=generator)
