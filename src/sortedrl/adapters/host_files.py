"""The run directory of a run inside another trainer: ledger, events, metrics and summary, as in our own runs.

`host.py` opens it in the controller's thread. The host keeps its own checkpoints; the ledger is the durable store of
everything else. A host that resumes after `n` updates needs no file of ours in its checkpoint: the ledger is cut to the
row where update n - 1 was taken, and its samples, their tokens and the position in the data follow from it.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.errors import RunDirError
from sortedrl.ledger.atomic_file import remove_unfinished
from sortedrl.ledger.compare import check_bounds, check_rules
from sortedrl.ledger.run_lock import RunLock
from sortedrl.ledger.store import Store
from sortedrl.run.machine_load import MachineSink
from sortedrl.run.rundir import check_writable, prepare_run_dir
from sortedrl.schedule import Knobs
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import AttemptEnded, AttemptStarted, RunResumed, RunStarted
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.sinks import Fanout, JsonlSink, MetricsSink
from sortedrl.telemetry.summary import Summary

LEDGER_FILE = "ledger.sqlite"
TOKENIZER_FOLDER = "tokenizer"  # `sortedrl report` and the dashboard decode answers with it

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class HostFiles:
    """What a run inside another trainer writes, and the buffer that its ledger records; in memory without a folder."""

    buffer: Buffer
    emit: Fanout
    metrics: RunMetrics
    clock: WallClock
    store: Store | None = None
    run_dir: Path | None = None
    lock: RunLock | None = None
    events: JsonlSink | None = None

    @classmethod
    def open(
        cls, run_dir: Path | None, *, updates_done: int, grouped: bool, knobs: Knobs, noise: str, started: RunStarted
    ) -> HostFiles:
        """New files, or those of an earlier process, cut to the host's checkpoint after `updates_done` updates."""
        if run_dir is None:
            if updates_done:
                raise RunDirError(
                    f"the trainer continues after update {updates_done - 1}, and without a run directory nothing is "
                    "known of that run: pass run_dir"
                )
            files = cls(buffer=Buffer(grouped=grouped), emit=Fanout([]), metrics=RunMetrics(), clock=WallClock())
            files.emit.add(files.metrics)
            files.emit(started)
            return files
        check_writable(run_dir)
        if updates_done:
            return cls._reopen(run_dir, updates_done, grouped=grouped, knobs=knobs, noise=noise, started=started)
        prepare_run_dir(run_dir)
        return cls._create(run_dir, grouped=grouped, knobs=knobs, noise=noise, started=started)

    @classmethod
    def _create(cls, run_dir: Path, *, grouped: bool, knobs: Knobs, noise: str, started: RunStarted) -> HostFiles:
        lock = RunLock(run_dir)
        lock.acquire()
        try:
            store = Store.create(run_dir / LEDGER_FILE, grouped=grouped, knobs=asdict(knobs), noise=noise)
            files = cls(
                buffer=store.restore(),
                emit=Fanout([]),
                metrics=RunMetrics(),
                clock=WallClock(),
                store=store,
                run_dir=run_dir,
                lock=lock,
            )
            files._add_sinks(0, 0)
        except BaseException:
            lock.release()
            raise
        files.emit(started)
        return files

    @classmethod
    def _reopen(
        cls, run_dir: Path, updates_done: int, *, grouped: bool, knobs: Knobs, noise: str, started: RunStarted
    ) -> HostFiles:
        path = run_dir / LEDGER_FILE
        if not path.is_file():
            raise RunDirError(
                f"the trainer continues after update {updates_done - 1}, and there is no {path}: pass the run_dir of "
                "the run that made the checkpoint, or start anew"
            )
        lock = RunLock(run_dir)
        lock.acquire()
        try:
            store, buffer = _cut_ledger(path, updates_done, grouped=grouped, knobs=knobs, noise=noise)
            try:
                files = cls(
                    buffer=buffer,
                    emit=Fanout([]),
                    metrics=RunMetrics(),
                    clock=WallClock(),
                    store=store,
                    run_dir=run_dir,
                    lock=lock,
                )
                files._resume(started)
            except BaseException:
                store.close(commit=False)
                raise
        except BaseException:
            lock.release()
            raise
        return files

    def _add_sinks(self, event_bytes: int, metric_bytes: int) -> None:
        assert self.run_dir is not None, "files need a folder"
        self.events = JsonlSink(self.run_dir / "events.jsonl", keep_bytes=event_bytes)
        self.emit.add(self.metrics)
        self.emit.add(self.events)
        self.emit.add(MetricsSink(self.run_dir / "metrics.jsonl", self.metrics, keep_bytes=metric_bytes))
        self.emit.add(MachineSink(emit_measured=self.emit, run_dir=self.run_dir))  # the last one

    def _resume(self, started: RunStarted) -> None:
        """Cut the event files, tell the metrics what happened before, and the files that the run goes on."""
        assert self.run_dir is not None, "only files can be resumed"
        assert self.store is not None, "a run with a folder has a ledger"
        remove_unfinished(self.run_dir)
        (self.run_dir / "summary.json").unlink(missing_ok=True)
        buffer, path = self.buffer, self.run_dir / "events.jsonl"
        keep = _bytes_until(path, "BatchTaken", buffer.num_updates - 1)
        # The line of the update after that is written when the update is settled.
        self._add_sinks(keep, _bytes_until(self.run_dir / "metrics.jsonl", None, buffer.num_updates - 2))
        told = list(read_events(path)) if keep else []
        running: dict[int, AttemptStarted] = {}
        for event in told:
            self.metrics.emit(event)
            if isinstance(event, AttemptStarted):
                running[event.sample] = event
            elif isinstance(event, AttemptEnded):
                running.pop(event.sample, None)
        self.clock = WallClock(at=max((event.t for event in told), default=0.0))
        gap = "" if told else "events.jsonl: the events before the checkpoint are missing"
        if self.metrics.run is None:
            self.emit(started)
        self.emit(
            RunResumed(
                t=self.clock.now(),
                version=buffer.version,
                lineage=self.store.lineage or 0,
                gap=gap,
                updates=buffer.num_updates if gap else 0,
                samples_trained=buffer.num_trained if gap else 0,
                waiting=list(buffer.samples) if gap else [],
            )
        )
        for event in running.values():  # their process ended before they did
            sample = buffer.samples.get(event.sample)
            num_tokens = 0 if sample is None else sample.num_tokens
            now = self.clock.now()
            self.emit(AttemptEnded(now, event.sample, event.attempt, "interrupted", num_tokens, event.slot, ""))

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Save the host's tokenizer beside the ledger, so that pages show answers as text."""
        if self.run_dir is not None and tokenizer is not None:
            tokenizer.save_pretrained(str(self.run_dir / TOKENIZER_FOLDER))

    def flush(self) -> None:
        """Hand the events to the operating system, so that they survive a killed process as the ledger does."""
        if self.events is not None:
            self.events.flush()

    def write_summary(self, summary: Summary) -> None:
        if self.run_dir is not None:
            summary.write(self.run_dir / "summary.json")

    def close(self, *, commit: bool) -> None:
        self.emit.close()
        try:
            if self.store is not None:
                self.store.close(commit=commit)
        finally:
            if self.lock is not None:
                self.lock.release()


