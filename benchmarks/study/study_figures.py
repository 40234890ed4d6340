"""Figures of the study: the outcome of a run, differences paired by seed with intervals, and the paper's claims.

`study.py` calls these pure functions of run directories and records. An interval is the 95 % bootstrap interval of the
mean over seeds. It goes through all ways to draw as many seeds with replacement, so it is deterministic. With five
seeds such intervals are somewhat too narrow. A verdict needs the whole interval on one side.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from rich.console import Console
from rich.table import Table

from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, UpdateDone
from sortedrl.telemetry.summary import Summary

BASE = "sync"
TARGETS = (0.5, 0.7, 0.8)  # accuracies whose first time is reported
FINAL_POINTS = 3  # evaluations that make up the final accuracy
LEAST_GAIN, FEWER_SAMPLES, BUBBLE_CUT = 0.039, 0.4074, 0.5  # the paper's claims

Record = Mapping[str, Any]
Interval = tuple[float, float, float]
"""Mean, and the ends of its 95 % interval."""


def outcome(run_dir: Path) -> dict[str, Any]:
    """Figures of a run from its summary and events; the curve is separate."""
    summary = Summary.read(run_dir / "summary.json")
    lengths: list[int] = []
    norms: list[float] = []
    num_flat = num_updates = num_idle = 0
    for event in read_events(run_dir / "events.jsonl"):
        if isinstance(event, BatchTaken):
            lengths += event.lengths
            num_flat += len(set(event.rewards)) == 1
            num_updates += 1
        elif isinstance(event, UpdateDone):
            norms.append(event.metrics["grad_norm"])
            num_idle += event.optimizer_steps == 0
    quarter = max(1, len(lengths) // 4)
    return {
        "bubble": summary.bubble_ratio,
        "goodput": summary.goodput,
        "tokens": summary.trained_tokens,
        "staleness": summary.staleness_token_mean,
        "staleness_max": summary.staleness_max,
        "lost": summary.ledger.lost if summary.ledger else None,
        "duplicated": summary.ledger.duplicated if summary.ledger else None,
        "length_first": mean(lengths[:quarter]),
        "length_last": mean(lengths[-quarter:]),
        "flat_batches": num_flat / num_updates,
        "idle_updates": num_idle / num_updates,
        "gradient_variation": pstdev(norms) / mean(norms) if norms and mean(norms) else None,
    }


def reached(curve: Sequence[Mapping[str, float]], accuracy: float, axis: str) -> float | None:
    """Where the curve first reaches the accuracy, with linear interpolation; None if it never does."""
    for before, after in itertools.pairwise(curve):
        if after["accuracy"] >= accuracy > before["accuracy"]:
            part = (accuracy - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before[axis] + part * (after[axis] - before[axis])
    return None


def bootstrap(values: Sequence[float]) -> Interval:
    """The mean, and its 2.5 % and 97.5 % quantiles over all draws of as many values with replacement."""
    num = len(values)
    if num < 2:
        return (mean(values), -math.inf, math.inf)
    means: Counter[float] = Counter()
    for drawn in itertools.combinations_with_replacement(range(num), num):
        counts = Counter(drawn).values()
        ways = math.factorial(num) // math.prod(math.factorial(count) for count in counts)
        means[math.fsum(values[place] for place in drawn) / num] += ways
    total, below = num**num, 0
    low = high = None
    for value in sorted(means):
        below += means[value]
        if low is None and below >= 0.025 * total:
            low = value
        if high is None and below >= 0.975 * total:
            high = value
    assert low is not None
    assert high is not None
    return (mean(values), low, high)


def by_arm(records: Sequence[Record], algorithm: str) -> dict[str, dict[int, Record]]:
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        if record["algorithm"] == algorithm:
            found.setdefault(record["arm"], {})[record["seed"]] = record
    return found


def paired(
    arm: Mapping[int, Record], base: Mapping[int, Record], figure: Callable[[Record, Record], float | None]
) -> Interval | None:
    """The interval of a figure that compares two runs of the same seed; None if a seed has no such figure."""
    values = [figure(arm[seed], base[seed]) for seed in sorted(arm.keys() & base.keys())]
    known = [value for value in values if value is not None]
    return bootstrap(known) if known and len(known) == len(values) else None


def final(record: Record) -> float:
    """Mean accuracy of the last evaluations, since a single one is too noisy."""
    return mean(point["accuracy"] for point in record["curve"][-FINAL_POINTS:])


def speed(record: Record) -> float:
    """Trained tokens per CPU second, including updates."""
    return record["tokens"] / record["curve"][-1]["seconds"]


def tabulate(records: Sequence[Record], algorithm: str) -> list[dict[str, Any]]:
    """A row for each arm: means over seeds, and differences from the base on the same seeds."""
    arms = by_arm(records, algorithm)
    base = arms.get(BASE, {})
    rows = []
    for name, runs in arms.items():
        every = list(runs.values())
        row: dict[str, Any] = {
            "arm": name,
            "seeds": len(every),
            "rate": every[0]["rate"],
            "accuracy": mean(map(final, every)),
            "accuracy_range": (min(map(final, every)), max(map(final, every))),
            "accuracy_difference": paired(runs, base, lambda a, b: final(a) - final(b)),
            "curve_mean": mean(mean(p["accuracy"] for p in record["curve"][1:]) for record in every),
            "curve_difference": paired(runs, base, _curve_difference),
            "speed_ratio": paired(runs, base, lambda a, b: speed(a) / speed(b)),
        }
        for axis in ("samples", "seconds"):
            for target in TARGETS:
                row[f"{axis}_to_{target:g}"] = _mean([reached(r["curve"], target, axis) for r in every])
                row[f"{axis}_to_{target:g}_ratio"] = paired(runs, base, _reach_ratio(target, axis))
        means = ("bubble", "goodput", "staleness", "length_first", "length_last", "flat_batches", "gradient_variation")
        row |= {name: _mean([record[name] for record in every]) for name in means}
        row |= {name: sum(record[name] or 0 for record in every) for name in ("lost", "duplicated")}
        row["staleness_max"] = max(record["staleness_max"] for record in every)
        rows.append(row)
    return rows


def _curve_difference(arm: Record, base: Record) -> float:
    return mean(p["accuracy"] for p in arm["curve"][1:]) - mean(p["accuracy"] for p in base["curve"][1:])


def _reach_ratio(target: float, axis: str) -> Callable[[Record, Record], float | None]:
    def ratio(arm: Record, base: Record) -> float | None:
        ours, theirs = reached(arm["curve"], target, axis), reached(base["curve"], target, axis)
        return None if ours is None or not theirs else ours / theirs

    return ratio


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean over seeds, or None if a seed has no value."""
    return None if None in values else mean(value for value in values if value is not None)


