"""Upstream's benchmarks in AFD mode on two GPUs, and more ranks where there are more GPUs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from gpu.conftest import BENCHMARKS, case, connectors

sys.path.append(str(BENCHMARKS))

import gate_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
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


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
@pytest.mark.parametrize(("attn", "ffn"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("connector", connectors())
def test_more_ranks(fleet, connector, attn, ffn):
    """Upstream's attention ranks join an NCCL group, which takes a GPU once, so each has its own."""
    asked = fleet.setup.asked("bf16")
    with fleet.serving(case(connector)) as server:
        reference, other = (gate_scores.score(server.url, asked, width) for width in (8, 4))
    bound = 2 * gate_scores.distance(reference, other).largest
    with fleet.serving(case(connector, attn_ranks=attn, ffn_ranks=ffn)) as server:
        found = gate_scores.score(server.url, asked, 8)
    assert gate_scores.distance(found, reference).largest <= bound
