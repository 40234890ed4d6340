"""What a bound on staleness costs: the goodput of every way to keep it, with unit costs and on modelled hardware.

    python -m benchmarks.schedule.goodput_table [--samples 16384] [--seeds 5] [--cost unit|roofline|both] [--json]

unit: lengths lognormal(700, 1.1) up to 8192; slots = update batch = 128; 4 batches per cohort; the end of the run, when
slots become empty, is included. Every row uses the lookahead (0, 1, 2, 4, 8 or none) with the best mean goodput over
the seeds. Rows that wait at the bound take a minute each and use only the first seed.
roofline: Llama-3.1-8B on an H100, with prefill costs, first seed. It shows whether resume, replay or restart is fastest
for several divergence rates and ratios of update batch to slots, again at the best lookahead.
"""

from __future__ import annotations

import json
import sys
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.simulate.costs import CostModel, load_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace, load_trace
from sortedrl.telemetry.summary import Summary

TRACE = "lognormal(700, 1.1, 8192)"
SLOTS = 128
LOOKAHEADS = (0, 1, 2, 4, 8, "none")
DIVERGENCES = (1e-5, 1e-4, 1e-3)
FIGURES = ("goodput", "bubble_ratio", "tokens_per_s", "staleness_token_mean", "staleness_max", "updates")
Arm = tuple[str, str, dict[str, Any]]  # label, strategy, options


def unit_arms() -> list[Arm]:
    arms: list[Arm] = [("sync", "sync", {}), ("april", "april", {}), ("staleness 0, restart", "sorted-on-policy", {})]
    arms += [(f"staleness 0, replay d={d:.0e}", "sorted-replay", {"divergence": d}) for d in DIVERGENCES]
    for bound in (1, 2, 4):
        for d in DIVERGENCES:
            replay = {"max_staleness": bound, "on_bound": "replay", "divergence": d}
            arms.append((f"staleness {bound}, resume, replay at the bound d={d:.0e}", "sorted-partial", replay))
    return [*arms, ("no bound, resume", "sorted-partial", {})]


def waiting_arms() -> list[Arm]:
    return [(f"staleness {s}, resume, wait at the bound", "sorted-partial", {"max_staleness": s}) for s in (1, 2, 4)]


def roofline_arms() -> list[Arm]:
    return [
        ("sync", "sync", {}),
        ("resume, no bound", "sorted-partial", {}),
        ("restart, staleness 0", "sorted-on-policy", {}),
        *((f"replay, staleness 0, d={d:.0e}", "sorted-replay", {"divergence": d}) for d in DIVERGENCES),
    ]


def best(traces: dict[int, Trace], arm: Arm, update_batch: int, cost: CostModel | None, by: str) -> dict[str, Any]:
    """The row of an arm, at the lookahead with the best mean over all seeds."""
    label, strategy, options = arm
    runs: dict[str, list[Summary]] = {}
    has_lookahead = strategy not in ("sync", "sync-large", "april")
    for lookahead in LOOKAHEADS if has_lookahead else (None,):
        for seed, trace in traces.items():
            run = simulate(
                trace,
                strategy=strategy,
                slots=SLOTS,
                update_batch=update_batch,
                cost=cost,
                seed=seed,
                cohort_batches=4,
                lookahead=lookahead,
                **options,
            )
            runs.setdefault(str(run.lookahead), []).append(run)
    means = {lookahead: mean(getattr(run, by) for run in of_seeds) for lookahead, of_seeds in runs.items()}
    chosen = max(means, key=lambda lookahead: means[lookahead])
    row = {"label": label, "strategy": strategy, "update_batch": update_batch, **options, "lookahead": chosen}
    row |= {name: mean(getattr(run, name) for run in runs[chosen]) for name in FIGURES}
    row["staleness_max"] = max(run.staleness_max or 0 for run in runs[chosen])
    row["discarded_share"] = mean((run.discarded_tokens or 0) / run.trained_tokens for run in runs[chosen])
    row["by_seed"] = {seed: round(getattr(run, by), 4) for seed, run in zip(traces, runs[chosen], strict=True)}
    row["by_lookahead"] = {lookahead: round(value, 4) for lookahead, value in means.items()}
    return row


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    headers = (
        "update batch",
        "lookahead",
        "goodput",
        "range",
        "bubble",
        "tokens/s",
        "discarded",
        "staleness",
        "max",
        "updates",
    )
    table = Table("", *headers, title=title, box=None)
    for row in rows:
        values = row["by_seed"].values()
        table.add_row(
            row["label"],
            str(row["update_batch"]),
            row["lookahead"],
            f"{row['goodput']:.3f}",
            f"{min(values):,.4g} - {max(values):,.4g}" if len(values) > 1 else "one seed",
            f"{row['bubble_ratio']:.3f}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['discarded_share']:.3f}",
            f"{row['staleness_token_mean']:.2f}",
            str(row["staleness_max"]),
            f"{row['updates']:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cost", choices=("unit", "roofline", "both"), default="both")
    options = parser.parse_args()
    console = Console(file=sys.stderr if options.json else sys.stdout, width=150)
    traces = {seed: load_trace(TRACE, samples=options.samples, seed=seed) for seed in range(options.seeds)}
    first = {0: traces[0]}
    settings: dict[str, Any] = {"trace": TRACE, "samples": options.samples, "slots": SLOTS}
    record: dict[str, Any] = {}
    if options.cost in ("unit", "both"):
        record["unit"] = [best(traces, arm, SLOTS, None, "goodput") for arm in unit_arms()]
        record["unit"] += [best(first, arm, SLOTS, None, "goodput") for arm in waiting_arms()]
        show(console, "unit costs", record["unit"])
        save("goodput_unit", {**settings, "seeds": list(traces), "unit": record["unit"]})
    if options.cost in ("roofline", "both"):
        cost = load_cost("roofline", hardware="h100", model="llama-3.1-8b", longest=8192 + 256)
        record["roofline"] = [
            best(first, arm, size, cost, "tokens_per_s")
            for size in (SLOTS // 4, SLOTS, SLOTS * 4)
            for arm in roofline_arms()
        ]
        show(console, "roofline: Llama-3.1-8B on one H100", record["roofline"])
        save("goodput_roofline", {**settings, "seeds": [0], "roofline": record["roofline"]})
    if options.json:
        print(json.dumps({**settings, **record}))


if __name__ == "__main__":
    main()
