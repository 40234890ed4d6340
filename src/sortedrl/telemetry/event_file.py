"""Read `events.jsonl`, whole or while a run is writing it.

`EventFile` follows a file: each `read` returns the events added since the last one. Report, dashboard and trace read
through it. `read_events` iterates over a finished file.

Guarantees: a line is returned once, and only when it is complete. A file that was replaced or truncated, as a resumed
run does, is read again from the start. Kinds and fields of events that this version does not know are left out, and so
are damaged lines; unknown kinds and damaged lines are counted. A file without a single event is refused.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sortedrl.errors import RunDirError
from sortedrl.telemetry.events import KINDS, SCHEMA_GAPS, SCHEMA_VERSION, Event, RunStarted

log = logging.getLogger(__name__)

Record = dict[str, Any]

FILE_NAME = "events.jsonl"
_CHUNK_BYTES = 4 << 20
_MARK_BYTES = 64
_MAX_LINE_BYTES = 256 << 20  # the largest line lists the samples of one cohort
_FIELDS = {kind: {f.name: str(f.type) for f in fields(cls)} for kind, cls in KINDS.items()}
_SCALAR_KINDS = {kind for kind, types in _FIELDS.items() if set(types.values()) <= {"int", "float", "str"}}
_PER_SAMPLE = ("samples", "lengths", "rewards", "staleness", "staleness_token_sum")  # the lists of BatchTaken
_REMEDY = "check that this is the event file of a run"


class EventFile:
    """A read position in an event file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.num_lines = 0
        self.offset = 0  # behind the last complete line
        self.size = 0  # at the last read
        self.unknown: Counter[str] = Counter()  # kinds of event that this version does not know
        self.num_unreadable = 0  # damaged lines, which are left out
        self.first_unreadable = ""
        self.needs_event = True  # refuse a file without a single event
        self._inode = -1
        self._mark = b""  # the bytes before `offset`: they differ if the file was replaced

    @property
    def is_cut_short(self) -> bool:
        """Whether the last line was incomplete at the last read."""
        return self.size > self.offset

    def read(self) -> tuple[list[Event], bool]:
        """Return the next events, from at most a few megabytes, and whether reading began again at the start."""
        if not self.path.parent.is_dir():
            raise RunDirError(f"{self.path.parent} is not a directory; pass the directory of a run")
        try:
            with self.path.open("rb") as file:
                is_new = self._rewind(file)
                lines = self._lines(file)
        except FileNotFoundError:
            raise RunDirError(
                f"{self.path.parent} is not a run directory: it has no {self.path.name}; pass one that has"
            ) from None
        except OSError as error:
            raise RunDirError(f"cannot read {self.path}: {error.strerror}; check its permissions") from error
        return self._events(lines), is_new

    def _rewind(self, file: BinaryIO) -> bool:
        """Go back to the start if this is not the file that was read before; return whether that was so."""
        status = os.fstat(file.fileno())
        self.size = status.st_size
        is_same = status.st_ino == self._inode and status.st_size >= self.offset
        if is_same and self._mark:
            file.seek(self.offset - len(self._mark))
            is_same = file.read(len(self._mark)) == self._mark
        if not is_same:
            self._inode, self.offset, self.num_lines, self._mark = status.st_ino, 0, 0, b""
            self.unknown.clear()
            self.num_unreadable, self.first_unreadable = 0, ""
        file.seek(self.offset)
        return not is_same

    def _lines(self, file: BinaryIO) -> list[bytes]:
        data = file.read(_CHUNK_BYTES)
        while (end := data.rfind(b"\n")) < 0 and len(data) < _MAX_LINE_BYTES:
            more = file.read(_CHUNK_BYTES)
            if not more:
                return []
            data += more
        if end < 0:
            limit = f"{_MAX_LINE_BYTES >> 20} MiB"
            raise RunDirError(f"{self.path}, line {self.num_lines + 1} is longer than {limit}; {_REMEDY}")
        data = data[: end + 1]
        self.offset += len(data)
        self._mark = data[-_MARK_BYTES:]
        return data.split(b"\n")[:-1]

    def _events(self, lines: list[bytes]) -> list[Event]:
        try:
            records = parse_json(b"[" + b",".join(lines) + b"]")  # one call is far faster than one per line
        except ValueError:
            records = []
        is_one_per_line = len(records) == len(lines)
        events = []
        for number, line in enumerate(lines):
            self.num_lines += 1
            try:
                record = records[number] if is_one_per_line else parse_json(line)
                event = event_from(record)
            except ValueError as error:
                self.leave_out(f"line {self.num_lines}: {error}")
                continue
            if event is None:
                self.unknown[record["kind"]] += 1
            else:
                events.append(event)
        if self.needs_event and self.num_unreadable and self.num_unreadable == self.num_lines:
            raise RunDirError(f"{self.path}, {self.first_unreadable}; {_REMEDY}")
        return events

    def leave_out(self, what: str) -> None:
        """Count a damaged line."""
        self.num_unreadable += 1
        self.first_unreadable = self.first_unreadable or what

    @property
    def damage(self) -> str:
        """What was left out as damaged, or nothing."""
        return _damage(self.num_unreadable, self.first_unreadable)


