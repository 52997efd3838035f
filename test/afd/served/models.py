"""Checkpoints for the served tests: the trained demo model, and a random tiny one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    folder: Path, num_experts: int = 8, seed: int = 0, hidden: int = 128, head_dim: int = 32
) -> Path:
    """A random Qwen3-MoE of 3 layers with a byte tokenizer; weights spread so that the two best
    tokens are rarely close."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*alphabet, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(vocab),
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        moe_intermediate_size=64,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2 * (128 / hidden) ** 0.5,
        eos_token_id=vocab["<|im_end|>"],
    )
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def demo_model() -> Path:
    """The model of `make demo`, trained now if it is not there yet."""
    folder = ROOT / "examples" / ".cache" / "demo-model"
    subprocess.run(
        [sys.executable, ROOT / "examples" / "train_demo_model.py", "--out", folder], check=True
    )
    return folder
