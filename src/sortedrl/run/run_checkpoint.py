"""A run as a whole on disk: gathered into a checkpoint between two updates, and set up again from one.

The trainer makes a `RunFiles` for the run directory. The controller has `RunSaver` make checkpoints; `restore` is the
way back. What they keep true: weights, optimiser, random generators, data cursor, event files and the ledger's row
number are of one moment; what was generated, trained or told after it is forgotten together.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.engine.base import EngineStats
from sortedrl.errors import DamagedLedgerError, RunDirError
from sortedrl.ledger.store import Store
from sortedrl.run.build.parts import RunParts
from sortedrl.run.checkpoint import Checkpoints, load_state
from sortedrl.run.rng import rng_state, set_rng_state
from sortedrl.telemetry.events import CheckpointSaved, Emit
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.sinks import JsonlSink, MetricsSink, read_events

LEDGER_FILE = "ledger.sqlite"
CHECKPOINTS = "checkpoints"

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunFiles:
    """The files that a run appends to."""

    events: JsonlSink
    metrics: MetricsSink
    store: Store

    @classmethod
    def create(cls, run_dir: Path, metrics: RunMetrics, *, grouped: bool, knobs: dict[str, Any]) -> RunFiles:
        """Empty ones; those of a run that died before its first checkpoint are begun anew."""
        for path in run_dir.glob(f"{LEDGER_FILE}*"):
            path.unlink()
        return cls(
            events=JsonlSink(run_dir / "events.jsonl"),
            metrics=MetricsSink(run_dir / "metrics.jsonl", metrics),
            store=Store.create(run_dir / LEDGER_FILE, grouped=grouped, knobs=knobs),
        )

    @classmethod
    def reopen(cls, run_dir: Path, metrics: RunMetrics, checkpoint: Path) -> RunFiles:
        """Those of a run that goes on from a checkpoint, cut to what they held when it was made."""
        state = load_state(checkpoint)
        # A later one that was passed over as damaged must not come back once what it belongs to is cut off.
        Checkpoints(run_dir / CHECKPOINTS).drop_after(state["version"])
        return cls(
            events=JsonlSink(run_dir / "events.jsonl", keep_bytes=state["events_bytes"]),
            metrics=MetricsSink(run_dir / "metrics.jsonl", metrics, keep_bytes=state["metrics_bytes"]),
            store=_reopen_ledger(run_dir / LEDGER_FILE, checkpoint / LEDGER_FILE, state["seq"]),
        )

    def sync(self) -> dict[str, int]:
        """Have everything on disk, and say how much that is."""
        self.store.commit(durable=True)
        try:
            return {
                "seq": self.store.seq,
                "events_bytes": self.events.sync(),
                "metrics_bytes": self.metrics.sync(),
            }
        except OSError as error:
            raise RunDirError(
                f"the events cannot be written ({error.strerror}): check space and permissions"
            ) from error


@dataclass(slots=True, kw_only=True)
class RunSaver:
    """Makes a checkpoint every `every_updates` updates (0: only when it is told to)."""

    config: SortedConfig
    parts: RunParts
    files: RunFiles
    checkpoints: Checkpoints
    clock: WallClock
    emit: Emit
    every_updates: int
    last_seq: int = -1  # of the ledger, at the last checkpoint

    def is_due(self, num_updates: int) -> bool:
        return self.every_updates > 0 and num_updates % self.every_updates == 0

    def run(self) -> None:
        """Save everything as it is, unless nothing has happened since."""
        parts, began = self.parts, self.clock.now()
        buffer = parts.controller.buffer
        synced = self.files.sync()
        if synced["seq"] == self.last_seq:
            return
        state = {
            "version": buffer.version,
            "config": self.config.resolved(),
            "updates": buffer.num_updates,
            "clock_s": self.clock.now(),
            "controller": parts.controller.state_dict(),
            "loader": parts.loader.state_dict(),
            "evaluated_at": parts.evaluator.last_run,
            "stats": asdict(parts.stats()),
            "reward_errors": dict(parts.rewards.errors),
            "rng": rng_state(),
            **synced,
        }
        self.checkpoints.save(
            buffer.version,
            parts.model,
            parts.tokenizer,
            learner=parts.learner,
            extra=state,
            add=lambda folder: self.files.store.snapshot(folder / LEDGER_FILE),
        )
        self.last_seq = synced["seq"]
        self.emit(
            CheckpointSaved(
                t=self.clock.now(), version=buffer.version, seq=self.last_seq, seconds=self.clock.now() - began
            )
        )


def restore(parts: RunParts, files: RunFiles, metrics: RunMetrics, checkpoint: Path) -> None:
    """Set everything but the weights, which `parts` was built with, to what the checkpoint holds."""
    state = load_state(checkpoint, parts.learner)
    for event in read_events(files.events.path):
        metrics.emit(event)
    controller = parts.controller
    controller.load_state_dict(state["controller"])
    controller.buffer = files.store.restore()
    if controller.buffer.version != state["version"]:
        raise RunDirError(
            f"the ledger is at version {controller.buffer.version}, checkpoint {checkpoint} at {state['version']}: "
            "they are of different runs; bring back the files that belong together"
        )
    parts.loader.load_state_dict(state["loader"])
    parts.evaluator.last_run = state["evaluated_at"]
    parts.carried = EngineStats(**state["stats"])
    parts.rewards.errors.update(state.get("reward_errors", {}))
    parts.engine.publish(controller.buffer.version, parts.learner.source).wait()
    set_rng_state(state["rng"])


def _reopen_ledger(path: Path, copy: Path, seq: int) -> Store:
    """The ledger, cut at a row; if it is damaged, the copy that the checkpoint holds takes its place."""
    try:
        return _cut_ledger(path, seq)
    except DamagedLedgerError as error:
        if not copy.is_file():
            raise
        log.warning("%s. The copy %s takes its place; tokens of trained samples are not in it", error, copy)
    _move_aside(path)
    shutil.copyfile(copy, path)
    return _cut_ledger(path, seq)


def _cut_ledger(path: Path, seq: int) -> Store:
    store = Store.open(path)
    try:
        store.truncate(seq)
        store.restore()  # damage to samples that wait shows only when they are read
        store.begin_lineage()
    except BaseException:
        store.close(commit=False)
        raise
    return store


def _move_aside(path: Path) -> None:
    """Keep a damaged ledger for inspection, with what SQLite wrote beside it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged{number}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(aside.with_name(aside.name + suffix))
