"""The correctness gate on GPUs: AFD must score what colocated SGLang scores. Run before every timing.

    python benchmark/afd/gate.py --logs /tmp/gate --out benchmark/afd/results/gate/2xh200.json

Servers of all cases start side by side: colocated SGLang, and 1 attention and 1 FFN rank over each
connector, eagerly and in graphs, with 1 and 2 microbatches, in BF16 and block FP8; other numbers of
ranks with `--topologies`. On a host with fewer GPUs than ranks, ranks share them. Each scores the
same sequences, at prefill and, teacher-forced, at decode steps. A case passes if its log
probabilities are no further from colocated's, at most and on average, than 1.5 times what colocated
itself is apart at neighbouring batch sizes, or with other kernels that SGLang offers for the same
model: FlashInfer's attention instead of Triton's, and the other of Triton and DeepGEMM for experts.
Connectors that only move rows must give the same bits in graphs as eagerly. Servers with faults
(`gate_faults`) must fail.

Exit code 0 means that all of it held. Benchmarks ask `verdict()` for the `gate` of their rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gate_models
import psutil
import requests
from gate_faults import FAULTS
from gate_scores import Distance, Scores, Sequence, distance, score, sequences

from sglang.srt.disaggregation.afd import sharing

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gate"
FACTOR = 1.5
WIDTHS = (4, 8, 16)  # of colocated; AFD runs at the middle one
COLOCATED = "colocated"
OTHER_KERNELS = "colocated with other kernels"
BITWISE = ("gloo", "nccl", "nvlink")  # the same sums in the same order, in graphs as eagerly
_FIRED_UP = "The server is fired up"
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all servers of a run share.

    Attributes:
        device: "cuda" or "cpu".
        widths: batch sizes of colocated, ascending; AFD runs at the middle one.
        runners: --moe-runner-backend by quantisation, for colocated and AFD alike; else upstream's
            and our own choice.
        num_sequences, forced: how many sequences, and tokens of each that are decoded.
    """

    device: str
    shapes: dict[str, gate_models.Shape]
    num_sequences: int = 32
    forced: int = 40
    widths: tuple[int, ...] = WIDTHS
    start_timeout_s: float = 300.0
    runners: dict[str, str] = field(default_factory=lambda: {"fp8": "deep_gemm"})

    @property
    def width(self) -> int:
        return self.widths[len(self.widths) // 2]

    def asked(self, quant: str) -> list[Sequence]:
        return sequences(self.num_sequences, self.forced, self.shapes[quant].vocab)

    def flags(self, quant: str, other: bool = False) -> list[str]:
        """Of every server, with another attention backend if `other`."""
        flags = [
            *("--device", self.device),
            *("--dtype", "float32" if quant == "fp32" else "bfloat16"),
            *("--host", "127.0.0.1", "--max-total-tokens", "8192", "--disable-radix-cache"),
            *("--enable-custom-logit-processor", "--skip-server-warmup"),
            *("--max-running-requests", str(max(self.widths))),
            *("--watchdog-timeout", "300"),
        ]
        if self.device == "cuda":
            backend = "flashinfer" if other else "triton"
            flags += ["--attention-backend", backend, "--cuda-graph-backend-prefill", "disabled"]
        return flags

    def runner(self, quant: str, other: bool) -> list[str]:
        """The MoE runner of a server, or another that SGLang offers for the same experts."""
        chosen = self.runners.get(quant)
        if other and self.device == "cuda":
            chosen = "triton" if chosen == "deep_gemm" else "deep_gemm"
        return [] if chosen is None else ["--moe-runner-backend", chosen]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One server. `connector` is `COLOCATED` for the reference of a quantisation, `OTHER_KERNELS` for
    what tells how far apart two right answers can be."""

    quant: str
    connector: str = COLOCATED
    graph: bool = True
    microbatches: int = 1
    fault: str = ""
    attn_ranks: int = 1
    ffn_ranks: int = 1

    @property
    def is_colocated(self) -> bool:
        return self.connector in (COLOCATED, OTHER_KERNELS)

    @property
    def name(self) -> str:
        if self.is_colocated:
            return f"{self.quant}-{self.connector.replace(' ', '-')}"
        way = "graph" if self.graph else "eager"
        name = f"{self.quant}-{self.connector}-{way}-{self.microbatches}mb"
        if (self.attn_ranks, self.ffn_ranks) != (1, 1):
            name += f"-{self.attn_ranks}a{self.ffn_ranks}f"
        return f"{name}-{self.fault}" if self.fault else name

    def flags(self, setup: Setup) -> list[str]:
        other = self.connector == OTHER_KERNELS
        flags = [*setup.flags(self.quant, other), *setup.runner(self.quant, other)]
        if self.is_colocated:
            batches = setup.widths
        else:
            batches = (2, setup.width)
            flags += [
                *("--disaggregation-mode", "afd", "--afd-connector", self.connector),
                *("--afd-microbatches", str(self.microbatches)),
                *("--afd-attn-ranks", str(self.attn_ranks)),
                *("--afd-ffn-ranks", str(self.ffn_ranks)),
                # A kernel that is compiled for the first time keeps its peer waiting.
                *("--afd-peer-timeout", "150"),
                # Small, so that a prefill goes in rounds.
                *("--afd-max-tokens-per-rank", "64"),
            ]
        if setup.device == "cpu":
            return flags
        if self.graph:
            return [*flags, "--cuda-graph-bs-decode", *map(str, batches)]
        return [*flags, "--cuda-graph-backend-decode", "disabled"]


@dataclass
class Outcome:
    """What one server showed; `error` says why there are no scores."""

    case: Case
    by_width: dict[int, Scores] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    start_seconds: float = 0.0
    seconds: float = 0.0
    error: str = ""


# --- cases -------------------------------------------------------------------------------------


def all_cases(
    quants: tuple[str, ...],
    connectors: tuple[str, ...],
    graphs: bool = True,
    topologies: tuple[tuple[int, int], ...] = ((1, 1),),
) -> list[Case]:
    """References first, since every verdict waits for them.

    Args:
        topologies: attention and FFN ranks.
    """
    cases = [
        Case(quant=quant, connector=connector)
        for quant in quants
        for connector in (COLOCATED, OTHER_KERNELS)
    ]
    for quant in quants:
        cases += [
            Case(
                quant=quant,
                connector=connector,
                graph=graph,
                microbatches=microbatches,
                attn_ranks=attn_ranks,
                ffn_ranks=ffn_ranks,
            )
            for attn_ranks, ffn_ranks in topologies
            for connector in connectors
            for graph in ((False, True) if graphs else (False,))
            for microbatches in (1, 2)
        ]
    cases += [
        Case(quant=quants[0], connector=connectors[0], graph=graphs, microbatches=2, fault=fault)
        for fault in FAULTS
    ]
    return cases


def select(cases: list[Case], only: str) -> list[Case]:
    """Cases whose name matches the pattern, the references that they need, and eager partners."""
    chosen = [case for case in cases if re.search(only, case.name)]
    quants = {case.quant for case in chosen}
    return [
        case for case in cases if case in chosen or (case.is_colocated and case.quant in quants)
    ]


def usable_connectors(device: str) -> tuple[str, ...]:
    from sglang.srt.disaggregation.afd.connector import registry

    return registry.available(device)


# --- servers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


class Fleet:
    """All servers of a run: how many are asked at once, their ports, and their end.

    Args:
        work: folder of the checkpoints, by name of the shape.
    """

    def __init__(
        self, setup: Setup, logs: Path, work: Path, busy: int = 3, first_port: int = 21000
    ) -> None:
        self.setup = setup
        self._logs, self._work = logs, work
        self._busy = threading.Semaphore(busy)
        self._ports = itertools.count(first_port, 10)
        self._lock = threading.Lock()
        self._servers: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def run(self, case: Case) -> Outcome:
        """Start the case's server, ask it, end it. Never raises."""
        outcome = Outcome(case)
        began = time.monotonic()
        try:
            with self.serving(case) as server:
                outcome.start_seconds = round(time.monotonic() - began, 1)
                with self._busy:
                    widths = (
                        self.setup.widths if case.connector == COLOCATED else (self.setup.width,)
                    )
                    asked = self.setup.asked(case.quant)
                    for width in widths:
                        outcome.by_width[width] = score(server.url, asked, width)
                    if not case.is_colocated:
                        info = requests.get(f"{server.url}/server_info", timeout=30).json()
                        outcome.state = info["internal_states"][0]["afd"]
        except Exception as error:  # noqa: BLE001 - one case must not take the others with it
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.seconds = round(time.monotonic() - began, 1)
        return outcome

    @contextlib.contextmanager
    def serving(
        self, case: Case, *more: str, env: dict[str, str] | None = None
    ) -> Iterator[Running]:
        """The case's server, from when it is ready until the block ends.

        Args:
            more: further flags.
        """
        log = self._logs / f"{case.name}.log"
        with self._lock:
            port = next(self._ports)
        command = [
            *(sys.executable, str(HERE / "gate_server.py")),
            *("--model-path", str(self._work / self.setup.shapes[case.quant].name)),
            *("--port", str(port), "--nccl-port", str(port + 1)),
            *case.flags(self.setup),
            *more,
        ]
        environment = {**os.environ, "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", **(env or {})}
        if case.fault:
            environment["AFD_GATE_FAULT"] = case.fault
        with log.open("w") as output:
            output.write(shlex.join(command) + "\n")
            output.flush()
            with self._lock:
                if self._closed:
                    raise RuntimeError("the run was ended")
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
                self._servers.add(process)
        try:
            server = Running(f"http://127.0.0.1:{port}", log, process)
            self._wait_ready(server)
            yield server
        finally:
            self._kill(process)

    def _wait_ready(self, server: Running) -> None:
        deadline = time.monotonic() + self.setup.start_timeout_s
        while True:
            text = server.log.read_text(errors="replace")
            # Without a warm-up it says so a moment before it listens.
            if _FIRED_UP in text and _is_listening(server.url):
                return
            if server.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with code {server.process.returncode}: {_last(text)}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready in {self.setup.start_timeout_s:g} s: {_last(text)}")
            time.sleep(_POLL_S)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the server and all below it at once: a kernel that waits for a peer ends no other way."""
        with self._lock:
            if process not in self._servers:
                return
            self._servers.discard(process)
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own, see `_server`
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(20)
        psutil.wait_procs(below, timeout=20)

    def close(self) -> None:
        """End every server that is left."""
        with self._lock:
            self._closed = True
            left = list(self._servers)
        for process in left:
            self._kill(process)


def _is_listening(url: str) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(f"{url}/model_info", timeout=30).ok
    return False


def _last(text: str) -> str:
    """The last line that names an error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"Error|error:|AFD .* ends", line)]
    return (named or lines or ["nothing in its log"])[-1][-400:]


