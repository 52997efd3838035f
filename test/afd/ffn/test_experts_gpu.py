"""Experts on a GPU, by DeepGEMM and by Triton, eagerly and in graphs; cases in gpu_experts.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CASES = Path(__file__).with_name("gpu_experts.py")
HAS_DEEP_GEMM = (
    importlib.util.find_spec("deep_gemm") is not None
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability()[0] == 9
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Path:
    """DeepGEMM's cache, shared by the processes."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize(
    ("quantisation", "runner", "ffn_ranks", "rank"),
    [
        ("fp8", "deep_gemm", 1, 0),
        ("fp8", "deep_gemm", 3, 2),  # two experts for three slots
        ("bf16", "deep_gemm", 1, 0),
        ("bf16", "deep_gemm", 3, 2),
        ("bf16", "triton", 3, 2),
        ("fp8", "triton", 1, 0),
    ],
)
def test_experts_against_fp32(tmp_path, kernels, quantisation, runner, ffn_ranks, rank):
    if runner == "deep_gemm" and not HAS_DEEP_GEMM:
        pytest.skip("needs deep_gemm and a GPU of compute capability 9")
    done = subprocess.run(
        [
            sys.executable,
            CASES,
            tmp_path / "model",
            quantisation,
            runner,
            str(ffn_ranks),
            str(rank),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "SGLANG_DG_CACHE_DIR": str(kernels)},
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("passed", "KERNELS"))]
    print("\n".join(told))
    assert "EXPERTS OK" in done.stdout, done.stdout[-8000:] + done.stderr[-3000:]
