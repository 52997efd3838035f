"""A chart of one or two panels over the ratio M:N: throughput per GPU, and step latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import canvas
from sglang.srt.disaggregation.afd.planner.layout import Layout
from sglang.srt.disaggregation.afd.planner.sweep import Point

COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")
_WIDTH, _HEIGHT = 470, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 50, 48


class Series(NamedTuple):
    """One curve: (x, y) with a flag per point, drawn filled or hollow.

    Attributes:
        line: draw the curve; without it only its dots.
    """

    name: str
    points: Sequence[tuple[float, float]]
    filled: Sequence[bool]
    colour: str
    line: bool = True


class Level(NamedTuple):
    """A dashed horizontal line."""

    name: str
    y: float
    colour: str


class Panel(NamedTuple):
    """Axes with what they hold; both start at zero."""

    title: str
    x_label: str
    series: Sequence[Series]
    levels: Sequence[Level] = ()


def draw(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Write the panels side by side to an .svg or .png file.

    Raises:
        AFDConfigError: see `canvas.create`; a panel without points; the file cannot be written.
    """
    if not all(any(series.points for series in panel.series) for panel in panels):
        raise AFDConfigError(f"--out {path}: there is nothing to plot")
    page = canvas.create(path, _WIDTH * len(panels), _HEIGHT, title)
    for index, panel in enumerate(panels):
        _panel(page, panel, index * _WIDTH)
    try:
        page.save(path)
    except OSError as error:
        raise AFDConfigError(f"--out {path} cannot be written: {error}") from error


def sweep_panels(
    curves: Sequence[tuple[str, Sequence[Point]]], colocated: Sequence[tuple[str, Layout]]
) -> list[Panel]:
    """Panels of one or more sweeps. Filled dots: the FFN side is hidden; hollow: it shows."""
    throughput, latency, levels, steps = [], [], [], []
    for (name, points), colour in zip(curves, COLOURS, strict=False):
        fitting = [p.layout for p in points if p.layout is not None and p.layout.stage is not None]
        ratios = [p.ratio for p in points if p.layout is not None and p.layout.stage is not None]
        hidden = [bool(fit.stage and fit.stage.slack >= 0) for fit in fitting]
        rates = [(x, fit.throughput) for x, fit in zip(ratios, fitting, strict=True)]
        times = [(x, fit.step_s * 1e3) for x, fit in zip(ratios, fitting, strict=True)]
        throughput.append(Series(name, rates, hidden, colour))
        latency.append(Series(name, times, hidden, colour))
    for (name, beside), colour in zip(colocated, COLOURS, strict=False):
        levels.append(Level(name, beside.throughput, colour))
        steps.append(Level(name, beside.step_s * 1e3, colour))
    label = "attention ranks per FFN rank, M:N"
    return [
        Panel("tokens/s per GPU", label, throughput, levels),
        Panel("decode step, ms", label, latency, steps),
    ]


def _panel(page: canvas.Canvas, panel: Panel, left: float) -> None:
    xs = [x for series in panel.series for x, _ in series.points]
    ys = [y for series in panel.series for _, y in series.points]
    ys += [level.y for level in panel.levels]
    x_ticks, y_ticks = _ticks(max(xs)), _ticks(max(ys))
    x0, x1 = left + _LEFT, left + _WIDTH - _RIGHT
    y0, y1 = _HEIGHT - _BOTTOM, _TOP

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            x0 + (x1 - x0) * x / x_ticks[-1],
            y0 + (y1 - y0) * y / y_ticks[-1],
        )

    page.text(x0, 18, panel.title)
    page.text((x0 + x1) / 2, _HEIGHT - 8, panel.x_label, "middle")
    for y in y_ticks:
        page.line([at(0, y), at(x_ticks[-1], y)], canvas.GRID, width=0.5)
        page.text(x0 - 6, at(0, y)[1] + 4, f"{y:g}", "end")
    for x in x_ticks:
        page.text(at(x, 0)[0], y0 + 18, f"{x:g}", "middle")
    page.line([(x0, y1), (x0, y0), (x1, y0)], canvas.INK)
    for level in panel.levels:
        page.line([at(0, level.y), at(x_ticks[-1], level.y)], level.colour, dashed=True, width=1.5)
    for series in panel.series:
        places = [at(x, y) for x, y in series.points]
        if series.line:
            page.line(places, series.colour, width=2)
        for place, filled in zip(places, series.filled, strict=True):
            page.dot(*place, series.colour, filled)
    _legend(page, panel, x0)


def _legend(page: canvas.Canvas, panel: Panel, x: float) -> None:
    entries = [(s.name, s.colour, False) for s in panel.series]
    entries += [(level.name, level.colour, True) for level in panel.levels]
    for name, colour, dashed in entries:
        page.line([(x, 32), (x + 18, 32)], colour, dashed=dashed, width=2)
        page.text(x + 23, 36, name)
        x += 35 + 6.4 * len(name)


def _ticks(highest: float) -> list[float]:
    """Zero and round numbers up to one at or above `highest`."""
    raw = highest / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * index for index in range(math.ceil(highest / step - 1e-9) + 1)]
