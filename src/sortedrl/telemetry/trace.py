"""`sortedrl trace`: what the events of a run directory tell, in one pass: slot time, cohorts, and a trace for Perfetto.

What it keeps true: memory follows the samples, not the events; whatever is unusual about the run is said in `notes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sortedrl.errors import RunDirError
from sortedrl.telemetry.cohorts import CohortFigures, Cohorts, as_records
from sortedrl.telemetry.events import SCHEMA_VERSION, Event
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.perfetto import write_trace
from sortedrl.telemetry.sinks import read_events

EVENTS_FILE = "events.jsonl"
_TELL_EVERY = 5000


@dataclass(slots=True, kw_only=True)
class Findings:
    """`seconds` and `slot_s` are on the events' clock: of the run, and of slots in which attempts advanced."""

    run: str
    strategy: str
    slots: int
    num_events: int
    updates: int
    seconds: float
    slot_s: float
    slot_time: dict[str, float] | None
    cohorts: list[CohortFigures]
    notes: list[str] = field(default_factory=list)
    trace: str | None = None  # the file for Perfetto

    def as_dict(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in self.__slots__}
        return {**record, "cohorts": as_records(self.cohorts)}


def look_back(
    run_dir: str | Path, *, perfetto: str | Path | None = None, tell: Callable[[int], None] | None = None
) -> Findings:
    """Read a run's events; `perfetto` names a file to write their trace to, `tell` hears how many were read so far."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunDirError(f"{run_dir} is not a directory; name the directory of a run")
    path = run_dir / EVENTS_FILE
    if not path.is_file():
        raise RunDirError(f"{run_dir} is no run: it holds no {EVENTS_FILE}; name the directory of a run")
    metrics, cohorts, count = RunMetrics(), Cohorts(), _Count(tell)
    events = _folded(read_events(path), metrics, cohorts, count)
    if perfetto is not None:
        write_trace(events, perfetto)
    else:
        for _ in events:
            pass
    assert metrics.run is not None, "a run without a start is refused while it is read"
    return Findings(
        run=run_dir.resolve().name,
        strategy=metrics.run.strategy,
        slots=metrics.slots,
        num_events=count.events,
        updates=metrics.updates,
        seconds=metrics.occupancy.now - metrics.occupancy.origin,
        slot_s=metrics.occupancy.busy_slot_s,
        slot_time=metrics.slot_time() if metrics.run.schema_version == SCHEMA_VERSION else None,
        cohorts=cohorts.figures(),
        notes=_notes(metrics),
        trace=None if perfetto is None else str(perfetto),
    )


class _Count:
    def __init__(self, tell: Callable[[int], None] | None) -> None:
        self.events = 0
        self._tell = tell

    def add(self) -> None:
        self.events += 1
        if self._tell is not None and self.events % _TELL_EVERY == 0:
            self._tell(self.events)


def _folded(events: Iterable[Event], metrics: RunMetrics, cohorts: Cohorts, count: _Count) -> Iterator[Event]:
    for event in events:
        metrics.emit(event)
        if metrics.run is None:
            break
        cohorts.emit(event)
        count.add()
        yield event
    if metrics.run is None:
        raise RunDirError("the events tell of no run: the first is no RunStarted; name the directory of a run")


def _notes(metrics: RunMetrics) -> list[str]:
    notes = []
    if metrics.end_reason is None:
        notes.append("has not ended: it is still being written, or it crashed; these are its events so far")
    elif metrics.end_reason != "complete":
        notes.append(f"was {metrics.end_reason} before it was complete")
    if not metrics.updates:
        notes.append("has no update: nothing was trained yet")
    if metrics.run is not None and metrics.run.schema_version < SCHEMA_VERSION:
        notes.append(
            f"is of event schema {metrics.run.schema_version}, older than {SCHEMA_VERSION}: slot time cannot be told "
            "by cause"
        )
    return notes