def judge(records: Sequence[Record], algorithm: str) -> list[dict[str, Any]]:
    """The paper's three claims for every sorted arm: yes, no or not decidable, with the interval."""
    arms = by_arm(records, algorithm)
    base = arms.get(BASE, {})
    if not base:
        return []
    target = 0.9 * mean(map(final, base.values()))
    verdicts = []
    for name, runs in arms.items():
        if not name.startswith(("sorted", "april")):
            continue
        gain = paired(runs, base, lambda a, b: final(a) / final(b) - 1)
        ratio = paired(runs, base, _reach_ratio(target, "samples"))
        fewer = None if ratio is None else (1 - ratio[0], 1 - ratio[2], 1 - ratio[1])
        cut = paired(runs, base, lambda a, b: 1 - a["bubble"] / b["bubble"])
        verdicts += [
            {
                "claim": f"scores better by {LEAST_GAIN:.1%} or more at equal data",
                "arm": name,
                **verdict(gain, LEAST_GAIN),
            },
            {
                "claim": f"{FEWER_SAMPLES:.1%} fewer samples to the same score ({target:.2f})",
                "arm": name,
                **verdict(fewer, FEWER_SAMPLES),
            },
            {"claim": "bubbles cut by more than half", "arm": name, **verdict(cut, BUBBLE_CUT)},
        ]
    return verdicts


def verdict(found: Interval | None, wanted: float) -> dict[str, Any]:
    if found is None:
        return {"answer": "not decidable", "interval": None}
    answer = "yes" if found[1] >= wanted else "no" if found[2] < wanted else "not decidable"
    return {"answer": answer, "interval": found}


# ---- tables ------------------------------------------------------------------------------------------------------


def show_table(algorithm: str, rows: Sequence[Mapping[str, Any]]) -> None:
    heads = ("arm", "rate", "accuracy", "against sync", "samples to .7", "CPU s to .7", "speed", "bubble", "goodput")
    table = Table(*heads, title=f"{algorithm}: means over seeds, 95 % intervals", box=None)
    for row in rows:
        table.add_row(
            row["arm"],
            f"{row['rate']:g}",
            f"{row['accuracy']:.3f}",
            with_interval(row["accuracy_difference"], "+.3f"),
            number(row["samples_to_0.7"], ".0f"),
            number(row["seconds_to_0.7"], ".0f"),
            with_interval(row["speed_ratio"], ".2f"),
            number(row["bubble"], ".2f"),
            number(row["goodput"], ".2f"),
        )
    Console(width=160).print(table)


def show_claims(verdicts: Sequence[Mapping[str, Any]]) -> None:
    table = Table("claim", "arm", "holds here", "measured", box=None)
    for found in verdicts:
        table.add_row(found["claim"], found["arm"], found["answer"], with_interval(found["interval"], ".1%"))
    Console(width=160).print(table)


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def with_interval(found: Interval | None, form: str) -> str:
    return "–" if found is None else f"{found[0]:{form}} [{found[1]:{form}}, {found[2]:{form}}]"