def run_all(
    fleet: Fleet, cases: list[Case], parallel: int, deadline_s: float
) -> dict[Case, Outcome]:
    """Outcomes by case; what is not finished at the deadline is ended and counts as failed."""
    outcomes: dict[Case, Outcome] = {}
    pool = concurrent.futures.ThreadPoolExecutor(parallel)
    try:
        running = {pool.submit(fleet.run, case): case for case in cases}
        try:
            for done in concurrent.futures.as_completed(running, timeout=deadline_s):
                outcome = done.result()
                outcomes[outcome.case] = outcome
                print(
                    f"{outcome.case.name}: {outcome.error or 'answered'} ({outcome.seconds} s)",
                    flush=True,
                )
        except concurrent.futures.TimeoutError:
            print(f"out of time after {deadline_s:g} s", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        fleet.close()
    for case in cases:
        outcomes.setdefault(case, Outcome(case, error="out of time"))
    return outcomes


# --- verdicts ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far from colocated a right answer can be.

    Attributes:
        largest, mean: of |d logprob| over all positions.
        batches: largest distance of colocated at neighbouring batch sizes. It is 0 where SGLang's
            kernels do not depend on the batch, and then says nothing of rounding.
        other: distance of colocated from itself with other kernels of SGLang.
    """

    largest: float
    mean: float
    batches: list[float]
    other: Distance


def bounds(setup: Setup, outcomes: dict[Case, Outcome]) -> dict[str, Bound]:
    """By quantisation; without those whose references did not answer."""
    found = {}
    for case, outcome in outcomes.items():
        partner = outcomes.get(replace(case, connector=OTHER_KERNELS))
        if case.connector != COLOCATED or outcome.error or partner is None or partner.error:
            continue
        pairs = zip(setup.widths, setup.widths[1:], strict=False)
        apart = [distance(outcome.by_width[a], outcome.by_width[b]) for a, b in pairs]
        other = distance(outcome.by_width[setup.width], partner.by_width[setup.width])
        found[case.quant] = Bound(
            largest=FACTOR * max(other.largest, *(each.largest for each in apart)),
            mean=FACTOR * max(other.mean, *(each.mean for each in apart)),
            batches=[each.largest for each in apart],
            other=other,
        )
    return found


def judge(setup: Setup, outcomes: dict[Case, Outcome]) -> list[dict[str, Any]]:
    """One row per AFD case, in the schema of docs/design.md; `gate` is "pass" or "fail".

    A row with a `fault` passes if the comparison noticed it.
    """
    limits = bounds(setup, outcomes)
    rows = []
    for case, outcome in outcomes.items():
        if case.is_colocated:
            continue
        row: dict[str, Any] = {
            "name": case.name,
            "model": setup.shapes[case.quant].name,
            "layers": setup.shapes[case.quant].layers,
            "quant": case.quant,
            "connector": case.connector,
            "attn_ranks": case.attn_ranks,
            "ffn_ranks": case.ffn_ranks,
            "microbatches": case.microbatches,
            "graph": case.graph,
            "batch_per_rank": setup.width,
            "attention_backend": "triton" if setup.device == "cuda" else "torch_native",
            "routing": "natural",
            "seconds": outcome.seconds,
            "start_seconds": outcome.start_seconds,
        }
        if case.fault:
            row["fault"] = case.fault
        problems = _problems(setup, case, outcomes, limits, row)
        # A server that a fault broke has not shown that the comparison would have noticed it.
        broke = bool(outcome.error) or case.quant not in limits
        red = bool(problems)
        row["gate"] = "pass" if red == bool(case.fault) and not (case.fault and broke) else "fail"
        row["problems"] = problems
        rows.append(row)
    return rows


def _problems(
    setup: Setup,
    case: Case,
    outcomes: dict[Case, Outcome],
    limits: dict[str, Bound],
    row: dict[str, Any],
) -> list[str]:
    """What is wrong with a case; adds to `row` what was measured."""
    outcome = outcomes[case]
    if outcome.error:
        return [outcome.error]
    if case.quant not in limits:
        return [f"{case.quant}-{COLOCATED} has no scores to compare with"]
    bound = limits[case.quant]
    reference = outcomes[Case(quant=case.quant)].by_width[setup.width]
    ours = outcome.by_width[setup.width]
    found = distance(ours, reference)
    row.update(
        _measured(found),
        bound=bound.largest,
        bound_mean=bound.mean,
        colocated_delta_max=bound.batches,
        other_kernels_delta_max=bound.other.largest,
        other_kernels_delta_mean=bound.other.mean,
    )
    row["tokens"] = outcome.state.get("tokens")
    problems = []
    if not found.largest <= bound.largest:
        problems.append(f"max |d logprob| {found.largest:.4g} is more than {bound.largest:.4g}")
    if not found.mean <= bound.mean:
        problems.append(f"mean |d logprob| {found.mean:.4g} is more than {bound.mean:.4g}")
    replays = outcome.state.get("graph_replays")
    if replays is not None:
        row["graph_replays"] = replays
        batches = -(-setup.num_sequences // setup.width)
        if case.graph and replays < batches * (setup.forced - 2):
            problems.append(f"only {replays} decode steps were graph replays")
    partner = outcomes.get(replace(case, graph=False))
    if case.graph and not case.fault and partner is not None and not partner.error:
        apart_eager = distance(ours, partner.by_width[setup.width]).largest
        row["graph_eager_delta_max"] = apart_eager
        if case.connector in BITWISE and apart_eager != 0.0:
            problems.append(f"graph and eager differ by {apart_eager:.4g}, not bitwise equal")
        elif not apart_eager <= bound.largest:
            problems.append(
                f"graph and eager differ by {apart_eager:.4g}, more than {bound.largest:.4g}"
            )
    return problems


def _measured(found: Distance) -> dict[str, Any]:
    return {
        "delta_max": found.largest,
        "delta_mean": found.mean,
        "delta_max_prefill": found.largest_prefill,
        "delta_max_decode": found.largest_decode,
        "positions": found.positions,
    }


def verdict(
    connector: str,
    quant: str,
    microbatches: int,
    graph: bool,
    path: Path | None = None,
    topology: tuple[int, int] = (1, 1),
) -> str:
    """What a benchmark writes as `gate` of its rows: "pass", "fail", or "none" if this commit was
    not gated for such a server.

    Args:
        path: a result of this command; the newest `results/gate/*.json` if None.
        topology: attention and FFN ranks.
    """
    if path is None:
        files = sorted(RESULTS.glob("*.json"), key=lambda each: each.stat().st_mtime)
        if not files:
            return "none"
        path = files[-1]
    result = json.loads(path.read_text())
    if result["commit"] != _commit():
        return "none"
    key = (connector, quant, microbatches, graph, *topology)
    fields = ("connector", "quant", "microbatches", "graph", "attn_ranks", "ffn_ranks")
    found = {
        row["gate"]
        for row in result["rows"]
        if "fault" not in row and tuple(row[name] for name in fields) == key
    }
    return "fail" if "fail" in found else "pass" if found else "none"


# --- command -----------------------------------------------------------------------------------


def report(
    setup: Setup, outcomes: dict[Case, Outcome], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The JSON of a run."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    references = [
        {
            "name": case.name,
            "error": outcome.error,
            "seconds": outcome.seconds,
            "widths": sorted(outcome.by_width),
        }
        for case, outcome in outcomes.items()
        if case.connector == COLOCATED
    ]
    return {
        "bench": "gate",
        "command": shlex.join(["python", *sys.argv]),
        "commit": _commit(),
        "versions": _versions(),
        "gpus": gpus,
        "ranks_share_gpus": sharing.wanted(),
        "driver": _driver(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "shapes": {quant: asdict(shape) for quant, shape in setup.shapes.items()},
        "samples": {
            "sequences": setup.num_sequences,
            "decoded_tokens_each": setup.forced,
            "widths": list(setup.widths),
            "runners": setup.runners,
            "factor": FACTOR,
        },
        "references": references,
        "rows": rows,
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False)
    return os.environ.get("AFD_COMMIT") or done.stdout.strip() or "unknown"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return (done.stdout.splitlines() or ["none"])[0]


def _versions() -> dict[str, str]:
    import torch

    versions = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for package in ("torch", "sglang", "sglang-afd", "sglang-kernel", "triton", "deep_ep"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def topology(text: str) -> tuple[int, int]:
    """Attention and FFN ranks of a text as 2A1F."""
    found = re.fullmatch(r"(\d+)A(\d+)F", text)
    if found is None:
        sys.exit(f"gate: --topologies {text!r} is not like 2A1F")
    return int(found[1]), int(found[2])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression over names of cases")
    parser.add_argument("--list", action="store_true", help="print the names of cases and end")
    parser.add_argument("--connectors", help="comma list; all that this host has by default")
    parser.add_argument("--quants", default="bf16,fp8")
    parser.add_argument(
        "--topologies", default="1A1F", help="comma list of attention and FFN ranks, as 2A1F"
    )
    parser.add_argument(
        "--runners",
        default="fp8=deep_gemm",
        help="--moe-runner-backend by quantisation, as bf16=triton,fp8=deep_gemm",
    )
    parser.add_argument(
        "--logs", type=Path, default=Path("gate-logs"), help="folder of server logs"
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/afd-gate"), help="checkpoints")
    parser.add_argument("--out", type=Path, help="JSON result")
    parser.add_argument("--parallel", type=int, default=8, help="servers at a time")
    parser.add_argument("--busy", type=int, default=3, help="servers that answer at a time")
    parser.add_argument("--deadline", type=float, default=420, help="seconds for all of it")
    parser.add_argument("--first-port", type=int, default=21000)
    return parser.parse_args()


def main() -> int:
    began = time.monotonic()
    args = _arguments()
    quants = tuple(args.quants.split(","))
    setup = Setup(
        device="cuda",
        shapes={quant: gate_models.Shape(quant=quant) for quant in quants},
        runners=dict(pair.split("=") for pair in args.runners.split(",") if pair),
    )
    connectors = tuple(args.connectors.split(",")) if args.connectors else usable_connectors("cuda")
    topologies = tuple(map(topology, args.topologies.split(",")))
    cases = select(all_cases(quants, connectors, topologies=topologies), args.only)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    sharing.share_if_fewer(max(map(sum, topologies)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through every `finally`
    args.logs.mkdir(parents=True, exist_ok=True)
    for quant in {case.quant for case in cases}:
        shape = setup.shapes[quant]
        gate_models.write(shape, args.work / shape.name, setup.device)
    print(f"{len(cases)} servers, checkpoints after {time.monotonic() - began:.0f} s", flush=True)
    fleet = Fleet(setup, args.logs, args.work, args.busy, args.first_port)
    left = args.deadline - (time.monotonic() - began)
    outcomes = run_all(fleet, cases, args.parallel, left)
    rows = judge(setup, outcomes)
    result = report(setup, outcomes, rows)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        said = "; ".join(row["problems"]) or f"max |d logprob| {row['delta_max']:.4g}"
        print(f"{row['gate']:4}  {row['name']}: {said}"[:400])
    missing = [each["name"] for each in result["references"] if each["error"]]
    passed = bool(rows) and not missing and all(row["gate"] == "pass" for row in rows)
    print(f"gate: {'pass' if passed else 'fail'} in {time.monotonic() - began:.0f} s", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may still wait for an answer that will not come
