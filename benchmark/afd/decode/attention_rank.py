"""A rank with KV cache: of a colocated layout, or an attention rank of AFD. Driven by a pipe.

It answers `(method, arguments)` with `("ok", result)`; its first message says that it is ready.
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is told when its process starts.

    Attributes:
        command_line: of SGLang, the same for all ranks of a configuration.
        rank: among ranks of its role.
        gpu: device index.
        is_null: an attention rank that talks to no FFN rank.
    """

    command_line: tuple[str, ...]
    rank: int
    gpu: int
    is_null: bool
    parent: int


def main(job: Job, pipe: Connection, memory: torch.Tensor | None) -> None:
    """Entry of the process; `memory` is the GPU's share of KV memory, see `arena`."""
    code = 1
    try:
        rank = AttentionRank(job, memory)
        pipe.send(("ok", rank.facts()))
        while True:
            method, arguments = pipe.recv()
            if method == "stop":
                break
            pipe.send(("ok", getattr(rank, method)(**arguments)))
        rank.close()
        code = 0
    except EOFError:
        pass  # the driver is gone
    except BaseException:  # noqa: BLE001 - its text goes to the driver, and the process ends
        pipe.send(("error", traceback.format_exc()))
    os._exit(code)  # the usual exit would wait for a kernel that waits for a lost peer


class AttentionRank:
    """Upstream's model runner, loaded and captured, and what is measured on it."""

    def __init__(self, job: Job, memory: torch.Tensor | None) -> None:
        from decode import arena, weights
        from sglang.benchmark import one_batch
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
        from sglang.srt.model_loader import loader
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import configure_logger, kill_itself_when_parent_died

        kill_itself_when_parent_died()
        if os.getppid() != job.parent:
            raise RuntimeError("the driver ended")
        args = prepare_server_args(list(job.command_line))
        configure_logger(args, prefix=f" rank {job.rank}")
        if job.is_null:
            from decode import nobody

            nobody.install()
        loader.initialize_dummy_weights = weights.fill
        one_batch.get_tokenizer = lambda *args, **kwargs: None  # no text is read or written
        one_batch._set_envs_and_config(args)
        initialize_moe_config(args)
        initialize_fp8_gemm_config(args)
        initialize_fp4_gemm_config(args)
        began = time.monotonic()
        # Of upstream's PortArgs this is all that is read, and those wait until no rank has the port.
        ports = SimpleNamespace(nccl_port=args.nccl_port)
        with arena.pools_use(memory):
            bench, _ = one_batch.load_model(args, ports, job.gpu, job.rank)
        self._load_s = time.monotonic() - began
        self._rank = job.rank
        self._runner = bench.torch_runner
        self._buffers = arena.buffers(self._runner.token_to_kv_pool)
        if memory is None:
            for buffer in self._buffers:
                arena.fill(buffer)

    def facts(self) -> dict[str, Any]:
        """What is known once it is ready. Bytes, seconds; `kv_tokens` by the rule in README.md."""
        runner = self._runner
        weights = sum(p.numel() * p.element_size() for p in runner.model.parameters())
        slots = runner.max_total_num_tokens + runner.page_size
        kv_bytes = sum(b.numel() * b.element_size() for b in self._buffers) / slots
        facts = {
            "ready_at": time.monotonic(),
            "weight_bytes": weights,
            "kv_bytes_per_token": kv_bytes,
            "load_s": self._load_s,
            "capture_s": sum(runner.graph_time_usage.values()),
            "graph_mib": 1024 * sum(runner.graph_memory_usage.values()),
            "attention_backend": runner.server_args.attention_backend,
            "kv_dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
            "moe_runner_backend": _moe_runner(runner.model),
            "layers": runner.model_config.num_hidden_layers,
        }
        if runner.device == "cuda":
            total = torch.cuda.get_device_properties(runner.gpu_id).total_memory
            facts["kv_tokens"] = int(0.85 * (total - weights) / kv_bytes)
        return facts

    @torch.no_grad()
    def measure(self, *, size: int, context: int, steps: int, warm_up: int, ahead: int) -> Any:
        """A window of steps over `size` fresh requests."""
        from decode.batch import ResidentBatch

        batch = ResidentBatch(self._runner, size, context, warm_up + steps)
        return batch.window(steps, warm_up, ahead)

    @torch.no_grad()
    def record(self, *, size: int, context: int, path: str | None) -> int | None:
        """Routing of one eager step, that of rank 0 into `path` if given; rows of this rank's
        fullest expert."""
        from decode import routing
        from decode.batch import ResidentBatch

        batch = ResidentBatch(self._runner, size, context, 1)
        recorder = routing.Recorder(self._runner.model)
        graphs, self._runner.decode_cuda_graph_runner = self._runner.decode_cuda_graph_runner, None
        try:
            batch.step()
        finally:
            self._runner.decode_cuda_graph_runner = graphs
            recorder.close()
        found = recorder.recorded()
        if found is None:
            return None
        if path is not None and self._rank == 0:
            routing.save(Path(path), *found)
        return routing.max_rows_per_expert(found[0])

    @torch.no_grad()
    def trace(self, *, size: int, context: int, steps: int, warm_up: int, ahead: int) -> Any:
        """Kernels of `steps` steps."""
        from decode.batch import ResidentBatch
        from decode.profile import Profiler

        batch = ResidentBatch(self._runner, size, context, warm_up + 1 + steps)
        batch.window(1, warm_up, ahead)
        profiler = Profiler()
        profiler.start()
        for _ in range(steps):
            batch.step()
        return profiler.stop()

    def close(self) -> None:
        """Tell FFN ranks to stop."""
        from sglang.srt.disaggregation.afd.attention import runtime

        if runtime.is_active():
            runtime.current().close("the benchmark is done")


def _moe_runner(model: torch.nn.Module) -> str:
    """The runner that upstream chose for the experts of this rank."""
    for module in model.modules():
        runner = getattr(getattr(module, "quant_method", None), "runner", None)
        if runner is not None:
            return str(runner.runner_backend.value)
    return "none"
