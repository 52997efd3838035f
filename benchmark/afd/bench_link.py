"""Time of one MoE layer's way to the FFN ranks and back, experts left out.

One process and one GPU per rank, and in each of them a link of every connector. Every shape is gated
first: the same link must return what it was sent. Then a CUDA graph of all layers is replayed on
every rank and timed on attention rank 0, the connectors in turn, so that they share whatever the
machine does meanwhile. `ratio` is a row's time over that of `--baseline` in the same run.

    python benchmark/afd/bench_link.py --connector nccl,deepep,nvlink --tokens 1,16,64,128,512 \
        --hidden 2048,4096,7168 --topk 8 --layers 48 --microbatches 1,2 --wire fp8,bf16 \
        --out results/link.json

`tokens` are those of one attention rank, all microbatches together. `us` is the time of one layer
with all its microbatches, `bytes` what this attention rank sends and receives in it.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import results_file
import torch
import torch.multiprocessing

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.connector.base import (
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
    wire: str  # of the rows out: "fp8" with scales, or "bf16"; back always BF16

    @property
    def fp8(self) -> bool:
        return self.wire == "fp8"

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
            fp8=self.fp8,
        )

    def wire_bytes(self, ids: torch.Tensor) -> int:
        """Bytes out and back of one attention rank in one layer, for the ids of one microbatch."""
        back = 2 * self.hidden
        out = self.hidden + 4 * self.hidden // 128 if self.fp8 else back
        meta = 8 * self.topk
        if self.connector == "deepep":  # one row per expert each way, 16 bytes ahead of those out
            return self.microbatches * int((ids >= 0).sum()) * (out + back + 16)
        if self.connector == "nvlink":  # a row per FFN rank that has an expert of the token
            owner = torch.tensor([*self.link().topology.owner_of, -1], device=ids.device)[ids]
            pairs = sum(int((owner == j).any(dim=1).sum()) for j in range(self.ffn_ranks))
            return self.microbatches * (pairs * (out + back) + self.bucket * self.ffn_ranks * meta)
        rows = self.microbatches * self.bucket * self.ffn_ranks
        return rows * (out + back + meta)


def main() -> None:
    args = _arguments()
    shapes = _shapes(args)
    world = args.attn_ranks + args.ffn_ranks
    if torch.cuda.device_count() < world:
        sys.exit(f"bench_link: {world} ranks need {world} GPUs, found {torch.cuda.device_count()}")
    out = Path(args.out) if args.out else None
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        _print(row)
        if out is not None:  # after each row, so that a failure of the next one loses nothing
            results_file.write(out, "link", rows)

    _run(shapes, args.baseline, world, args.timeout, keep)


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
    parser.add_argument("--wire", default="bf16", help="bf16, fp8; nccl has no fp8")
    parser.add_argument("--baseline", default="deepep", help="connector that ratios refer to")
    parser.add_argument("--reps", type=int, default=30, help="timed replays per shape")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for everything")
    parser.add_argument("--out", help="JSON file of results")
    return parser.parse_args()


def _shapes(args: argparse.Namespace) -> list[list[Shape]]:
    """What is timed in turn, a list for each shape with an entry for each connector."""
    groups = []
    for wire in args.wire.split(","):
        for hidden in map(int, args.hidden.split(",")):
            for tokens in map(int, args.tokens.split(",")):
                for microbatches in map(int, args.microbatches.split(",")):
                    group = [
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
                            wire=wire,
                        )
                        for connector in args.connector.split(",")
                        if _can_carry(connector, wire, tokens // microbatches)
                    ]
                    if tokens % microbatches == 0 and group:
                        groups.append(group)
    return groups


def _can_carry(connector: str, wire: str, tokens: int) -> bool:
    if connector == "deepep":
        return tokens <= 1024
    return connector != "nccl" or wire == "bf16"


def _run(
    groups: list[list[Shape]],
    baseline: str,
    world: int,
    timeout_s: float,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Run all shapes in one set of processes; `keep` gets each row as soon as it is known.

    What is not finished in time is left out: a kernel that waits for a lost peer may never end.
    """
    store = host_store("127.0.0.1", LINK_TIMEOUT_S)
    rendezvous = Rendezvous(store_host="127.0.0.1", store_port=store.port, timeout_s=LINK_TIMEOUT_S)
    context = torch.multiprocessing.get_context("spawn")
    ranks = []
    found = 0
    try:
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (groups, baseline, rank, rendezvous, theirs)
            process = context.Process(target=_rank, args=args)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        pipes = [pipe for _, pipe in ranks]
        deadline = time.monotonic() + timeout_s
        while pipes:
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                print(f"bench_link: out of time after {found} rows", flush=True)
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    message: Any = pipe.recv()
                except EOFError:
                    message = "a rank died"
                if isinstance(message, list):
                    found += len(message)
                    for row in message:
                        keep(row)
                elif message is None:
                    pipes.remove(pipe)
                else:
                    print(f"bench_link: {message}", flush=True)
                    return
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join(10)


