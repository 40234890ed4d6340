"""How the simulator scales: 10k, 100k and 1M samples on 4,096 slots.

    python benchmarks/simulate_scale.py [--samples 10000 100000 1000000] [--html FILE] [--json]

lognormal(700, 1.1, cap 8192), U = 1,024, n = 8, sorted-partial, unit costs. Each size runs in a process of its own, so
that its peak memory is its own. `exponent` is the slope between neighbours on log axes: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from typing import Any

from record import save
from rich.console import Console
from rich.table import Table

from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace

SLOTS, UPDATE_BATCH, COHORT_BATCHES = 4096, 1024, 8
GOAL_S, GOAL_BYTES = 30.0, 3e9


def measure(samples: int) -> dict[str, Any]:
    """One size, in this process."""
    began = time.perf_counter()
    trace = load_trace("lognormal(700, 1.1, 8192)", samples=samples)
    loaded = time.perf_counter()
    summary = simulate(
        trace, strategy="sorted-partial", slots=SLOTS, update_batch=UPDATE_BATCH, cohort_batches=COHORT_BATCHES
    )
    done = time.perf_counter()
    return {
        "samples": samples,
        "trace_s": loaded - began,
        "seconds": done - loaded,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bubble_ratio": summary.bubble_ratio,
        "updates": summary.updates,
    }


def measure_apart(samples: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(samples)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write_plot(path: str, rows: list[dict[str, Any]]) -> None:
    import plotly.graph_objects as go

    sizes, seconds = [row["samples"] for row in rows], [row["seconds"] for row in rows]
    figure = go.Figure()
    figure.add_scatter(x=sizes, y=seconds, name="measured", mode="lines+markers")
    scale = seconds[0] / (sizes[0] * math.log(sizes[0]))
    figure.add_scatter(x=sizes, y=[scale * n * math.log(n) for n in sizes], name="N log N", line={"dash": "dash"})
    figure.update_xaxes(type="log", title="samples")
    figure.update_yaxes(type="log", title="seconds")
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the simulator scales.")
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--one", type=int)
    parser.add_argument("--html")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows: list[dict[str, Any]] = []
    for samples in sorted(options.samples):
        row = measure_apart(samples)
        if rows:
            last = rows[-1]
            row["exponent"] = math.log(row["seconds"] / last["seconds"]) / math.log(row["samples"] / last["samples"])
        rows.append(row)
    largest = rows[-1]
    record = {
        "slots": SLOTS,
        "update_batch": UPDATE_BATCH,
        "cohort_batches": COHORT_BATCHES,
        "rows": rows,
        "within_goal": largest["seconds"] < GOAL_S and largest["peak_bytes"] < GOAL_BYTES,
    }
    save("simulate_scale", record)
    if options.html:
        write_plot(options.html, rows)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("samples", "seconds", "us / sample", "GB", "exponent", "bubble", "updates", box=None)
    for row in rows:
        table.add_row(
            f"{row['samples']:,}",
            f"{row['seconds']:.1f}",
            f"{1e6 * row['seconds'] / row['samples']:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['exponent']:.2f}" if "exponent" in row else "",
            f"{row['bubble_ratio']:.3f}",
            str(row["updates"]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
