"""Write a run as a trace for Perfetto and chrome://tracing: tracks for slots, reward workers, tools and learner.

`sortedrl trace --perfetto` opens a `TraceWriter` and gives it to a `RunView`, which passes on every event together with
the samples that run at that moment. The file is the JSON form of Chrome's trace events.

Guarantees: slices on one track never overlap. Slices on the slots' tracks add up to the time in which slots worked.
Events are written as they arrive, so memory does not grow with the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sortedrl.errors import RunDirError
from sortedrl.ledger.atomic_file import atomic_file
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    BatchTaken,
    CheckpointBegun,
    CheckpointSaved,
    Evaluated,
    Event,
    LearnerRestarted,
    RewardCalled,
    RunResumed,
    RunStarted,
    ScoresAwaited,
    ToolsCalled,
    ToolsReturned,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.sample_lives import SampleLife

SLOTS, REWARDS, LEARNER, TOOLS = 1, 2, 3, 4  # groups of tracks, which Chrome's format calls processes
_UPDATES, _PUBLICATIONS, _CHECKPOINTS = 0, 1, 2
# All thread numbers differ, and none is 0: Perfetto takes 0 for the idle thread of every process.
_TID_STRIDE = 1_000_000
_GROUPS = {SLOTS: "slots", REWARDS: "reward workers", LEARNER: "learner", TOOLS: "trajectories in tools"}
_TRACKS = {_UPDATES: "updates", _PUBLICATIONS: "publications", _CHECKPOINTS: "checkpoints"}


@contextmanager
def open_trace(path: str | Path) -> Iterator[TraceWriter]:
    """Write a trace to `path`; the file appears there when the block ends without an error."""
    path = Path(path)
    try:
        with atomic_file(path) as file:
            writer = TraceWriter(file)
            yield writer
            writer.close()
    except RunDirError:  # from the block: the run cannot be read
        raise
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}; create its folder or choose another") from error


class TraceWriter:
    """Writes trace events to `file`."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_empty = True
        self._running: Mapping[int, SampleLife] = {}
        self._slice_starts: dict[int, float] = {}  # by sample, for attempts that are not paused
        self._worker_ends: dict[int, float] = {}  # where the last slice of each reward worker ends
        self._calls: dict[int, tuple[int, float]] = {}  # row and start of the trajectories in tools, by sample
        self._num_tool_rows = 0
        self._batches: dict[int, BatchTaken] = {}
        self._now = 0.0
        self._num_working: int | None = None
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for pid, name in _GROUPS.items():
            self._name("process_name", pid, 0, name)
            order = {"sort_index": pid}
            self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": _tid(pid, 0), "args": order})
        for tid, name in _TRACKS.items():
            self._name("thread_name", LEARNER, tid, name)

    def emit(self, event: Event, running: Mapping[int, SampleLife]) -> None:
        """Write one event; `running` are the samples with an attempt in a slot, before the event takes effect."""
        self._running = running
        if not isinstance(event, Evaluated):  # the time of one before the run may lie in the future
            self._now = max(self._now, event.t)
        match event:
            case AttemptStarted():
                self._slice_starts[event.sample] = event.t
            case AttemptEnded():
                if event.sample in self._slice_starts:
                    self._end_slice(running[event.sample], event.t, event.outcome, num_tokens=event.num_tokens)
            case ScoresAwaited():
                if event.num_paused and not self._is_paused:
                    self._pause(event.t - event.seconds, "paused for scores")
                    self._continue(event.t)
            case BatchTaken():
                self._batches[event.update] = event
                if event.num_paused:
                    self._pause(event.t, "paused for an update")
            case UpdateDone():
                self._write_update(event)
            case WeightsPublished():
                if not self._is_paused:
                    self._pause(event.t - event.seconds, "paused for new weights")
                self._continue(event.t)
                self._slice(LEARNER, _PUBLICATIONS, event.t - event.seconds, event.t, f"version {event.version}", {})
            case RewardCalled():
                self._write_reward_call(event)
            case ToolsCalled():
                self._begin_call(event)
            case ToolsReturned():
                self._end_call(event)
            case CheckpointSaved():
                self._slice(LEARNER, _CHECKPOINTS, event.t - event.seconds, event.t, f"version {event.version}", {})
            case CheckpointBegun():
                self._slice(LEARNER, _CHECKPOINTS, event.t - event.seconds, event.t, f"copy {event.version}", {})
            case LearnerRestarted():
                self._instant(event.t, f"ranks started again from {event.point}")
            case Evaluated():
                self._instant(event.t, f"evaluated: {event.sampled_accuracy:.3f}")
            case RunResumed():
                self._pause(event.t, "cut")
                self._calls.clear()  # their process is gone
                self._instant(event.t, f"resumed at version {event.version}")
            case RunStarted():
                for slot in range(min(event.slots, _TID_STRIDE)):
                    self._name("thread_name", SLOTS, slot, f"slot {slot}")
            case _:
                pass
        self._count_working(event.t)

    def close(self) -> None:
        """End the slices of attempts that still run after the last event, and complete the file."""
        if not self._is_paused:
            self._pause(self._now, "events end")
        self._file.write("\n]}\n")

    # ---- slices -----------------------------------------------------------------------------------------------------

    @property
    def _is_paused(self) -> bool:
        return len(self._slice_starts) < len(self._running)

    def _pause(self, t: float, reason: str) -> None:
        for sample in list(self._slice_starts):
            self._end_slice(self._running[sample], t, reason)

    def _continue(self, t: float) -> None:
        for sample in self._running:
            self._slice_starts.setdefault(sample, t)

    def _end_slice(self, life: SampleLife, end: float, outcome: str, **more: int) -> None:
        start, attempt, bar = self._slice_starts.pop(life.sample), life.attempt, life.bar
        assert attempt is not None, f"sample {life.sample} has a slice but no attempt"
        assert bar is not None, f"sample {life.sample} has a slice but no bar"
        args = {"sample": life.sample, "attempt": attempt.attempt, "mode": attempt.mode, "version": bar.version}
        args |= {"cached": attempt.cached, "outcome": outcome, **more}
        if life.accepted is not None:
            args["accepted"] = life.accepted
        self._slice(SLOTS, attempt.slot, start, end, f"sample {life.sample}", args, category=attempt.mode)

    def _write_update(self, event: UpdateDone) -> None:
        batch = self._batches.pop(event.update, None)
        if batch is None:
            return
        args = {"samples": len(batch.samples), "tokens": sum(batch.lengths), "interrupted": batch.num_interrupted}
        self._slice(LEARNER, _UPDATES, batch.t, event.t, f"update {event.update}", args)

    def _write_reward_call(self, event: RewardCalled) -> None:
        worker, end = event.worker, event.t - event.lag_s
        if worker not in self._worker_ends:
            self._name("thread_name", REWARDS, worker, f"worker {worker}")
        # The times come from clocks of different threads: without this, a call might begin before the last one ended.
        start = max(end - event.seconds, self._worker_ends.get(worker, 0.0))
        self._worker_ends[worker] = max(end, start)
        self._slice(REWARDS, worker, start, end, f"{event.num_samples} answers", {"answers": event.num_samples})

    def _begin_call(self, event: ToolsCalled) -> None:
        """Give a trajectory the lowest free row."""
        taken = {row for row, _ in self._calls.values()}
        row = next(row for row in range(len(taken) + 1) if row not in taken)
        while self._num_tool_rows <= row:
            self._name("thread_name", TOOLS, self._num_tool_rows, f"row {self._num_tool_rows}")
            self._num_tool_rows += 1
        self._calls[event.sample] = (row, event.t)

    def _end_call(self, event: ToolsReturned) -> None:
        if event.sample not in self._calls:
            return
        row, start = self._calls.pop(event.sample)
        args = {"turn": event.turn, "outcome": event.outcome, "failed": event.num_failed, "fed": event.num_fed}
        self._slice(TOOLS, row, start, event.t, f"sample {event.sample}", args)

    # ---- the format -------------------------------------------------------------------------------------------------

    def _slice(
        self, pid: int, tid: int, start: float, end: float, name: str, args: dict[str, Any], category: str = "run"
    ) -> None:
        ts = _microseconds(max(start, 0.0))
        dur = round(max(_microseconds(end) - ts, 0.0), 3)
        where = {"pid": pid, "tid": _tid(pid, tid)}
        self._write({"ph": "X", "name": name, "cat": category, **where, "ts": ts, "dur": dur, "args": args})

    def _instant(self, t: float, name: str) -> None:
        where = {"pid": LEARNER, "tid": _tid(LEARNER, _UPDATES)}
        self._write({"ph": "i", "name": name, **where, "ts": _microseconds(t), "s": "g"})

    def _count_working(self, t: float) -> None:
        num_working = len(self._slice_starts)
        if num_working != self._num_working and t >= self._now:
            self._num_working = num_working
            args = {"working": num_working}
            self._write({"ph": "C", "name": "slots working", "pid": SLOTS, "ts": _microseconds(t), "args": args})

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._write({"ph": "M", "name": what, "pid": pid, "tid": _tid(pid, tid), "args": {"name": name}})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write("" if self._is_empty else ",\n")
        self._file.write(json.dumps(record, separators=(",", ":")))
        self._is_empty = False


def _tid(pid: int, track: int) -> int:
    return pid * _TID_STRIDE + track + 1


def _microseconds(seconds: float) -> float:
    """Convert to microseconds, rounded to the nanosecond, which is Perfetto's resolution."""
    return round(seconds * 1e6, 3)