def _rank(
    groups: list[list[Shape]], baseline: str, rank: int, rendezvous: Rendezvous, pipe: Connection
) -> None:
    """Entry of a rank's process."""
    logging.basicConfig(level=logging.WARNING)
    code = 1
    try:
        torch.cuda.set_device(rank)
        for i, group in enumerate(groups):
            names = [f"bench{i}-{shape.connector}" for shape in group]
            rows = _measure(group, rank, [replace(rendezvous, namespace=name) for name in names])
            times = {row["connector"]: row["us"] for row in rows}
            for row in rows:
                if baseline in times:
                    row["baseline"] = baseline
                    row["baseline_us"] = times[baseline]
                    row["ratio"] = round(row["us"] / times[baseline], 3)
            if rank == 0:
                pipe.send(rows)
        pipe.send(None)
        pipe.poll(STEP_TIMEOUT_S)  # a peer may still read this rank's memory; the parent hangs up
        code = 0
    except Exception:  # noqa: BLE001
        pipe.send(traceback.format_exc())
    os._exit(code)  # the usual exit would wait for a kernel that waits for a lost peer


def _measure(group: list[Shape], rank: int, rendezvous: list[Rendezvous]) -> list[dict[str, Any]]:
    """Rows of one shape, one per connector; empty on FFN ranks."""
    sides: list[_AttnSide | _FFNSide] = []
    is_attn = rank < group[0].attn_ranks
    try:
        for shape, meeting_point in zip(group, rendezvous, strict=True):
            role = _AttnSide if is_attn else _FFNSide
            sides.append(role(shape, rank, meeting_point))
        for replay in range(WARM_UP + group[0].reps):
            for side in sides:
                side.replay(is_timed=replay >= WARM_UP)
        for side in sides:
            side.finish()
        return [side.row() for side in sides if isinstance(side, _AttnSide)]
    finally:
        for side in sides:
            side.close()


class _AttnSide:
    """One attention rank's graph of one connector."""

    def __init__(self, shape: Shape, rank: int, rendezvous: Rendezvous) -> None:
        self._shape = shape
        self._link = registry.create_attn(shape.connector, shape.link(), rank, rendezvous)
        generator = torch.Generator().manual_seed(rank)
        hidden_TH = torch.randn(shape.bucket, shape.hidden, generator=generator)
        self._hidden_TH = hidden_TH.to("cuda", torch.bfloat16)
        scores_TE = torch.rand(shape.bucket, shape.experts, generator=generator)
        self._ids_TK = scores_TE.topk(shape.topk, dim=1).indices.cuda()
        self._weights_TK = torch.full((shape.bucket, shape.topk), 1 / shape.topk, device="cuda")
        self._results: list[torch.Tensor] = []
        self._times_ms: list[float] = []
        self._graph, self._is_right = _capture(self._step, self._check)

    def _step(self) -> None:
        """In the order of two-batch overlap."""
        shape = self._shape
        max_rows = (shape.bucket,) * shape.attn_ranks
        handles: list[DispatchHandle | None] = [None] * shape.microbatches
        self._results.clear()
        for layer in range(shape.layers):
            for microbatch in range(shape.microbatches):
                handle = handles[microbatch]
                if handle is not None:
                    self._results.append(self._link.combine(handle))
                handles[microbatch] = self._link.dispatch(
                    Transfer(0, layer, microbatch),
                    self._hidden_TH,
                    self._ids_TK,
                    self._weights_TK,
                    max_rows,
                )
        self._results.extend(self._link.combine(handle) for handle in handles if handle is not None)

    def _check(self) -> bool:
        return _gate(self._shape, self._results, self._hidden_TH)

    def replay(self, is_timed: bool) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        _finish(end)
        if is_timed:
            self._times_ms.append(start.elapsed_time(end))

    def finish(self) -> None:
        # FFN ranks return what was prepared when they are timed, so FP8 is gated before.
        if not self._shape.fp8:
            self._is_right = self._is_right and self._check()

    def row(self) -> dict[str, Any]:
        shape = self._shape
        layer_us = [1e3 * ms / shape.layers for ms in self._times_ms]
        quartiles = statistics.quantiles(layer_us, n=4)
        us = statistics.median(layer_us)
        num_bytes = shape.wire_bytes(self._ids_TK)
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
            "wire": shape.wire,
            "tokens": shape.tokens,
            "hidden": shape.hidden,
            "topk": shape.topk,
            "gate": "pass" if self._is_right else "fail",
            "us": round(us, 2),
            "iqr": round(quartiles[2] - quartiles[0], 2),
            "reps": shape.reps,
            "samples": [round(sample, 2) for sample in layer_us],
            "bytes": num_bytes,
            "GB_per_s": round(num_bytes / us / 1e3, 2),
        }

    def close(self) -> None:
        self._link.close()


