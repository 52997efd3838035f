"""KV memory that all configurations of a GPU share, since one of them runs at a time.

The driver holds one allocation per GPU, filled with finite random values. Each rank gets it by CUDA
IPC, and upstream's KV pools carve their buffers from it instead of allocating: configurations can
then stay loaded side by side whose caches would not fit together. Every request has slots of its
own as ever; only a configuration's idle neighbours lose what they had, and content does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ALIGN = 1024  # bytes
_SMALL = 1 << 20  # bytes; what is smaller is no KV cache
_KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)


def make(num_bytes: int, gpu: int, fp8: bool) -> torch.Tensor:
    """Allocate and fill `num_bytes` on a GPU. Of FP8 only codes that are small and no NaN."""
    memory = torch.empty(-(-num_bytes // _ALIGN) * _ALIGN, dtype=torch.uint8, device=f"cuda:{gpu}")
    fill(memory if fp8 else memory.view(torch.bfloat16))
    return memory


def fill(buffer: torch.Tensor) -> None:
    """Finite random values, in place; bytes become FP8 codes up to 1."""
    if buffer.dtype == torch.uint8:
        buffer.random_(0, 0x38)
    else:
        buffer.normal_(0, 0.5)


class _Torch:
    """The module `torch`, but for `zeros` of a KV buffer, which takes the next piece of the arena."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._used = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = kwargs.get("dtype")
        if len(args) != 1 or dtype not in _KV_DTYPES or "cuda" not in str(kwargs.get("device")):
            return torch.zeros(*args, **kwargs)
        num_bytes = math.prod(args[0]) * dtype.itemsize
        if num_bytes < _SMALL:
            return torch.zeros(*args, **kwargs)
        end = self._used + num_bytes
        if end > len(self._memory):
            raise MemoryError(
                f"the KV pool needs more than the {len(self._memory) / 2**30:.1f} GiB that were set "
                "aside; start with --kv own"
            )
        piece = self._memory[self._used : end].view(dtype).view(args[0])
        self._used = -(-end // _ALIGN) * _ALIGN
        return piece


@contextmanager
def pools_use(memory: torch.Tensor | None) -> Iterator[None]:
    """Within, KV pools that upstream builds live in `memory`, and take as many tokens as they want."""
    if memory is None:
        yield
        return
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    profile = KVCacheConfigurator._profile_available_bytes
    KVCacheConfigurator._profile_available_bytes = lambda self, pre_model_load_memory: len(memory)
    memory_pool.torch = _Torch(memory)
    try:
        yield
    finally:
        memory_pool.torch = torch
        KVCacheConfigurator._profile_available_bytes = profile


def buffers(pool: Any) -> list[torch.Tensor]:
    """Every KV buffer of upstream's pool, those of the pools inside it too."""
    found: list[torch.Tensor] = []
    for value in vars(pool).values():
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() >= _SMALL:
            found.append(value)
        elif isinstance(value, list) and value and all(isinstance(v, torch.Tensor) for v in value):
            found += value
        elif "KVPool" in type(value).__name__:
            found += buffers(value)
    return found
