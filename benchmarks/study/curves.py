"""Line charts as SVG for the scripts of this folder: panels side by side with one legend below.

Guarantees: a chart is readable without colour, since lines of one panel also differ in their dashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2171b5", "#d94801", "#238b45", "#6a51a3", "#666666", "#b8860b", "#c51b8a")
DASHES = ("none", "7 3", "2 2", "9 3 2 3", "1 3", "12 4", "4 4")
LEFT, TOP, PLOT_W, PLOT_H, GAP, FOOT = 56, 40, 380, 220, 90, 80

Point = tuple[float, float]
Place = Callable[[float, float], Point]


@dataclass(slots=True, kw_only=True, frozen=True)
class Line:
    """A named line; `faint` lines (such as single runs) and the `band` (low and high at each x) are drawn behind it."""

    name: str
    points: Sequence[Point]
    faint: Sequence[Sequence[Point]] = ()
    band: Sequence[Point] = ()
    rings: Sequence[Point] = ()


@dataclass(slots=True, kw_only=True, frozen=True)
class Panel:
    title: str
    x_title: str
    x_marks: Sequence[float]
    y_marks: Sequence[float]
    lines: Sequence[Line]


def draw(panels: Sequence[Panel]) -> str:
    """The SVG of all panels; lines with the same name look the same in each."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    width = LEFT + len(panels) * PLOT_W + (len(panels) - 1) * GAP + 54
    per_row = 2 * len(panels)
    rows = [names[at : at + per_row] for at in range(0, len(names), per_row)]
    height = TOP + PLOT_H + FOOT + 20 * (len(rows) - 1)
    parts = [f'<rect width="{width}" height="{height}" fill="white" stroke="none"/>']
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (PLOT_W + GAP), names)
    for row, some in enumerate(rows):
        step = (width - LEFT) / per_row
        for column, name in enumerate(some):
            x, y = LEFT + column * step, TOP + PLOT_H + FOOT - 18 + 20 * row
            parts.append(
                f'<line x1="{x:.0f}" x2="{x + 28:.0f}" y1="{y - 4}" y2="{y - 4}" {_stroke(names, name, 2.5)}/>'
            )
            parts.append(_text(x + 34, y, name, "start"))
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>{"".join(parts)}</svg>\n'


def _panel(panel: Panel, left: float, names: Sequence[str]) -> list[str]:
    (x_low, x_high), (y_low, y_high) = ((marks[0], marks[-1]) for marks in (panel.x_marks, panel.y_marks))

    def place(x: float, y: float) -> Point:
        return left + PLOT_W * (x - x_low) / (x_high - x_low), TOP + PLOT_H * (1 - (y - y_low) / (y_high - y_low))

    parts = [_text(left, TOP - 22, panel.title, "start", 'font-weight="bold"')]
    for mark in panel.y_marks:
        y = place(x_low, mark)[1]
        parts.append(f'<line x1="{left}" x2="{left + PLOT_W}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(_text(left - 8, y + 4, f"{mark:.1f}" if y_high <= 1 else f"{mark:,.0f}", "end"))
    parts += [_text(place(mark, y_low)[0], TOP + PLOT_H + 18, f"{mark:,.0f}") for mark in panel.x_marks]
    parts.append(_text(left + PLOT_W / 2, TOP + PLOT_H + 36, panel.x_title))
    for line in panel.lines:
        colour = _colour(names, line.name)
        if line.band:
            xs = [x for x, _ in line.points]
            around = [*zip(xs, (high for _, high in line.band), strict=True)]
            around += [*zip(xs, (low for low, _ in line.band), strict=True)][::-1]
            parts.append(f'<polygon points="{_path(place, around)}" fill="{colour}" opacity="0.12"/>')
        thin = f'stroke="{colour}" stroke-width="1" opacity="0.22"'
        parts += [f'<polyline points="{_path(place, points)}" fill="none" {thin}/>' for points in line.faint]
        parts.append(f'<polyline points="{_path(place, line.points)}" fill="none" {_stroke(names, line.name, 2.2)}/>')
        for x, y in (place(*ring) for ring in line.rings):
            ring = f'fill="white" stroke="{colour}" stroke-width="2"'
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {ring}/>')
    return parts


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _stroke(names: Sequence[str], name: str, width: float) -> str:
    dash = DASHES[names.index(name) % len(DASHES)]
    return f'stroke="{_colour(names, name)}" stroke-width="{width}" stroke-dasharray="{dash}" stroke-linejoin="round"'


def _path(place: Place, points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))


def _text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(words)}</text>'