def _gate(shape: Shape, results: list[torch.Tensor], hidden_TH: torch.Tensor) -> bool:
    """Experts that return what they get, and weights that sum to 1, must give the input back.

    With several FFN ranks each rounds its share, so the last bits may differ; with FP8, what the
    rows lose on the wire.
    """
    if len(results) != shape.layers * shape.microbatches:
        return False
    expected_TH = hidden_TH.float()
    bound_TH = torch.zeros_like(expected_TH)
    if shape.fp8:
        groups = expected_TH.view(len(expected_TH), -1, 128)
        least = groups.abs().amax(dim=2, keepdim=True) * 2**-10  # where E4M3 is no longer relative
        bound_TH = (groups.abs() * 2**-4 + least).view_as(expected_TH)
    if shape.ffn_ranks > 1 and shape.connector != "deepep":
        bound_TH = bound_TH + expected_TH.abs() * 2**-7 + 2**-7
    if shape.fp8:
        bound_TH = bound_TH + expected_TH.abs() * 2**-8  # rounded to BF16 on the way back
    return all(
        bool(((result_TH.float() - expected_TH).abs() <= bound_TH).all()) for result_TH in results
    )


class _FFNSide:
    """One FFN rank's graph of one connector: experts that return what they get."""

    def __init__(self, shape: Shape, rank: int, rendezvous: Rendezvous) -> None:
        self._shape = shape
        self._link: FFNConnector[Any] = registry.create_ffn(
            shape.connector, shape.link(), rank - shape.attn_ranks, rendezvous
        )
        self._prepared: dict[torch.Size, torch.Tensor] = {}
        self._is_real = True  # in the step that is gated, answers are computed
        self._graph, _ = _capture(self._step, self._prepare)
        self._done = torch.cuda.Event()

    def _step(self) -> None:
        shape = self._shape
        max_rows = (shape.bucket,) * shape.attn_ranks
        for layer in range(shape.layers):
            for microbatch in range(shape.microbatches):
                batch = self._link.receive(Transfer(0, layer, microbatch), max_rows)
                self._link.send(batch, self._answer(batch))

    def _answer(self, batch: Any) -> torch.Tensor:
        if not isinstance(batch, ExpertMajorBatch):
            if self._shape.ffn_ranks == 1:  # it has all of a token's weight, which is 1
                return batch.hidden_RH
            share_R1 = batch.topk_weights_RK.sum(dim=1, keepdim=True)
            return (batch.hidden_RH.float() * share_R1).to(torch.bfloat16)
        if batch.scales_ELG is None:
            return batch.hidden_ELH
        if self._is_real:
            scales_ELH = batch.scales_ELG.repeat_interleave(128, dim=2)
            answer_ELH = (batch.hidden_ELH.float() * scales_ELH).to(torch.bfloat16)
            self._prepared[answer_ELH.shape] = answer_ELH
        return self._prepared[batch.hidden_ELH.shape]

    def _prepare(self) -> bool:
        self._is_real = False
        return True

    def replay(self, is_timed: bool) -> None:
        """Launched ahead, so that attention rank 0 times no launch of this rank."""
        del is_timed
        self._graph.replay()

    def finish(self) -> None:
        self._done.record()
        _finish(self._done)

    def close(self) -> None:
        self._link.close()


def _capture(
    step: Callable[[], None], check: Callable[[], bool]
) -> tuple[torch.cuda.CUDAGraph, bool]:
    """Run the step once, with all its peers, look at what came out, and then capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        done = torch.cuda.Event()
        done.record()
    _finish(done)
    is_right = check()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, is_right


def _finish(event: torch.cuda.Event) -> None:
    """Wait for the GPU, but not for ever."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the GPU still waits for a peer after {STEP_TIMEOUT_S} s")
        time.sleep(1e-4)


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['connector']:7} {row['wire']} {row['tokens']:5} x {row['hidden']:5} "
        f"microbatches {row['microbatches']}: {row['us']:8.2f} us per layer "
        f"(iqr {row['iqr']:.2f}), {row['GB_per_s']:7.2f} GB/s, gate {row['gate']}"
        + (f", {row['ratio']} of {row['baseline']}" if "ratio" in row else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
