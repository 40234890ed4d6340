"""What a bound on staleness costs: goodput of every way to keep it, under unit costs and on modelled hardware.

    python benchmarks/goodput_table.py [--samples 16384] [--seed 0] [--cost unit|roofline|both] [--json]

unit: lognormal(700, 1.1, cap 8192), Q = U = 128, n = 4, the drain at the run's end included. Every row is at its best
lookahead of 0, 1, 2, 4 and 8. roofline: Llama-3.1-8B on an H100, prefill paid: which of resume, replay and
restart is fastest over the divergence rate and U/Q, again at the best lookahead.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from record import save
from rich.console import Console
from rich.table import Table

from sortedrl.simulate.costs import CostModel, load_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace, load_trace
from sortedrl.telemetry.summary import Summary

TRACE = "lognormal(700, 1.1, 8192)"
SLOTS = 128
LOOKAHEADS = (0, 1, 2, 4, 8)
DIVERGENCES = (1e-5, 1e-4, 1e-3)
Arm = tuple[str, str, dict[str, Any]]  # label, strategy, options


def unit_arms() -> list[Arm]:
    arms: list[Arm] = [("staleness 0, restart", "sorted-on-policy", {})]
    arms += [(f"staleness 0, replay d={d:.0e}", "sorted-replay", {"divergence": d}) for d in DIVERGENCES]
    for bound in (1, 2, 4):
        staleness = {"max_staleness": bound}
        arms.append((f"staleness {bound}, resume, wait at the bound", "sorted-partial", staleness))
        for d in DIVERGENCES[:2]:
            replay = {**staleness, "on_bound": "replay", "divergence": d}
            arms.append((f"staleness {bound}, resume, replay at the bound d={d:.0e}", "sorted-partial", replay))
    return [*arms, ("no bound, resume", "sorted-partial", {})]


def best(trace: Trace, arm: Arm, update_batch: int, cost: CostModel | None, by: str, seed: int) -> dict[str, Any]:
    """The arm at its best lookahead."""
    label, strategy, options = arm
    runs: list[Summary] = []
    has_lookahead = strategy not in ("sync", "sync-large", "april")
    for lookahead in LOOKAHEADS if has_lookahead else (None,):
        runs.append(
            simulate(
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
        )
    chosen = max(runs, key=lambda run: getattr(run, by))
    kept = ("lookahead", "goodput", "bubble_ratio", "tokens_per_s", "staleness_token_mean", "staleness_max", "updates")
    row = {"label": label, "strategy": strategy, "update_batch": update_batch, **options}
    row |= {name: getattr(chosen, name) for name in kept}
    row["discarded_share"] = (chosen.discarded_tokens or 0) / chosen.trained_tokens
    row["by_lookahead"] = {str(run.lookahead): round(getattr(run, by), 4) for run in runs}
    return row


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    headers = ("U", "L", "goodput", "bubble", "tokens/s", "discarded", "by token", "max", "updates")
    table = Table("", *headers, title=title, box=None)
    for row in rows:
        table.add_row(
            row["label"],
            str(row["update_batch"]),
            str(row["lookahead"]),
            f"{row['goodput']:.3f}",
            f"{row['bubble_ratio']:.3f}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['discarded_share']:.3f}",
            f"{row['staleness_token_mean']:.2f}",
            str(row["staleness_max"]),
            str(row["updates"]),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a bound on staleness costs.")
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", choices=("unit", "roofline", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(file=sys.stderr if options.json else sys.stdout, width=130)
    trace = load_trace(TRACE, samples=options.samples, seed=options.seed)
    record: dict[str, Any] = {"trace": TRACE, "samples": options.samples, "seed": options.seed, "slots": SLOTS}
    ends: list[Arm] = [("sync", "sync", {}), ("april", "april", {})]
    if options.cost in ("unit", "both"):
        arms = [*ends, *unit_arms()]
        record["unit"] = [best(trace, arm, SLOTS, None, "goodput", options.seed) for arm in arms]
        show(console, "unit costs", record["unit"])
        save("goodput_unit", record)
    if options.cost in ("roofline", "both"):
        cost = load_cost("roofline", hardware="h100", model="llama-3.1-8b", longest=8192 + 256)
        arms = [
            ("sync", "sync", {}),
            ("resume, no bound", "sorted-partial", {}),
            ("restart, staleness 0", "sorted-on-policy", {}),
            *((f"replay, staleness 0, d={d:.0e}", "sorted-replay", {"divergence": d}) for d in DIVERGENCES),
        ]
        record["roofline"] = [
            best(trace, arm, size, cost, "tokens_per_s", options.seed)
            for size in (SLOTS // 4, SLOTS, SLOTS * 4)
            for arm in arms
        ]
        show(console, "roofline: Llama-3.1-8B on one H100", record["roofline"])
        save("goodput_roofline", {**record, "unit": None})
    if options.json:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
