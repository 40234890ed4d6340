"""The pages of a run with a million events: time, file size and memory of the report, answers of the dashboard.

    python -m benchmarks.telemetry.report_scale [--samples 330000] [--dir FOLDER] [--json]

The simulator writes the events (lengths lognormal(700, 1.1) up to 8192, 128 slots, update batch 128, sorted-partial).
With --dir they are kept, and existing ones are used. A second run has a quarter of the samples: its memory shows how
much memory grows with the run. Each report is made in a new process, so that its memory is measured alone. The
dashboard reads the large run once; then its answers are timed: the list of runs, and the page after the run has grown.
If the machine also does other work, `cpu_s` is more reliable than `seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from starlette.requests import Request

from benchmarks.record import make_parser, run_module, save
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.dashboard.app import Dashboard
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.sinks import JsonlSink

SLOTS = 128
GOAL_S, GOAL_BYTES, GOAL_ANSWER_S = 15.0, 8e6, 1.0


def write_events(run_dir: Path, samples: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    sink = JsonlSink(run_dir / "events.jsonl")
    trace = load_trace("lognormal(700, 1.1, 8192)", samples=samples)
    summary = simulate(trace, strategy="sorted-partial", slots=SLOTS, update_batch=SLOTS, emit=sink.emit)
    sink.close()
    summary.write(run_dir / "summary.json")


def peak_bytes() -> int:
    """Peak memory of this process. `ru_maxrss` would be at least that of the process that started this one."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024


def measure_report(run_dir: Path) -> dict[str, Any]:
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
        "peak_bytes": peak_bytes(),
    }


def measure_dashboard(run_dir: Path) -> dict[str, Any]:
    """Read one run as the dashboard does, all but its last events; then time answers, also after the rest arrived."""
    whole = (run_dir / "events.jsonl").read_bytes()
    half = whole.rfind(b"\n", 0, len(whole) - 200_000) + 1
    with tempfile.TemporaryDirectory() as scratch:
        live = Path(scratch) / "live"
        live.mkdir()
        (live / "events.jsonl").write_bytes(whole[:half])
        dashboard = Dashboard([Path(scratch)])
        listing, longest_poll, began = [], 0.0, time.perf_counter()
        while True:
            poll_began = time.perf_counter()
            state = dashboard.views.poll([live])
            longest_poll = max(longest_poll, time.perf_counter() - poll_began)
            listing.append(_list_s(dashboard))
            if state.parts is not None:
                break
        read_s = time.perf_counter() - began
        with (live / "events.jsonl").open("ab") as file:
            file.write(whole[half:])
        del whole
        began = time.perf_counter()
        assert dashboard.views.poll([live]).parts is not None
        page_s = time.perf_counter() - began
    return {"read_s": read_s, "longest_poll_s": longest_poll, "list_s": max(listing), "page_s": page_s}


def _list_s(dashboard: Dashboard) -> float:
    began = time.perf_counter()
    asyncio.run(dashboard.runs(Request({"type": "http"})))
    return time.perf_counter() - began


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=330_000)
    parser.add_argument("--dir", type=Path, help="run directory to keep, or to use if it exists")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dashboard", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one or arguments.dashboard:
        found = measure_report(arguments.one) if arguments.one else measure_dashboard(arguments.dashboard)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, quarter = arguments.dir or Path(scratch) / "run", Path(scratch) / "quarter"
        if not (run_dir / "summary.json").is_file():
            write_events(run_dir, arguments.samples)
        write_events(quarter, arguments.samples // 4)
        module, place = "benchmarks.telemetry.report_scale", str(run_dir.resolve())
        row, small = (json.loads(run_module(module, "--one", path)) for path in (place, str(quarter)))
        answers = json.loads(run_module(module, "--dashboard", place))
    goals = {"goal_s": GOAL_S, "goal_bytes": GOAL_BYTES, "goal_answer_s": GOAL_ANSWER_S}
    path = save("report_scale", {"row": row, "quarter": small, "dashboard": answers, **goals})
    if arguments.json:
        print(json.dumps({"row": row, "quarter": small, "dashboard": answers}))
        return
    table = Table("events", "seconds", "CPU s", "report, MB", "peak memory, MB")
    for line in (small, row):
        cells = (line["seconds"], line["cpu_s"], line["report_bytes"] / 1e6, line["peak_bytes"] / 1e6)
        table.add_row(f"{line['events']:,}", *(f"{value:,.1f}" for value in cells))
    shown = ", ".join(f"{name} {value:.2f}" for name, value in answers.items())
    goal = f"goals: {GOAL_S:.0f} s, {GOAL_BYTES / 1e6:.0f} MB, answers within {GOAL_ANSWER_S:.0f} s; {path}"
    Console().print(table, f"dashboard: {shown}", goal, sep="\n")


if __name__ == "__main__":
    main()
