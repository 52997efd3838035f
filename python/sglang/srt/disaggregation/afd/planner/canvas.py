"""Two places to draw lines and text on: an SVG file, and a PNG through Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from xml.sax.saxutils import escape

from sglang.srt.disaggregation.afd.errors import AFDConfigError

Points = Sequence[tuple[float, float]]
# Readable on a white and on a dark page.
INK, GRID = "#6e7781", "#afb8c1"
_FONT_SIZE = 13


class Canvas(Protocol):
    """Coordinates are pixels from the upper left corner."""

    def line(self, points: Points, colour: str, dashed: bool = False, width: float = 1) -> None: ...

    def dot(self, x: float, y: float, colour: str, filled: bool = True) -> None: ...

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None: ...

    def save(self, path: Path) -> None: ...


class Svg:
    """Plain SVG, the same bytes for the same drawing."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
            f"  <title>{escape(title)}</title>",
            f"  <style>text {{ font: {_FONT_SIZE}px system-ui, Helvetica, Arial, sans-serif; "
            f"fill: {INK}; }}</style>",
        ]

    def line(self, points: Points, colour: str, dashed: bool = False, width: float = 1) -> None:
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(
            f'  <polyline points="{way}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dash}/>'
        )

    def dot(self, x: float, y: float, colour: str, filled: bool = True) -> None:
        fill = colour if filled else "none"
        self._parts.append(
            f'  <circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}"/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._parts.append(
            f'  <text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self._parts, "</svg>", ""]), encoding="utf-8")


class Png:
    """Pixels, for places that take no SVG. Pillow comes with SGLang, not with the planner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            raise AFDConfigError(
                "--out with .png needs the package pillow; install it, or name an .svg file"
            ) from error
        self._image = Image.new("RGB", (width, height), "white")
        self._image.info["title"] = title
        self._draw = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(_FONT_SIZE)

    def line(self, points: Points, colour: str, dashed: bool = False, width: float = 1) -> None:
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            length = max(1.0, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
            step = 10 / length if dashed else 1.0
            start = 0.0
            while start < 1:
                end = min(1.0, start + step * (0.6 if dashed else 1))
                ends = [(x0 + (x1 - x0) * part, y0 + (y1 - y0) * part) for part in (start, end)]
                self._draw.line(ends, fill=colour, width=max(1, round(width)))
                start += step

    def dot(self, x: float, y: float, colour: str, filled: bool = True) -> None:
        box = (x - 3.5, y - 3.5, x + 3.5, y + 3.5)
        self._draw.ellipse(box, fill=colour if filled else "white", outline=colour)

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        side = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        self._draw.text((x, y), text, fill=INK, font=self._font, anchor=side)

    def save(self, path: Path) -> None:
        self._image.save(path)


def create(path: Path, width: int, height: int, title: str) -> Canvas:
    """The canvas that the file's suffix asks for.

    Raises:
        AFDConfigError: neither .svg nor .png, or no Pillow for the latter.
    """
    if path.suffix == ".svg":
        return Svg(width, height, title)
    if path.suffix == ".png":
        return Png(width, height, title)
    raise AFDConfigError(f"--out {path}: name a file that ends in .svg or .png")
