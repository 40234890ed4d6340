"""What each schedule costs at frozen weights: the real local engine, with the same samples and seeds for every preset.

    python -m benchmarks.schedule.schedules [--samples 2048] [--seed 0] [--model FOLDER] [--json]

Slots = update batch = 16, cohorts of 8 batches. The script reports decode steps and seconds per trained token (as
ratios to `sync`), bubble ratio, goodput, and staleness by sample and by token. Updates change nothing here, but they
count for staleness.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch
from sortedrl.run.builders.loop import build_loop
from sortedrl.run.builders.parts import build_parts
from sortedrl.run.session import run_started
from sortedrl.telemetry.events import RunEnded
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.summary import summarize

ARMS: list[tuple[str, dict[str, Any]]] = [
    ("sync", {}),
    ("sync-large", {}),
    ("sorted-on-policy", {"lookahead": 0}),
    ("sorted-on-policy", {"lookahead": 2}),
    ("sorted-partial", {"lookahead": 0}),
    ("sorted-partial", {"lookahead": 2}),
    ("sorted-replay", {"lookahead": 0}),
    ("sorted-replay", {"lookahead": 2}),
    ("april", {}),
    ("tail-batching", {}),
]


@dataclass(slots=True, kw_only=True)
class FrozenUpdate:
    def done(self) -> bool:
        return True

    def result(self) -> UpdateResult:
        return UpdateResult(optimizer_steps=0)


@dataclass(slots=True, kw_only=True)
class FrozenLearner:
    """A learner that takes batches and does not change the weights."""

    source: Any

    def start(self, batch: Batch) -> FrozenUpdate:
        return FrozenUpdate()


def measure(strategy: str, knobs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    slots = options.slots
    if strategy != "sync":
        knobs = {"cohort_batches": 8, **knobs}
    config = SortedConfig(
        run={"samples": options.samples, "seed": options.seed},
        model={"path": options.model},
        schedule={"strategy": strategy, "update_batch": slots, **knobs},
        engine={"slots": slots},
        learner={"algorithm": "reinforce++", "group_size": 1},
        eval={"prompts": 0},
    )
    clock, metrics = WallClock(), RunMetrics()
    parts = build_parts(config)
    try:
        controller = build_loop(config, parts, Buffer(grouped=config.is_grouped), emit=metrics.emit, clock=clock)
        controller.learner = FrozenLearner(source=parts.learner.source)
        metrics.emit(run_started(config, clock.now()))
        controller.run()
        metrics.emit(RunEnded(t=clock.now(), reason="complete"))
        facts = controller.summary_facts()
        summary = summarize(metrics, stats=parts.engine.stats(), **facts, ledger_s=0.0, emit_s=0.0)
    finally:
        parts.close()
    assert summary.decode_steps is not None
    assert summary.rollout_s is not None
    return {
        **summary.model_dump(mode="json"),
        "decode_steps_per_token": summary.decode_steps / summary.trained_tokens,
        "seconds_per_token": summary.rollout_s / summary.trained_tokens,
    }


def table(runs: list[dict[str, Any]]) -> Table:
    base = runs[0]
    shown = Table(title="Schedules at frozen weights, ratios to sync")
    for name in (
        "strategy",
        "lookahead",
        "steps/token",
        "s/token",
        "bubble",
        "goodput",
        "staleness",
        "by token",
        "max",
    ):
        shown.add_column(name, justify="left" if name == "strategy" else "right")
    for run in runs:
        shown.add_row(
            run["strategy"],
            str(run["lookahead"]),
            f"{run['decode_steps_per_token'] / base['decode_steps_per_token']:.2f}",
            f"{run['seconds_per_token'] / base['seconds_per_token']:.2f}",
            f"{run['bubble_ratio']:.2f}",
            f"{run['goodput']:.2f}",
            f"{run['staleness_mean']:.2f}",
            f"{run['staleness_token_mean']:.2f}",
            str(run["staleness_max"]),
        )
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="knights-tiny")
    options = parser.parse_args()
    console = Console(stderr=True)
    arms = track(ARMS, description="schedules", console=console, disable=options.json)
    runs = [measure(strategy, knobs, options) for strategy, knobs in arms]
    if options.json:
        print(json.dumps({"runs": runs}))
        return
    Console(width=110).print(table(runs))
    print(f"saved {save('schedules', {'arguments': vars(options), 'runs': runs})}", file=sys.stderr)


if __name__ == "__main__":
    main()
