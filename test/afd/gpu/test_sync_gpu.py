"""No host waits for its GPU between the layers of a step, on either role.

In the eager steps of a served model, torch raises where a call would wait; a captured step cannot
wait at all.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from gpu.conftest import BENCHMARKS, case, connectors

sys.path.append(str(BENCHMARKS))

import gate_faults
import gate_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("connector", connectors())
def test_no_host_sync_in_a_step(fleet, connector, microbatches):
    watched = replace(case(connector, False, microbatches), fault=gate_faults.NO_SYNC)
    with fleet.serving(watched) as server:
        scores = gate_scores.score(server.url, fleet.setup.asked("bf16")[:16], 8)
    assert scores.num_positions > 100
