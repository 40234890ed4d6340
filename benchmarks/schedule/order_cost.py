"""What an order by length gains in speed: how sorted the batches of on-policy schedules are, and how fast each is.

    python -m benchmarks.schedule.order_cost            # simulated; benchmarks/results/order_cost.json

All schedules here train at staleness 0 and get the same answers. "Sorted" is the share of the variance of log lengths
that lies between update batches: 1 / (update batch) for batches drawn at random, near 1 for cohorts that are sorted as
a whole. "First batches" is the mean length of the first four batches over the mean of all. Speeds are trained tokens
per second against `sync`, in conditions of the map of strategies (`sortedrl plan`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import mean, pvariance
from typing import Any

from benchmarks.record import make_parser, save
from sortedrl.schedule import Knobs, resolve_knobs
from sortedrl.simulate.run import simulate
from sortedrl.simulate.strategy_map import (
    MEDIAN,
    NUM_SAMPLES,
    PROMPT_TOKENS,
    SLOTS,
    Condition,
    ShapedCost,
)
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.events import BatchTaken, Event

MIDDLE = Condition(tail=1.1, batch_per_slot=1.0, fixed_share=0.9, learner_share=0.1, diverged=0.07)
CONDITIONS = (
    replace(MIDDLE, fixed_share=0.3),
    replace(MIDDLE, fixed_share=0.6),
    MIDDLE,
    replace(MIDDLE, diverged=0.7),
    replace(MIDDLE, batch_per_slot=4.0),
)
SEEDS = range(2)
_REPLAY = {"interrupted": "replay", "max_staleness": 0, "on_bound": "replay"}
SCHEDULES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sync": ("sync", {}),
    "whole cohort, shuffled, replayed": ("sync-large", {"cohort_batches": 4, **_REPLAY}),
    "whole cohort, shortest first, replayed": (
        "sync-large",
        {"cohort_batches": 4, "order": "shortest-first", **_REPLAY},
    ),
    "sorted-replay, lookahead 0": ("sorted-replay", {"cohort_batches": 4}),
    "sorted-replay, lookahead 2": ("sorted-replay", {"cohort_batches": 4, "lookahead": 2}),
    "sorted-replay, lookahead 4": ("sorted-replay", {"cohort_batches": 4, "lookahead": 4}),
    "async-on-policy": ("async-on-policy", {"cohort_batches": 4, "lookahead": 2}),
}


def sortedness(batches: Sequence[Sequence[float]]) -> float:
    """The share of the variance of log lengths that lies between batches."""
    logs = [[math.log(length) for length in batch] for batch in batches]
    every = [value for batch in logs for value in batch]
    middle = mean(every)
    between = sum(len(batch) * (mean(batch) - middle) ** 2 for batch in logs) / len(every)
    return between / pvariance(every)


def run(condition: Condition, name: str, seed: int, update_token_s: float) -> tuple[float, list[list[int]]]:
    """Tokens per second and the lengths of each batch."""
    strategy, knobs = SCHEDULES[name]
    trace = load_trace(f"lognormal({MEDIAN}, {condition.tail}, {20 * MEDIAN})", samples=NUM_SAMPLES, seed=seed)
    batches: list[list[int]] = []

    def keep(event: Event) -> None:
        if isinstance(event, BatchTaken):
            batches.append(list(event.lengths))

    update_batch = max(1, round(SLOTS * condition.batch_per_slot))
    exact: Knobs = resolve_knobs(strategy, update_batch, **knobs)
    summary = simulate(
        trace,
        strategy=strategy,
        slots=SLOTS,
        update_batch=update_batch,
        cost=ShapedCost(slots=SLOTS, fixed_share=condition.fixed_share, update_token_s=update_token_s),
        divergence=min(condition.diverged / mean(trace.lengths), 0.5),
        prompt_tokens=PROMPT_TOKENS,
        seed=seed,
        emit=keep,
        exact=exact,
    )
    assert summary.tokens_per_s, "a simulation has a speed"
    return summary.tokens_per_s, batches


def measure(condition: Condition) -> dict[str, dict[str, float]]:
    """Means over seeds for each schedule."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for seed in SEEDS:
        rollout, batches = run(condition, "sync", seed, 0.0)
        tokens = sum(map(sum, batches))
        trained = tokens + PROMPT_TOKENS * sum(map(len, batches))
        share = condition.learner_share
        update_token_s = share / (1 - share) * tokens / rollout / trained
        base = None
        for name in SCHEDULES:
            speed, batches = run(condition, name, seed, update_token_s)
            base = base or speed
            first = mean(length for batch in batches[:4] for length in batch)
            every = mean(length for batch in batches for length in batch)
            found[name].append({"speed": speed / base, "sorted": sortedness(batches), "first": first / every})
    return {name: {key: mean(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()}


def markdown(points: Sequence[Mapping[str, Any]]) -> str:
    middle = points[CONDITIONS.index(MIDDLE)]["schedules"]
    heads = [f"fixed {c.fixed_share:.0%}, d {c.diverged:g}, batch / slots {c.batch_per_slot:g}" for c in CONDITIONS]
    lines = [f"| schedule | sorted | first batches | {' | '.join(heads)} |", "|" + " --- |" * (3 + len(heads))]
    for name in SCHEDULES:
        cells = [name, f"{middle[name]['sorted']:.2f}", f"{middle[name]['first']:.2f}"]
        cells += [f"{point['schedules'][name]['speed']:.2f}" for point in points]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    given = make_parser(__doc__).parse_args()
    points = [{"condition": asdict(condition), "schedules": measure(condition)} for condition in CONDITIONS]
    save("order_cost", {"points": points})
    print(json.dumps(points) if given.json else markdown(points))


if __name__ == "__main__":
    main()
