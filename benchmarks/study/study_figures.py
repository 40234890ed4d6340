"""Figures of the study: the outcome of a run, differences paired by seed with intervals, and the paper's claims.

`study.py` and `claims.py` call these pure functions of run directories and records. Arms are compared with a base:
`sync`, or `sync-large`, which is what the paper compares with on math. An interval is Student's 95 % interval of the
mean over seeds; `claims.py` prints how often it covers the true mean. A verdict needs the whole interval on one side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.study.intervals import Interval, student
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, UpdateDone
from sortedrl.telemetry.summary import Summary

BASES = ("sync", "sync-large")
EARLY = 1  # the evaluation that shows early learning: after 128 samples
TARGETS = (0.5, 0.7, 0.8)  # accuracies whose first time is reported
FINAL_POINTS = 3  # evaluations that make up the final accuracy
LEAST_GAIN, FEWER_SAMPLES, BUBBLE_CUT = 0.039, 0.4074, 0.5  # the paper's claims

Record = Mapping[str, Any]


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


def reached_or_end(curve: Sequence[Mapping[str, float]], accuracy: float) -> float:
    """The samples to the accuracy. A curve that never reaches it counts as its whole length, which is too few."""
    found = reached(curve, accuracy, "samples")
    return curve[-1]["samples"] if found is None else found


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
    return student(known) if known and len(known) == len(values) else None


def final(record: Record) -> float:
    """Mean accuracy of the last evaluations, since a single one is too noisy."""
    return mean(point["accuracy"] for point in record["curve"][-FINAL_POINTS:])


def speed(record: Record) -> float:
    """Trained tokens per CPU second, including updates."""
    return record["tokens"] / record["curve"][-1]["seconds"]


def early(record: Record) -> float:
    return record["curve"][EARLY]["accuracy"]


def tabulate(records: Sequence[Record], algorithm: str, base: str = BASES[0]) -> list[dict[str, Any]]:
    """A row for each arm: means over seeds, and differences from the base on the same seeds."""
    arms = by_arm(records, algorithm)
    other = arms.get(base, {})
    rows = []
    for name, runs in arms.items():
        every = list(runs.values())
        row: dict[str, Any] = {
            "arm": name,
            "seeds": len(every),
            "rate": every[0]["rate"],
            "accuracy": mean(map(final, every)),
            "accuracy_range": (min(map(final, every)), max(map(final, every))),
            "accuracy_difference": paired(runs, other, lambda a, b: final(a) - final(b)),
            "early_difference": paired(runs, other, lambda a, b: early(a) - early(b)),
            "curve_mean": mean(mean(p["accuracy"] for p in record["curve"][1:]) for record in every),
            "curve_difference": paired(runs, other, _curve_difference),
            "speed_ratio": paired(runs, other, lambda a, b: speed(a) / speed(b)),
        }
        for target in TARGETS:
            row[f"fewer_to_{target:g}"] = paired(runs, other, _fewer(target))
            row[f"reached_{target:g}"] = sum(reached(r["curve"], target, "samples") is not None for r in every)
            for axis in ("samples", "seconds"):
                row[f"{axis}_to_{target:g}"] = _mean([reached(r["curve"], target, axis) for r in every])
        means = ("bubble", "goodput", "staleness", "length_first", "length_last", "flat_batches", "gradient_variation")
        row |= {name: _mean([record[name] for record in every]) for name in means}
        row |= {name: sum(record[name] or 0 for record in every) for name in ("lost", "duplicated")}
        row["staleness_max"] = max(record["staleness_max"] for record in every)
        rows.append(row)
    return rows


def _curve_difference(arm: Record, base: Record) -> float:
    return mean(p["accuracy"] for p in arm["curve"][1:]) - mean(p["accuracy"] for p in base["curve"][1:])


def _fewer(target: float) -> Callable[[Record, Record], float]:
    """The share of the base's samples that an arm saves on the way to an accuracy."""

    def saved(arm: Record, base: Record) -> float:
        return 1 - reached_or_end(arm["curve"], target) / reached_or_end(base["curve"], target)

    return saved


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean over seeds, or None if a seed has no value."""
    return None if None in values else mean(value for value in values if value is not None)


def is_sorted(arm: str) -> bool:
    return arm.startswith(("sorted", "april"))


def judge(records: Sequence[Record], algorithm: str, base: str = BASES[0]) -> list[dict[str, Any]]:
    """The paper's three claims for every sorted arm: yes, no or not decidable, with the interval."""
    arms = by_arm(records, algorithm)
    other = arms.get(base, {})
    if not other:
        return []
    target = 0.9 * mean(map(final, other.values()))
    verdicts = []
    for name, runs in arms.items():
        if not is_sorted(name):
            continue
        gain = paired(runs, other, lambda a, b: final(a) / final(b) - 1)
        fewer = paired(runs, other, _fewer(target))
        cut = paired(runs, other, lambda a, b: 1 - a["bubble"] / b["bubble"])
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


def show_table(algorithm: str, rows: Sequence[Mapping[str, Any]], base: str = BASES[0]) -> None:
    heads = ("arm", "rate", "accuracy", f"against {base}", "samples to .7", "CPU s to .7", "speed", "bubble", "goodput")
    table = Table(*heads, title=f"{algorithm}: means over seeds, Student's 95 % intervals", box=None)
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
