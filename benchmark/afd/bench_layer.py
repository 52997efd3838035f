"""The experts of one MoE layer on one FFN rank, by FFN ranks N, attention ranks M and their batch.

    python benchmark/afd/bench_layer.py --shape Qwen3-30B-A3B-FP8 --ffn-ranks 1,2,4,8 \
        --attn-ranks 1,2,4,7 --batch 16,64,128 --out benchmark/afd/results/layer.json

One GPU is enough. FFN rank 0 of N holds its share of the experts, as a server builds it; the rows of M
attention ranks have arrived already, routed evenly at random, so no link is timed. Two readings of one
table: colocated EP-N is M = N, each rank's batch its own; AFD is any other M. What an expert gets to do
decides which share of the GPU's arithmetic it reaches (MFU), and M is what AFD adds to that.

Layers take turns in one CUDA graph, several of them, so that a layer's weights are not still in the
L2 cache. Before anything is timed, some rows are compared with FP32. `us` is one layer.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import results_file
from decode import shapes

_WARM_UP = 3
_READY_S = 300.0
_POINT_S = 120.0
_CHECKED_ROWS = 6
# Of a row's error, relative to its norm, in plain torch with the same roundings: 0.085 with FP8 rows
# and FP8 between the GEMMs, 0.0076 in BF16. Another expert's row is off by 1.4.
_BOUNDS = {"fp8": 0.13, "bfloat16": 0.015, "float32": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process measures: all M and batches for one N."""

    model: str
    shape: str
    quant: str
    device: str
    connector: str
    ffn_ranks: int
    points: tuple[tuple[int, int], ...]
    reps: int
    port: int
    flags: tuple[str, ...]


