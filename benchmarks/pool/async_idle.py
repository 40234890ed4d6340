"""Why the engine is idle under `async`, simulated: which setting helps when the learner is slower than the engine?

    python -m benchmarks.pool.async_idle [--update-s 0.134] [--engine-speed 2] [--json]

A simulated run like the quickstart: 2,048 answers with a mean of 76 tokens, 16 per batch. `--update-s` is the time of
an update on 16 samples; the default is what async_overlap.py measured with 16 slots and bound 4, without compiled
layers in the learner. Decoding costs come from results/forecast.json, divided by `--engine-speed`, whose default makes
the engine as idle as it was in that measurement. Idle engine and free slots are shares of the time in which an update
runs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.pool.async_overlap import UpdateWatch
from benchmarks.record import load, make_parser, save
from sortedrl.simulate.fit import FittedCost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace, load_trace

LENGTHS, SAMPLES, BATCH = "lognormal(55, 0.8, 512)", 2048, 16
DECODING = ("base_s", "several_s", "slot_s", "window_s", "poll_s", "call_s", "host_s")
USUAL: dict[str, Any] = {"slots": 16, "max_staleness": 4, "on_bound": "wait", "lookahead": 2, "update_batch": BATCH}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"max_staleness": 2},
    {"max_staleness": 8},
    {"on_bound": "replay"},
    {"lookahead": 4},
    {"update_batch": 32},
    {"update_batch": 8},
    {"slots": 12},
    {"slots": 8},
    {"slots": 6},
)


def run(trace: Trace, cost: FittedCost, update_s: float, change: dict[str, Any]) -> dict[str, Any]:
    knobs = USUAL | change
    watch = UpdateWatch(knobs["slots"])
    summary = simulate(
        trace,
        strategy="async",
        cost=cost,
        update_s=update_s * knobs["update_batch"] / BATCH,
        divergence=1e-3,
        prompt_tokens=cost.prompt_tokens,
        emit=watch.emit,
        **knobs,
    )
    return {
        "change": change,
        "engine_idle": watch.idle_s / watch.update_s,
        "slots_free": watch.free_slot_s / (watch.slots * watch.update_s),
        "tokens_per_s": summary.tokens_per_s,
        "staleness_max": summary.staleness_max,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--update-s", type=float, default=0.134)
    parser.add_argument("--engine-speed", type=float, default=2.0)
    options = parser.parse_args()
    fitted = FittedCost(**load("forecast")["fit"]["cost"])
    cost = replace(fitted, **{name: getattr(fitted, name) / options.engine_speed for name in DECODING})
    trace = load_trace(LENGTHS, samples=SAMPLES)
    rows = [
        run(trace, cost, options.update_s, change) for change in track(CHANGES, "runs", console=Console(stderr=True))
    ]
    record = {"update_s": options.update_s, "engine_speed": options.engine_speed, "usual": USUAL, "rows": rows}
    save("async_idle", record)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("changed setting", "engine idle", "slots free", "tokens / s", "staleness", box=None)
    for row in rows:
        table.add_row(
            ", ".join(f"{name} = {value}" for name, value in row["change"].items()) or "none",
            f"{row['engine_idle']:.1%}",
            f"{row['slots_free']:.1%}",
            f"{row['tokens_per_s']:,.0f}",
            str(row["staleness_max"]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
