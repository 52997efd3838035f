"""The GPU gate's own judgement, without servers: what turns it red, and that its scores are right."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmark" / "afd"))

import gate
import gate_faults
import gate_models
from gate import COLOCATED, OTHER_KERNELS, Case, Outcome, Setup
from gate_scores import Scores, distance

SHAPE = gate_models.Shape(
    quant="bf16", hidden=256, layers=2, experts=4, topk=2, inner=128, heads=2, head_dim=128, vocab=32
)  # fmt: skip
SETUP = Setup(device="cuda", shapes={"bf16": SHAPE}, num_sequences=2, forced=3, widths=(1, 2, 4))
BASE = [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]
REPLAYS = {"graph_replays": 9, "tokens": 5}


def scores(shift: float = 0.0) -> Scores:
    """All but the first position of the first sequence are equal for all shifts."""
    moved = [[BASE[0][0] + shift, *BASE[0][1:]], BASE[1]]
    return Scores(prefill=[list(row) for row in BASE], decode=moved)


def outcomes(other: float = 0.0, **shifts: float) -> dict[Case, Outcome]:
    """Colocated, whose widths are 0.1 apart, with other kernels `other`; a case for each name."""
    reference = Case(quant="bf16")
    by_width = {1: scores(0.1), 2: scores(), 4: scores(0.1)}
    found = {reference: Outcome(reference, by_width=by_width)}
    partner = Case(quant="bf16", connector=OTHER_KERNELS)
    found[partner] = Outcome(partner, by_width={2: scores(other)})
    for name, shift in shifts.items():
        connector, way, *fault = name.split("_", 2)
        case = Case(
            quant="bf16", connector=connector, graph=way == "graph", fault="".join(fault)
        )  # fmt: skip
        found[case] = Outcome(case, by_width={2: scores(shift)}, state=dict(REPLAYS))
    return found


def verdicts(found: dict[Case, Outcome]) -> dict[str, str]:
    return {row["name"]: row["gate"] for row in gate.judge(SETUP, found)}


def test_the_bound_is_one_and_a_half_times_what_colocated_differs_from_itself():
    found = outcomes(nccl_eager=0.149, deepep_eager=0.151)
    assert verdicts(found) == {"bf16-nccl-eager-1mb": "pass", "bf16-deepep-eager-1mb": "fail"}
    row = next(row for row in gate.judge(SETUP, found) if row["gate"] == "fail")
    assert row["problems"] == [
        "max |d logprob| 0.151 is more than 0.15",
        "mean |d logprob| 0.01258 is more than 0.0125",
    ]
    assert row["delta_max_prefill"] == 0.0
    assert row["positions"] == 12


def test_other_kernels_of_sglang_may_be_further_apart_than_batch_sizes():
    assert verdicts(outcomes(other=0.2, nccl_eager=0.29)) == {"bf16-nccl-eager-1mb": "pass"}
    assert verdicts(outcomes(other=0.2, nccl_eager=0.31)) == {"bf16-nccl-eager-1mb": "fail"}


def test_many_small_differences_are_red():
    found = outcomes(nccl_eager=0.0)
    case = next(case for case in found if case.connector == "nccl")
    spread = [[value + 0.05 for value in row] for row in BASE]
    found[case].by_width[2] = Scores(prefill=spread, decode=spread)
    (row,) = gate.judge(SETUP, found)
    assert row["problems"] == ["mean |d logprob| 0.05 is more than 0.0125"]


def test_graphs_must_give_the_bits_of_eager_steps_if_the_connector_only_moves_rows():
    found = outcomes(nccl_eager=0.0, nccl_graph=1e-6, deepep_eager=0.0, deepep_graph=1e-6)
    assert verdicts(found) == {
        "bf16-nccl-eager-1mb": "pass",
        "bf16-nccl-graph-1mb": "fail",
        "bf16-deepep-eager-1mb": "pass",
        "bf16-deepep-graph-1mb": "pass",
    }


def test_graphs_that_were_not_replayed_are_red():
    found = outcomes(nccl_graph=0.0)
    case = next(case for case in found if case.connector == "nccl")
    found[case].state["graph_replays"] = 0
    assert verdicts(found) == {"bf16-nccl-graph-1mb": "fail"}


@pytest.mark.parametrize("shift", [math.nan, math.inf, 5.0])
def test_numbers_that_are_none_are_red(shift):
    assert verdicts(outcomes(nccl_eager=shift)) == {"bf16-nccl-eager-1mb": "fail"}


def test_a_fault_passes_only_if_the_comparison_noticed_it():
    found = outcomes(nccl_graph_layer_stale=5.0, nccl_graph_output_zeroed=0.01)
    broken = Case(quant="bf16", connector="nccl", fault="experts_swapped")
    found[broken] = Outcome(broken, error="the server ended")
    assert verdicts(found) == {
        "bf16-nccl-graph-1mb-layer_stale": "pass",
        "bf16-nccl-graph-1mb-output_zeroed": "fail",
        "bf16-nccl-graph-1mb-experts_swapped": "fail",
    }


def test_without_a_reference_nothing_passes():
    found = outcomes(nccl_eager=0.0)
    reference = Case(quant="bf16")
    found[reference] = Outcome(reference, error="out of memory")
    (row,) = gate.judge(SETUP, found)
    assert row["gate"] == "fail"
    assert row["problems"] == [f"bf16-{COLOCATED} has no scores to compare with"]


def test_benchmarks_read_the_verdict_of_this_commit_only(tmp_path, monkeypatch):
    rows = gate.judge(SETUP, outcomes(nccl_eager=0.0, nccl_graph=5.0))
    path = tmp_path / "gate.json"
    monkeypatch.setattr(gate, "_commit", lambda: "abc")
    path.write_text(json.dumps({"commit": "abc", "rows": rows}))
    assert gate.verdict("nccl", "bf16", 1, graph=False, path=path) == "pass"
    assert gate.verdict("nccl", "bf16", 1, graph=True, path=path) == "fail"
    assert gate.verdict("nccl", "bf16", 2, graph=True, path=path) == "none"
    path.write_text(json.dumps({"commit": "abd", "rows": rows}))
    assert gate.verdict("nccl", "bf16", 1, graph=False, path=path) == "none"


def test_every_fault_is_a_case_and_a_selection_keeps_its_reference():
    cases = gate.all_cases(("bf16", "fp8"), ("nccl", "deepep"))
    assert {case.fault for case in cases} == {"", *gate_faults.FAULTS}
    chosen = gate.select(cases, "fp8-deepep-graph-2mb")
    assert [case.name for case in chosen] == [
        "fp8-colocated",
        "fp8-colocated-with-other-kernels",
        "fp8-deepep-graph-2mb",
    ]
    assert len({case.name for case in cases}) == len(cases)


def test_forced_tokens_and_their_log_probability():
    """As upstream's greedy sampler sees it: argmax, and log_softmax of what the processor left."""
    import gate_forced

    torch.manual_seed(0)
    params = [{"forced": [5, 7]}, {"forced": [9, 3]}]
    for step in range(3):  # the last one runs beyond the request under the overlap scheduler
        logits = 3 * torch.randn(2, 16)
        token = [p["forced"][min(step, 1)] for p in params]
        wanted = torch.log_softmax(logits, dim=1)[[0, 1], token].tolist()
        left = gate_forced.Forced()(logits, params)
        assert left.argmax(dim=1).tolist() == token
        slots = torch.log_softmax(left, dim=1)[:, gate_forced.SLOT].tolist()
        found = [gate_forced.logprob(slot) for slot in slots]
        assert found == pytest.approx(wanted, abs=1e-5)


