"""The Grafana dashboard asks only for metrics and labels that exist, and docs/metrics.md is current."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib.metadata import distribution
from pathlib import Path

import pytest

from sglang.srt.disaggregation.afd.metrics import definitions

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "docker" / "grafana" / "sglang-afd.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Labels that Prometheus, or one of its histograms, adds.
OTHERS = {"instance", "le"}
_SUFFIX = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def series() -> dict[str, set[str]]:
    """Labels of every series of ours, by its name in Prometheus."""
    return {
        metric.full_name + suffix: {*definitions.COMMON_LABELS, *metric.labels, *OTHERS}
        for metric in definitions.METRICS
        for suffix in _SUFFIX[metric.kind]
    }


def queries() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("query", queries())
def test_every_queried_metric_and_label_exists(query: str) -> None:
    ours = series()
    used = set(re.findall(r"sglang:\w+", query))
    assert used
    upstream = {name for name in used if name not in ours}
    assert not any(name.startswith(definitions.PREFIX) for name in upstream), upstream
    for name in upstream:
        assert name in upstream_names(), name
    if not upstream:
        known = set.union(*(ours[name] for name in used))
        by = re.findall(r"\b(?:by|on) \(([^)]*)\)", query)
        labels = {label.strip() for group in by for label in group.split(",")}
        labels |= set(re.findall(r"[{,]\s*(\w+)\s*=", query))
        assert labels <= known, labels - known
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def upstream_names() -> set[str]:
    root = Path(str(distribution("sglang").locate_file("sglang/srt/observability")))
    text = (root / "metrics_collector.py").read_text()
    return set(re.findall(r'name="(sglang:\w+)"', text))


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join([*queries(), json.dumps(DASHBOARD["templating"])])
    missing = [m.full_name for m in definitions.METRICS if m.full_name not in text]
    assert not missing


def test_legends_use_labels_that_their_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in kept or " by " not in target["expr"], (panel["title"], label)


def test_panels_have_ids_places_and_the_chosen_source() -> None:
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["uid"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(refs) == len(set(refs))


def test_the_page_of_metrics_is_generated_from_the_definitions() -> None:
    path = ROOT / "scripts" / "gen_metrics.py"
    spec = importlib.util.spec_from_file_location("gen_metrics", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "metrics.md").read_text() == module.text()
