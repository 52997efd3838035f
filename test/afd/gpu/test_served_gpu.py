"""On two GPUs of one host: AFD scores as colocated SGLang does, at prefill and decode steps.

The gate of benchmark/afd, as tests: one run of its command, one test per case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from gpu.conftest import BENCHMARKS, connectors

sys.path.append(str(BENCHMARKS))

import gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(700),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

QUANTS = os.environ.get("AFD_GATE_QUANTS", "bf16,fp8")
NAMES = [
    case.name
    for case in gate.all_cases(tuple(QUANTS.split(",")), tuple(connectors()))
    if case.connector != gate.COLOCATED
]
TIMEOUT_S = 560


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    command = [
        *(sys.executable, str(BENCHMARKS / "gate.py"), "--quants", QUANTS),
        *("--logs", str(folder), "--out", str(folder / "gate.json")),
        *("--deadline", str(TIMEOUT_S - 40)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    print(done.stdout[-6000:], done.stderr[-3000:])
    return {row["name"]: row for row in json.loads((folder / "gate.json").read_text())["rows"]}


@pytest.mark.pain(6, 18, 27, 46, 76)
@pytest.mark.parametrize("name", NAMES)
def test_gate(rows, name):
    row = rows[name]
    print({key: row.get(key) for key in ("delta_max", "bound", "graph_eager_delta_max")})
    assert row["gate"] == "pass", row["problems"]
    if "fault" not in row:
        assert row["positions"] >= 1000
