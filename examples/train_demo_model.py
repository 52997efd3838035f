"""Trains the demo model: a small Qwen3-MoE in Hugging Face format, from scratch, on the CPU.

The corpus is the Python standard library of the interpreter that runs this: nothing is downloaded.
Expert tensors and all others go to different shards, so that a rank reads only its own files.

    python examples/train_demo_model.py --out examples/.cache/demo-model
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import math
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

START = time.monotonic()  # the time budget includes the imports
DEFAULT_OUT = Path(__file__).resolve().parent / ".cache" / "demo-model"
STAMP = "demo_model.json"

VOCAB_SIZE = 10240  # SGLang's bench_one_batch draws token ids below 10000
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SEQ_LEN = 256  # tokens
BATCH = 2  # sequences per step and worker
PEAK_LR = 4e-3
WARMUP = 0.03  # part of the run
PAIR_PHASE = 0.25  # part of the run that trains embeddings and head only
PIECE_CHARS = 4000  # library files are shuffled in pieces of this size
POOL_ROWS = 256  # rows from which the next one is drawn
PAIR_BATCH = 8  # sequences per step and worker of that phase
MIN_STEPS = 300
MAX_WORKERS = 4  # more would mean fewer, larger steps
NEGATIVES = 1024  # vocabulary entries sampled for the softmax of one step
EVAL_TOKENS = 16 * 1024
CHAT_SHARE = 0.25  # part of the training sequences that are chats
HOLD_OUT_EVERY = 20  # every 20th file is held out

# Packages that hold tables, tests or vendored wheels rather than prose and code.
SKIPPED_DIRS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# Chats about these come up several times in a run, so that their answers are remembered.
FAMILIAR = ("heapq", "os.path")


class Corpus(NamedTuple):
    """Texts by purpose. Chats are (user, assistant) pairs."""

    train: list[str]
    held_out: list[str]
    chats: list[tuple[str, str]]
    familiar_chats: list[tuple[str, str]]


def log(message: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {message}", flush=True)


# ---------------------------------------------------------------------------------- corpus


def library_files(root: Path) -> Iterator[Path]:
    """Python files below the standard library `root`, in sorted order."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts[:-1]
        if not any(part in SKIPPED_DIRS or part.startswith("config-") for part in parts):
            yield path


def chats_of(source: str, module: str) -> list[tuple[str, str]]:
    """(question, answer) pairs from the public, documented definitions of one module."""
    pairs: list[tuple[str, str]] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            name = f"{prefix}.{node.name}"
            doc = inspect.cleandoc(ast.get_docstring(node) or "")
            if 20 <= len(doc) <= 700:
                pairs.append((f"Explain {name}", doc))
            if isinstance(node, ast.ClassDef):
                visit(node.body, name)
            elif doc and prefix == module:
                code = ast.get_source_segment(source, node) or ""
                if len(code) <= 900:
                    pairs.append((f"Write the function {name}", code))

    visit(ast.parse(source).body, module)
    return pairs


def read_corpus(root: Path) -> Corpus:
    """Read the standard library.

    Raises:
        SystemExit: there is too little of it to train on.
    """
    corpus = Corpus([], [], [], [])
    for index, path in enumerate(library_files(root)):
        try:
            source = path.read_text(encoding="utf-8")
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            module = {"posixpath": "os.path"}.get(module, module.removesuffix(".__init__"))
            chats = chats_of(source, module)
        except (UnicodeDecodeError, SyntaxError):
            continue  # a few files of the library are broken on purpose
        if index % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1 and module not in FAMILIAR:
            corpus.held_out.append(source)
            continue
        corpus.train.append(source)
        (corpus.familiar_chats if module in FAMILIAR else corpus.chats).extend(chats)
    if sum(map(len, corpus.train)) < 1_000_000 or not corpus.familiar_chats:
        raise SystemExit(
            f"{root} holds too little Python source to train on: run this with an interpreter "
            "whose standard library is installed as .py files"
        )
    return corpus


# ------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the chat template; ends a reply with <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def encode_joined(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts as one stream of ids [tokens], each followed by <|endoftext|>."""
    import torch

    pad = tokenizer.convert_tokens_to_ids(PAD)
    stream: list[int] = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream.extend(ids)
        stream.append(pad)
    return torch.tensor(stream)


def chat_text(user: str, assistant: str) -> str:
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{assistant}{IM_END}\n"


