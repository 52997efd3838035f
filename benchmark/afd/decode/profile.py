"""The GPU kernels of one rank during a few steps, from torch's profiler."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

_GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


class Kernel(NamedTuple):
    """One run of a kernel. Nanoseconds of this host's clock; `launch` is the same for all kernels
    of one graph replay."""

    name: str
    start: int
    duration: int
    launch: int
    stream: int = 0

    @property
    def end(self) -> int:
        return self.start + self.duration


class Profiler:
    """Records GPU kernels of this process, whichever thread launches them."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        if not torch.cuda.is_available():
            activities = [torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> list[Kernel]:
        """What ran since `start`, in order of start."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return read(path.read_text())


def read(text: str) -> list[Kernel]:
    """GPU work in a trace in Chrome's format."""
    trace = json.loads(text)
    base = int(trace.get("baseTimeNanoseconds", 0))
    kernels = [
        Kernel(
            event["name"],
            base + round(1e3 * float(event["ts"])),
            round(1e3 * float(event["dur"])),
            int(event.get("args", {}).get("correlation", -1)),
            int(event.get("args", {}).get("stream", 0)),
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _GPU_WORK
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)
