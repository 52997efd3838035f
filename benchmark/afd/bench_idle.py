"""What an idle server costs, and how long a step's plan takes to reach the FFN ranks. CPU only.

    python benchmark/afd/bench_idle.py --out benchmark/afd/results/idle_cpu.json

Starts colocated and AFD servers of a small model one after the other. Each is left alone for
`--seconds`, and every process is charged its processor time; then requests run while a trace
notes, on one clock, when attention rank 0 had a plan (before it sent it) and when each FFN rank
began to work on it.

Upstream's scheduler looks for requests without a pause unless `--sleep-on-idle` says otherwise, so
every case runs without and with that flag, and the thread that looks is listed apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import requests
import results_file

from sglang.srt.disaggregation.afd import profile
from sglang.srt.disaggregation.afd.trace.spans import file_name

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "examples" / ".cache" / "demo-model"
START_S, STOP_S = 600, 40
SETTLE_S = 5.0  # after the start, whose last requests are still being cleaned up
REQUESTS, NEW_TOKENS = 4, 200
TRACE_S = 10.0
ALONE, PAUSE_S = 7, 1.3  # requests that come one at a time, and the silence before each
# Title of a process and what it is called here.
TITLES = (
    ("sglang::afd_ffn", "ffn"),
    ("sglang::scheduler", "scheduler"),
    ("sglang::detokenizer", "detokenizer"),
    ("sglang::data_parallel_controller", "controller"),
    ("resource_tracker", "resource tracker"),
    ("sglang.launch_server", "launcher"),
)


class Case(NamedTuple):
    attn_ranks: int
    ffn_ranks: int  # 0: colocated
    sleep: bool

    @property
    def name(self) -> str:
        layout = f"{self.attn_ranks}A{self.ffn_ranks}F" if self.ffn_ranks else "colocated"
        return layout + (", --sleep-on-idle" if self.sleep else "")

    def flags(self) -> list[str]:
        flags = ["--sleep-on-idle"] if self.sleep else []
        if self.ffn_ranks:
            flags += ["--disaggregation-mode", "afd"]
            flags += ["--afd-attn-ranks", str(self.attn_ranks)]
            flags += ["--afd-ffn-ranks", str(self.ffn_ranks)]
        return flags

    def row(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "device": "cpu",
            "connector": "gloo" if self.ffn_ranks else "colocated",
            "attn_ranks": self.attn_ranks,
            "ffn_ranks": self.ffn_ranks,
            "microbatches": 1,
            "graph": False,
            "sleep_on_idle": self.sleep,
            "gate": "none",
        }


class Load(NamedTuple):
    """Processor time since the start of a process, seconds."""

    total: float
    main_thread: float


CASES = tuple(Case(m, n, sleep) for m, n in ((1, 0), (1, 1), (2, 1)) for sleep in (False, True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--seconds", type=float, default=20.0, help="of idling that are charged")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.model == DEMO_MODEL:
        train = ROOT / "examples" / "train_demo_model.py"
        subprocess.run([sys.executable, train, "--out", args.model], check=True)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        with _server(case, args.model) as (process, url):
            rows += _idle(case, process, args.seconds)
            rows.append(_first_token(case, url))
            if case.ffn_ranks:
                rows += _overhead(case, url)
        results_file.write(args.out, "idle", rows)
    rows.append(_added(rows))
    results_file.write(args.out, "idle", rows)
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k != "samples"}))


@contextlib.contextmanager
def _server(case: Case, model: Path) -> Iterator[tuple[psutil.Process, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-total-tokens", "16384", *case.flags()]
    print(f"{case.name}: starting", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_S
            while b"The server is fired up" not in _text(log):
                if started.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{case.name}: no server:\n{_text(log)[-4000:].decode()}")
                time.sleep(1)
            yield psutil.Process(started.pid), f"http://127.0.0.1:{port}"
            started.send_signal(signal.SIGTERM)
            started.wait(STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def _text(log: Any) -> bytes:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, 0)


def _idle(case: Case, server: psutil.Process, seconds: float) -> list[dict[str, Any]]:
    """One row per process: percent of a core while nothing is asked."""
    time.sleep(SETTLE_S)
    processes = [server, *server.children(recursive=True)]
    before = [_load(process) for process in processes]
    began = time.monotonic()
    time.sleep(seconds)
    after = [_load(process) for process in processes]
    passed = time.monotonic() - began
    rows = []
    for process, first, last in zip(processes, before, after, strict=True):
        total = 100 * (last.total - first.total) / passed
        main_thread = 100 * (last.main_thread - first.main_thread) / passed
        rows.append(
            {
                **case.row(),
                "op": "idle",
                "process": _name(process),
                "seconds": round(passed, 1),
                "percent_of_core": round(total, 2),
                "percent_main_thread": round(main_thread, 2),
                "percent_other_threads": round(max(0.0, total - main_thread), 2),
            }
        )
    return rows


def _first_token(case: Case, url: str) -> dict[str, Any]:
    """How long one token takes when nobody has asked for a while: sleepers have to wake up."""
    samples = []
    for _ in range(ALONE):
        time.sleep(PAUSE_S)
        began = time.monotonic()
        _ask(url, 1)
        samples.append(round(1e6 * (time.monotonic() - began), 1))
    us = round(statistics.median(samples), 1)
    return {**case.row(), "op": "first token", "us": us, "reps": ALONE, "samples": samples}


def _ask(url: str, new_tokens: int) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"text": "for", "sampling_params": sampling}
    requests.post(f"{url}/generate", json=body, timeout=120).raise_for_status()


def _load(process: psutil.Process) -> Load:
    times = process.cpu_times()
    main = next((t for t in process.threads() if t.id == process.pid), None)
    spent = main.user_time + main.system_time if main is not None else 0.0
    return Load(times.user + times.system, spent)


def _name(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((name for title, name in TITLES if title in words), words[:40])


def _added(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What 1A1F adds to a colocated server beside its FFN rank, whose row stands alone.

    Of servers whose schedulers sleep: those that do not take a core each, with AFD and without.
    """
    spent = {
        ffn_ranks: sum(
            row["percent_of_core"]
            for row in rows
            if row["op"] == "idle" and row["process"] != "ffn" and row["attn_ranks"] == 1
            if row["ffn_ranks"] == ffn_ranks and row["sleep_on_idle"]
        )
        for ffn_ranks in (0, 1)
    }
    added = round(spent[1] - spent[0], 2)
    return {**Case(1, 1, True).row(), "op": "idle added", "percent_of_core": added}