# ----------------------------------------------------------------------------------- model


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    eos = tokenizer.convert_tokens_to_ids(IM_END)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        intermediate_size=512,  # used by dense layers only, and there is none
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return Qwen3MoeForCausalLM(config)


def grouped_experts(
    experts: Any, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Forward of all experts of a layer with the rows sorted by expert: [T, H]."""
    import torch
    import torch.nn.functional as F

    flat = ids_TK.reshape(-1)
    order = flat.argsort(stable=True)
    token = order // ids_TK.shape[1]
    rows = hidden_TH[token].split(flat.bincount(minlength=experts.num_experts).tolist())
    outputs = []
    # `unbind` has one backward for all experts; indexing would fill a full gradient per expert.
    for row, up, down in zip(
        rows, experts.gate_up_proj.unbind(0), experts.down_proj.unbind(0), strict=True
    ):
        gate, value = F.linear(row, up).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * value, down))
    weighted = torch.cat(outputs) * weights_TK.reshape(-1)[order, None]
    return torch.zeros_like(hidden_TH).index_add(0, token, weighted)


def sampled_loss(
    hidden_TH: torch.Tensor, head_VH: torch.Tensor, targets_T: torch.Tensor, seed: int
) -> torch.Tensor:
    """Cross-entropy over the targets of this step plus a random sample of the other entries.

    The full softmax would cost more than the rest of the model. The sample stands for all entries
    that it was drawn from, so its logits are raised by the log of the inverse sampling rate.
    """
    import torch
    import torch.nn.functional as F

    present, local_targets = targets_T.unique(return_inverse=True)
    absent = torch.ones(len(head_VH), dtype=torch.bool)
    absent[present] = False
    others = absent.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    sample = others[torch.randperm(len(others), generator=generator)[:NEGATIVES]]
    logits = hidden_TH @ head_VH[torch.cat([present, sample])].T
    logits[:, len(present) :] += math.log(len(others) / len(sample))
    return F.cross_entropy(logits, local_targets)


def perplexity(model: Qwen3MoeForCausalLM, stream: torch.Tensor) -> float:
    """Per-token perplexity with the full softmax on EVAL_TOKENS spread evenly over `stream`."""
    import torch
    import torch.nn.functional as F

    rows = stream[: len(stream) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)
    rows = rows[:: max(1, len(rows) * SEQ_LEN // EVAL_TOKENS)]
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in rows.split(4):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            total += F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
            count += logits.shape[0]
    return math.exp(total / count)


# -------------------------------------------------------------------------------- training


class Sampler:
    """Seeded batches: library text in random order, mixed with chats. Encodes as it goes.

    Half of the chat text is about the familiar modules, which are few and so come up often.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        pieces = [
            source[start : start + PIECE_CHARS]
            for source in corpus.train
            for start in range(0, len(source), PIECE_CHARS)
        ]
        size = sum(len(question) + len(answer) for question, answer in corpus.chats)
        familiar = sum(len(question) + len(answer) for question, answer in corpus.familiar_chats)
        chats = corpus.chats + corpus.familiar_chats * max(1, size // familiar)
        self._library = self._endless(pieces)
        self._chats = self._endless([chat_text(*chat) for chat in chats])

    def _endless(self, texts: list[str]) -> Iterator[torch.Tensor]:
        """Rows of SEQ_LEN + 1 ids; the pool keeps rows of one file out of one batch."""
        import torch

        pool: list[torch.Tensor] = []
        rest = torch.empty(0, dtype=torch.long)
        while True:
            order = self._random.sample(texts, len(texts))
            for start in range(0, len(order), 16):
                stream = torch.cat(
                    [rest, encode_joined(self._tokenizer, order[start : start + 16])]
                )
                *rows, rest = stream.split(SEQ_LEN + 1)
                pool.extend(rows)
                while len(pool) > POOL_ROWS:
                    yield pool.pop(self._random.randrange(len(pool)))

    def batch(self, size: int) -> torch.Tensor:
        """Token ids [size, SEQ_LEN + 1]."""
        import torch

        return torch.stack(
            [
                next(self._chats if self._random.random() < CHAT_SHARE else self._library)
                for _ in range(size)
            ]
        )


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine to zero. `progress` goes from 0 to 1."""
    return PEAK_LR * min(1.0, progress / WARMUP) * (1 + math.cos(math.pi * progress)) / 2


def train(
    model: Qwen3MoeForCausalLM, sampler: Sampler, steps: int | None, end: float
) -> tuple[int, float]:
    """Train in place until `end` (time.monotonic) and at least MIN_STEPS, or for `steps` steps.

    A first phase leaves out the layers: embeddings and head learn which token follows which, from
    many more tokens per second than the whole model can see. Returns (tokens seen, seconds).
    """
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)
    experts, topk = model.config.num_experts, model.config.num_experts_per_tok

    def backward(ids: torch.Tensor, seed: int, pairs_only: bool) -> float:
        """Add the gradient of one worker's sequences; returns their loss."""
        inputs, targets_T = ids[:, :-1], ids[:, 1:].flatten()
        if pairs_only:
            hidden = model.model.norm(model.model.embed_tokens(inputs))
            balance = torch.zeros(())
        else:
            outputs = model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
            hidden = outputs.last_hidden_state
            balance = load_balancing_loss_func(outputs.router_logits, experts, topk)
        loss = sampled_loss(hidden.flatten(0, 1), model.lm_head.weight, targets_T, seed)
        ((loss + 0.01 * balance) / workers).backward()
        return float(loss.item())

    # One thread per core on sequences of its own: threads that share the small matrices of this
    # model spend their time waiting for each other, above all when another program wants a core.
    threads = torch.get_num_threads()
    workers = min(threads, MAX_WORKERS)
    torch.set_num_threads(1)
    start = next_line = time.monotonic()
    step, tokens, smooth = 0, 0, math.log(VOCAB_SIZE)
    model.train()
    with ThreadPoolExecutor(workers) as pool:
        while True:
            now = time.monotonic()
            if steps is not None:
                progress = step / steps
            else:
                progress = min((now - start) / max(end - start, 1e-9), step / MIN_STEPS)
            if now >= next_line or progress >= 1:
                next_line = now + 5
                rate = tokens / max(now - start, 1e-9)
                left = (
                    f"{(now - start) * (1 / progress - 1):.0f} s left" if progress else "starting"
                )
                log(f"step {step:4}, loss {smooth:.3f}, {rate:5.0f} tokens/s, {left}")
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress)
            pairs_only = progress < PAIR_PHASE
            rows = PAIR_BATCH if pairs_only else BATCH
            jobs = [
                pool.submit(backward, sampler.batch(rows), step * workers + worker, pairs_only)
                for worker in range(workers)
            ]
            loss = sum(job.result() for job in jobs) / workers
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            tokens += workers * rows * SEQ_LEN
            smooth += (loss - smooth) * max(0.02, 1 / step)
    torch.set_num_threads(threads)
    model.eval()
    return tokens, time.monotonic() - start


# --------------------------------------------------------------------------------- storage


def checkpoint_tensors(model: Qwen3MoeForCausalLM) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(all but the experts, the experts of each layer) under the names of a released Qwen3-MoE."""
    import torch

    shared: dict[str, Any] = {}
    experts: list[dict[str, Any]] = [{} for _ in range(model.config.num_hidden_layers)]
    for name, tensor in model.state_dict().items():
        tensor = tensor.to(torch.bfloat16)
        prefix, is_expert, kind = name.partition(".mlp.experts.")
        if not is_expert:
            if name != "lm_head.weight" or not model.config.tie_word_embeddings:
                shared[name] = tensor.contiguous()
            continue
        layer = experts[int(prefix.rpartition(".")[2])]
        for index, matrix in enumerate(tensor.unbind(0)):
            stem = f"{prefix}.mlp.experts.{index}"
            if kind == "gate_up_proj":  # Transformers keeps the two fused in memory
                gate, up = matrix.chunk(2)
                layer[f"{stem}.gate_proj.weight"] = gate.contiguous()
                layer[f"{stem}.up_proj.weight"] = up.contiguous()
            else:
                layer[f"{stem}.down_proj.weight"] = matrix.contiguous()
    return shared, experts


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a Hugging Face checkpoint: one shard without experts, one per layer of experts."""
    import torch
    from safetensors.torch import save_file

    shared, experts = checkpoint_tensors(model)
    shards = [shared, *experts]
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # a container may read it as another user
        index |= dict.fromkeys(tensors, file)
    size = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["num_experts"] = (
        model.config.num_experts
    )  # Transformers 5 writes it as num_local_experts
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(token) for token in (IM_END, PAD)
    ]
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def load(out: Path) -> Qwen3MoeForCausalLM:
    """The checkpoint as Transformers reads it, with its own expert forward, in FP32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def check_saved(trained: Qwen3MoeForCausalLM, loaded: Qwen3MoeForCausalLM) -> None:
    """Compare the fast forward with that of Transformers on the stored weights.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    import torch

    trained.load_state_dict(loaded.state_dict())  # both now hold the rounded weights
    ids = torch.arange(SEQ_LEN)[None] * 37 % VOCAB_SIZE
    with torch.inference_mode():
        ours, theirs = trained(input_ids=ids).logits, loaded(input_ids=ids).logits
    worst = (ours - theirs).abs().max().item()
    if not worst < 1e-3:
        raise RuntimeError(f"the stored model differs from the trained one: {worst} in a logit")


