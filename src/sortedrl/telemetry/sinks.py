"""Where events go: the files of the run directory, and the way back from file to events.

A run builds one `Fanout` over its sinks and injects it as `emit`. What it keeps true: a sink that fails is reported
once through logging and never stops the run; every line is one JSON object, and strictly JSON (a float that is not
finite becomes null); after a crash all lines up to the last finished update are in the file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from sortedrl.errors import RunDirError
from sortedrl.telemetry import events
from sortedrl.telemetry.events import SCHEMA_VERSION, SCHEMAS, Evaluated, Event, RunEnded, RunStarted, UpdateDone
from sortedrl.telemetry.metrics import RunMetrics

log = logging.getLogger(__name__)

KINDS: dict[str, type[Event]] = {
    name: cls
    for name, cls in vars(events).items()
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}
"""Event classes by the `kind` that names them in a file."""

_FIELDS = {kind: {f.name: f.type for f in fields(cls)} for kind, cls in KINDS.items()}
_GETTERS = {kind: (("kind", *names), attrgetter(*names)) for kind, names in _FIELDS.items()}
_SCALAR_KINDS = {
    kind for kind, types in _FIELDS.items() if all(str(name) in ("int", "float", "str") for name in types.values())
}
_BUFFER_BYTES = 1 << 20
_MAX_WAITING = 4096
_FLUSHED = (RunStarted, UpdateDone, Evaluated, RunEnded)
_CHUNK_CHARS = 1 << 20


class Sink(Protocol):
    """Something that takes the events of a run: all, or those of the classes that an attribute `kinds` names."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Fanout:
    """Hands every event to each sink in turn. Sinks that read a shared `RunMetrics` come after it."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)
        self.seconds = 0.0  # spent in here
        self.num_failures: Counter[str] = Counter()  # by the sink's class
        self._warned: set[int] = set()  # positions in `sinks`
        self._routes: dict[type[Event], list[tuple[int, Sink]]] = {}  # who wants which class of events

    def add(self, sink: Sink) -> None:
        self.sinks.append(sink)
        self._routes.clear()

    def __call__(self, event: Event) -> None:
        began = time.perf_counter()
        route = self._routes.get(type(event))
        if route is None:
            route = self._routes[type(event)] = self._route(type(event))
        for position, sink in route:
            try:
                sink.emit(event)
            except Exception as error:
                self._failed(position, f"on {event.kind}", error)
        self.seconds += time.perf_counter() - began

    def _route(self, kind: type[Event]) -> list[tuple[int, Sink]]:
        wanted = [getattr(sink, "kinds", None) for sink in self.sinks]
        return [pair for pair, kinds in zip(enumerate(self.sinks), wanted, strict=True) if not kinds or kind in kinds]

    def close(self) -> None:
        for position, sink in enumerate(self.sinks):
            try:
                sink.close()
            except Exception as error:
                self._failed(position, "while closing", error)

    def _failed(self, position: int, when: str, error: Exception) -> None:
        name = type(self.sinks[position]).__name__
        self.num_failures[name] += 1
        if position not in self._warned:
            self._warned.add(position)
            log.warning(
                "%s failed %s (%s: %s); training goes on, but what it records is incomplete. "
                "Further failures of it are not reported.",
                name,
                when,
                type(error).__name__,
                error,
            )


class JsonlSink:
    """`events.jsonl`: every event, buffered, on disk at the end of every update.

    `keep_bytes` of a file that is there are kept, and what comes goes behind them.
    """

    def __init__(self, path: str | Path, *, keep_bytes: int = 0) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("a", encoding="utf-8", buffering=_BUFFER_BYTES)
            size = os.fstat(self._file.fileno()).st_size
            self._file.truncate(min(keep_bytes, size))
        except OSError as error:
            raise RunDirError(
                f"cannot write {self.path}: {error.strerror}; create its folder or choose another"
            ) from error
        self._waiting: list[Event] = []  # written together: far from the code that tells them it costs thrice as much
        if size < keep_bytes:
            raise RunDirError(
                f"{self.path} has {size} bytes and had {keep_bytes} at the checkpoint: bring it back from a copy"
            )

    def emit(self, event: Event) -> None:
        self._waiting.append(event)
        if isinstance(event, _FLUSHED) or len(self._waiting) >= _MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            # Not `as_dict`: its deep copy of every list would cost more than the writing.
            kind = event.kind
            names, values = _GETTERS[kind]
            self._write(dict(zip(names, (kind, *values(event)), strict=True)))
        self._file.flush()

    def sync(self) -> int:
        """Have everything on disk; returns how many bytes that is."""
        self.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json_line(record))


class MetricsSink(JsonlSink):
    """`metrics.jsonl`: one line per update, from figures that `metrics` has folded before this sink is called."""

    kinds = frozenset({UpdateDone})

    def __init__(self, path: str | Path, metrics: RunMetrics, *, keep_bytes: int = 0) -> None:
        super().__init__(path, keep_bytes=keep_bytes)
        self._metrics = metrics

    def emit(self, event: Event) -> None:
        if isinstance(event, UpdateDone):
            self._write(asdict(self._metrics.row(event)))
            self._file.flush()


def _plain(value: object) -> object:
    """Scalars of array libraries, without importing one."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a {type(value).__name__} cannot be written to an event file; use plain numbers and strings")
    return item()


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain)