def _overhead(case: Case, url: str) -> list[dict[str, Any]]:
    """From a plan on attention rank 0 to each FFN rank's start of work on it, microseconds."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(REQUESTS + 1) as pool:
        trace = pool.submit(profile.take, url, TRACE_S, Path(folder), {})
        time.sleep(0.5)  # the trace has begun
        list(pool.map(_ask, [url] * REQUESTS, [NEW_TOKENS] * REQUESTS))
        trace.result()
        (parts,) = Path(folder).glob("afd-*")
        attn, *ffn = (
            json.loads((parts / name).read_text())
            for name in (
                file_name("attn", 0),
                *(file_name("ffn", j) for j in range(case.ffn_ranks)),
            )
        )
    planned = {step: began for step, mode, began in attn["steps"] if mode == "decode"}
    rows = []
    for rank in ffn:
        us = sorted((at - planned[s]) / 1e3 for s, _, at in rank["steps"] if s in planned)
        quantiles = statistics.quantiles(us, n=100)
        rows.append(
            {
                **case.row(),
                "op": "plan to FFN start",
                "ffn_rank": rank["rank"],
                "batch_per_rank": REQUESTS // case.attn_ranks,
                "steps": len(us),
                "us": round(quantiles[49], 1),
                "us_p99": round(quantiles[98], 1),
                "samples": [round(value, 1) for value in us],
            }
        )
    return rows


if __name__ == "__main__":
    main()
