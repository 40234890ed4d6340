"""Draw reward and length over samples for the three scopes, from results/advantage_scope.json, as SVG.

    python -m benchmarks.study.draw_scopes docs/images/advantage_scope.svg

A faint line is one seed, a strong line is the mean over seeds. Rings are the mean held-out accuracy or length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import load, make_parser
from benchmarks.study.advantage_scope import SCOPES, WINDOW
from benchmarks.study.curves import Line, Panel, draw


def panel(runs: Sequence[dict[str, Any]], curve: str, held: int, y_marks: Sequence[float], title: str) -> Panel:
    """The panel of one quantity: `curve` is its key in a run, `held` its column in the evaluations."""
    samples = WINDOW * len(runs[0][curve])
    lines = []
    for scope in SCOPES:
        mine = [run for run in runs if run["scope"] == scope]
        middles = [WINDOW * (number + 0.5) for number in range(min(len(run[curve]) for run in mine))]
        evaluations = list(zip(*(run["evaluations"] for run in mine), strict=False))
        lines.append(
            Line(
                name=scope,
                points=[(x, mean(run[curve][at] for run in mine)) for at, x in enumerate(middles)],
                faint=[list(zip(middles, run[curve], strict=False)) for run in mine],
                rings=[(mean(e[0] for e in each), mean(e[held] for e in each)) for each in evaluations],
            )
        )
    x_marks = range(0, samples + 1, samples // 4)
    return Panel(title=title, x_title="samples trained", x_marks=x_marks, y_marks=y_marks, lines=lines)


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("svg", type=Path)
    options = parser.parse_args()
    record = load("advantage_scope")
    runs = [run for run in record["runs"] if run["study"] == "scopes"]
    longest = max(value for run in runs for value in [*run["lengths"], *(e[2] for e in run["evaluations"])])
    shares, tokens = [0.2 * mark for mark in range(6)], range(0, int(longest) + 25, 25)
    panels = [
        panel(runs, "rewards", 1, shares, "share of right answers"),
        panel(runs, "lengths", 2, tokens, "tokens per answer"),
    ]
    options.svg.write_text(draw(panels), encoding="utf-8")


if __name__ == "__main__":
    main()
