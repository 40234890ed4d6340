"""Train on a pool of two engines and kill one of them with SIGKILL every 20 seconds: the run must complete.

    python -m benchmarks.pool.pool_faults [--seconds 180] [--every 20] [--json]

Kills happen for the given time, alternating between the engines; then the run continues until it has its samples. For
each kill the script reports how long it takes until the throughput of the last three seconds is back at 80 % of the
throughput before the kill, so the smallest possible value is three seconds. Throughput is finished answers per second,
and separately tokens per second (the tokens of an attempt count evenly over its duration). `away_s` is the time that
the pool needs: from the detection of the death until a new engine with the current weights is in place.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pool.cores import engine_processes
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.pool import pool
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.trainer import SortedTrainer

WINDOW_S = 3.0
BACK_AT = 0.8


class Watch:
    """An event sink that records when attempts start and end, and how many tokens they write."""

    def __init__(self) -> None:
        self.finished: list[float] = []
        self.written: list[tuple[float, float, int]] = []  # start, end, number of tokens
        self._running: dict[int, tuple[float, int]] = {}

    def emit(self, event: Any) -> None:
        now = time.monotonic()
        if event.kind == "AttemptStarted":
            self._running[event.sample] = (now, event.cached)
        elif event.kind == "AttemptEnded":
            began, cached = self._running.pop(event.sample)
            self.written.append((began, now, event.num_tokens - cached))
            if event.outcome in ("stop", "length"):
                self.finished.append(now)

    def close(self) -> None:
        pass

    def answers(self, start: float, stop: float) -> float:
        """Finished answers per second."""
        return sum(start <= t < stop for t in self.finished) / (stop - start)

    def tokens(self, start: float, stop: float) -> float:
        """Written tokens per second."""
        num = 0.0
        for began, ended, tokens in self.written:
            if (inside := min(ended, stop) - max(began, start)) > 0:
                num += tokens * inside / (ended - began)
        return num / (stop - start)


class Returns(logging.Handler):
    """A log handler that reads from the pool's log how long each engine was missing."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.away_s: list[float] = []
        self.log = logging.getLogger(pool.__name__)
        self.log.setLevel(logging.INFO)
        self.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == pool.BACK and isinstance(record.args, tuple):
            self.away_s.append(float(f"{record.args[1]:.2f}"))


def kill_in_turn(watch: Watch, kills: list[float], *, seconds: float, every_s: float, is_over: threading.Event) -> None:
    """Kill the oldest engine each time, so that the kills alternate."""
    while not watch.finished and not is_over.wait(0.2):
        pass
    began = time.monotonic()
    while not is_over.wait(every_s) and time.monotonic() - began < seconds:
        living = engine_processes()
        if living:
            living[0].kill()
            kills.append(time.monotonic())


def recovery_s(rate: Callable[[float, float], float], kill: float, *, before_s: float, until: float) -> float | None:
    """Seconds from a kill until the throughput is back, or None if the run ended first."""
    normal = rate(kill - before_s, kill)
    t = kill + WINDOW_S
    while t <= until:
        if rate(t - WINDOW_S, t) >= BACK_AT * normal:
            return round(t - kill, 1)
        t += 0.25
    return None


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--samples", type=int, default=24576)
    parser.add_argument("--strategy", default="sorted-partial")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    watch, returns, kills, is_over = Watch(), Returns(), [], threading.Event()
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
        assert summary.ledger is not None, "every run has a ledger"
        assert summary.wall_s, "a complete run has a duration"
        found = verify(Ledger(Path(folder) / "pool" / "ledger.sqlite"))
        span = {"before_s": arguments.every / 2, "until": watch.finished[-1]}
        recovered = [recovery_s(watch.answers, kill, **span) for kill in kills]
        record = {
            "kills": len(kills),
            "status": summary.status,
            "ledger": summary.ledger.model_dump(),
            "violations": found.num_violations,
            "recovery_s": recovered,
            "tokens_recovery_s": [recovery_s(watch.tokens, kill, **span) for kill in kills],
            "away_s": returns.away_s,
            "wall_s": round(summary.wall_s, 1),
            "samples_per_s": round(summary.samples / summary.wall_s, 1),
            "settings": {"strategy": arguments.strategy, "seed": arguments.seed, "every_s": arguments.every},
        }
    save("pool_faults", record)
    if arguments.json:
        print(json.dumps(record))
        return
    table = Table(
        "kills", "status", "trained", "lost", "duplicated", "max. away s", "median recovery s", "max. recovery s"
    )
    known = [seconds for seconds in recovered if seconds is not None]
    ledger = summary.ledger
    table.add_row(
        str(len(kills)),
        summary.status,
        str(ledger.trained),
        str(ledger.lost),
        str(ledger.duplicated),
        f"{max(returns.away_s, default=0.0):.2f}",
        f"{statistics.median(known):.1f}" if known else "-",
        f"{max(known):.1f}" if known else "-",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
