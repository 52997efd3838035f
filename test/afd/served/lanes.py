"""Reads a trace in Chrome's format as a viewer does: processes, lanes, and spans that nest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple


class Span(NamedTuple):
    name: str
    began: float  # microseconds
    ended: float
    args: dict[str, int]


def lanes(trace: dict[str, Any]) -> dict[tuple[str, int], list[Span]]:
    """Spans by (rank, microbatch), outer before inner."""
    names = {
        event["pid"]: event["args"]["name"].partition(" (")[0]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    found: defaultdict[tuple[str, int], list[Span]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            span = Span(event["name"], event["ts"], event["ts"] + event["dur"], event["args"])
            found[names[event["pid"]], event["tid"]].append(span)
    for spans in found.values():
        spans.sort(
            key=lambda span: (span.began, -span.ended, len(span.args), "layer" not in span.name)
        )
    return dict(found)


def steps(spans: list[Span]) -> list[int]:
    return [span.args["step"] for span in spans if span.name.startswith("step ")]


def parents(spans: list[Span]) -> list[tuple[str, ...]]:
    """The names around each span and its own, outermost first; fails on a partial overlap."""
    paths, open_spans = [], []
    slack = 2e-3  # microseconds; times were written as nanoseconds over 1000
    for span in spans:
        while open_spans and open_spans[-1].ended <= span.began + slack:
            open_spans.pop()
        for outer in open_spans:
            assert span.ended <= outer.ended + slack, (outer, span)
            assert span.args["step"] == outer.args["step"]
        open_spans.append(span)
        paths.append(tuple(outer.name.split()[0].rstrip(",") for outer in open_spans))
    return paths
