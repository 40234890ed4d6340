"""Where sorted scheduling does not pay: even lengths, a slow learner, or more slots than a cohort fills.

    python -m benchmarks.schedule.where_not [--samples 8192] [--seeds 3] [--json]

The simulator with the costs of Llama-3.1-8B on an H100, including prefill, updates and publications; slots = update
batch = 128, 4 batches per cohort. The first condition is the one that sorted scheduling is made for: lengths
lognormal(700, 1.1) up to 8192. Each other condition changes one thing. Figures are means over seeds; speed is trained
tokens per second relative to `sync` in the same condition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.simulate.costs import RooflineCost, load_hardware, load_model_shape
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace

TAIL = "lognormal(700, 1.1, 8192)"
BASE: Mapping[str, Any] = {"trace": TAIL, "slots": 128, "update_times": 1.0}
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "a heavy tail": {},
    "lengths nearly even": {"trace": "lognormal(1224, 0.05, 8192)"},  # the same mean as the heavy tail
    "all lengths equal": {"trace": "lognormal(1224, 0, 8192)"},
    "the learner takes ten times as long": {"update_times": 10.0},
    "four times as many slots: a cohort fills them once": {"slots": 512},
    "sixteen times as many slots as the update": {"slots": 2048},
}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"strategy": "sync"},
    "sync-large": {"strategy": "sync-large"},
    "sorted-on-policy": {"strategy": "sorted-on-policy", "lookahead": 2},
    "sorted-partial": {"strategy": "sorted-partial", "lookahead": 2},
    "sorted-replay": {"strategy": "sorted-replay", "lookahead": 2, "divergence": 1e-4},
}
FIGURES = ("tokens_per_s", "bubble_ratio", "goodput", "discarded_share", "staleness_token_mean", "update_share")


def run(condition: Mapping[str, Any], arm: Mapping[str, Any], samples: int, seed: int) -> dict[str, float]:
    given = {**BASE, **condition}
    trace = load_trace(given["trace"], samples=samples, seed=seed)
    hardware = load_hardware("h100")
    hardware = replace(hardware, train_flops_share=hardware.train_flops_share / given["update_times"])
    cost = RooflineCost(hardware=hardware, model=load_model_shape("llama-3.1-8b"))
    found = simulate(trace, slots=given["slots"], update_batch=128, cohort_batches=4, seed=seed, cost=cost, **arm)
    assert found.wall_s
    assert found.trained_tokens
    return {
        "tokens_per_s": found.tokens_per_s or 0.0,
        "bubble_ratio": found.bubble_ratio or 0.0,
        "goodput": found.goodput or 0.0,
        "discarded_share": (found.discarded_tokens or 0) / found.trained_tokens,
        "staleness_token_mean": found.staleness_token_mean or 0.0,
        "update_share": (found.update_s or 0.0) / found.wall_s,
    }


def table(samples: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pairs = [(condition, arm) for condition in CONDITIONS for arm in ARMS]
    for condition, arm in track(pairs, console=Console(stderr=True), description="simulating"):
        found = [run(CONDITIONS[condition], ARMS[arm], samples, seed) for seed in seeds]
        rows.append(
            {"condition": condition, "arm": arm, **{name: mean(each[name] for each in found) for name in FIGURES}}
        )
    base = {row["condition"]: row["tokens_per_s"] for row in rows if row["arm"] == "sync"}
    return [{**row, "speed": row["tokens_per_s"] / base[row["condition"]]} for row in rows]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    heads = ("condition", "strategy", "speed", "bubble", "goodput", "discarded", "staleness", "time in updates")
    shown = Table(*heads, box=None)
    for row in rows:
        shown.add_row(
            row["condition"] if row["arm"] == "sync" else "",
            row["arm"],
            f"{row['speed']:.2f}x",
            f"{row['bubble_ratio']:.2f}",
            f"{row['goodput']:.2f}",
            f"{row['discarded_share']:.1%}",
            f"{row['staleness_token_mean']:.2f}",
            f"{row['update_share']:.0%}",
        )
    Console(width=150).print(shown)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    rows = table(given.samples, range(given.seeds))
    record = {"samples": given.samples, "seeds": given.seeds, "rows": rows}
    save("where_not", record)
    if given.json:
        print(json.dumps(record))
    else:
        show(rows)


if __name__ == "__main__":
    main()
