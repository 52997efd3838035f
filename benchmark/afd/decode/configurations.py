"""What is measured: a layout of ranks as a short name, and the SGLang command line it stands for.

colocated:1            the whole model on one GPU (`colocated:1@1`: on GPU 1)
colocated:tp2          tensor parallel, on any number of GPUs
colocated:dp2ep2       DP attention, expert parallel, no all-to-all backend; likewise dp4ep4, dp8ep8
colocated:dp2ep2+deepep
afd:nccl:mb1           one attention and one FFN rank, the connector's name, microbatches
afd:nccl:mb2:2a1f      other numbers of ranks
null:mb1               an attention rank whose experts return their input: T_a
afd:nccl:mb1:eager     without CUDA graphs, as in all of them
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_RANKS = re.compile(r"(\d+)a(\d+)f")
_TENSOR_PARALLEL = re.compile(r"tp(\d+)")
_EXPERT_PARALLEL = re.compile(r"dp(\d+)ep\1")
_RUNNERS = ("triton", "deep_gemm", "cutlass")
COLOCATED, NULL = "colocated", "null"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One layout.

    Attributes:
        name: as typed.
        connector: `colocated`, `null`, or a connector of AFD.
        layout: of a colocated one: 1, tp2, dp2ep2 and so on; else "".
        attn_ranks: ranks that hold KV cache; all of them in a colocated layout.
        microbatches: per step; with 2 each has half of a rank's batch.
        graph: under CUDA graphs.
        first_gpu: GPU of rank 0; the others follow.
        batch_is_shared: ranks work on one batch (tensor parallel) and not on one each.
    """

    name: str
    connector: str
    layout: str
    attn_ranks: int
    ffn_ranks: int
    microbatches: int
    graph: bool
    first_gpu: int
    a2a: str
    flags: tuple[str, ...]

    @property
    def gpus(self) -> int:
        return self.attn_ranks + self.ffn_ranks

    @property
    def attn_gpus(self) -> range:
        return range(self.first_gpu, self.first_gpu + self.attn_ranks)

    @property
    def batch_is_shared(self) -> bool:
        return self.layout.startswith("tp")

    @property
    def is_afd(self) -> bool:
        """Attention ranks of our mode, with FFN ranks or (`null`) without."""
        return self.connector != COLOCATED


def parse(name: str) -> Configuration:
    """The configuration that `name` stands for.

    Raises:
        ValueError: says what is wrong with it.
    """
    text, _, gpu = name.partition("@")
    kind, *parts = text.split(":")
    graph = "eager" not in parts
    runners = [part for part in parts if part in _RUNNERS]
    parts = [part for part in parts if part != "eager" and part not in _RUNNERS]
    common: dict[str, Any] = {"name": name, "graph": graph, "first_gpu": int(gpu or 0)}
    runner_flags = ("--moe-runner-backend", runners[0]) if runners else ()
    if kind == COLOCATED and len(parts) == 1:
        layout, _, a2a = parts[0].partition("+")
        ranks, flags = _colocated(name, layout)
        if a2a:
            flags = (*flags, "--moe-a2a-backend", a2a)
        return Configuration(
            connector=COLOCATED,
            layout=layout,
            attn_ranks=ranks,
            ffn_ranks=0,
            microbatches=1,
            a2a=a2a or "none",
            flags=(*flags, *runner_flags),
            **common,
        )
    if kind not in ("afd", NULL):
        raise ValueError(f"{name}: starts with {kind!r}; choose {COLOCATED}, {NULL} or afd")
    connector = NULL if kind == NULL else parts.pop(0) if parts else ""
    microbatches, attn_ranks, ffn_ranks = 1, 1, 1
    for part in parts:
        ranks_given = _RANKS.fullmatch(part)
        if part in ("mb1", "mb2"):
            microbatches = int(part[2:])
        elif ranks_given:
            attn_ranks, ffn_ranks = map(int, ranks_given.groups())
        else:
            raise ValueError(f"{name}: {part!r} is none of mb1, mb2, eager, or ranks like 2a1f")
    if not connector:
        raise ValueError(f"{name}: no connector; for example afd:nccl:mb1")
    flags = (
        *("--disaggregation-mode", "afd", "--afd-connector", connector),
        *("--afd-attn-ranks", str(attn_ranks), "--afd-ffn-ranks", str(ffn_ranks)),
        *("--afd-microbatches", str(microbatches)),
        *runner_flags,
    )
    return Configuration(
        connector=connector,
        layout="",
        attn_ranks=attn_ranks,
        ffn_ranks=0 if connector == NULL else ffn_ranks,
        microbatches=microbatches,
        a2a="none",
        flags=flags,
        **common,
    )


def _colocated(name: str, layout: str) -> tuple[int, tuple[str, ...]]:
    """GPUs and flags of a colocated layout."""
    if layout == "1":
        return 1, ()
    if found := _TENSOR_PARALLEL.fullmatch(layout):
        return int(found[1]), ("--tp-size", found[1])
    if found := _EXPERT_PARALLEL.fullmatch(layout):
        ranks = found[1]
        flags = ("--tp-size", ranks, "--dp-size", ranks, "--enable-dp-attention")
        return int(ranks), (*flags, "--ep-size", ranks)
    raise ValueError(
        f"{name}: layout {layout!r}; choose 1, tp2 or dp2ep2, or other numbers of GPUs"
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all configurations of a run share.

    Attributes:
        model: folder with config.json.
        batches: requests per rank, each a captured bucket.
        max_tokens: KV slots that a rank needs for its largest point.
        max_length: longest request, its window of steps included.
    """

    model: str
    device: str
    batches: tuple[int, ...]
    max_tokens: int
    max_length: int
    attention_backend: str
    kv_dtype: str
    peer_timeout_s: float
    flags: tuple[str, ...]


def command_line(
    configuration: Configuration, settings: Settings, ports: tuple[int, int]
) -> list[str]:
    """Arguments of SGLang for all ranks of a configuration.

    Args:
        ports: free ones, for torch's rendezvous and for the handshake of AFD.
    """
    largest = max(settings.batches)
    ranks = configuration.attn_ranks
    graph_flags = ["--cuda-graph-backend-prefill", "disabled"]
    if configuration.graph:
        graph_flags += ["--cuda-graph-bs-decode", *map(str, sorted(settings.batches))]
        graph_flags += ["--cuda-graph-max-bs-decode", str(largest)]
    else:
        graph_flags += ["--cuda-graph-backend-decode", "disabled"]
    if settings.device == "cpu":
        graph_flags += ["--dtype", "float32"]
    afd_flags = []
    if configuration.is_afd:
        afd_flags = [
            *("--afd-bootstrap-addr", f"127.0.0.1:{ports[1]}"),
            *("--afd-max-tokens-per-rank", str(largest)),
            *("--afd-peer-timeout", str(settings.peer_timeout_s)),
        ]
    return [
        *("--model-path", settings.model, "--load-format", "dummy", "--device", settings.device),
        *("--random-seed", "0", "--nccl-port", str(ports[0]), "--disable-radix-cache"),
        *("--attention-backend", settings.attention_backend),
        *("--kv-cache-dtype", settings.kv_dtype),
        *("--context-length", str(settings.max_length)),
        *("--max-total-tokens", str(settings.max_tokens)),
        # Upstream divides it among data-parallel ranks.
        *("--max-running-requests", str(largest * ranks)),
        # Nothing is prefilled, and its buffers would grow with this.
        *("--chunked-prefill-size", str(max(1024, largest) * ranks)),
        *graph_flags,
        *configuration.flags,
        *afd_flags,
        *settings.flags,
    ]
