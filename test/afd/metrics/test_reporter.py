"""Graph hits and misses with their reasons, counts on other devices' layouts, and definitions."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.disaggregation.afd.connector.base import (
    ExpertMajorBatch,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.messages import ROLES
from sglang.srt.disaggregation.afd.metrics import definitions
from sglang.srt.disaggregation.afd.metrics.expert_rows import ExpertRows
from sglang.srt.disaggregation.afd.metrics.instruments import Instruments
from sglang.srt.disaggregation.afd.metrics.reporter import _PHASE_METRIC, GraphUse
from sglang.srt.disaggregation.afd.plan import make_plan

CAPACITY = 64


def plan(mode, tokens, microbatches=1, bucket=0):
    return make_plan(0, mode, tokens, CAPACITY, microbatches, bucket)


@pytest.mark.pain(24, 35)
def test_every_miss_has_its_reason():
    graphs = GraphUse()
    assert graphs.judge(plan("decode", (4, 1))) == ("miss", "disabled")
    assert graphs.judge(plan("warmup", (8, 8), 2, 4)) == ("miss", "warmup")
    assert graphs.judge(plan("capture", (8, 8), 2, 4)) == ("miss", "capture")
    assert graphs.judge(plan("decode", (8, 8), 2, 4)) == ("hit", "")
    assert graphs.judge(plan("extend", (100, 0))) == ("miss", "prefill")
    assert graphs.judge(plan("mixed", (100, 0))) == ("miss", "prefill")
    assert graphs.judge(plan("decode", (9, 1))) == ("miss", "too_large")
    assert graphs.judge(plan("decode", (8, 1))) == ("miss", "other")


def test_rows_of_both_layouts_are_counted_by_expert():
    rows = ExpertRows(moe_layers=2, slots=3, device=torch.device("cpu"))
    transfer = Transfer(0, 1, 0)
    rows.count(
        ReceivedBatch(
            transfer=transfer,
            hidden_RH=torch.zeros(3, 4),
            topk_ids_RK=torch.tensor([[0, 2], [-1, 2], [-1, -1]], dtype=torch.int32),
            topk_weights_RK=torch.zeros(3, 2),
            rows_per_rank=(3,),
        )
    )
    rows.count(
        ExpertMajorBatch(
            transfer=transfer,
            hidden_ELH=torch.zeros(3, 8, 4),
            scales_ELG=None,
            rows_per_expert_E=torch.tensor([5, 0, 1], dtype=torch.int32),
            expected_rows=1,
        )
    )
    assert rows.read() == [[0, 0, 0], [0, 0, 0]]  # until the step has been enqueued
    rows.step_enqueued()
    assert rows.read() == [[0, 0, 0], [6, 0, 3]]


def test_definitions_are_complete_and_sane():
    names = [metric.name for metric in definitions.METRICS]
    assert len(names) == len(set(names))
    assert set(_PHASE_METRIC.values()) <= set(names)
    for metric in definitions.METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.help.endswith(".") and metric.roles


@pytest.mark.parametrize("role", ROLES)
def test_a_rank_has_the_metrics_of_its_role(role):
    instruments = Instruments(role, 3)
    for metric in definitions.of_role(role):
        labels = tuple("x" for _ in metric.labels)
        if metric.kind == "counter":
            instruments.add(metric.name, 1, *labels)
        elif metric.kind == "gauge":
            instruments.set(metric.name, 1, *labels)
        else:
            instruments.observe(metric.name, 0.5, *labels)
    text = instruments.text().decode()
    for metric in definitions.METRICS:
        assert (f"{metric.full_name.removesuffix('_total')}" in text) == (role in metric.roles)
    assert 'rank="3"' in text and f'role="{role}"' in text


def test_a_count_kept_elsewhere_only_grows():
    instruments = Instruments("attn", 0)
    for total in (5, 5, 9, 2):
        instruments.count_to("tokens_total", total)
    own = {"role": "attn", "rank": "0"}
    assert instruments.registry.get_sample_value("sglang:afd_tokens_total", own) == 9
