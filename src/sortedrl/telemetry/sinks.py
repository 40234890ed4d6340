"""Where the events of a run go: the sinks of a run, and those that write the files of the run directory.

A run builds one `Fanout` over its sinks and injects it as `emit`; `event_file.py` reads the files back.

Guarantees: a sink that fails is reported once through logging and never stops the run. Every line is one strict JSON
object (a float that is not finite becomes null). After a crash the file has all lines up to the last finished update.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from sortedrl.errors import RunDirError
from sortedrl.telemetry.events import KINDS, Evaluated, Event, RunEnded, RunStarted, UpdateDone
from sortedrl.telemetry.metrics import RunMetrics

log = logging.getLogger(__name__)

_NAMES = {kind: [f.name for f in fields(cls)] for kind, cls in KINDS.items()}
_GETTERS = {kind: (("kind", *names), attrgetter(*names)) for kind, names in _NAMES.items()}
_BUFFER_BYTES = 1 << 20
_MAX_WAITING = 4096
_FLUSHED = (RunStarted, UpdateDone, Evaluated, RunEnded)


class Sink(Protocol):
    """Receives the events of a run: all of them, or only the classes in its attribute `kinds`, if it has one."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Fanout:
    """Passes every event to each sink in turn. Sinks that read a shared `RunMetrics` must come after it."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)
        self.seconds = 0.0  # spent in sinks
        self.num_failures: Counter[str] = Counter()  # by the sink's class
        self._warned: set[int] = set()  # positions in `sinks`
        self._routes: dict[type[Event], list[tuple[int, Sink]]] = {}  # the sinks that want each class of events

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
                self._report(position, f"on {event.kind}", error)
        self.seconds += time.perf_counter() - began

    def _route(self, kind: type[Event]) -> list[tuple[int, Sink]]:
        wanted = [getattr(sink, "kinds", None) for sink in self.sinks]
        return [pair for pair, kinds in zip(enumerate(self.sinks), wanted, strict=True) if not kinds or kind in kinds]

    def close(self) -> None:
        for position, sink in enumerate(self.sinks):
            try:
                sink.close()
            except Exception as error:
                self._report(position, "while closing", error)

    def _report(self, position: int, when: str, error: Exception) -> None:
        name = type(self.sinks[position]).__name__
        self.num_failures[name] += 1
        if position not in self._warned:
            self._warned.add(position)
            log.warning(
                "%s failed %s (%s: %s); training continues, but the sink's output is incomplete. "
                "Further failures of this sink are not reported.",
                name,
                when,
                type(error).__name__,
                error,
            )


class JsonlSink:
    """`events.jsonl`: every event, buffered, and flushed at the end of every update.

    The first `keep_bytes` of an existing file are kept, and new lines are appended to them. `gap` tells what is wrong
    with them; a file that has fewer is kept as it is.
    """

    def __init__(self, path: str | Path, *, keep_bytes: int = 0) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("a", encoding="utf-8", buffering=_BUFFER_BYTES)
            self.gap = self._cut(keep_bytes)
        except OSError as error:
            raise RunDirError(
                f"cannot write {self.path}: {error.strerror}; create its folder or choose another"
            ) from error
        # Events are written together. Written one by one, between the work that emits them, each costs three times as
        # much.
        self._waiting: list[Event] = []

    def _cut(self, keep_bytes: int) -> str:
        """Cut the file to `keep_bytes`, or to the last complete line before; return what is wrong, or nothing."""
        size = os.fstat(self._file.fileno()).st_size
        end = _end_of_line(self.path, min(keep_bytes, size))
        if size < keep_bytes:
            if end < size:
                self._file.write("\n")  # new lines begin behind the incomplete one
                self._file.flush()
            return f"it has {size:,} bytes but had {keep_bytes:,} at the checkpoint"
        self._file.truncate(end)
        return "" if end == keep_bytes else "lines before the checkpoint were lost or changed"

    def emit(self, event: Event) -> None:
        self._waiting.append(event)
        if isinstance(event, _FLUSHED) or len(self._waiting) >= _MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            # `as_dict` would copy every list deeply, which costs more than the writing.
            kind = event.kind
            names, values = _GETTERS[kind]
            self._write(dict(zip(names, (kind, *values(event)), strict=True)))
        self._file.flush()

    def sync(self) -> int:
        """Force everything to disk; return the size of the file in bytes."""
        self.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(_json_line(record))


class MetricsSink(JsonlSink):
    """`metrics.jsonl`: one line per update. `metrics` must receive each event before this sink does."""

    kinds = frozenset({UpdateDone})

    def __init__(self, path: str | Path, metrics: RunMetrics, *, keep_bytes: int = 0) -> None:
        super().__init__(path, keep_bytes=keep_bytes)
        self._metrics = metrics

    def emit(self, event: Event) -> None:
        if isinstance(event, UpdateDone):
            self._write(asdict(self._metrics.row(event)))
            self._file.flush()


def _end_of_line(path: Path, at: int) -> int:
    """Return the position after the last end of line among the first `at` bytes, or 0."""
    with path.open("rb") as file:
        while at > 0:
            start = max(at - _BUFFER_BYTES, 0)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            at = start
    return 0


def _plain(value: object) -> object:
    """Convert a scalar of an array library to a Python number, without importing the library."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a {type(value).__name__} cannot be written to an event file; use plain numbers and strings")
    return item()


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain)


def _json_line(record: dict[str, Any]) -> str:
    """Return one line of strict JSON."""
    try:
        return _ENCODER.encode(record) + "\n"
    except ValueError:
        return _ENCODER.encode(_finite(record)) + "\n"


def _finite(value: Any) -> Any:
    """Return the same data with null for floats that strict JSON cannot express."""
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
