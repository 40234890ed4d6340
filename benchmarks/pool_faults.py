"""Train on a pool of two engines and kill one of them, with SIGKILL, every 20 seconds: the run must not notice.

    python benchmarks/pool_faults.py [--seconds 180] [--every 20] [--json]

Engines are killed in turn for the given time; then the run goes on to its end, which is set by its samples. For each
kill: how long until the answers finished per second, over three seconds, are back at 80 % of what they were before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from cores import engine_processes
from record import save
from rich.console import Console
from rich.table import Table

from sortedrl.config import SortedConfig
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.trainer import SortedTrainer

WINDOW_S = 3.0
BACK_AT = 0.8


class Watch:
    """Notes when answers finish, and when updates begin and end: a sink of the run."""

    def __init__(self) -> None:
        self.finished: list[float] = []

    def emit(self, event: Any) -> None:
        if event.kind == "AttemptEnded" and event.outcome in ("stop", "length"):
            self.finished.append(time.monotonic())

    def close(self) -> None:
        pass

    def rate(self, start: float, stop: float) -> float:
        return sum(start <= t < stop for t in self.finished) / (stop - start)


def kill_in_turn(watch: Watch, kills: list[float], *, seconds: float, every_s: float, is_over: threading.Event) -> None:
    """The oldest engine each time, so that both have their turn."""
    while not watch.finished and not is_over.wait(0.2):
        pass
    began = time.monotonic()
    while not is_over.wait(every_s) and time.monotonic() - began < seconds:
        living = engine_processes()
        if living:
            living[0].kill()
            kills.append(time.monotonic())


def recovery_s(watch: Watch, kill: float, before_s: float) -> float | None:
    """Seconds from a kill until throughput is back; None if the run ended first."""
    normal = watch.rate(kill - before_s, kill)
    last = watch.finished[-1]
    t = kill + WINDOW_S
    while t <= last:
        if watch.rate(t - WINDOW_S, t) >= BACK_AT * normal:
            return round(t - kill, 1)
        t += 0.25
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--strategy", default="sorted-partial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    watch, kills, is_over = Watch(), [], threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        config = SortedConfig(
            run={"name": "pool", "dir": folder, "samples": arguments.samples, "seed": arguments.seed, "report": False},
            engine={"slots": 16, "replicas": 2, "max_new_tokens": 256},
            schedule={"strategy": arguments.strategy, "update_batch": 32},
            learner={"algorithm": "reinforce++", "group_size": 1, "lr": 1e-4},
            eval={"prompts": 0},
            checkpoint={"save": False},
        )
        trainer = SortedTrainer(args=config, sinks=[watch], quiet=arguments.json)
        killer = threading.Thread(
            target=kill_in_turn,
            args=(watch, kills),
            kwargs={"seconds": arguments.seconds, "every_s": arguments.every, "is_over": is_over},
        )
        killer.start()
        try:
            summary = trainer.train()
        finally:
            is_over.set()
            killer.join()
        assert summary.ledger is not None, "a run without a ledger"
        assert summary.wall_s, "a run that took no time"
        found = verify(Ledger(Path(folder) / "pool" / "ledger.sqlite"))
        recovered = [recovery_s(watch, kill, arguments.every / 2) for kill in kills]
        record = {
            "kills": len(kills),
            "status": summary.status,
            "ledger": summary.ledger.model_dump(),
            "violations": found.num_violations,
            "recovery_s": recovered,
            "wall_s": round(summary.wall_s, 1),
            "samples_per_s": round(summary.samples / summary.wall_s, 1),
            "settings": {"strategy": arguments.strategy, "seed": arguments.seed, "every_s": arguments.every},
        }
    save("pool_faults", record)
    if arguments.json:
        print(json.dumps(record))
        return
    table = Table("kills", "status", "trained", "lost", "duplicated", "median recovery s", "longest")
    known = [seconds for seconds in recovered if seconds is not None]
    ledger = summary.ledger
    table.add_row(
        str(len(kills)),
        summary.status,
        str(ledger.trained),
        str(ledger.lost),
        str(ledger.duplicated),
        f"{statistics.median(known):.1f}" if known else "-",
        f"{max(known):.1f}" if known else "-",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
