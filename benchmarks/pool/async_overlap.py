"""`async` with real processes: rollout continues in another process while the learner updates, on one core each.

    python -m benchmarks.pool.async_overlap [--seeds 3] [--samples 2048] [--bound 4] [--slots 8] [--json]

Compares `async`, whose engine never stops, with `sorted-partial`, whose engine stops for every update. Both train the
quickstart with the same samples and seeds, and with the engine in its own process. There are three variants of `async`:
samples wait at the staleness bound (the preset), samples are replayed there, or samples wait and there are fewer slots
(`--slots`). Fewer slots make the engine about as fast as the learner; a faster engine must be idle at times, whatever
the bound (async_idle.py). Idle engine and free slots are shares of the time in which an update runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.pool.cores import EnginesApart
from benchmarks.record import QUICKSTART, make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.pool.ray_cluster import connect, disconnect
from sortedrl.trainer import SortedTrainer

ASYNC = ("schedule.strategy=async", "schedule.max_staleness={bound}")
CONTENDERS = {
    "sorted-partial": ("schedule.strategy=sorted-partial",),
    "async": ASYNC,
    "async, replay": (*ASYNC, "schedule.on_bound=replay"),
    "async, fewer slots": (*ASYNC, "engine.slots={slots}"),
}
GOAL_IDLE = 0.1


class UpdateWatch:
    """An event sink that adds up, while updates run, the time without any running sample and the free slot time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.update_s = self.idle_s = self.free_slot_s = 0.0
        self._running, self._last, self._is_update = 0, 0.0, False

    def emit(self, event: Any) -> None:
        if self._is_update:
            elapsed = event.t - self._last
            self.update_s += elapsed
            self.idle_s += 0.0 if self._running else elapsed
            self.free_slot_s += elapsed * (self.slots - self._running)
        self._last = event.t
        match event.kind:
            case "AttemptStarted":
                self._running += 1
            case "AttemptEnded":
                self._running -= 1
            case "BatchTaken":
                self._is_update = True
            case "UpdateDone":
                self._is_update = False

    def close(self) -> None:
        pass


def train(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}",
            f"run.seed={seed}",
            f"run.samples={options.samples}",
            f"eval.every_samples={options.samples}",
            "run.report=false",
            "engine.own_process=true",
            "checkpoint.save=false",
        ]
        knobs = [knob.format(bound=options.bound, slots=options.slots) for knob in CONTENDERS[name]]
        config = SortedConfig.load(QUICKSTART, [*settings, *knobs])
        watch = UpdateWatch(config.slots)
        summary = SortedTrainer(args=config, sinks=[watch], quiet=options.json).train()
    assert summary.ledger is not None, "every run has a ledger"
    return {
        "strategy": name,
        "seed": seed,
        "updates": summary.updates,
        "accuracy": summary.accuracy_after,
        "staleness_max": summary.staleness_max,
        "ledger": summary.ledger.model_dump(),
        "engine_idle": watch.idle_s / watch.update_s,
        "slots_free": watch.free_slot_s / (watch.slots * watch.update_s),
        "learner_wait_s": summary.learner_wait_s,
        "update_s": summary.update_s,
        "publish_s": summary.publish_s,
        "wall_s": summary.wall_s,
        "tokens_per_s": summary.tokens_per_s,
    }


def judge(name: str, rows: list[dict[str, Any]], bound: int) -> dict[str, bool]:
    ours = [row for row in rows if row["strategy"] == name]
    theirs = [row["accuracy"] for row in rows if row["strategy"] == "sorted-partial"]
    spread = max(max(theirs) - min(theirs), 0.03)  # the precision of 256 held-out answers
    return {
        "bound_kept": all(row["staleness_max"] <= bound for row in ours),
        "nothing_dropped": all(row["ledger"]["lost"] == row["ledger"]["duplicated"] == 0 for row in ours),
        "accuracy_within_spread": statistics.mean(row["accuracy"] for row in ours) >= statistics.mean(theirs) - spread,
        "engine_idle_below_goal": all(row["engine_idle"] < GOAL_IDLE for row in ours),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--bound", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    connect()  # one Ray for all runs
    apart = EnginesApart()
    apart.start()
    try:
        turns = [(name, seed) for seed in range(options.seeds) for name in CONTENDERS]
        rows = [train(*turn, options) for turn in track(turns, "runs", console=Console(stderr=True))]
    finally:
        apart.stop()
        disconnect()
    goals = {name: judge(name, rows, options.bound) for name in CONTENDERS if name != "sorted-partial"}
    record = {
        "bound": options.bound,
        "fewer_slots": options.slots,
        "samples": options.samples,
        "goals": goals,
        "rows": rows,
    }
    save("async_overlap", record)
    if options.json:
        print(json.dumps(record))
        return
    columns = ("accuracy", "updates", "staleness", "lost", "engine idle", "slots free", "tokens / s")
    table = Table("strategy", "seed", *columns, box=None)
    for row in rows:
        table.add_row(
            row["strategy"],
            str(row["seed"]),
            f"{row['accuracy']:.3f}",
            str(row["updates"]),
            str(row["staleness_max"]),
            str(row["ledger"]["lost"]),
            f"{row['engine_idle']:.1%}",
            f"{row['slots_free']:.1%}",
            f"{row['tokens_per_s']:,.0f}",
        )
    Console().print(table)
    Console().print(goals)


if __name__ == "__main__":
    main()
