"""A run on disk: the files it appends to, and checkpoints that gather its whole state between two updates.

The trainer opens `RunFiles`; the controller calls `RunSaver` for checkpoints; `restore` sets the parts of a resumed run
to a checkpoint. Guarantees: weights, optimiser, random generators, data position, event files and the ledger's row
number in a checkpoint belong to the same moment, and everything that happened after it is dropped together on resume.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sortedrl.buffer import Buffer
from sortedrl.clock import Clock
from sortedrl.config import SortedConfig
from sortedrl.engine.base import EngineStats
from sortedrl.errors import DamagedLedgerError, RunDirError, SortedRLError
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.ledger.schema import FIRST_NOISE
from sortedrl.ledger.store import Store
from sortedrl.run.builders.parts import RunParts
from sortedrl.run.checkpoint_folder import Checkpoints, load_state
from sortedrl.run.evaluate import Evaluator
from sortedrl.run.rng import rng_state, set_rng_state
from sortedrl.run.sharded_checkpoint import SaveInFlight
from sortedrl.telemetry.events import CheckpointBegun, CheckpointSaved, Emit, LearnerRestarted
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.sinks import JsonlSink, MetricsSink
from sortedrl.weights import is_adapted

LEDGER_FILE = "ledger.sqlite"
CHECKPOINTS = "checkpoints"

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RunFiles:
    """The files that a run appends to, and the buffer that the ledger records."""

    events: JsonlSink
    metrics: MetricsSink
    store: Store
    buffer: Buffer

    @classmethod
    def create(
        cls, run_dir: Path, metrics: RunMetrics, *, grouped: bool, knobs: dict[str, Any], noise: str
    ) -> RunFiles:
        """Empty files. They replace those of a run that died before its first checkpoint."""
        for path in run_dir.glob(f"{LEDGER_FILE}*"):
            path.unlink()
        store = Store.create(run_dir / LEDGER_FILE, grouped=grouped, knobs=knobs, noise=noise)
        return cls(
            events=JsonlSink(run_dir / "events.jsonl"),
            metrics=MetricsSink(run_dir / "metrics.jsonl", metrics),
            store=store,
            buffer=store.restore(),
        )

    @classmethod
    def reopen(cls, run_dir: Path, metrics: RunMetrics, checkpoint: Path, config: SortedConfig) -> RunFiles:
        """The files of a resumed run, cut to what they held when `checkpoint` was written.

        The ledger records which settings of `config` differ from those of the checkpoint.
        """
        state = load_state(checkpoint)
        # A later checkpoint that was skipped as damaged must not come back once the files are cut.
        Checkpoints(run_dir / CHECKPOINTS).drop_after(state["version"])
        changes = config.changes_since(state["config"])
        store, buffer = _reopen_ledger(run_dir / LEDGER_FILE, checkpoint / LEDGER_FILE, state["seq"], changes)
        if buffer.version != state["version"]:
            store.close(commit=False)
            raise RunDirError(
                f"the ledger is at version {buffer.version}, checkpoint {checkpoint} at {state['version']}: they are "
                "files of different runs; restore those that belong together"
            )
        return cls(
            events=JsonlSink(run_dir / "events.jsonl", keep_bytes=state["events_bytes"]),
            metrics=MetricsSink(run_dir / "metrics.jsonl", metrics, keep_bytes=state["metrics_bytes"]),
            store=store,
            buffer=buffer,
        )

    def sync(self) -> dict[str, int]:
        """Flush everything to disk; returns the ledger's last row number and the sizes of the event files."""
        self.store.commit(durable=True)
        try:
            return {
                "seq": self.store.seq,
                "events_bytes": self.events.sync(),
                "metrics_bytes": self.metrics.sync(),
            }
        except OSError as error:
            raise RunDirError(
                f"the event files cannot be written ({error.strerror}): check free space and permissions"
            ) from error


