"""How fast the controller schedules, without engine, scorer and learner: samples per second, and the longest harvest.

    python -m benchmarks.schedule.controller_rate [--samples 100000] [--slots 4096] [--json]

The real controller, buffer and schedule run over the simulated engine; the time inside the engine is subtracted. A
harvest is everything between two polls: the batch, an update (which takes no time), the publication, and the decision
what happens to each interrupted sample. All events are created and added to the run's metrics, as in training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.controller import Controller
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.events import ignore

STRATEGIES = ("sorted-partial", "sorted-on-policy", "sorted-replay", "async")
GOAL_RATE, GOAL_HARVEST_S = 20_000.0, 0.1


class Stopwatch:
    """Measures the CPU time inside some methods of a class: the total, and the longest call."""

    def __init__(self, owner: type, *names: str) -> None:
        self.total = self.longest = 0.0
        self.owner, self.methods = owner, {name: getattr(owner, name) for name in names}

    def __enter__(self) -> Stopwatch:
        for name, method in self.methods.items():
            setattr(self.owner, name, self._timed(method))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self.methods.items():
            setattr(self.owner, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent = time.process_time() - began
                self.total += spent
                self.longest = max(self.longest, spent)

        return timed


def measure(strategy: str, samples: int, slots: int) -> dict[str, Any]:
    trace = load_trace("lognormal(700, 1.1, 8192)", samples=samples)
    engine = Stopwatch(SimEngine, "submit", "poll", "interrupt", "publish")
    harvest, settle = Stopwatch(Controller, "harvest"), Stopwatch(Controller, "settle")
    began = time.process_time()
    with engine, harvest, settle:
        summary = simulate(
            trace, strategy=strategy, slots=slots, update_batch=slots // 4, cohort_batches=8, emit=ignore
        )
    seconds = time.process_time() - began - engine.total
    return {
        "strategy": strategy,
        "samples_per_s": samples / seconds,
        "us_per_sample": 1e6 * seconds / samples,
        # With async a settle includes the harvest.
        "harvest_s": settle.longest + (0.0 if strategy == "async" else harvest.longest),
        "updates": summary.updates,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--slots", type=int, default=4096)
    options = parser.parse_args()
    rows = [measure(strategy, options.samples, options.slots) for strategy in STRATEGIES]
    is_met = all(row["samples_per_s"] >= GOAL_RATE and row["harvest_s"] < GOAL_HARVEST_S for row in rows)
    record = {"samples": options.samples, "slots": options.slots, "rows": rows, "within_goal": is_met}
    save("controller_rate", record)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("strategy", "samples / s", "us / sample", "longest harvest, ms", "updates", box=None)
    for row in rows:
        table.add_row(
            row["strategy"],
            f"{row['samples_per_s']:,.0f}",
            f"{row['us_per_sample']:.1f}",
            f"{1e3 * row['harvest_s']:.0f}",
            str(row["updates"]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