def _cut_ledger(path: Path, updates_done: int, *, grouped: bool, knobs: Knobs, noise: str) -> tuple[Store, Buffer]:
    store = Store.open(path)
    try:
        last, seq = store.num_updates, store.seq_of_update(updates_done - 1)
        check_bounds(path, store.knobs, asdict(knobs))
        if (store.grouped, store.noise) != (grouped, noise):
            told = [f"{'several answers' if g else 'one answer'} per prompt" for g in (store.grouped, grouped)]
            raise RunDirError(
                f"{path} was begun with {told[0]} and the sampling noise {store.noise}, and this process has {told[1]} "
                f"and {noise}: continue it with the settings and the engine that began it"
            )
    finally:
        store.close(commit=False)
    check_rules(path)
    if seq is None:
        raise RunDirError(
            f"the trainer continues after update {updates_done - 1}, and {path} ends with update {last - 1}: it is "
            "older than the checkpoint, or of another run; continue from an earlier checkpoint, or restore the ledger"
        )
    if last > updates_done:
        log.warning(
            "%s has %d updates and the trainer's checkpoint %d: the ledger goes back, and the samples of the later "
            "updates are generated and trained again under the checkpoint's weights",
            path,
            last,
            updates_done,
        )
    return Store.reopen(path, seq)


def _bytes_until(path: Path, kind: str | None, update: int) -> int:
    """The size of a file up to the line of this kind and update, with that line; 0 without such a line."""
    position = found = 0
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            position += len(line)
            with suppress(ValueError):
                record = json.loads(line)
                if record.get("update") == update and (kind is None or record.get("kind") == kind):
                    found = position
    return found
