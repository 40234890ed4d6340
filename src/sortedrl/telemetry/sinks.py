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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from sortedrl.errors import RunDirError
from sortedrl.telemetry import events
from sortedrl.telemetry.events import Evaluated, Event, RunEnded, RunStarted, UpdateDone
from sortedrl.telemetry.metrics import RunMetrics

log = logging.getLogger(__name__)

KINDS: dict[str, type[Event]] = {
    name: cls
    for name, cls in vars(events).items()
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}
"""Event classes by the `kind` that names them in a file."""

_FIELDS = {kind: {f.name: f.type for f in fields(cls)} for kind, cls in KINDS.items()}
_BUFFER_BYTES = 1 << 20


class Sink(Protocol):
    """Something that takes every event of a run."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Fanout:
    """Hands every event to each sink in turn. Sinks that read a shared `RunMetrics` come after it."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)
        self.num_failures: Counter[str] = Counter()  # by the sink's class
        self._warned: set[int] = set()  # positions in `sinks`

    def add(self, sink: Sink) -> None:
        self.sinks.append(sink)

    def __call__(self, event: Event) -> None:
        for position, sink in enumerate(self.sinks):
            try:
                sink.emit(event)
            except Exception as error:
                self._failed(position, f"on {event.kind}", error)

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
        if size < keep_bytes:
            raise RunDirError(
                f"{self.path} has {size} bytes and had {keep_bytes} at the checkpoint: bring it back from a copy"
            )

    def emit(self, event: Event) -> None:
        # Not `as_dict`: its deep copy of every list would cost more than the writing.
        self._write({"kind": event.kind, **{name: getattr(event, name) for name in _FIELDS[event.kind]}})
        if isinstance(event, RunStarted | UpdateDone | Evaluated | RunEnded):
            self._file.flush()

    def sync(self) -> int:
        """Have everything on disk; returns how many bytes that is."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json_line(record))


class MetricsSink(JsonlSink):
    """`metrics.jsonl`: one line per update, from figures that `metrics` has folded before this sink is called."""

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
    """The events of a file, in order.

    A last line that a crash cut short is left out, with a warning. Kinds of event that this version does not know are
    left out too, and counted in `unknown`.
    """
    path = Path(path)
    if not path.is_file():
        raise RunDirError(f"{path} is not a file; name a run directory that holds an events.jsonl")
    return _read_events(path, Counter() if unknown is None else unknown)


def _read_events(path: Path, unknown: Counter[str]) -> Iterator[Event]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith("\n"):
                    log.warning("%s: line %d was cut short and is left out", path, number)
                    break
                raise RunDirError(f"{path}, line {number}: not JSON; is it an event file of a run?") from error
            event = _event_from(record, f"{path}, line {number}", unknown)
            if event is not None:
                yield event
    if unknown:
        log.warning("%s: %d events of unknown kind left out: %s", path, unknown.total(), ", ".join(sorted(unknown)))


def _event_from(record: Any, where: str, unknown: Counter[str]) -> Event | None:
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise RunDirError(f"{where}: no event, since it names no kind; is it an event file of a run?")
    if kind not in KINDS:
        unknown[kind] += 1
        return None
    known = _FIELDS[kind]
    try:
        return KINDS[kind](**{key: _restored(value, known[key]) for key, value in record.items() if key in known})
    except TypeError as error:
        raise RunDirError(f"{where}: an incomplete {kind} ({error}); write the run's events again") from error


def _restored(value: Any, annotation: Any) -> Any:
    """Undo what strict JSON did to floats that are not finite."""
    if value is None and annotation == "float":
        return math.nan
    if isinstance(value, dict) and None in value.values():
        return {key: math.nan if item is None else item for key, item in value.items()}
    if isinstance(value, list) and None in value:
        return [math.nan if item is None else item for item in value]
    return value
