"""Draw the result of `study.py`: accuracy over samples and over CPU seconds, one SVG per algorithm.

    python -m benchmarks.study.draw_study [benchmarks/results/study.json] [--to docs/images]

Lines are means over seeds. Bands are 95 % intervals of these means, for the first and the last strategy only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.record import RESULTS, make_parser
from benchmarks.study.curves import Line, Panel, Point, draw
from benchmarks.study.intervals import student
from benchmarks.study.study_figures import by_arm

ARMS = (
    "sync",
    "sync-large",
    "sorted-on-policy, lookahead 2",
    "sorted-partial, lookahead 2",
    "sorted-replay, lookahead 2",
)
WITH_BAND = (ARMS[0], ARMS[-1])


def line(name: str, runs: Sequence[Mapping[str, Any]], axis: str) -> Line:
    """The line of one strategy; both axes are means over seeds at each evaluation."""
    points: list[Point] = []
    band: list[Point] = []
    for at in zip(*[run["curve"] for run in runs], strict=True):
        middle, low, high = student([point["accuracy"] for point in at])
        points.append((mean(point[axis] for point in at), middle))
        band.append((low, high))
    return Line(name=name, points=points, band=band if name in WITH_BAND else ())


def panel(records: Sequence[Mapping[str, Any]], algorithm: str, axis: str, title: str) -> Panel:
    arms = by_arm(records, algorithm)
    lines = [line(name, list(arms[name].values()), axis) for name in ARMS]
    longest = max(line.points[-1][0] for line in lines)
    step = next(step for step in (5, 10, 20, 50, 128, 256, 512) if longest / step <= 8)
    return Panel(
        title=f"{algorithm}: held-out accuracy",
        x_title=title,
        x_marks=[step * at for at in range(math.ceil(longest / step) + 1)],
        y_marks=[0.2, 0.4, 0.6, 0.8, 1.0],
        lines=lines,
    )


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "study.json")
    parser.add_argument("--to", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    records = json.loads(given.results.read_text(encoding="utf-8"))["runs"]
    for algorithm in dict.fromkeys(record["algorithm"] for record in records):
        panels = [
            panel(records, algorithm, "samples", "samples trained"),
            panel(records, algorithm, "seconds", "CPU seconds of training"),
        ]
        path = given.to / f"study-{algorithm.rstrip('+')}.svg"
        path.write_text(draw(panels), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
