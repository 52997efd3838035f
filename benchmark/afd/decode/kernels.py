"""What a step is made of: kernels by class, and how much of one lies under another.

Classes follow the planner's terms: `fmha` reads KV; `moe` is what routed experts compute; `comm` is
collectives and connectors, waits included; `dense` is everything else: projections, norms, router,
shared experts, LM head, sampling.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from decode.profile import Kernel

FMHA, MOE, DENSE, COMM = "fmha", "moe", "dense", "comm"
CLASSES = (FMHA, MOE, DENSE, COMM)
_NEXT, _SAME = "next", "same"  # of a helper that works for its neighbour in the stream
# The first that matches; what none matches is dense.
_PATTERNS = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"nccl|deep_ep|internode|intranode|nvshmem|all_?reduce|all_?gather|reduce_scatter", COMM),
        (r"cross_device|\bafd|afd_|memcpy ptop", COMM),
        (r"topk|top_k|moe_fused_gate|gating", DENSE),
        (r"fused_moe|moe_|_moe|grouped_?gemm|group_gemm|GemmType\)[1-9]|Masked|expert", MOE),
        (r"BatchDecode|BatchPrefill|MergeState|attention|attn|fmha|flash_fwd|flash_mla", FMHA),
        (r"_fwd_grouped_kernel|_fwd_kernel_stage|decode_att", FMHA),
        (r"quant", _NEXT),
        (r"act_and_mul|silu|swiglu|gelu", _SAME),
    )
)
_FEW = 20  # kernels; a launch with fewer is no graph of a step


def classify(names: Sequence[str]) -> list[str]:
    """The class of each kernel of a stream, in order.

    A quantization belongs to the GEMM that follows it, an activation to the one before it: both
    serve dense layers and experts alike.
    """
    found = [_match(name) for name in names]
    for index, kind in enumerate(found):
        if kind == _SAME:
            found[index] = found[index - 1] if index and found[index - 1] in (MOE, DENSE) else DENSE
    following = DENSE
    for index in range(len(found) - 1, -1, -1):
        if found[index] == _NEXT:
            found[index] = following if following in (MOE, DENSE) else DENSE
        following = found[index]
    return found


def _match(name: str) -> str:
    return next((kind for pattern, kind in _PATTERNS if pattern.search(name)), DENSE)


def steps(kernels: Iterable[Kernel], count: int) -> list[list[Kernel]]:
    """The last `count` graph replays, each with its kernels in turn; fewer if there are not so many."""
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.launch].append(kernel)
    replays = [found for launch, found in launches.items() if len(found) >= _FEW and launch >= 0]
    return [in_turn(found) for found in sorted(replays, key=lambda found: found[0].start)[-count:]]


def in_turn(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The same, each from when the one before it in its stream has ended.

    A kernel of a programmatic dependent launch starts early and waits for its predecessor: behind a
    connector that waits for the other side it would seem to compute all the while.
    """
    ends: dict[int, int] = {}
    found = []
    for kernel in sorted(kernels, key=lambda each: each.start):
        start = max(kernel.start, ends.get(kernel.stream, kernel.start))
        end = max(kernel.end, start)
        ends[kernel.stream] = end
        found.append(kernel._replace(start=start, duration=end - start))
    return sorted(found, key=lambda each: each.start)


def by_class(kernels: Sequence[Kernel], role: str) -> dict[str, float]:
    """Milliseconds of each class in one step.

    Args:
        role: attn and ffn know more than a name says: what an FFN rank computes is experts, and an
            attention rank has none. `all` for a colocated rank.
    """
    kinds = _kinds(kernels, role)
    totals = dict.fromkeys(CLASSES, 0.0)
    for kernel, kind in zip(kernels, kinds, strict=True):
        totals[kind] += kernel.duration * 1e-6
    return totals


def _kinds(kernels: Sequence[Kernel], role: str) -> list[str]:
    kinds = classify([kernel.name for kernel in kernels])
    if role == "ffn":
        return [COMM if kind == COMM else MOE for kind in kinds]
    if role == "attn":
        return [DENSE if kind == MOE else kind for kind in kinds]
    return kinds


Spans = list[tuple[int, int]]


def spans(kernels: Sequence[Kernel], role: str, kinds: Iterable[str]) -> Spans:
    """When a kernel of these classes ran, as disjoint intervals in order."""
    wanted = set(kinds)
    merged: Spans = []
    for kernel, kind in zip(kernels, _kinds(kernels, role), strict=True):
        if kind not in wanted:
            continue
        if merged and kernel.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], kernel.end))
        else:
            merged.append((kernel.start, kernel.end))
    return merged


def length(given: Spans) -> int:
    return sum(end - start for start, end in given)


def shared(one: Spans, other: Spans) -> int:
    """Length of what lies in both."""
    total = i = j = 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(attn: Sequence[Kernel], ffn: Sequence[Kernel]) -> dict[str, float]:
    """How much of the FFN rank's busy time lies under what the attention rank computes.

    Waits and transfers count on neither side. With one microbatch both shares are near 0, since
    the two sides take turns: that is the test that their clocks agree.
    """
    busy = spans(ffn, "ffn", (MOE,))
    whole = max(1, length(busy))
    return {
        "ffn_busy_ms": length(busy) * 1e-6,
        "under_attention": shared(busy, spans(attn, "attn", (FMHA, DENSE))) / whole,
        "under_fmha": shared(busy, spans(attn, "attn", (FMHA,))) / whole,
    }


def compact(kernels: Sequence[Kernel], role: str, zero: int) -> dict[str, Any]:
    """One step as small JSON: names once, and [name, class, start, duration] of each kernel, in
    nanoseconds from `zero`."""
    names = sorted({kernel.name for kernel in kernels})
    number = {name: index for index, name in enumerate(names)}
    return {
        "role": role,
        "classes": CLASSES,
        "names": [name[:120] for name in names],
        "kernels": [
            [number[k.name], CLASSES.index(kind), k.start - zero, k.duration]
            for k, kind in zip(kernels, _kinds(kernels, role), strict=True)
        ],
    }
