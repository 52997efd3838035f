"""Sweeps as a table and as plots."""

from __future__ import annotations

import builtins
import xml.etree.ElementTree as ET

import pytest
from planner.harness import cost

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import canvas, plot, report, sweep
from sglang.srt.disaggregation.afd.planner.plot import Panel, Series

SVG = "{http://www.w3.org/2000/svg}"


def points(pairs=((4, 4), (28, 4), (12, 4), (8, 1)), context=16384):
    known = cost("Qwen3-235B-A22B-FP8", "gb200-nvl72")
    wire = known.estimates.link("nccl", known.hardware)
    return sweep.sweep(known, context, list(pairs), 2, wire, None)


def test_points_come_in_order_of_the_ratio():
    found = points()
    assert [(p.attn_ranks, p.ffn_ranks) for p in found] == [(4, 4), (12, 4), (28, 4), (8, 1)]


def test_what_does_not_fit_is_a_row_that_says_so():
    """227 GB of experts on one GPU of 186 GB."""
    found = points()
    assert found[-1].layout is None
    lines = report.columns(sweep.table(found))
    assert lines[-1].split()[:3] == ["8", "8", "1"]
    assert "does not fit" in lines[-1]


def test_step_grows_and_leaves_the_hidden_regime():
    found = points([(m, 4) for m in range(4, 65, 4)])
    steps = [point.layout.step_s for point in found]
    assert steps == sorted(steps)
    hidden = [point.layout.stage.regime == "hidden" for point in found]
    assert hidden == sorted(hidden, reverse=True), "once exposed, always exposed"
    assert hidden[0]
    assert not hidden[-1]


def test_nothing_to_sweep():
    with pytest.raises(AFDConfigError, match="no ratio to sweep"):
        points(())
    with pytest.raises(AFDConfigError, match="none of the 1 ratios fits gb200-nvl72"):
        points([(8, 1)])


def test_svg_has_a_dot_per_point_and_is_reproducible(tmp_path):
    found = points()
    panels = plot.sweep_panels([("AFD & more", found)], [])
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        plot.draw(panels, file, "a < b")
    root = ET.parse(files[0]).getroot()
    assert len(root.findall(f"{SVG}circle")) == 2 * 3
    assert "AFD & more" in {text.text for text in root.findall(f"{SVG}text")}
    assert files[0].read_bytes() == files[1].read_bytes()


def test_dots_stand_inside_the_axes_and_higher_is_higher(tmp_path):
    file = tmp_path / "p.svg"
    panel = Panel("y", "x", [Series("s", [(1, 10), (2, 20)], [True, False], "#000000")])
    plot.draw([panel], file, "t")
    first, second = ET.parse(file).getroot().findall(f"{SVG}circle")
    assert float(first.get("cx")) < float(second.get("cx"))
    assert float(first.get("cy")) > float(second.get("cy")) > 0
    assert (first.get("fill"), second.get("fill")) == ("#000000", "none")


@pytest.mark.parametrize("highest", [0.0003, 0.9, 1, 7, 99, 1000, 123456])
def test_ticks_are_few_round_and_cover(highest):
    ticks = plot._ticks(highest)
    assert ticks[0] == 0
    assert ticks[-2] < highest <= ticks[-1] * (1 + 1e-9)
    assert 3 <= len(ticks) <= 7


def test_png(tmp_path):
    pytest.importorskip("PIL")
    from PIL import Image

    file = tmp_path / "p.png"
    plot.draw(plot.sweep_panels([("AFD", points())], []), file, "t")
    with Image.open(file) as image:
        assert image.format == "PNG"
        assert image.size == (940, 340)
        colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert (9, 105, 218) in colours, "the curve"


def test_png_without_pillow_names_the_way_out(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AFDConfigError, match=r"needs the package pillow.*\.svg"):
        canvas.create(tmp_path / "p.png", 10, 10, "t")


def test_unknown_suffix_and_unwritable_file(tmp_path):
    panels = plot.sweep_panels([("AFD", points())], [])
    with pytest.raises(AFDConfigError, match=r"ends in \.svg or \.png"):
        plot.draw(panels, tmp_path / "p.pdf", "t")
    with pytest.raises(AFDConfigError, match="cannot be written"):
        plot.draw(panels, tmp_path / "absent" / "p.svg", "t")


def test_an_empty_panel_is_refused(tmp_path):
    with pytest.raises(AFDConfigError, match="nothing to plot"):
        plot.draw([Panel("y", "x", [])], tmp_path / "p.svg", "t")
