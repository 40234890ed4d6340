"""What rollout during updates costs at staleness 0, and where it does not pay (simulated).

    python -m benchmarks.schedule.on_policy_overlap [--samples 4096] [--seeds 3] [--json]

`async-on-policy` against `sync`, `sorted-replay`, and `async` at staleness 2 and 4 with replay, for divergences of
1e-5, 1e-4 and 1e-3. Lengths are lognormal(700, 1.1) up to 8192 unless the condition says otherwise; slots = update
batch = 128, 4 batches per cohort, lookahead 2. Prefill, verification, updates and publications are paid, except with
unit costs, where only decode steps and updates take time. Strategies with overlap have learner devices of their own; in
the condition with equal devices the others use those devices for rollout too. Figures are means over seeds; speed is
trained tokens per second relative to `sync` in the same condition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.events import AttemptVerified, Event

TAIL = "lognormal(700, 1.1, 8192)"
H100 = {"kind": "roofline", "hardware": "h100", "model": "llama-3.1-8b"}
BASE: Mapping[str, Any] = {"trace": TAIL, "cost": H100, "update_s": None, "prompt_tokens": 256, "is_equal": False}
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "unit cost, updates of 300 steps": {"cost": {"kind": "unit"}, "update_s": 300.0},
    "unit cost, updates of 1,200 steps": {"cost": {"kind": "unit"}, "update_s": 1200.0},
    "8B, one H100": {},
    "8B, equal devices": {"is_equal": True},
    "32B, two H100s": {"cost": {**H100, "model": "qwen2.5-32b", "tensor_parallel": 2}},
    "8B, short answers to long prompts": {"trace": "lognormal(60, 0.8, 512)", "prompt_tokens": 1024},
}
DIVERGENCES = (1e-5, 1e-4, 1e-3)
BOUNDED = {"strategy": "async", "on_bound": "replay", "lookahead": 2}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "sorted-replay": {"strategy": "sorted-replay", "lookahead": 2},
    "async, staleness 2": {**BOUNDED, "max_staleness": 2},
    "async, staleness 4": {**BOUNDED, "max_staleness": 4},
    "async-on-policy": {"strategy": "async-on-policy", "lookahead": 2},
}
SYNC: Mapping[str, Any] = {"strategy": "sync"}
FIGURES = (
    "tokens_per_s",
    "bubble_ratio",
    "goodput",
    "discarded_share",
    "verified_share",
    "staleness_max",
    "mean_batch",
)


def run(
    condition: Mapping[str, Any], arm: Mapping[str, Any], divergence: float, samples: int, seed: int
) -> dict[str, float]:
    given = {**BASE, **condition}
    num_verified = 0

    def count(event: Event) -> None:
        nonlocal num_verified
        num_verified += event.cached if isinstance(event, AttemptVerified) else 0

    has_overlap = arm["strategy"].startswith("async")
    replicas = 2 if given["is_equal"] and not has_overlap else 1
    found = simulate(
        load_trace(given["trace"], samples=samples, seed=seed),
        slots=128,
        update_batch=128,
        cost=load_cost(replicas=replicas, **given["cost"]),
        divergence=divergence,
        update_s=given["update_s"],
        prompt_tokens=given["prompt_tokens"],
        seed=seed,
        emit=count,
        **arm,
    )
    trained = found.trained_tokens or 1
    return {
        "tokens_per_s": found.tokens_per_s or 0.0,
        "bubble_ratio": found.bubble_ratio or 0.0,
        "goodput": found.goodput or 0.0,
        "discarded_share": (found.discarded_tokens or 0) / trained,
        "verified_share": num_verified / trained,
        "staleness_max": found.staleness_max or 0,
        "mean_batch": found.samples / found.updates,
    }


def table(samples: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    plans: list[tuple[str, str, Mapping[str, Any], float]] = []
    for condition in CONDITIONS:
        plans.append((condition, "sync", SYNC, DIVERGENCES[0]))  # nothing is interrupted, so d does not matter
        plans += [(condition, name, arm, d) for d in DIVERGENCES for name, arm in ARMS.items()]
    for condition, name, arm, divergence in track(plans, console=Console(stderr=True), description="simulating"):
        found = [run(CONDITIONS[condition], arm, divergence, samples, seed) for seed in seeds]
        figures = {figure: mean(each[figure] for each in found) for figure in FIGURES}
        rows.append({"condition": condition, "arm": name, "divergence": divergence, **figures})
    base = {row["condition"]: row["tokens_per_s"] for row in rows if row["arm"] == "sync"}
    return [{**row, "speed": row["tokens_per_s"] / base[row["condition"]]} for row in rows]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    heads = ("condition", "strategy", "d", "tokens/s", "speed", "bubble", "discarded", "verified", "stale max", "batch")
    shown = Table(*heads, box=None)
    for row in rows:
        shown.add_row(
            row["condition"] if row["arm"] == "sync" else "",
            row["arm"],
            "" if row["arm"] == "sync" else f"{row['divergence']:.0e}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['speed']:.2f}x",
            f"{row['bubble_ratio']:.2f}",
            f"{row['discarded_share']:.0%}",
            f"{row['verified_share']:.2f}",
            f"{row['staleness_max']:.0f}",
            f"{row['mean_batch']:.0f}",
        )
    Console(width=150).print(shown)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    rows = table(given.samples, range(given.seeds))
    record = {"samples": given.samples, "seeds": given.seeds, "rows": rows}
    save("on_policy_overlap", record)
    if given.json:
        print(json.dumps(record))
    else:
        show(rows)


if __name__ == "__main__":
    main()
