"""Read a run directory: fold its events into a view, and read the summary and metrics next to them.

The report and the trace read a directory to its end; the dashboard continues while the run writes. Reading locks
nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sortedrl.errors import RunDirError
from sortedrl.ledger.run_lock import is_being_written
from sortedrl.telemetry.event_file import FILE_NAME, EventFile, Record, parse_json
from sortedrl.telemetry.perfetto import TraceWriter
from sortedrl.telemetry.summary import Summary
from sortedrl.telemetry.view import RunView

_TAIL_BYTES = 65536
DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What computing with damaged events raises."""


class RunReader:
    """A run directory, read as far as it is written; `read_more` continues from there."""

    def __init__(self, run_dir: str | Path, *, keep_cohorts: bool = False, trace: TraceWriter | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.file = EventFile(self.run_dir / FILE_NAME)
        self.view = RunView(self.run_dir.resolve().name, keep_cohorts=keep_cohorts, trace=trace)
        self._keep_cohorts = keep_cohorts
        self.is_live = False  # a process is writing the run

    def read_more(self) -> bool:
        """Fold new events, from at most a few megabytes; return whether there was anything new."""
        events, is_new = self.file.read()
        if is_new and self.view.num_events:  # the file was replaced or truncated
            self.view = RunView(self.view.name, keep_cohorts=self._keep_cohorts)
        for event in events:
            try:
                self.view.emit(event)
            except DAMAGE as error:
                self.file.leave_out(f"a {event.kind} at {event.t} s: {type(error).__name__}: {error}")
        return bool(events) or is_new

    def read_all(self, progress: Callable[[int, int], None] | None = None) -> RunView:
        """Fold all events; `progress` is called with the bytes read so far and the size of the file."""
        while self.read_more():
            if progress is not None:
                progress(self.file.offset, self.file.size)
        self.check_started()
        if self.view.run is None:
            raise RunDirError(f"{self.file.path} has no RunStarted, so it is not the event file of a run; pass another")
        return self.view

    def check_started(self) -> None:
        """Refuse a file whose RunStarted is damaged: nothing can be shown without it."""
        if self.view.run is None and self.file.damage:
            raise RunDirError(
                f"{self.file.path} has lost its RunStarted: {self.file.damage}; resume the run, which writes it again, "
                "or restore the file from a copy"
            )

    def read_summary(self) -> None:
        """Read the files next to the events, and whether the run is being written."""
        path = self.run_dir / "summary.json"
        self.is_live = is_being_written(self.run_dir)
        self.view.recorded = Summary.read(path) if path.is_file() else None
        self.view.latest = self._latest()
        self.view.slot_time = _slot_time(path, self.view.latest)

    def _latest(self) -> Record:
        """Return the last line of metrics.jsonl that is not newer than the events read, so that all figures agree."""
        done = self.num_updates_done
        return last_record(self.run_dir / "metrics.jsonl", lambda row: not _is_newer(row.get("update"), done - 1))

    @property
    def num_updates_done(self) -> int:
        """The number of the first update that is not done in the events read so far."""
        points = self.view.updates.points
        return points[-1].update + 1 if points else 0

    def remarks(self) -> list[str]:
        """Return what a reader of the figures must know, as sentences that begin with the run's name."""
        summary, notes = self.view.recorded, []
        if summary is None and self.is_live:
            notes.append("is still being written: the figures are those so far")
        elif summary is None:
            notes.append(
                "left no summary.json: its figures are estimated from the events that were written, and its ledger "
                "counts are unknown"
            )
        elif summary.status == "stopped":
            notes.append("was stopped before it was complete")
        if summary is not None and summary.ledger and (summary.ledger.lost or summary.ledger.duplicated):
            ledger = summary.ledger
            notes.append(f"broke its guarantee: {ledger.lost} samples lost, {ledger.duplicated} trained twice")
        return [f"{self.view.name} {note}." for note in notes + self.file_notes()]

    def file_notes(self) -> list[str]:
        """Return what is unusual about the event file, as predicates of the run."""
        notes = self.damage_notes()
        if self.view.schema_note is not None:
            notes.append(self.view.schema_note)
        if self.file.is_cut_short and not self.is_live:
            notes.append("has an incomplete last line of events, which is left out")
        if self.file.unknown:
            kinds = ", ".join(sorted(self.file.unknown))
            notes.append(f"has {self.file.unknown.total():,} events of unknown kinds, which are left out: {kinds}")
        return notes

    def damage_notes(self) -> list[str]:
        """Return what was lost of the run's telemetry, as predicates of the run."""
        notes = []
        if self.view.metrics.gap:
            notes.append(f"was resumed although its telemetry is incomplete: {self.view.metrics.gap}")
        if self.file.damage:
            notes.append(f"has damaged events: {self.file.damage}")
        return notes


def _is_newer(update: object, last: int) -> bool:
    return isinstance(update, int) and update > last


def last_record(path: Path, is_wanted: Callable[[Record], bool] = lambda record: True) -> Record:
    """Return the last readable line of a JSONL file that is wanted, or an empty record if it has none near its end."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and is_wanted(record):
                return record
    return {}


def _slot_time(path: Path, latest: Record) -> dict[str, float]:
    """Return the shares by cause from the summary at `path`, or else those at the last update."""
    try:
        record = parse_json(path.read_bytes()) if path.is_file() else latest
    except (OSError, ValueError):
        record = {}
    found = record.get("slot_time") if isinstance(record, dict) else None
    if not isinstance(found, dict):
        return {}
    return {str(cause): float(value) for cause, value in found.items() if isinstance(value, int | float)}
