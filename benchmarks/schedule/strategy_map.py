"""The map "which strategy when" of `sortedrl plan`: made by simulation, and checked between its points.

    python -m benchmarks.schedule.strategy_map             # checks the shipped map, prints its digest
    python -m benchmarks.schedule.strategy_map --write     # makes it anew: simulate/presets/strategy_map.json

The check draws conditions between the points of the grid, simulates all choices there with another seed, and compares:
how often the map's advice is the fastest choice within 5 %, how much speed it loses, and how far its speeds are off.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.record import ROOT, make_parser, save
from sortedrl.simulate.strategy_map import AXES, Condition, MapPoint, grid, measure, nearest, shipped_map, to_json

PATH = ROOT / "src" / "sortedrl" / "simulate" / "presets" / "strategy_map.json"
NUM_CHECKS = 24
QUESTIONS = {
    "staleness 0": {"max_staleness": 0},
    "any staleness": {},
    "staleness 0, learner apart": {"max_staleness": 0, "overlap": True},
    "any staleness, learner apart": {"overlap": True},
}


def drawn_condition(rng: random.Random) -> Condition:
    """A condition anywhere within the grid."""
    values = {}
    for name, marks in AXES.items():
        if name in ("batch_per_slot", "diverged"):
            values[name] = math.exp(rng.uniform(math.log(marks[0]), math.log(marks[-1])))
        else:
            values[name] = rng.uniform(marks[0], marks[-1])
    return Condition(**values)


def check(points: Sequence[MapPoint], console: Console) -> dict[str, Any]:
    rng = random.Random(0)
    lost: dict[str, list[float]] = {question: [] for question in QUESTIONS}
    errors: list[float] = []
    runs = []
    for _ in track(range(NUM_CHECKS), description="checks", console=console):
        there = measure(drawn_condition(rng), seed=7)
        known = nearest(points, there.condition)
        errors += [abs(known.speedups[name] / there.speedups[name] - 1) for name in there.speedups if name != "sync"]
        runs.append({"condition": asdict(there.condition), "speedups": there.speedups})
        for question, allowed in QUESTIONS.items():
            chosen, best = known.advice(**allowed), there.advice(**allowed)
            lost[question].append(max(0.0, 1 - there.speedups[chosen] / there.speedups[best]))
    found = {
        question: {
            "within_5_percent": mean(value <= 0.05 for value in values),
            "mean_lost": mean(values),
            "most_lost": max(values),
        }
        for question, values in lost.items()
    }
    return {
        "checks": found,
        "speed_error_median": median(errors),
        "speed_error_p90": sorted(errors)[int(0.9 * len(errors))],
        "runs": runs,
    }


def digest(points: Sequence[MapPoint]) -> str:
    """The advice over tail and step cost, with as many slots as samples per update and a small learner."""
    middle = {"batch_per_slot": 1.0, "learner_share": 0.1, "diverged": 0.07}
    lines = []
    for question in ("staleness 0", "any staleness"):
        lines += [f"| {question}: tail | " + " | ".join(f"fixed {share:.0%}" for share in AXES["fixed_share"]) + " |"]
        lines += ["|" + " --- |" * (1 + len(AXES["fixed_share"]))]
        for tail in AXES["tail"]:
            cells = [f"{tail:g}"]
            for share in AXES["fixed_share"]:
                point = nearest(points, Condition(tail=tail, fixed_share=share, **middle))
                name = point.advice(**QUESTIONS[question])
                cells.append(f"{name} ({point.speedups[name]:.2f})")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="make the map anew")
    given = parser.parse_args()
    console = Console(stderr=True)
    if given.write:
        points = [measure(c) for c in track(list(grid()), description="map", console=console)]
        rows = to_json(points)
        text = ",\n".join(json.dumps(row) for row in rows.pop("points"))
        head = json.dumps(rows)[:-1]
        PATH.write_text(f'{head}, "points": [\n{text}\n]}}\n', encoding="utf-8")
        shipped_map.cache_clear()
    points = shipped_map()
    found = check(points, console)
    if given.json:
        print(json.dumps(found))
        return
    save("strategy_map", found)
    print(digest(points))
    for question, figures in found["checks"].items():
        print(
            f"{question}: within 5 % of the fastest in {figures['within_5_percent']:.0%} of {NUM_CHECKS} conditions, "
            f"{figures['mean_lost']:.1%} lost on average, {figures['most_lost']:.0%} at most"
        )
    print(f"error of the map's speeds: median {found['speed_error_median']:.0%}, p90 {found['speed_error_p90']:.0%}")


if __name__ == "__main__":
    main()
