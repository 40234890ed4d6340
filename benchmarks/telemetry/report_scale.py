"""The report of a run with a million events: time, file size and memory.

    python -m benchmarks.telemetry.report_scale [--samples 330000] [--dir FOLDER] [--json]

The simulator writes the events (lengths lognormal(700, 1.1) up to 8192, 128 slots, update batch 128, sorted-partial).
With --dir they are kept, and existing ones are used. The report is made in a new process, so that its memory is
measured alone. If the machine also does other work, `cpu_s` is more reliable than `seconds`.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, run_module, save
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.sinks import JsonlSink

SLOTS = 128
GOAL_S, GOAL_BYTES = 20.0, 15e6


def write_events(run_dir: Path, samples: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    sink = JsonlSink(run_dir / "events.jsonl")
    trace = load_trace("lognormal(700, 1.1, 8192)", samples=samples)
    summary = simulate(trace, strategy="sorted-partial", slots=SLOTS, update_batch=SLOTS, emit=sink.emit)
    sink.close()
    summary.write(run_dir / "summary.json")


def measure(run_dir: Path) -> dict[str, Any]:
    """Make the report of one run in this process."""
    began, cpu = time.perf_counter(), time.process_time()
    report = write_report([run_dir], run_dir / "report.html")
    with (run_dir / "events.jsonl").open("rb") as file:
        events = sum(1 for _ in file)
    return {
        "events": events,
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "report_bytes": report.stat().st_size,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=330_000)
    parser.add_argument("--dir", type=Path, help="run directory to keep, or to use if it exists")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = arguments.dir or Path(scratch) / "run"
        if not (run_dir / "summary.json").is_file():
            write_events(run_dir, arguments.samples)
        row = json.loads(run_module("benchmarks.telemetry.report_scale", "--one", str(run_dir.resolve())))
    path = save("report_scale", {"row": row, "goal_s": GOAL_S, "goal_bytes": GOAL_BYTES})
    if arguments.json:
        print(json.dumps(row))
        return
    table = Table("events", "seconds", "CPU s", "report, MB", "peak memory, MB")
    cells = (row["seconds"], row["cpu_s"], row["report_bytes"] / 1e6, row["peak_bytes"] / 1e6)
    table.add_row(f"{row['events']:,}", *(f"{value:,.1f}" for value in cells))
    Console().print(table, f"goals: {GOAL_S:.0f} s, {GOAL_BYTES / 1e6:.0f} MB; {path}", sep="\n")


if __name__ == "__main__":
    main()
