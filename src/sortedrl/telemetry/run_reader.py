"""A run directory, read: its events folded into a view, its summary, and what a reader has to know about them.

The report reads a directory to its end, the dashboard goes on as the run does. Nothing is locked, nothing written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sortedrl.errors import RunDirError
from sortedrl.ledger.run_lock import is_being_written
from sortedrl.telemetry.event_file import EventFile, Record
from sortedrl.telemetry.summary import Summary
from sortedrl.telemetry.view import RunView

_TAIL_BYTES = 65536


class RunReader:
    """A run directory, read as far as it is written; `read_on` goes on where it stopped."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self.file = EventFile(self.run_dir)
        self.view = RunView(self.run_dir.resolve().name)
        self.is_live = False  # somebody writes it

    def read_on(self) -> bool:
        """Fold what has come, a few megabytes at most; returns whether there was anything."""
        records, is_new = self.file.read()
        if is_new:
            self.view = RunView(self.view.name)
        for record in records:
            self.view.fold(record)
        return bool(records) or is_new

    def read_all(self, tell: Callable[[int, int], None] | None = None) -> RunView:
        """Fold all there is; `tell` hears of bytes read, and of all."""
        while self.read_on():
            if tell is not None:
                tell(self.file.offset, self.file.size)
        if self.view.run is None:
            raise RunDirError(f"{self.file.path} tells of no run: it lacks RunStarted; run it again")
        self.look_around()
        return self.view

    def look_around(self) -> None:
        """The files beside the events."""
        path = self.run_dir / "summary.json"
        self.is_live = is_being_written(self.run_dir)
        self.view.recorded = Summary.read(path) if path.is_file() else None
        self.view.latest = last_record(self.run_dir / "metrics.jsonl")
        self.view.slot_time = _slot_time(path, self.view.latest)

    def remarks(self) -> list[str]:
        """What a reader has to know about the figures, as sentences that begin with the run's name."""
        view, said = self.view, list(self.view.notes)
        summary = view.recorded
        if summary is None and self.is_live:
            said.append("is still being written: its figures are those so far")
        elif summary is None:
            said.append(
                "left no summary.json: its figures are estimated from its events, as far as they go, and its ledger "
                "is not known"
            )
        elif summary.status == "stopped":
            said.append("was stopped before it was complete")
        if summary is not None and summary.ledger and (summary.ledger.lost or summary.ledger.duplicated):
            ledger = summary.ledger
            said.append(f"broke its guarantee: {ledger.lost} samples lost, {ledger.duplicated} trained twice")
        if self.file.is_cut_short and not self.is_live:
            said.append("has a last line of events that was cut short and is left out")
        if view.unknown:
            kinds = ", ".join(sorted(view.unknown))
            said.append(f"has {view.unknown.total():,} events of a kind unknown here, left out: {kinds}")
        return [f"{view.name} {words}." if not words.startswith("its") else f"{view.name}: {words}." for words in said]


def last_record(path: Path) -> Record:
    """The last complete line of a file of records; empty where there is none, or where it is no record."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")[:-1]
        record = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _slot_time(path: Path, latest: Record) -> dict[str, float]:
    """Shares by cause from the summary, or as they stood at the last update."""
    try:
        record = json.loads(path.read_bytes()) if path.is_file() else latest
    except (OSError, ValueError):
        record = {}
    found = record.get("slot_time") if isinstance(record, dict) else None
    if not isinstance(found, dict):
        return {}
    return {str(cause): float(value) for cause, value in found.items() if isinstance(value, int | float)}