def main() -> int:
    args = _arguments()
    rows: list[dict[str, Any]] = []
    failed = False
    points = tuple(itertools.product(_ints(args.attn_ranks), _ints(args.batch)))
    with tempfile.TemporaryDirectory(prefix="bench_layer_") as folder:
        model = shapes.write(args.shape, Path(folder) / args.shape, args.layers)
        for ffn_ranks in _ints(args.ffn_ranks):
            job = Job(
                model=str(model),
                shape=args.shape,
                quant=shapes.quant(args.shape),
                device=args.device,
                connector=args.connector,
                ffn_ranks=ffn_ranks,
                points=points,
                reps=args.reps,
                port=23000 + ffn_ranks,
                flags=tuple(args.server_flags.split()),
            )
            for found in _rows(job):
                if isinstance(found, str):
                    print(f"N = {ffn_ranks}: {found}", file=sys.stderr, flush=True)
                    failed = True
                    continue
                failed |= found["gate"] == "fail"
                rows.append(found)
                print(_line(found), flush=True)
                if args.out:
                    results_file.write(args.out, "layer", rows)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="Qwen3-30B-A3B-FP8", choices=shapes.names())
    parser.add_argument("--layers", type=int, default=4, help="that take turns")
    parser.add_argument("--ffn-ranks", default="1,2,4,8")
    parser.add_argument("--attn-ranks", default="1,2,4,7")
    parser.add_argument("--batch", default="16,64,128", help="tokens per attention rank")
    parser.add_argument(
        "--connector", help="whose form rows have: default nvlink (FP8 by expert), on CPU gloo"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--reps", type=int, default=30, help="timed rounds of all layers")
    parser.add_argument("--server-flags", default="", help="more flags of SGLang")
    parser.add_argument("--out", type=Path, help="JSON file of results")
    args = parser.parse_args()
    args.connector = args.connector or ("gloo" if args.device == "cpu" else "nvlink")
    return args


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _line(row: dict[str, Any]) -> str:
    share = f", MFU {row['mfu']:.3f}" if "mfu" in row else ""
    return (
        f"{row['attn_ranks']}A{row['ffn_ranks']}F x {row['batch_per_rank']}: "
        f"{row['rows_per_expert']:.1f} rows per expert, {row['us']:.1f} us, "
        f"{row['GB_per_s']:.0f} GB/s of weights{share}, gate {row['gate']}"
    )


def _rows(job: Job) -> Iterator[dict[str, Any] | str]:
    """Of a process of its own, since upstream's parallel state is global; a text if it failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure_all, args=(job, theirs), daemon=True)
    process.start()
    theirs.close()
    wait_s = _READY_S
    try:
        while True:
            if not ours.poll(wait_s):
                yield f"no answer in {wait_s:g} s"
                return
            found = ours.recv()
            if found is None:
                return
            yield found
            wait_s = _POINT_S
    except EOFError:
        yield f"its process ended with code {process.exitcode}"
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


# --- in the process of a rank ------------------------------------------------------------------


def _measure_all(job: Job, pipe: Connection) -> None:
    """Entry of the process."""
    try:
        os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
        rank = _Rank(job)
        for attn_ranks, batch in job.points:
            pipe.send(rank.measure(attn_ranks, batch))
        pipe.send(None)
    except BaseException:  # noqa: BLE001 - its text goes to the driver
        pipe.send(traceback.format_exc())


class _Rank:
    """FFN rank 0 with dummy weights."""

    def __init__(self, job: Job) -> None:
        import torch
        from decode import weights

        from sglang.srt.disaggregation.afd import wire
        from sglang.srt.disaggregation.afd.ffn.model_runner import FFNModelRunner
        from sglang.srt.model_loader import weight_utils
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import prepare_server_args

        weight_utils.initialize_dummy_weights = weights.fill
        line = [
            *("--model-path", job.model, "--load-format", "dummy", "--device", job.device),
            *("--skip-tokenizer-init", "--disaggregation-mode", "afd", "--afd-role", "ffn"),
            *("--afd-connector", job.connector, "--afd-bootstrap-addr", f"127.0.0.1:{job.port}"),
            *("--afd-attn-ranks", "1", "--afd-ffn-ranks", str(job.ffn_ranks)),
            *(("--dtype", "float32") if job.device == "cpu" else ()),
            *job.flags,
        ]
        args = prepare_server_args(line).for_ffn_rank(0)
        publish(args, role="scheduler")
        if job.device == "cuda":
            torch.cuda.set_device(0)
        self._job, self._fp8 = job, wire.fp8(args, job.connector)
        self._runner = FFNModelRunner(args, 0)
        self._device = self._runner.device
        if self._device.type == "cuda":
            self._device = torch.device("cuda", 0)
        self._layers = self._runner.load()

    def measure(self, attn_ranks: int, batch: int) -> dict[str, Any]:
        """One point: checked, then timed."""
        import torch

        from sglang.srt.disaggregation.afd.connector.base import LinkSpec
        from sglang.srt.disaggregation.afd.connector.null import (
            EXPERT_MAJOR,
            ROWS,
            Arrivals,
            NullFFN,
        )
        from sglang.srt.disaggregation.afd.topology import Topology

        job, shape = self._job, self._runner.shape
        topology = Topology(attn_ranks, job.ffn_ranks, shape.num_experts)
        spec = LinkSpec(
            topology=topology,
            hidden_size=shape.hidden_size,
            topk=shape.topk,
            dtype=self._runner.model_config.dtype,
            capacity=batch,
            timeout_s=_POINT_S,
            microbatches=1,
            fp8=self._fp8,
        )
        form = EXPERT_MAJOR if self._fp8 else ROWS
        arrivals = Arrivals(spec)
        with torch.inference_mode():
            connector = NullFFN(spec, 0, arrivals, self._device, form)
            owned = len(topology.expert_range(0))
            counts = self._counts(arrivals, owned, attn_ranks * batch, topology)
            gate = self._gate(connector, topology)
            times = self._times(lambda: self._step(connector))
        module = self._layers[0].module
        entries = statistics.mean(sum(each) for each in counts)
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        num_bytes = num_bytes * owned / len(module.w13_weight)
        us = 1e3 * statistics.median(times) / len(self._layers)
        values = math.prod(module.w13_weight.shape[1:]) + math.prod(module.w2_weight.shape[1:])
        flops = 2 * entries * values
        row = {
            "op": "layer",
            "model": job.shape,
            "layers": len(self._layers),
            "quant": job.quant,
            "connector": job.connector,
            "wire": "fp8" if self._fp8 else "model's",
            "attn_ranks": attn_ranks,
            "ffn_ranks": job.ffn_ranks,
            "batch_per_rank": batch,
            "experts": owned,
            "hidden": shape.hidden_size,
            "topk": shape.topk,
            "routing": "balanced",  # evenly at random, so a count still differs from the next
            "moe_runner_backend": self._name(),
            "graph": self._device.type == "cuda",
            "gate": gate,
            "rows_per_expert": round(entries / owned, 3),
            "max_rows_per_expert": max(max(each) for each in counts),
            "bytes": round(num_bytes),
            "GB_per_s": round(num_bytes / us / 1e3, 1),
            "tflops": round(flops / us / 1e6, 2),
            "us": round(us, 2),
            "reps": len(times),
            "samples": [round(1e3 * each / len(self._layers), 2) for each in times],
        }
        peak = _peak_tflops(self._device, job.quant)
        if peak is not None:
            row["mfu"] = round(flops / us / 1e6 / peak, 4)
        return row

    def _name(self) -> str:
        runner = getattr(self._layers[0].module.quant_method, "runner", None)
        return "native" if runner is None else str(runner.runner_backend.value)

    def _step(self, connector: Any) -> None:
        from sglang.srt.disaggregation.afd.connector.base import Transfer

        for index, layer in enumerate(self._layers):
            batch = connector.receive(Transfer(step_id=0, layer=index, microbatch=0))
            connector.send(batch, layer(batch))

    def _counts(self, arrivals: Any, owned: int, num_rows: int, topology: Any) -> list[list[int]]:
        """Rows of each expert of this rank, by layer."""
        import torch

        found = []
        for index in range(len(self._layers)):
            ids_A = arrivals(index)[0][:num_rows].flatten()
            per_expert = torch.bincount(ids_A, minlength=topology.num_experts)
            found.append([int(per_expert[expert]) for expert in topology.expert_range(0)])
            assert len(found[-1]) == owned
        return found

    def _gate(self, connector: Any, topology: Any) -> str:
        """Some rows of the first layer against FP32: pass, fail, or none for other formats."""
        import torch

        from sglang.srt.disaggregation.afd.connector.base import ExpertMajorBatch, Transfer

        if self._job.quant not in _BOUNDS:
            return "none"
        layer = self._layers[0]
        batch = connector.receive(Transfer(step_id=0, layer=0, microbatch=0))
        out = layer(batch)
        want: list[torch.Tensor] = []
        got: list[torch.Tensor] = []
        if isinstance(batch, ExpertMajorBatch):
            counts = batch.rows_per_expert_E.tolist()
            hidden_ELH = _rows_in_fp32(batch.hidden_ELH[:, :1], batch.scales_ELG)
            chosen = [slot for slot, count in enumerate(counts) if count][:_CHECKED_ROWS]
            want = [_expert(layer.module, slot, hidden_ELH[slot, :1]) for slot in chosen]
            got = [out[slot, :1] for slot in chosen]
        else:
            ids_RK = batch.topk_ids_RK.tolist()
            chosen = [row for row, ids in enumerate(ids_RK) if max(ids) >= 0][:_CHECKED_ROWS]
            for row in chosen:
                total = torch.zeros(1, batch.hidden_RH.shape[1], device=out.device)
                for entry, slot in enumerate(ids_RK[row]):
                    if slot >= 0:
                        part = _expert(layer.module, slot, batch.hidden_RH[row : row + 1].float())
                        total += part * batch.topk_weights_RK[row, entry]
                want.append(total)
                got.append(out[row : row + 1])
        if not want:
            return "none"
        expected, found = torch.cat(want), torch.cat(got).float()
        off = (found - expected).norm(dim=1) / expected.norm(dim=1)
        bound = _BOUNDS["float32" if expected.device.type == "cpu" else self._job.quant]
        return "pass" if bool((off <= bound).all()) else "fail"

    def _times(self, step: Callable[[], None]) -> list[float]:
        """Milliseconds of each round of all layers."""
        import torch

        if self._device.type == "cpu":
            times = []
            for _ in range(_WARM_UP + self._job.reps):
                began = time.perf_counter()
                step()
                times.append(1e3 * (time.perf_counter() - began))
            return times[_WARM_UP:]
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_WARM_UP + self._job.reps + 1)]
        for mark in marks:
            mark.record()
            graph.replay()
        torch.cuda.synchronize()
        pairs = zip(marks, marks[1:], strict=False)
        return [before.elapsed_time(after) for before, after in pairs][_WARM_UP:]


def _rows_in_fp32(hidden: Any, scales_ELG: Any) -> Any:
    """Rows [E, 1, H] of each expert as numbers."""
    if scales_ELG is None:
        return hidden.float()
    return hidden.float() * scales_ELG[:, :1].repeat_interleave(128, 2)[..., : hidden.shape[2]]


def _expert(module: Any, slot: int, rows_RH: Any) -> Any:
    """A gated expert in FP32."""
    import torch

    w13, w2 = (_weight(module, name, slot) for name in ("w13_weight", "w2_weight"))
    gate, up = (rows_RH.float() @ w13.T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


def _weight(module: Any, name: str, slot: int) -> Any:
    values = getattr(module, name)[slot].float()
    scale = getattr(module, f"{name}_scale_inv", None)
    if scale is None:
        return values
    wide = scale[slot].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values * wide[: values.shape[0], : values.shape[1]]


def _peak_tflops(device: Any, quant: str) -> float | None:
    """Of the GPU's datasheet, as the planner knows it."""
    import torch

    from sglang.srt.disaggregation.afd.planner import hardware

    if device.type != "cuda":
        return None
    machine = hardware.by_device_name(torch.cuda.get_device_name(device))
    if machine is None:
        return None
    return (machine.fp8_rate if quant == "fp8" else machine.bf16_rate) / 1e12


if __name__ == "__main__":
    sys.exit(main())