def test_block_fp8():
    weight = torch.randn(256, 384) * torch.linspace(0.01, 1, 384)
    values, scales = gate_models.to_block_fp8(weight)
    assert (values.dtype, scales.dtype, scales.shape) == (
        torch.float8_e4m3fn,
        torch.float32,
        (2, 3),
    )
    restored = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.allclose(restored, weight, rtol=2**-3, atol=2e-3)


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
def test_a_checkpoint_has_its_experts_in_shards_of_their_own(tmp_path, quant):
    shape = gate_models.Shape(**{**vars(SHAPE), "quant": quant})
    gate_models.write(shape, tmp_path, "cpu")
    before = (tmp_path / "config.json").stat().st_mtime_ns
    gate_models.write(shape, tmp_path, "cpu")
    assert (tmp_path / "config.json").stat().st_mtime_ns == before
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert all(
        (".experts." in name) != file.startswith("model-00001") for name, file in index.items()
    )
    tensors = load_file(tmp_path / "model-00003-of-00003.safetensors")
    down = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert down.shape == (256, 128)
    assert down.dtype == (torch.float8_e4m3fn if quant == "fp8" else torch.bfloat16)
    scale = "model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"
    assert (scale in tensors) == (quant == "fp8")


def test_faults_of_weights():
    def layer(base: float) -> types.SimpleNamespace:
        module = torch.nn.Module()
        module.num_local_experts = 3
        module.w = torch.nn.Parameter(base + torch.arange(3.0), requires_grad=False)
        module.other = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        return types.SimpleNamespace(module=module)

    def loaded(fault) -> list[list[float]]:
        class FFNModelRunner:
            def load(self):
                return [layer(0.0), layer(10.0)]

        fault(types.SimpleNamespace(FFNModelRunner=FFNModelRunner))
        return [each.module.w.tolist() for each in FFNModelRunner().load()]

    assert loaded(gate_faults.experts_swapped) == [[1, 0, 2], [11, 10, 12]]
    assert loaded(gate_faults.layer_stale) == [[0, 1, 2], [0, 1, 2]]


def test_distance_needs_the_same_sequences():
    with pytest.raises(ValueError, match="zip"):
        distance(scores(), Scores(prefill=BASE[:1], decode=BASE))
