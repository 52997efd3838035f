"""Time of one MoE layer's way to the FFN ranks and back, experts left out.

One process and one GPU per rank. Every shape is gated first: the same link must return exactly what
it was sent. Then a CUDA graph of all layers is replayed on every rank and timed on attention rank 0.

    python benchmark/afd/bench_link.py --connector nccl,deepep --tokens 1,64,128,512 \
        --hidden 2048,4096,7168 --topk 8 --layers 48 --microbatches 1,2 --out results/link.json

`tokens` are those of one attention rank, all microbatches together. `us` is the time of one layer
with all its microbatches, `bytes` what this attention rank sends and receives in it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import logging
import os
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.connector.base import (
    AttnConnector,
    DispatchHandle,
    ExpertMajorBatch,
    FFNConnector,
    LinkSpec,
    Transfer,
)
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.store import host_store
from sglang.srt.disaggregation.afd.topology import Topology

WARM_UP = 5
LINK_TIMEOUT_S = 90
STEP_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One row of the results."""

    connector: str
    tokens: int  # of one attention rank, all microbatches together
    hidden: int
    topk: int
    layers: int
    microbatches: int
    attn_ranks: int
    ffn_ranks: int
    experts: int
    reps: int

    @property
    def bucket(self) -> int:
        """Tokens of one microbatch."""
        return self.tokens // self.microbatches

    def link(self) -> LinkSpec:
        return LinkSpec(
            topology=Topology(self.attn_ranks, self.ffn_ranks, self.experts),
            hidden_size=self.hidden,
            topk=self.topk,
            dtype=torch.bfloat16,
            capacity=self.bucket,
            timeout_s=LINK_TIMEOUT_S,
            microbatches=self.microbatches,
        )

    def wire_bytes(self, ids: torch.Tensor) -> int:
        """Bytes out and back of one attention rank in one layer, for the ids of one microbatch."""
        row = 2 * self.hidden
        if self.connector == "deepep":  # one row per expert each way, 16 bytes ahead of those out
            return self.microbatches * int((ids >= 0).sum()) * (2 * row + 16)
        rows = self.microbatches * self.bucket * self.ffn_ranks
        return rows * (2 * row + 8 * self.topk)


