"""The kernels alone, all ranks in one process on two GPUs: attention on the first, FFN on the second.

    python sgl-kernel/benchmark/bench_kernels.py --out results/kernels.json

Two tables. `round_trip`: dispatch, receive by expert, send, combine of one layer, by number of FFN
ranks N, which all share the second GPU, so that the attention rank's side of a wider pool can be
timed; the experts are left out. `one_way`: dispatch of many tokens against what a copy engine moves
between the same GPUs in the same run. Every shape is checked against plain torch before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "python")]
import conftest  # noqa: E402, F401  sets what must be set before CUDA starts
import reference  # noqa: E402
import torch  # noqa: E402
from harness import Link  # noqa: E402
from sglang_afd_kernel.ends import Shape  # noqa: E402

LAYERS = 24
WARM_UP = 5
_DISPATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,64,128,512")
    parser.add_argument("--hidden", default="2048,4096,7168")
    parser.add_argument("--ffn-ranks", default="1,2,4,8")
    parser.add_argument("--blocks", default="16,32,64", help="most blocks on attention ranks")
    parser.add_argument("--ffn-blocks", type=int, default=264, help="most blocks on all FFN ranks")
    parser.add_argument("--one-way-blocks", default="16,32,64,132,264")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        sys.exit("bench_kernels: needs two GPUs")
    # torch opens the GPUs' memory to each other when it first copies between them.
    torch.zeros(1, device="cuda:0").to("cuda:1").to("cuda:0")
    torch.cuda.set_device(0)
    rows: list[dict] = []

    def keep(row: dict) -> None:
        rows.append(row)
        print({key: value for key, value in row.items() if key != "samples"}, flush=True)
        if args.out:
            _write(args.out, rows)

    peer_gb_per_s = _copy_bandwidth()
    for blocks in _ints(args.one_way_blocks):
        keep(_one_way(4096, 7168, blocks, args.reps, peer_gb_per_s))
    for hidden in _ints(args.hidden):
        for ffn_ranks in _ints(args.ffn_ranks):
            for blocks in _ints(args.blocks):
                for tokens in _ints(args.tokens):
                    keep(_round_trip(tokens, hidden, ffn_ranks, blocks, args.ffn_blocks, args.reps))


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _copy_bandwidth() -> float:
    source = torch.zeros(2**28, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(2**28, dtype=torch.uint8, device="cuda:1")
    times = _timed(lambda: target.copy_(source, non_blocking=True), 10)
    return source.numel() / statistics.median(times) / 1e6


def _timed(call, reps: int) -> list[float]:
    """Milliseconds of each call on the first GPU."""
    times = []
    for _ in range(WARM_UP + reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        for device in (0, 1):
            torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    return times[WARM_UP:]


def _one_way(tokens: int, hidden: int, blocks: int, reps: int, peer_gb_per_s: float) -> dict:
    shape = Shape(attn_ranks=1, ffn_ranks=1, num_experts=32, hidden=hidden, topk=8, capacity=tokens)
    link = Link(shape, by_expert=False, blocks=blocks, devices=(0, 1))
    sent = reference.draw(shape, tokens, seed=0, masked=0)

    def several() -> None:  # so that the launch of one hides behind another
        for _ in range(_DISPATCHES):
            link.attn[0].dispatch(0, *sent, max_rows=(tokens,))

    times = [each / _DISPATCHES for each in _timed(several, reps)]
    num_bytes = tokens * (hidden + hidden // 128 * 4 + 8 * 8)
    us = 1e3 * statistics.median(times)
    return {
        "op": "dispatch",
        "tokens": tokens,
        "hidden": hidden,
        "blocks": blocks,
        "bytes": num_bytes,
        "us": round(us, 2),
        "GB_per_s": round(num_bytes / us / 1e3, 1),
        "peer_GB_per_s": round(peer_gb_per_s, 1),
        "ratio": round(num_bytes / us / 1e3 / peer_gb_per_s, 3),
        "samples": [round(1e3 * each, 2) for each in times],
    }


def _round_trip(
    tokens: int, hidden: int, ffn_ranks: int, blocks: int, ffn_blocks: int, reps: int
) -> dict:
    shape = Shape(
        attn_ranks=1,
        ffn_ranks=ffn_ranks,
        num_experts=128,
        hidden=hidden,
        topk=8,
        capacity=tokens,
    )
    link = Link(
        shape,
        by_expert=True,
        blocks=blocks,
        ffn_blocks=ffn_blocks // ffn_ranks,
        devices=(0, *(1,) * ffn_ranks),
    )
    sent = reference.draw(shape, tokens, seed=0, masked=0)
    got_TH = torch.empty_like(sent.hidden_TH)
    rows = (tokens,)
    answers = [torch.empty(0) for _ in link.ffn]

    def attn_step(layers: int) -> None:
        for layer in range(layers):
            link.attn[0].dispatch(0, *sent, max_rows=rows, layer=layer)
            link.attn[0].combine(0, sent.ids_TK, got_TH, layer=layer)

    def ffn_step(j: int, layers: int, is_real: bool) -> None:
        for layer in range(layers):
            batch = link.ffn[j].receive_by_expert(0, tokens, layer=layer)
            if is_real:
                values = reference.dequantized(batch.hidden_ELH, batch.scales_ELG)
                answers[j] = values.bfloat16()
            link.ffn[j].send(0, answers[j], max_rows=rows, layer=layer)

    with torch.cuda.stream(link.attn_streams[0]):
        link.attn[0].dispatch(0, *sent, max_rows=rows)
    for j, stream in enumerate(link.ffn_streams):
        with torch.cuda.device(1), torch.cuda.stream(stream):
            ffn_step(j, 1, is_real=True)
    with torch.cuda.stream(link.attn_streams[0]):
        link.attn[0].combine(0, sent.ids_TK, got_TH)
    link.finish()
    weight_T1 = sent.weights_TK.sum(dim=1, keepdim=True)
    expected_TH = sent.hidden_TH.float() * weight_T1
    least = sent.hidden_TH.abs().max() * 2**-5 * weight_T1
    is_right = bool(
        ((got_TH.float() - expected_TH).abs() <= expected_TH.abs() * 0.08 + least).all()
    )

    graphs = []
    for device, stream, step in [
        (0, link.attn_streams[0], lambda: attn_step(LAYERS)),
        *(
            (1, stream, lambda j=j: ffn_step(j, LAYERS, is_real=False))
            for j, stream in enumerate(link.ffn_streams)
        ),
    ]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
            step()
        graphs.append((graph, device, stream))

    times = []
    for _ in range(WARM_UP + reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for graph, device, stream in reversed(graphs):  # FFN ranks first: they wait, as in service
            with torch.cuda.device(device), torch.cuda.stream(stream):
                if device == 0:
                    begin.record()
                graph.replay()
                if device == 0:
                    end.record()
        for device in (0, 1):
            torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    assert not link.failures(), link.failures()[0]
    layer_us = [1e3 * each / LAYERS for each in times[WARM_UP:]]
    return {
        "op": "round_trip",
        "gate": "pass" if is_right else "fail",
        "tokens": tokens,
        "hidden": hidden,
        "ffn_ranks": ffn_ranks,
        "blocks": blocks,
        "ffn_blocks": ffn_blocks,
        "layers": LAYERS,
        "us": round(statistics.median(layer_us), 2),
        "samples": [round(each, 2) for each in layer_us],
    }


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE)
    results = {
        "bench": "kernels",
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit.stdout.strip() or "unknown",
        "versions": {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
