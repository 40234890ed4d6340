"""Print the tables of a comparison as Markdown, from the run directories that `sortedrl compare` has written.

    python -m benchmarks.study.compare_table RUNS_DIR [--name quickstart] [--save NAME]

Figures are means over seeds; accuracy also has its minimum and maximum. Seconds do not include evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import make_parser, save
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import Evaluated, Event, RunStarted
from sortedrl.telemetry.summary import Summary


@dataclass(slots=True, kw_only=True, frozen=True)
class Point:
    samples: int
    seconds: float
    accuracy: float


@dataclass(slots=True, kw_only=True, frozen=True)
class Run:
    summary: Summary
    curve: list[Point]  # held-out accuracy of sampled answers


def read_run(folder: Path) -> Run:
    curve, evaluating, began = [], 0.0, 0.0
    previous: Event | None = None
    for event in read_events(folder / "events.jsonl"):
        if isinstance(event, RunStarted):
            began = event.t
        if isinstance(event, Evaluated) and previous is not None:
            evaluating += event.t - previous.t
            seconds = event.t - began - evaluating
            curve.append(Point(samples=event.samples_trained, seconds=seconds, accuracy=event.sampled_accuracy))
        previous = event
    return Run(summary=Summary.read(folder / "summary.json"), curve=curve)


def mean(values: Sequence[float | int | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def costs(arms: dict[str, list[Run]]) -> list[str]:
    base = next(iter(arms.values()))
    base_speed = mean([run.summary.tokens_per_s for run in base])
    base_steps = mean([(run.summary.decode_steps or 0) / run.summary.trained_tokens for run in base])
    lines = [
        "| strategy | bubble | goodput | steps per token | tokens/s | speed | rollout s | update s | staleness "
        "by token (max) | discarded |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in arms.items():
        sums = [run.summary for run in runs]
        speed = mean([s.tokens_per_s for s in sums])
        steps = mean([(s.decode_steps or 0) / s.trained_tokens for s in sums])
        discarded = mean([(s.discarded_tokens or 0) / s.trained_tokens for s in sums])
        oldest = max(s.staleness_max or 0 for s in sums)
        lines.append(
            f"| `{name}` | {mean([s.bubble_ratio for s in sums]):.2f} | {mean([s.goodput for s in sums]):.2f} "
            f"| {steps / base_steps:.2f} | {speed:,.0f} | {speed / base_speed:.2f}x "
            f"| {mean([s.rollout_s for s in sums]):.1f} | {mean([s.update_s for s in sums]):.1f} "
            f"| {mean([s.staleness_token_mean for s in sums]):.2f} ({oldest}) | {discarded:.1%} |"
        )
    return lines


def learning(arms: dict[str, list[Run]]) -> list[str]:
    """Lines of the accuracy table; the number of samples is that of the first strategy, others differ slightly."""
    num_points = min(len(run.curve) for runs in arms.values() for run in runs)
    first = next(iter(arms.values()))[0].curve
    heads = [f"after {point.samples:,}" for point in first[1:num_points]]
    lines = [
        "| strategy | " + " | ".join(heads) + " | final (min-max) | four people | five people | mean length |",
        "| --- |" + " --- |" * (len(heads) + 4),
    ]
    for name, runs in arms.items():
        points = [[run.curve[at] for run in runs] for at in range(1, num_points)]
        cells = [f"{mean([p.accuracy for p in at]):.3f} at {mean([p.seconds for p in at]):.0f} s" for at in points]
        sums = [run.summary for run in runs]
        groups = [f"{mean([(s.accuracy_by_group_after or {}).get(key) for s in sums]):.2f}" for key in ("4", "5")]
        final = spread([s.accuracy_after or 0.0 for s in sums])
        length = f"{mean([s.mean_length for s in sums]):.0f}"
        lines.append("| " + " | ".join([f"`{name}`", *cells, final, *groups, length]) + " |")
    return lines


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--name", default="quickstart", help="name of the comparison")
    parser.add_argument("--save", metavar="NAME", help="also save the summaries as benchmarks/results/NAME.json")
    options = parser.parse_args()
    arms: dict[str, list[Run]] = {}
    for folder in sorted(options.runs.glob(f"{options.name}-*-seed*"), key=lambda folder: folder.stat().st_mtime):
        run = read_run(folder)
        arms.setdefault(run.summary.strategy, []).append(run)
    print("\n".join([*costs(arms), "", *learning(arms)]))
    if options.save:
        runs = [run.summary.model_dump(mode="json") for runs in arms.values() for run in runs]
        curves = {
            f"{run.summary.strategy}/{run.summary.seed}": [
                [point.samples, round(point.seconds, 2), point.accuracy] for point in run.curve
            ]
            for runs in arms.values()
            for run in runs
        }
        save(options.save, {"runs": runs, "curves": curves})


if __name__ == "__main__":
    main()