@dataclass(slots=True, kw_only=True)
class RunSaver:
    """Writes a checkpoint every `every_updates` updates (0: only when `run` is called)."""

    config: SortedConfig
    parts: RunParts
    files: RunFiles
    evaluator: Evaluator
    stats: Callable[[], EngineStats]
    checkpoints: Checkpoints
    clock: Clock
    emit: Emit
    every_updates: int
    last_seq: int = -1  # the ledger's row number at the last checkpoint
    in_flight: _InFlight | None = None

    def is_due(self, num_updates: int) -> bool:
        """Called after every update; also tells of a checkpoint that was completed in the background meanwhile."""
        self._tell_restarts()
        if self.in_flight is not None and self.in_flight.save.is_done:
            self.finish()
        return self.every_updates > 0 and num_updates % self.every_updates == 0

    def finish(self) -> bool:
        """Wait until a checkpoint that is being written has its name; False if it was given up."""
        if self.in_flight is None:
            return True
        flight, self.in_flight = self.in_flight, None
        if not flight.save.wait():
            return False
        self.last_seq, now = flight.seq, self.clock.now()
        self.emit(
            CheckpointSaved(
                t=now, version=flight.save.version, seq=flight.seq, seconds=0.0, background_s=now - flight.began
            )
        )
        return True

    def run_to_end(self, buffer: Buffer, controller_state: Mapping[str, Any]) -> None:
        """Save the run and wait until the checkpoint has its name; again if a rank is lost meanwhile."""
        self.run(buffer, controller_state)
        while not self.finish():
            self.run(buffer, controller_state)
        self._tell_restarts()

    def wait_after(self, kind: type[BaseException] | None) -> None:
        """Wait for a checkpoint that is being written when the run has ended with an error of this kind, if any.

        Only after an error of this package: others end the process at once, and the checkpoint before stays.
        """
        if self.in_flight is not None and (kind is None or issubclass(kind, SortedRLError)):
            with suppress(SortedRLError):  # the run ends with its own error
                self.in_flight.save.wait()

    def run(self, buffer: Buffer, controller_state: Mapping[str, Any]) -> None:
        """Save the whole run, unless nothing has happened since the last checkpoint.

        Ranks write their shards while the run goes on: `finish` waits for them. One save at a time: this waits for the
        one before.

        The run is not saved if every answer of the last update failed and an earlier checkpoint exists: such answers
        teach nothing, and weights that cannot answer must not replace sound ones.
        """
        self.finish()
        parts, began = self.parts, self.clock.now()
        if controller_state.get("num_failed_updates") and self.checkpoints.versions():
            log.warning("no checkpoint is written, because every answer of the last update failed")
            return
        synced = self.files.sync()
        if synced["seq"] == self.last_seq:
            return
        state = {
            "version": buffer.version,
            "config": self.config.resolved(),
            "updates": buffer.num_updates,
            "clock_s": self.clock.now(),
            "noise": parts.engine.capabilities.noise,
            "controller": dict(controller_state),
            "loader": parts.loader.state_dict(),
            "rows": parts.rows.state_dict(),
            "hub_commits": parts.commits,
            "base_model": parts.base_model,
            "from_python": list(parts.from_python),
            "evaluated_at": self.evaluator.last_run,
            "stats": asdict(self.stats()),
            "reward_errors": dict(parts.rewards.errors),
            "alarm": parts.alarm.state_dict(),
            "rng": rng_state(),
            **synced,
        }

        def add(folder: Path) -> None:
            self.files.store.snapshot(folder / LEDGER_FILE)

        learner, version = parts.learner, buffer.version
        if isinstance(learner, ShardedLearner) and self.config.has_sharded_checkpoints(
            has_adapters=is_adapted(parts.model)
        ):
            save = SaveInFlight(self.checkpoints, version, learner, parts.model, parts.tokenizer, extra=state, add=add)
            self.in_flight = _InFlight(save=save, seq=synced["seq"], began=began)
            self.emit(CheckpointBegun(t=self.clock.now(), version=version, seconds=self.clock.now() - began))
            return
        self.checkpoints.save(
            version,
            learner.model,  # of ranks: fetched now
            parts.tokenizer,
            learner=learner,
            extra=state,
            add=add,
        )
        if isinstance(learner, ShardedLearner):
            learner.mark_saved()
        self.last_seq, now = synced["seq"], self.clock.now()
        self.emit(CheckpointSaved(t=now, version=version, seq=self.last_seq, seconds=now - began))

    def _tell_restarts(self) -> None:
        learner = self.parts.learner
        for restart in learner.take_restarts() if isinstance(learner, ShardedLearner) else ():
            self.emit(
                LearnerRestarted(
                    t=self.clock.now(),
                    number=restart.number,
                    reason=restart.reason,
                    point=restart.point,
                    updates_repeated=restart.num_repeated,
                    seconds=restart.seconds,
                )
            )


@dataclass(slots=True, kw_only=True, frozen=True)
class _InFlight:
    """A checkpoint that ranks are writing."""

    save: SaveInFlight
    seq: int  # the ledger's row number in it
    began: float


def check_noise(checkpoint: Path, noise: str) -> None:
    """Raise an error if a checkpoint's run drew with other sampling noise than the engine that is to continue it.

    Its samples would otherwise hold tokens of two schemes, and a restart would not repeat an answer.
    """
    saved = load_state(checkpoint).get("noise", FIRST_NOISE)
    if saved != noise:
        raise RunDirError(
            f"{checkpoint.parents[1]} was drawn with the sampling noise {saved}, and this engine draws with {noise}: "
            "resume it with the engine and the version of sortedrl that began it, or start a new run"
        )


def restore(parts: RunParts, evaluator: Evaluator, version: int, checkpoint: Path) -> dict[str, Any]:
    """Set the parts to a checkpoint, except the weights, which they were built with; returns the checkpoint's state."""
    state = load_state(checkpoint, parts.learner)
    parts.loader.load_state_dict(state["loader"])
    evaluator.last_run = state["evaluated_at"]
    parts.rewards.errors.update(state.get("reward_errors", {}))
    parts.alarm.load_state_dict(state.get("alarm"))
    parts.engine.publish(version, parts.learner.source).wait()
    set_rng_state(state["rng"])
    return state


def _reopen_ledger(path: Path, copy: Path, seq: int, changes: Mapping[str, tuple[Any, Any]]) -> tuple[Store, Buffer]:
    """Open the ledger, cut at row `seq`. The checkpoint's copy replaces a damaged one."""
    try:
        return Store.reopen(path, seq, changes, copy=copy if copy.is_file() else None)
    except DamagedLedgerError as error:
        if not copy.is_file():
            raise
        log.warning("%s. The copy %s replaces it; it has no tokens of trained samples", error, copy)
    try:
        _move_aside(path)
        shutil.copyfile(copy, path)
    except OSError as error:  # the next resume finds half a copy damaged, and copies again
        raise RunDirError(f"cannot write {path}: {error.strerror}; check free space and permissions") from error
    return Store.reopen(path, seq, changes)


def _move_aside(path: Path) -> None:
    """Keep a damaged ledger for inspection, with the files that SQLite wrote next to it."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged{number}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(target.with_name(target.name + suffix))
