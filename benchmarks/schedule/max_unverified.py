"""When an answer is verified: after each update, after some, or once, when it is complete (simulated).

    python -m benchmarks.schedule.max_unverified [--samples 2048] [--seeds 3] [--json]

`sorted-replay` and `async-on-policy` with `max_unverified` = 0, 2 and none, for divergences of 1e-6 to 1e-3, with
prefill, verification, updates and publications paid for Llama-3.1-8B on one H100: 128 slots, lookahead 2, lengths
lognormal(700, 1.1) up to 8192, prompts of 256 tokens. In one condition an update has 128 samples, in the other 32, so
that an answer goes through four times as many. Figures are means over seeds; speed is trained tokens per second
relative to `max_unverified = 0` in the same condition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.events import AttemptVerified, Event

TAIL = "lognormal(700, 1.1, 8192)"
SLOTS = 128
BATCHES = (128, 32)
STRATEGIES = ("sorted-replay", "async-on-policy")
DIVERGENCES = (1e-6, 1e-5, 1e-4, 1e-3)
UNVERIFIED = (0, 2, "none")
FIGURES = ("tokens_per_s", "bubble_ratio", "discarded_share", "verified_share")


def run(
    strategy: str, update_batch: int, unverified: int | str, divergence: float, samples: int, seed: int
) -> dict[str, float]:
    num_verified = 0

    def count(event: Event) -> None:
        nonlocal num_verified
        num_verified += event.cached if isinstance(event, AttemptVerified) else 0

    found = simulate(
        load_trace(TAIL, samples=samples, seed=seed),
        strategy=strategy,
        slots=SLOTS,
        update_batch=update_batch,
        lookahead=2,
        max_unverified=unverified,
        cost=load_cost(kind="roofline", hardware="h100", model="llama-3.1-8b"),
        divergence=divergence,
        seed=seed,
        emit=count,
    )
    trained = found.trained_tokens or 1
    return {
        "tokens_per_s": found.tokens_per_s or 0.0,
        "bubble_ratio": found.bubble_ratio or 0.0,
        "discarded_share": (found.discarded_tokens or 0) / trained,
        "verified_share": num_verified / trained,
    }


def table(samples: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    plans = [
        (strategy, batch, divergence, unverified)
        for strategy in STRATEGIES
        for batch in BATCHES
        for divergence in DIVERGENCES
        for unverified in UNVERIFIED
    ]
    rows: list[dict[str, Any]] = []
    for strategy, batch, divergence, unverified in track(plans, console=Console(stderr=True), description="simulating"):
        found = [run(strategy, batch, unverified, divergence, samples, seed) for seed in seeds]
        figures = {figure: mean(each[figure] for each in found) for figure in FIGURES}
        base = figures if unverified == 0 else rows[-UNVERIFIED.index(unverified)]
        named = {"strategy": strategy, "update_batch": batch, "divergence": divergence, "max_unverified": unverified}
        rows.append({**named, **figures, "speed": figures["tokens_per_s"] / base["tokens_per_s"]})
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    heads = ("strategy", "U", "d", "max_unverified", "tokens/s", "speed", "bubble", "discarded", "verified")
    shown = Table(*heads, box=None)
    for row in rows:
        shown.add_row(
            row["strategy"],
            str(row["update_batch"]),
            f"{row['divergence']:.0e}",
            str(row["max_unverified"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['speed']:.2f}x",
            f"{row['bubble_ratio']:.2f}",
            f"{row['discarded_share']:.0%}",
            f"{row['verified_share']:.2f}",
        )
    Console(width=120).print(shown)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    rows = table(given.samples, range(given.seeds))
    record = {"samples": given.samples, "seeds": given.seeds, "rows": rows}
    save("max_unverified", record)
    if given.json:
        print(json.dumps(record))
    else:
        show(rows)


if __name__ == "__main__":
    main()
