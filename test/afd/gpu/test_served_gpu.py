"""On the GPUs of one host: AFD scores as colocated SGLang does, at prefill and decode steps.

The gate of benchmark/afd, as tests: one run of its command, one test per case.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from gpu.conftest import BENCHMARKS, connectors, gate_rows

sys.path.append(str(BENCHMARKS))

import gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(700),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

QUANTS = os.environ.get("AFD_GATE_QUANTS", "bf16,fp8")
NAMES = [
    case.name
    for case in gate.all_cases(tuple(QUANTS.split(",")), tuple(connectors()))
    if not case.is_colocated
]
TIMEOUT_S = 560


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return gate_rows(tmp_path_factory.mktemp("gate"), TIMEOUT_S, "--quants", QUANTS)


@pytest.mark.pain(6, 18, 27, 46, 76)
@pytest.mark.parametrize("name", NAMES)
def test_gate(rows, name):
    row = rows[name]
    print({key: row.get(key) for key in ("delta_max", "bound", "graph_eager_delta_max")})
    assert row["gate"] == "pass", row["problems"]
    if "fault" not in row:
        assert row["positions"] >= 1000
