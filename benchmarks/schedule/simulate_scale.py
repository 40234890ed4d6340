"""How the simulator scales: 10,000, 100,000 and 1,000,000 samples on 4,096 slots.

    python -m benchmarks.schedule.simulate_scale [--samples 10000 100000 1000000] [--svg FILE] [--json]

Lengths lognormal(700, 1.1) up to 8192, update batch 1,024, 8 batches per cohort, sorted-partial, unit costs. Each size
runs in a new process, so that its peak memory is measured alone. `exponent` is the slope between neighbours on log
axes: 1 is linear. If the machine also does other work, compare CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, run_module, save
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace

SLOTS, UPDATE_BATCH, COHORT_BATCHES = 4096, 1024, 8
GOAL_S, GOAL_BYTES = 30.0, 3e9


def measure(samples: int) -> dict[str, Any]:
    """Simulate one size in this process."""
    began = time.perf_counter()
    trace = load_trace("lognormal(700, 1.1, 8192)", samples=samples)
    loaded, cpu_began = time.perf_counter(), time.process_time()
    summary = simulate(
        trace, strategy="sorted-partial", slots=SLOTS, update_batch=UPDATE_BATCH, cohort_batches=COHORT_BATCHES
    )
    done = time.perf_counter()
    return {
        "samples": samples,
        "trace_s": loaded - began,
        "seconds": done - loaded,
        "cpu_s": time.process_time() - cpu_began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bubble_ratio": summary.bubble_ratio,
        "updates": summary.updates,
    }


def measure_apart(samples: int) -> dict[str, Any]:
    return json.loads(run_module("benchmarks.schedule.simulate_scale", "--one", str(samples)))


def write_plot(path: str, rows: list[dict[str, Any]]) -> None:
    """Write an SVG of seconds over samples on log axes, with N log N through the first point."""
    sizes, seconds = [row["samples"] for row in rows], [row["seconds"] for row in rows]
    scale = seconds[0] / (sizes[0] * math.log(sizes[0]))
    expected = [scale * n * math.log(n) for n in sizes]
    lowest, highest = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(*seconds, *expected)))

    def at(n: float, s: float) -> str:
        x = 70 + 420 * math.log(n / sizes[0]) / math.log(sizes[-1] / sizes[0])
        return f"{x:.1f},{250 - 220 * (math.log10(s) - lowest) / (highest - lowest):.1f}"

    def line(values: list[float], style: str) -> str:
        points = " ".join(at(n, s) for n, s in zip(sizes, values, strict=True))
        return f'<polyline points="{points}" fill="none" stroke-width="2" {style}/>'

    def label(x: float, y: float, text: str, anchor: str = "middle") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'

    parts = [line(expected, 'stroke="#888" stroke-dasharray="6 4"'), line(seconds, 'stroke="#2171b5"')]
    for n, s in zip(sizes, seconds, strict=True):
        x, y = at(n, s).split(",")
        parts += [f'<circle cx="{x}" cy="{y}" r="4" fill="#2171b5"/>', label(float(x), 270, f"{n:,}")]
        parts.append(label(float(x), float(y) - 10, f"{s:.1f} s"))
    for power in range(lowest, highest + 1):
        y = float(at(sizes[0], 10.0**power).split(",")[1])
        parts.append(
            f'<line x1="64" x2="500" y1="{y}" y2="{y}" stroke="#ddd"/>' + label(58, y + 4, f"{10.0**power:g}", "end")
        )
    parts += [label(280, 292, "samples"), label(16, 20, "seconds", "start"), label(500, 20, "dashed: N log N", "end")]
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    box = '<rect width="540" height="300" fill="white" stroke="none"/>'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 300" {style}>{box}{"".join(parts)}</svg>'
    Path(path).write_text(picture + "\n", encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--svg", help="also draw the times into this file")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows: list[dict[str, Any]] = []
    for samples in sorted(options.samples):
        row = measure_apart(samples)
        if rows:
            last = rows[-1]
            row["exponent"] = math.log(row["cpu_s"] / last["cpu_s"]) / math.log(row["samples"] / last["samples"])
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
    if options.svg:
        write_plot(options.svg, rows)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("samples", "seconds", "CPU s", "CPU us / sample", "GB", "exponent", "bubble", "updates", box=None)
    for row in rows:
        table.add_row(
            f"{row['samples']:,}",
            f"{row['seconds']:.1f}",
            f"{row['cpu_s']:.1f}",
            f"{1e6 * row['cpu_s'] / row['samples']:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['exponent']:.2f}" if "exponent" in row else "",
            f"{row['bubble_ratio']:.3f}",
            str(row["updates"]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
