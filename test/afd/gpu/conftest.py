"""Servers on the GPUs of one host, as the gate of benchmark/afd starts them. Ranks share GPUs where
there are fewer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmark" / "afd"
sys.path.append(str(BENCHMARKS))

import gate  # noqa: E402
import gate_models  # noqa: E402
from gate import Case, Fleet, Running  # noqa: E402

from sglang.srt.disaggregation.afd import sharing  # noqa: E402

QUANT = "bf16"
# Of the servers that tests start, unless the test says otherwise.
RANKS = gate.topology(os.environ.get("AFD_GPU_RANKS", "1A1F"))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Of the gate's BF16 model; what a test leaves running ends with the session."""
    sharing.share_if_fewer(sum(RANKS))
    work = Path("/tmp/afd-gate")  # as the command's default, which may have made it already
    shape = gate_models.Shape(quant=QUANT)
    gate_models.write(shape, work / shape.name, "cuda")
    torch.cuda.empty_cache()
    setup = gate.Setup(device="cuda", shapes={QUANT: shape})
    made = Fleet(setup, tmp_path_factory.mktemp("gpu-logs"), work, first_port=25000)
    yield made
    made.close()


def case(connector: str, graph: bool = True, microbatches: int = 1) -> Case:
    attn_ranks, ffn_ranks = RANKS
    return Case(
        quant=QUANT,
        connector=connector,
        graph=graph,
        microbatches=microbatches,
        attn_ranks=attn_ranks,
        ffn_ranks=ffn_ranks,
    )


def connectors() -> list[str]:
    """Those that this host can serve with, by name."""
    return list(gate.usable_connectors("cuda")) if torch.cuda.is_available() else ["nccl"]


def gate_rows(folder: Path, limit_s: float, *flags: str) -> dict[str, dict]:
    """Rows of a run of the gate's command, by name."""
    command = [
        *(sys.executable, str(BENCHMARKS / "gate.py"), *flags),
        *("--logs", str(folder), "--out", str(folder / "gate.json")),
        *("--deadline", str(limit_s - 40)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    print(done.stdout[-6000:], done.stderr[-3000:])
    return {row["name"]: row for row in json.loads((folder / "gate.json").read_text())["rows"]}


def used_mib(gpu: int) -> float:
    free, total = torch.cuda.mem_get_info(gpu)
    return (total - free) / 2**20


def utilization() -> list[int]:
    """Percent of the last sample period, by GPU."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]


def wait_for_end(server: Running, limit_s: float) -> int:
    """Exit code of the server's main process."""
    began = time.monotonic()
    while server.process.poll() is None:
        assert time.monotonic() - began < limit_s, f"still running after {limit_s} s"
        time.sleep(0.2)
    return int(server.process.returncode)
