"""Draw reward and length over samples for the three scopes, from the result file of advantage_scope.py, as SVG.

    python benchmarks/draw_scopes.py docs/advantage_scope.svg

A thin line is one seed, a thick one the mean over seeds; rings are the mean held-out accuracy or length.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from advantage_scope import SCOPES, WINDOW
from record import RESULTS

COLOURS = {"batch": "#2171b5", "cohort": "#d94801", "running": "#238b45"}
WIDTH, HEIGHT, LEFT, TOP, PLOT_W, PLOT_H, GAP = 960, 340, 56, 40, 380, 220, 90

Place = Callable[[float, float], tuple[float, float]]


def text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{words}</text>'


def line(place: Place, points: Sequence[tuple[float, float]], style: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    return f'<polyline points="{path}" fill="none" stroke-linejoin="round" {style}/>'


def axes(place: Place, samples: int, marks: Sequence[float], label: Callable[[float], str], title: str) -> list[str]:
    parts = []
    for mark in marks:
        x, y = place(0, mark)
        parts.append(f'<line x1="{x}" x2="{x + PLOT_W}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(text(x - 8, y + 4, label(mark), "end"))
    for at in range(0, samples + 1, samples // 4):
        x, y = place(at, marks[0])
        parts.append(text(x, y + 18, f"{at:,}"))
    x, y = place(samples / 2, marks[0])
    parts.append(text(x, y + 36, "samples trained"))
    parts.append(text(place(0, 0)[0], TOP - 22, title, "start", 'font-weight="bold"'))
    return parts


def panel(
    runs: Sequence[dict[str, Any]], left: float, curve: str, held: int, marks: Sequence[float], title: str
) -> list[str]:
    """One quantity: `curve` names the windows of trained samples, `held` the column of an evaluation."""
    samples, low, high = WINDOW * len(runs[0][curve]), marks[0], marks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return left + PLOT_W * x / samples, TOP + PLOT_H * (1 - (y - low) / (high - low))

    label = (lambda mark: f"{mark:.1f}") if high <= 1 else (lambda mark: f"{mark:.0f}")
    parts = axes(place, samples, marks, label, title)
    for scope in SCOPES:
        mine, colour = [run for run in runs if run["scope"] == scope], COLOURS[scope]
        middles = [WINDOW * (number + 0.5) for number in range(min(len(run[curve]) for run in mine))]
        for run in mine:
            points = list(zip(middles, run[curve], strict=False))
            parts.append(line(place, points, f'stroke="{colour}" stroke-width="1" opacity="0.22"'))
        means = [mean(run[curve][at] for run in mine) for at in range(len(middles))]
        parts.append(line(place, list(zip(middles, means, strict=True)), f'stroke="{colour}" stroke-width="2.5"'))
        for number in range(min(len(run["evaluations"]) for run in mine)):
            at = mean(run["evaluations"][number][0] for run in mine)
            x, y = place(at, mean(run["evaluations"][number][held] for run in mine))
            ring = f'fill="white" stroke="{colour}" stroke-width="2"'
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {ring}/>')
    return parts


def legend() -> list[str]:
    parts, x = [], 330.0
    for scope in SCOPES:
        parts.append(f'<line x1="{x}" x2="{x + 26}" y1="322" y2="322" stroke="{COLOURS[scope]}" stroke-width="3"/>')
        parts.append(text(x + 32, 326, scope, "start"))
        x += 110
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what advantage_scope does.")
    parser.add_argument("svg", type=Path)
    options = parser.parse_args()
    record = json.loads((RESULTS / "advantage_scope.json").read_text(encoding="utf-8"))
    runs = [run for run in record["runs"] if run["study"] == "scopes"]
    longest = max(value for run in runs for value in [*run["lengths"], *(e[2] for e in run["evaluations"])])
    tops = [float(mark) for mark in range(0, int(longest) + 25, 25)]
    shares = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    parts = [
        *legend(),
        *panel(runs, LEFT, "rewards", 1, shares, "share of right answers"),
        *panel(runs, LEFT + PLOT_W + GAP, "lengths", 2, tops, "tokens an answer"),
    ]
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    box = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white" stroke="none"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    options.svg.write_text(f"{head}{box}{''.join(parts)}</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
