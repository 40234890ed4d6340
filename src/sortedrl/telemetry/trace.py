"""`sortedrl trace`: slot time by cause, figures of every cohort, and on request a trace for Perfetto, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sortedrl.telemetry.cohorts import CohortFigures
from sortedrl.telemetry.perfetto import open_trace
from sortedrl.telemetry.run_reader import RunReader


@dataclass(slots=True, kw_only=True)
class TraceFindings:
    """`seconds` is the run's time and `slot_s` the slot-seconds in which attempts advanced, on the events' clock."""

    run: str
    strategy: str
    slots: int
    num_events: int
    updates: int
    seconds: float
    slot_s: float
    slot_time: dict[str, float] | None
    cohorts: list[CohortFigures]
    notes: list[str] = field(default_factory=list)  # what is unusual about the run
    trace: str | None = None  # the file for Perfetto

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def trace_run(
    run_dir: str | Path, *, perfetto: str | Path | None = None, progress: Callable[[int, int], None] | None = None
) -> TraceFindings:
    """Read a run's events, and write their trace to the file `perfetto` if given.

    `progress` is called with the bytes read so far and the size of the file.
    """
    with nullcontext() if perfetto is None else open_trace(perfetto) as trace:
        reader = RunReader(run_dir, keep_cohorts=True, trace=trace)
        view = reader.read_all(progress)
    metrics = view.metrics
    assert metrics.run is not None, "the reader refuses a run without RunStarted"
    return TraceFindings(
        run=view.name,
        strategy=metrics.run.strategy,
        slots=metrics.slots,
        num_events=view.num_events,
        updates=metrics.updates,
        seconds=metrics.occupancy.now - metrics.occupancy.origin,
        slot_s=metrics.occupancy.busy_slot_s,
        slot_time=None if view.schema_note else metrics.slot_time(),
        cohorts=view.samples.cohort_figures(),
        notes=_notes(reader),
        trace=None if perfetto is None else str(perfetto),
    )


def _notes(reader: RunReader) -> list[str]:
    metrics = reader.view.metrics
    notes = []
    if metrics.end_reason is None:
        notes.append("has not ended: it is still being written, or it crashed; these are its events so far")
    elif metrics.end_reason != "complete":
        notes.append(f"was {metrics.end_reason} before it was complete")
    if not metrics.updates:
        notes.append("has no update: nothing was trained yet")
    return notes + reader.file_notes()
