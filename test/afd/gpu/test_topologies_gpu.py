"""M attention and N FFN ranks under CUDA graphs score as one colocated rank, and so do idle ranks.

Ranks share GPUs on a host with fewer. That shows the kernels, the graphs and the step protocol of
M:N; links between more GPUs it does not show.
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

TOPOLOGIES = os.environ.get("AFD_GATE_TOPOLOGIES", "2A1F,1A2F,2A2F,3A1F")
ONLY = os.environ.get("AFD_GATE_ONLY", "f$")  # no faults
TIMEOUT_S = 560
# Connectors that were not seen to work with several ranks on a GPU.
APART = ("deepep",)
USED = tuple(name for name in connectors() if torch.cuda.device_count() > 3 or name not in APART)
CASES = gate.all_cases(
    ("bf16", "fp8"), USED, topologies=tuple(map(gate.topology, TOPOLOGIES.split(",")))
)
NAMES = [case.name for case in gate.select(CASES, ONLY) if not case.is_colocated]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return gate_rows(
        tmp_path_factory.mktemp("topologies"),
        TIMEOUT_S,
        *("--topologies", TOPOLOGIES, "--connectors", ",".join(USED), "--only", ONLY),
    )


@pytest.mark.pain(2, 5)
@pytest.mark.parametrize("name", NAMES)
def test_more_ranks(rows, name):
    row = rows[name]
    print({key: row.get(key) for key in ("delta_max", "bound", "graph_eager_delta_max")})
    assert row["gate"] == "pass", row["problems"]