# ------------------------------------------------------------------------------------ main


def show_sample(
    title: str, model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str
) -> str:
    """Sample a reply at temperature 0.7, print it and return it."""
    import torch

    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        reply = model.generate(ids, max_new_tokens=80, do_sample=True, temperature=0.7)
    text = str(tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True))
    print(f"--- {title}\n{text}\n---", flush=True)
    return text


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the result: a finished model with the same settings is not trained again."""
    source = Path(__file__).read_bytes()
    return {
        "script": hashlib.sha256(source).hexdigest()[:16],
        "seed": args.seed,
        "minutes": None if args.steps else args.minutes,
        "steps": args.steps,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes",
        type=float,
        default=2.5,
        help=f"wall time of the whole run but for its last seconds; at least {MIN_STEPS} steps",
    )
    parser.add_argument("--steps", type=int, help="train this many steps, whatever time it takes")
    parser.add_argument("--force", action="store_true", help="train again over a finished model")
    args = parser.parse_args()
    if args.minutes <= 0 or (args.steps is not None and args.steps < 1):
        parser.error("--minutes and --steps must be positive")
    return args


def main() -> None:
    args = parse_args()
    out: Path = args.out
    settings = settings_of(args)
    stamp = out / STAMP
    if stamp.is_file() and not args.force:
        if json.loads(stamp.read_text())["settings"] == settings:
            print(f"{out} already holds this model (--force trains it again)")
            return
        log(f"{out} holds an unfinished model, or one with other settings: training again")
    elif (out / "config.json").exists() and not args.force:
        raise SystemExit(f"{out} holds a model that this did not make; --force overwrites it")
    out.mkdir(parents=True, exist_ok=True)
    stamp.write_text('{"settings": null}\n')  # unfinished until the end

    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is to be downloaded
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    log("importing torch and transformers")
    import torch
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(threads or 1)
    torch.manual_seed(args.seed)

    root = Path(sysconfig.get_path("stdlib"))
    log(f"reading the standard library in {root}")
    corpus = read_corpus(root)
    log(f"{len(corpus.train)} files to train on, {len(corpus.held_out)} held out; tokenizer next")
    tokenizer = train_tokenizer(corpus.train)
    sampler = Sampler(tokenizer, corpus, args.seed)
    held_out = encode_joined(tokenizer, corpus.held_out)

    ALL_EXPERTS_FUNCTIONS.register("grouped", grouped_experts)
    model = build_model(tokenizer)
    model.set_experts_implementation("grouped")
    model.eval()
    before = perplexity(model, held_out)
    params = sum(p.numel() for p in model.parameters())
    log(f"{params / 1e6:.1f} M parameters, held-out perplexity {before:.0f}; training")
    tokens, seconds = train(model, sampler, args.steps, START + 60 * args.minutes)

    save(model, tokenizer, out)
    loaded = load(out)
    check_saved(model, loaded)
    after = perplexity(model, held_out)
    log(f"held-out perplexity {before:.0f} before, {after:.1f} after {tokens} tokens")
    question = f"{IM_START}user\nExplain os.path.join{IM_END}\n{IM_START}assistant\n"
    show_sample("chat: Explain os.path.join", model, tokenizer, question)
    show_sample("completion: class Queue", model, tokenizer, 'class Queue:\n    """')
    result = {
        "settings": settings,
        "tokens": tokens,
        "train_seconds": round(seconds, 1),
        "perplexity_before": round(before, 1),
        "perplexity_after": round(after, 2),
        "python": sys.version.split()[0],
    }
    stamp.write_text(json.dumps(result, indent=2) + "\n")
    log(f"saved to {out}")


if __name__ == "__main__":
    main()
