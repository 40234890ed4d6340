"""A run as a trace that Perfetto and chrome://tracing open: a track per slot and reward worker, learner, publications.

`sortedrl trace --perfetto` calls `write_trace`; the file is the JSON form of Chrome's trace events. What it keeps true:
slices on one track never overlap; those on the slots' tracks add up to the time in which slots worked; events are
written as they are read, so that memory does not grow with the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sortedrl.errors import RunDirError
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CheckpointSaved,
    Evaluated,
    Event,
    RewardCalled,
    RunResumed,
    RunStarted,
    ScoresAwaited,
    UpdateDone,
    WeightsPublished,
)

SLOTS, REWARDS, LEARNER = 1, 2, 3  # what Chrome's format calls processes: groups of tracks
UPDATES, PUBLICATIONS, CHECKPOINTS = 0, 1, 2
# Thread numbers are all different, and none is 0: that is the idle thread of every process to Perfetto.
_TID_STRIDE = 1_000_000
_GROUPS = {SLOTS: "slots", REWARDS: "reward workers", LEARNER: "learner"}
_TRACKS = {UPDATES: "updates", PUBLICATIONS: "publications", CHECKPOINTS: "checkpoints"}

Write = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class _Running:
    event: AttemptStarted
    since: float  # where its slice begins
    version: int
    accepted: int | None = None


class TraceBuilder:
    """Turns events into trace events, handed to `write` as they come. `close` ends what is still open."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._running: dict[int, _Running] = {}
        self._paused: set[int] = set()
        self._workers: dict[int, float] = {}  # where the last slice of each ends
        self._batches: dict[int, BatchTaken] = {}
        self._now = 0.0
        self._working: int | None = None
        for pid, name in _GROUPS.items():
            self._name("process_name", pid, 0, name)
            order = {"sort_index": pid}
            self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": _tid(pid, 0), "args": order})
        for tid, name in _TRACKS.items():
            self._name("thread_name", LEARNER, tid, name)

    def emit(self, event: Event) -> None:
        if not isinstance(event, Evaluated):  # one before the run may bear a time that is yet to come
            self._now = max(self._now, event.t)
        match event:
            case AttemptStarted():
                self._running[event.sample] = _Running(event, event.t, event.version)
            case AttemptVerified():
                if event.sample in self._running:
                    self._running[event.sample].accepted = event.accepted
            case AttemptEnded():
                self._end(event)
            case ScoresAwaited():
                self._stand_still(event)
            case BatchTaken():
                self._batches[event.update] = event
                if event.num_paused:
                    self._pause(event.t, "paused for an update")
            case UpdateDone():
                self._update(event)
            case WeightsPublished():
                if not self._paused:
                    self._pause(event.t - event.seconds, "paused for new weights")
                self._go_on(event.t, event.version)
                self._slice(LEARNER, PUBLICATIONS, event.t - event.seconds, event.t, f"version {event.version}", {})
            case RewardCalled():
                self._call(event)
            case CheckpointSaved():
                self._slice(LEARNER, CHECKPOINTS, event.t - event.seconds, event.t, f"version {event.version}", {})
            case Evaluated():
                self._instant(event.t, f"evaluated: {event.sampled_accuracy:.3f}")
            case RunResumed():
                self._instant(event.t, f"resumed at version {event.version}")
            case RunStarted():
                for slot in range(event.slots):
                    self._name("thread_name", SLOTS, slot, f"slot {slot}")
            case _:
                pass
        self._count(event.t)

    def close(self) -> None:
        """Attempts that the events leave running end with the last of them."""
        if not self._paused:
            self._pause(self._now, "events end")

    # ---- slices -----------------------------------------------------------------------------------------------------

    def _end(self, event: AttemptEnded) -> None:
        running = self._running.pop(event.sample, None)
        if running is None:
            return
        if event.sample in self._paused:
            self._paused.discard(event.sample)
        else:
            self._attempt(running, event.t, event.outcome, num_tokens=event.num_tokens)

    def _pause(self, t: float, why: str) -> None:
        for sample, running in self._running.items():
            self._attempt(running, t, why)
            self._paused.add(sample)

    def _go_on(self, t: float, version: int | None = None) -> None:
        for sample in self._paused:
            self._running[sample].since = t
            if version is not None:
                self._running[sample].version = version
        self._paused.clear()

    def _stand_still(self, event: ScoresAwaited) -> None:
        """What stood still for scores, if anything did, did not work meanwhile."""
        if event.num_paused and not self._paused:
            self._pause(event.t - event.seconds, "paused for scores")
            self._go_on(event.t)

    def _attempt(self, running: _Running, end: float, outcome: str, **more: int) -> None:
        event = running.event
        args = {"sample": event.sample, "attempt": event.attempt, "mode": event.mode, "version": running.version}
        args |= {"cached": event.cached, "outcome": outcome, **more}
        if running.accepted is not None:
            args["accepted"] = running.accepted
        self._slice(SLOTS, event.slot, running.since, end, f"sample {event.sample}", args, category=event.mode)

    def _update(self, event: UpdateDone) -> None:
        batch = self._batches.pop(event.update, None)
        if batch is None:
            return
        args = {"samples": len(batch.samples), "tokens": sum(batch.lengths), "interrupted": batch.num_interrupted}
        self._slice(LEARNER, UPDATES, batch.t, event.t, f"update {event.update}", args)

    def _call(self, event: RewardCalled) -> None:
        worker, end = event.worker, event.t - event.lag_s
        if worker not in self._workers:
            self._name("thread_name", REWARDS, worker, f"worker {worker}")
        # Clocks of different threads: a call never begins before the last one ended, whatever the last digits say.
        start = max(end - event.seconds, self._workers.get(worker, 0.0))
        self._workers[worker] = max(end, start)
        self._slice(REWARDS, worker, start, end, f"{event.num_samples} answers", {"answers": event.num_samples})

    # ---- the format -------------------------------------------------------------------------------------------------

    def _slice(
        self, pid: int, tid: int, start: float, end: float, name: str, args: dict[str, Any], category: str = "run"
    ) -> None:
        ts = _us(max(start, 0.0))
        dur = _round(max(_us(end) - ts, 0.0))
        where = {"pid": pid, "tid": _tid(pid, tid)}
        self._write({"ph": "X", "name": name, "cat": category, **where, "ts": ts, "dur": dur, "args": args})

    def _instant(self, t: float, name: str) -> None:
        self._write({"ph": "i", "name": name, "pid": LEARNER, "tid": _tid(LEARNER, UPDATES), "ts": _us(t), "s": "g"})

    def _count(self, t: float) -> None:
        working = len(self._running) - len(self._paused)
        if working != self._working and t >= self._now:
            self._working = working
            args = {"working": working}
            self._write({"ph": "C", "name": "slots working", "pid": SLOTS, "ts": _us(t), "args": args})

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._write({"ph": "M", "name": what, "pid": pid, "tid": _tid(pid, tid), "args": {"name": name}})


def _tid(pid: int, track: int) -> int:
    return pid * _TID_STRIDE + track + 1


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond that Perfetto reckons in."""
    return _round(seconds * 1e6)


def _round(microseconds: float) -> float:
    return round(microseconds, 3)


def write_trace(events: Iterable[Event], out: str | Path) -> int:
    """Write the trace of these events; returns how many trace events it has."""
    out = Path(out)
    aside = out.with_name(out.name + ".part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            count = _write_all(events, file)
        os.replace(aside, out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, RunDirError):
            raise
        raise RunDirError(f"cannot write {out}: {error.strerror}; create its folder or choose another") from error
    return count


def _write_all(events: Iterable[Event], file: IO[str]) -> int:
    count = 0

    def write(record: dict[str, Any]) -> None:
        nonlocal count
        file.write(",\n" if count else "")
        file.write(json.dumps(record, separators=(",", ":")))
        count += 1

    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    builder = TraceBuilder(write)
    for event in events:
        builder.emit(event)
    builder.close()
    file.write("\n]}\n")
    return count
