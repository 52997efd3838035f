"""Upstream's benchmarks in AFD mode on GPUs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from gpu.conftest import BENCHMARKS, case, connectors

sys.path.append(str(BENCHMARKS))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TIMEOUT_S = 300


def run(*argv: object) -> str:
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.parametrize("connector", connectors())
def test_bench_one_batch(fleet, connector, tmp_path):
    import gate_models

    # The tool draws token ids below 10000.
    shape = gate_models.Shape(quant="bf16", layers=2, experts=16, vocab=10240)
    model = gate_models.write(shape, tmp_path / "model", "cuda")
    output = run(
        *("-m", "sglang.bench_one_batch", "--model-path", model),
        *("--disaggregation-mode", "afd", "--afd-connector", connector),
        *("--afd-max-tokens-per-rank", 64, "--attention-backend", "triton"),
        *("--cuda-graph-bs-decode", 8, "--max-total-tokens", 4096),
        *("--batch-size", 8, "--input-len", 32, "--output-len", 8),
    )
    assert re.search(r"Decode\.  median latency: .* median throughput: ", output), output[-3000:]


def test_bench_serving(fleet):
    with fleet.serving(case("nccl")) as server:
        port = server.url.rpartition(":")[2]
        output = run(
            *("-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1"),
            *("--port", port, "--dataset-name", "random-ids", "--num-prompts", 16),
            *("--random-input-len", 24, "--random-output-len", 16, "--random-range-ratio", 1.0),
        )
    assert re.search(r"Successful requests:\s+16\b", output), output[-3000:]