def damage_of(path: Path) -> str:
    """Return what is unreadable in a file of one JSON object per line, or nothing."""
    faults = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            parse_json(line)
        except ValueError as error:
            faults.append(f"line {number}: {error}")
    return _damage(len(faults), faults[0]) if faults else ""


def _damage(count: int, first: str) -> str:
    if not count:
        return ""
    lines = "1 line is" if count == 1 else f"{count:,} lines are"
    return f"{lines} unreadable and left out ({first})"


def parse_json(data: bytes) -> Any:
    """Parse JSON. Raises ValueError if it is not JSON, or a number is not finite or needs more than 64 bits."""
    try:
        return _DECODER.decode(data.decode("utf-8", errors="replace"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError("not JSON") from error


def _parse_int(text: str) -> int:
    if len(text) > 19 and (len(text) > 21 or abs(int(text)) >= 1 << 64):
        raise _impossible(text)
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _impossible(text)
    return value


def _parse_constant(text: str) -> NoReturn:
    raise _impossible(text)


def _impossible(text: str) -> ValueError:
    return ValueError(f"{text if len(text) <= 24 else text[:20] + '...'} is not a number that a run can have")


_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_constant)


def event_from(record: Record) -> Event | None:
    """Return the event of one line, or None if its kind is unknown. Raises ValueError if it is not an event."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str):
        raise ValueError("not an event, it has no kind")
    cls = KINDS.get(kind)
    if cls is None:
        return None
    known = _FIELDS[kind]
    try:
        if kind == "BatchTaken" and len({len(record.get(name, ())) for name in _PER_SAMPLE}) > 1:
            raise ValueError("a BatchTaken whose lists differ in length")
        if kind in _SCALAR_KINDS and len(record) == len(known) + 1 and None not in record.values():
            del record["kind"]  # nearly all events: no value to restore, no field to leave out
            return cls(**record)
        return cls(**{key: _restored(value, known[key]) for key, value in record.items() if key in known})
    except TypeError as error:
        raise ValueError(f"an incomplete {kind} ({error})") from error


def _restored(value: Any, annotation: str) -> Any:
    """Turn null back into NaN where the field is a float: strict JSON has no word for it."""
    if value is None and annotation == "float":
        return math.nan
    if isinstance(value, dict) and None in value.values():
        return {key: math.nan if item is None else item for key, item in value.items()}
    if isinstance(value, list) and None in value:
        return [math.nan if item is None else item for item in value]
    return value


def schema_note(started: RunStarted) -> str | None:
    """Return what an older schema lacks, or None for the current one. Refuses a later schema."""
    version = started.schema_version
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunDirError(
            f"the events have schema version {version}, but this package reads up to {SCHEMA_VERSION}: upgrade it"
        )
    if version == SCHEMA_VERSION:
        return None
    gaps = [SCHEMA_GAPS[older] for older in range(version, SCHEMA_VERSION) if older in SCHEMA_GAPS]
    return f"has event schema version {version}, older than {SCHEMA_VERSION}: " + "; ".join(gaps)


def read_events(
    path: str | Path, *, unknown: Counter[str] | None = None, damage: list[str] | None = None
) -> Iterator[Event]:
    """Iterate over the events of a file, with a few megabytes of it in memory at a time.

    Logs a warning for what is left out: an incomplete last line (from a crash, or from a run that is writing it),
    damaged lines, and events of unknown kinds, which `unknown` counts. With `damage`, what is damaged is added there
    instead, and a file without a single event is not refused. Also warns about an older schema, and refuses a later
    one.
    """
    path = Path(path)
    if not path.is_file():
        raise RunDirError(f"{path} is not a file; pass the events.jsonl of a run directory")
    return _read_events(EventFile(path), unknown, damage)


def _read_events(file: EventFile, unknown: Counter[str] | None, damage: list[str] | None) -> Iterator[Event]:
    file.needs_event = damage is None
    events, is_new = file.read()
    num_lines = 0
    while events or is_new or file.num_lines > num_lines:  # a part of the file may have damaged lines only
        num_lines = file.num_lines
        for event in events:
            if isinstance(event, RunStarted) and (note := schema_note(event)):
                log.warning("%s %s", file.path, note)
            yield event
        events, is_new = file.read()
    if file.damage and damage is not None:
        damage.append(file.damage)
    elif file.damage:
        log.warning("%s: %s", file.path, file.damage)
    if file.is_cut_short:
        log.warning("%s: line %d was cut short and is left out", file.path, file.num_lines + 1)
    if file.unknown:
        kinds = ", ".join(sorted(file.unknown))
        log.warning("%s: %d events of unknown kind are left out: %s", file.path, file.unknown.total(), kinds)
    if unknown is not None:
        unknown.update(file.unknown)