def json_line(record: dict[str, Any]) -> str:
    """One line of strict JSON."""
    try:
        return _ENCODER.encode(record) + "\n"
    except ValueError:
        return _ENCODER.encode(_finite(record)) + "\n"


def _finite(value: Any) -> Any:
    """The same data with null for floats that JSON has no word for."""
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case _:
            return _finite(_plain(value))


def read_events(path: str | Path, *, unknown: Counter[str] | None = None) -> Iterator[Event]:
    """The events of a file, in order, a few thousand at a time in memory.

    A last line that a crash cut short, or that a run is just writing, is left out, with a warning. Kinds of event that
    this version does not know are left out too, and counted in `unknown`. A file of an older schema is read with a
    warning that says what it lacks, one of a later schema refused.
    """
    path = Path(path)
    if not path.is_file():
        raise RunDirError(f"{path} is not a file; name a run directory that holds an events.jsonl")
    return _read_events(path, Counter() if unknown is None else unknown)


def _read_events(path: Path, unknown: Counter[str]) -> Iterator[Event]:
    number = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        while lines := file.readlines(_CHUNK_CHARS):
            for record in _records(lines, path, number):
                number += 1
                event = _event_from(record, path, number, unknown)
                if event is not None:
                    yield event
    if unknown:
        log.warning("%s: %d events of unknown kind left out: %s", path, unknown.total(), ", ".join(sorted(unknown)))


def _records(lines: list[str], path: Path, number: int) -> Iterator[Any]:
    """What the lines hold, `number` lines into the file. Parsed in one call, since that takes half the time."""
    whole = lines if lines[-1].endswith("\n") else lines[:-1]
    try:
        records = json.loads(f"[{','.join(whole)}]")
        is_one_each = len(records) == len(whole)
    except (ValueError, RecursionError):
        records, is_one_each = [], False
    if not is_one_each:
        records = []
        for line in whole:
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                yield from records  # whatever is wrong with an earlier line is said first
                where = f"{path}, line {number + len(records) + 1}"
                raise RunDirError(f"{where}: not JSON; is it an event file of a run?") from None
    yield from records
    if len(whole) < len(lines):
        try:
            yield json.loads(lines[-1])
        except (ValueError, RecursionError):
            log.warning("%s: line %d was cut short and is left out", path, number + len(lines))


def _event_from(record: Any, path: Path, number: int, unknown: Counter[str]) -> Event | None:
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str):
        raise RunDirError(f"{path}, line {number}: no event, since it names no kind; is it an event file of a run?")
    cls = KINDS.get(kind)
    if cls is None:
        unknown[kind] += 1
        return None
    if cls is RunStarted:
        check_schema(record, path)
    known = _FIELDS[kind]
    is_plain = kind in _SCALAR_KINDS and len(record) == len(known) + 1 and None not in record.values()
    try:
        if is_plain:  # nearly all: nothing to restore, nothing to leave out
            del record["kind"]
            return cls(**record)
        return cls(**{key: _restored(value, known[key]) for key, value in record.items() if key in known})
    except TypeError as error:
        where = f"{path}, line {number}"
        raise RunDirError(f"{where}: an incomplete {kind} ({error}); write the run's events again") from error


def check_schema(record: dict[str, Any], path: Path) -> None:
    """Warn of a file of an older schema and refuse one of a later; `record` is its RunStarted."""
    version = record.get("schema_version", 1)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunDirError(f"{path} has event schema {version}, this package reads {SCHEMA_VERSION}: upgrade it")
    if version < SCHEMA_VERSION:
        lacks = "; ".join(SCHEMAS[older] for older in range(version, SCHEMA_VERSION) if older in SCHEMAS)
        log.warning("%s is of event schema %d, older than %d: %s", path, version, SCHEMA_VERSION, lacks)


def _restored(value: Any, annotation: Any) -> Any:
    """Undo what strict JSON did to floats that are not finite."""
    if value is None and annotation == "float":
        return math.nan
    if isinstance(value, dict) and None in value.values():
        return {key: math.nan if item is None else item for key, item in value.items()}
    if isinstance(value, list) and None in value:
        return [math.nan if item is None else item for item in value]
    return value
