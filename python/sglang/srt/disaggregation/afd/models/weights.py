"""Which tensors of a checkpoint a role reads, and the reading.

A rule on names, not a fork of the loaders: upstream's `load_weights` gets an iterator that holds
only what the role needs, and only those tensors are read from disk.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.topology import Topology

logger = logging.getLogger(__name__)

_PER_EXPERT = re.compile(r"\.(?:local_)?experts\.(\d+)\.")
# One tensor for all experts of a layer, in the spellings of gpt-oss, Llama-4, Qwen3-VL, Step-3
# and Granite. The router's bias that some families keep below `experts` is not among them.
_ALL_EXPERTS = re.compile(
    r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj|w13|w2|mlp)(?![a-z])"
    r"|\.moe\.(gate|up|down)_proj\.weight"
    r"|\.block_sparse_moe\.(input|output)_linear\."
)


@dataclass
class LoadReport:
    """What this process read from the checkpoint: bytes of tensors and their number."""

    bytes_read: int = 0
    tensors_read: int = 0
    tensors_skipped: int = 0


_report = LoadReport()
_selected: Callable[[str], bool] | None = None


def report() -> LoadReport:
    """What this process has read so far."""
    return _report


def select(wanted: Callable[[str], bool]) -> None:
    """Set what this process reads; an attention rank need not."""
    global _selected
    _selected = wanted


def is_expert(name: str) -> bool:
    """True for a tensor of routed experts; shared experts and the router belong to attention."""
    return bool(_PER_EXPERT.search(name) or _ALL_EXPERTS.search(name))


def expert_index(name: str) -> int | None:
    """Global expert id in a per-expert tensor name, None if the tensor holds all experts."""
    match = _PER_EXPERT.search(name)
    return int(match[1]) if match else None


def wanted_by_attention(name: str) -> bool:
    return not is_expert(name)


def wanted_by_ffn(topology: Topology, ffn_rank: int) -> Callable[[str], bool]:
    """The predicate of one FFN rank: its own experts, and tensors that hold all of them."""
    owned = topology.expert_range(ffn_rank)

    def wanted(name: str) -> bool:
        if not is_expert(name):
            return False
        index = expert_index(name)
        return index is None or index in owned

    return wanted


def parameter_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers that exist, meta tensors not counted."""
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers()) if not t.is_meta}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def read_tensors(
    files: Iterable[str], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the wanted tensors of safetensors files, in file order.

    Shards that an index file says hold nothing wanted are not opened.
    """
    for path in _needed(sorted(files), wanted):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():
                if not wanted(name):
                    _report.tensors_skipped += 1
                    continue
                tensor = shard.get_tensor(name)
                _report.tensors_read += 1
                _report.bytes_read += tensor.numel() * tensor.element_size()
                yield name, tensor


def _needed(files: list[str], wanted: Callable[[str], bool]) -> list[str]:
    kept = []
    for path in files:
        names = _indexed_names(Path(path).parent).get(Path(path).name)
        if names is not None and not any(wanted(name) for name in names):
            _report.tensors_skipped += len(names)
            continue
        kept.append(path)
    return kept


def _indexed_names(folder: Path) -> dict[str, list[str]]:
    """Tensor names by shard file, from the checkpoint's index; empty if it has none."""
    index = folder / "model.safetensors.index.json"
    by_file: dict[str, list[str]] = defaultdict(list)
    if index.is_file():
        for name, file in json.loads(index.read_text())["weight_map"].items():
            by_file[file].append(name)
    return by_file


def _present_files(
    folder: Path, wanted: Callable[[str], bool]
) -> tuple[Path, list[str], bool] | None:
    """What upstream's `_prepare_weights` returns, for a local copy without the other role's shards,
    which upstream would refuse; None for a complete copy.

    Raises:
        AFDConfigError: a shard of this role is missing.
    """
    index = _indexed_names(folder)
    missing = {file for file in index if not (folder / file).is_file()}
    needed = sorted(file for file in missing if any(wanted(name) for name in index[file]))
    if needed:
        raise AFDConfigError(
            f"--model-path {folder} lacks {', '.join(needed)}, which this role needs; copy them"
        )
    return (
        (folder, [str(folder / file) for file in sorted(set(index) - missing)], True)
        if missing
        else None
    )


# --- hook, see patches.py ----------------------------------------------------------------------


def role_weights(orig: Any, self: Any, source: Any) -> Any:
    """AROUND `DefaultModelLoader._get_weights_iterator`."""
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    if not getattr(server_args, "afd_enabled", False):
        return orig(self, source)
    wanted = _selected or wanted_by_attention
    folder, files, is_safetensors = _present_files(Path(source.model_or_path), wanted) or (
        self._prepare_weights(source.model_or_path, source.revision, source.fall_back_to_pt)
    )
    if not is_safetensors:
        raise AFDConfigError(
            f"--model-path {source.model_or_path} has no safetensors files; AFD reads single "
            "tensors by role, which other formats do not allow: convert the checkpoint"
        )
    logger.info("AFD reads its part of %d safetensors files below %s", len(files), folder)
    return ((source.prefix + name, tensor) for name, tensor in read_tensors(files, wanted))