def main() -> None:
    args = _arguments()
    shapes = _shapes(args)
    world = args.attn_ranks + args.ffn_ranks
    if torch.cuda.device_count() < world:
        sys.exit(f"bench_link: {world} ranks need {world} GPUs, found {torch.cuda.device_count()}")
    rows = []
    for connector in args.connector.split(","):
        ours = [shape for shape in shapes if shape.connector == connector]
        rows += _run(ours, world, args.timeout)
        if args.out:  # after each connector, so that a failure of the next one loses nothing
            _write(Path(args.out), rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connector", default="nccl,deepep")
    parser.add_argument("--tokens", default="1,64,128,512")
    parser.add_argument("--hidden", default="2048,4096,7168")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--microbatches", default="1,2")
    parser.add_argument("--attn-ranks", type=int, default=1)
    parser.add_argument("--ffn-ranks", type=int, default=1)
    parser.add_argument("--reps", type=int, default=30, help="timed replays per shape")
    parser.add_argument("--timeout", type=float, default=240, help="seconds per connector")
    parser.add_argument("--out", help="JSON file of results")
    return parser.parse_args()


def _shapes(args: argparse.Namespace) -> list[Shape]:
    return [
        Shape(
            connector=connector,
            tokens=tokens,
            hidden=hidden,
            topk=args.topk,
            layers=args.layers,
            microbatches=microbatches,
            attn_ranks=args.attn_ranks,
            ffn_ranks=args.ffn_ranks,
            experts=args.experts,
            reps=args.reps,
        )
        for connector in args.connector.split(",")
        for hidden in map(int, args.hidden.split(","))
        for tokens in map(int, args.tokens.split(","))
        for microbatches in map(int, args.microbatches.split(","))
        if tokens % microbatches == 0
    ]


def _run(shapes: list[Shape], world: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run all shapes of one connector in fresh processes; prints and returns their rows.

    What is not finished in time is left out: a kernel that waits for a lost peer never ends.
    """
    store = host_store("127.0.0.1", LINK_TIMEOUT_S)
    rendezvous = Rendezvous(store_host="127.0.0.1", store_port=store.port, timeout_s=LINK_TIMEOUT_S)
    context = torch.multiprocessing.get_context("spawn")
    ranks = []
    rows: list[dict[str, Any]] = []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(shapes, rank, rendezvous, theirs))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        pipes = [pipe for _, pipe in ranks]
        deadline = time.monotonic() + timeout_s
        while pipes:
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                print(f"{shapes[0].connector}: out of time after {len(rows)} rows", flush=True)
                return rows
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    message: Any = pipe.recv()
                except EOFError:
                    message = "a rank died"
                if isinstance(message, dict):
                    rows.append(message)
                    _print(message)
                elif message is None:
                    pipes.remove(pipe)
                else:
                    print(f"{shapes[0].connector}: {message}", flush=True)
                    return rows
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join(10)
    return rows


def _rank(shapes: list[Shape], rank: int, rendezvous: Rendezvous, pipe: Connection) -> None:
    """Entry of a rank's process."""
    logging.basicConfig(level=logging.WARNING)
    code = 1
    try:
        torch.cuda.set_device(rank)
        for i, shape in enumerate(shapes):
            row = _measure(shape, rank, replace(rendezvous, namespace=f"bench{i}"))
            if rank == 0:
                pipe.send(row)
        pipe.send(None)
        pipe.poll(STEP_TIMEOUT_S)  # a peer may still read this rank's memory; the parent hangs up
        code = 0
    except Exception:  # noqa: BLE001
        pipe.send(traceback.format_exc())
    os._exit(code)  # the usual exit would wait for a kernel that waits for a lost peer


def _measure(shape: Shape, rank: int, rendezvous: Rendezvous) -> dict[str, Any]:
    spec = shape.link()
    if rank < shape.attn_ranks:
        attn = registry.create_attn(shape.connector, spec, rank, rendezvous)
        try:
            return _measure_attn(shape, spec, attn, rank)
        finally:
            attn.close()
    ffn = registry.create_ffn(shape.connector, spec, rank - shape.attn_ranks, rendezvous)
    try:
        _serve(shape, ffn)
    finally:
        ffn.close()
    return {}


def _measure_attn(shape: Shape, spec: LinkSpec, attn: AttnConnector, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    hidden_TH = torch.randn(shape.bucket, shape.hidden, generator=generator)
    hidden_TH = hidden_TH.to("cuda", torch.bfloat16)
    scores_TE = torch.rand(shape.bucket, shape.experts, generator=generator)
    ids_TK = scores_TE.topk(shape.topk, dim=1).indices.cuda()
    weights_TK = torch.full((shape.bucket, shape.topk), 1 / shape.topk, device="cuda")
    max_rows = (shape.bucket,) * shape.attn_ranks
    results: list[torch.Tensor] = []

    def dispatch(layer: int, microbatch: int) -> DispatchHandle:
        transfer = Transfer(0, layer, microbatch)
        return attn.dispatch(transfer, hidden_TH, ids_TK, weights_TK, max_rows)

    def step() -> None:
        """In the order of two-batch overlap."""
        handles: list[DispatchHandle | None] = [None] * shape.microbatches
        results.clear()
        for layer in range(shape.layers):
            for microbatch in range(shape.microbatches):
                handle = handles[microbatch]
                if handle is not None:
                    results.append(attn.combine(handle))
                handles[microbatch] = dispatch(layer, microbatch)
        results.extend(attn.combine(handle) for handle in handles if handle is not None)

    graph = _capture(step)
    times_ms = []
    for replay in range(WARM_UP + shape.reps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        _finish(end)
        if replay == 0:
            gate = _gate(shape, results, hidden_TH)
        if replay >= WARM_UP:
            times_ms.append(start.elapsed_time(end))
    layer_us = [1e3 * ms / shape.layers for ms in times_ms]
    quartiles = statistics.quantiles(layer_us, n=4)
    us = statistics.median(layer_us)
    num_bytes = shape.wire_bytes(ids_TK)
    return {
        "connector": shape.connector,
        "attn_ranks": shape.attn_ranks,
        "ffn_ranks": shape.ffn_ranks,
        "layers": shape.layers,
        "microbatches": shape.microbatches,
        "graph": True,
        "experts": shape.experts,
        "routing": "random",
        "op": "dispatch+combine",
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "topk": shape.topk,
        "gate": gate,
        "us": round(us, 2),
        "iqr": round(quartiles[2] - quartiles[0], 2),
        "reps": shape.reps,
        "samples": [round(sample, 2) for sample in layer_us],
        "bytes": num_bytes,
        "GB_per_s": round(num_bytes / us / 1e3, 2),
    }


def _gate(shape: Shape, results: list[torch.Tensor], hidden_TH: torch.Tensor) -> str:
    """Experts that return what they get, and weights that sum to 1, must give the input back.

    With several FFN ranks each rounds its share, so the last bits may differ.
    """
    for result_TH in results:
        if shape.ffn_ranks == 1 or shape.connector == "deepep":
            same = torch.equal(result_TH, hidden_TH)
        else:
            same = torch.allclose(result_TH.float(), hidden_TH.float(), rtol=2**-7, atol=2**-7)
        if not same:
            return "fail"
    return "pass" if len(results) == shape.layers * shape.microbatches else "fail"


def _serve(shape: Shape, ffn: FFNConnector[Any]) -> None:
    max_rows = (shape.bucket,) * shape.attn_ranks

    def step() -> None:
        for layer in range(shape.layers):
            for microbatch in range(shape.microbatches):
                batch = ffn.receive(Transfer(0, layer, microbatch), max_rows)
                if isinstance(batch, ExpertMajorBatch) or shape.ffn_ranks == 1:
                    # One FFN rank has all of a token's weight, which is 1.
                    rows = getattr(batch, "hidden_ELH", None)
                    ffn.send(batch, batch.hidden_RH if rows is None else rows)
                else:
                    share_R1 = batch.topk_weights_RK.sum(dim=1, keepdim=True)
                    ffn.send(batch, (batch.hidden_RH.float() * share_R1).to(torch.bfloat16))

    graph = _capture(step)
    for _ in range(WARM_UP + shape.reps):
        graph.replay()  # launched ahead, so that attention rank 0 times no launch of this rank
    done = torch.cuda.Event()
    done.record()
    _finish(done)


def _capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run the step once, with all its peers, and then capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        done = torch.cuda.Event()
        done.record()
    _finish(done)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _finish(event: torch.cuda.Event) -> None:
    """Wait for the GPU, but not for ever."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the GPU still waits for a peer after {STEP_TIMEOUT_S} s")
        time.sleep(1e-4)


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['connector']:7} {row['tokens']:5} x {row['hidden']:5} "
        f"microbatches {row['microbatches']}: {row['us']:8.2f} us per layer "
        f"(iqr {row['iqr']:.2f}), {row['GB_per_s']:7.2f} GB/s, gate {row['gate']}",
        flush=True,
    )


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    results = {
        "bench": "link",
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit.stdout.strip() or "unknown",
        "versions": _versions(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _versions() -> dict[str, str]:
    versions = {
        "python": sys.version.split()[0],
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    for package in ("torch", "sglang", "deep_ep"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = str(torch.__version__) if package == "torch" else "unknown"
    return versions


if __name__ == "__main__":
    main()
