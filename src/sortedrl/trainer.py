"""`SortedTrainer`: a run from start to end, as Python users and the command line start it.

It owns the run directory: configuration, events, metrics, checkpoint, summary and report. What happens in between is
the controller's; everything written here is read by nobody who decides.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.engine.base import EngineStats
from sortedrl.errors import ConfigError, RunDirError, SortedRLError
from sortedrl.ledger.run_lock import RunLock
from sortedrl.redact import redact
from sortedrl.run.gc_tuning import rare_collections
from sortedrl.run.rundir import check_writable, prepare_run_dir
from sortedrl.tasks.base import DatasetTask, RewardFunc, RowSequence, Task
from sortedrl.telemetry.console import ConsoleSink
from sortedrl.telemetry.events import RunEnded, RunResumed, RunStarted
from sortedrl.telemetry.metrics import RunMetrics, Timing
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.sinks import Fanout, Sink, read_events
from sortedrl.telemetry.summary import Summary, summarize
from sortedrl.telemetry.trackers import TrackSettings, open_trackers

if TYPE_CHECKING:
    from sortedrl.run.build.parts import RunParts
    from sortedrl.run.callbacks import CallbackSink
    from sortedrl.run.run_checkpoint import RunFiles, RunSaver

log = logging.getLogger(__name__)


class SortedTrainer:
    """Trains a causal language model with sorted scheduling.

    `model`: a folder that `from_pretrained` loads, or a model object with its tokenizer as `processing_class`; left
    out, the configured one. `reward_funcs` and `train_dataset` (rows with a `prompt`) replace the configured task.
    `callbacks` are transformers' (see callbacks.py), `peft_config` one of peft's, to train adapters in place of all
    weights. Every event of the run also goes to each of `sinks`.
    """

    def __init__(
        self,
        model: str | Path | Any = None,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: SortedConfig | None = None,
        train_dataset: RowSequence | None = None,
        eval_dataset: RowSequence | None = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        *,
        sinks: Sequence[Sink] = (),
        console: Console | None = None,
        quiet: bool = False,
    ) -> None:
        config = args or SortedConfig()
        if isinstance(model, str | Path):
            config = SortedConfig(**{**config.model_dump(), "model": {"path": str(model)}})
            model = None
        self.config = config
        self.model = model
        self.tokenizer = processing_class
        self.task = _dataset_task(reward_funcs, train_dataset, eval_dataset)
        self.sinks = sinks
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.run_dir = config.run_dir
        self.stop_requested = False
        self.peft_config = peft_config
        self.callbacks = self._call_back(callbacks) if callbacks else None

    def train(self, *, resume: bool = False) -> Summary:
        """Run to the end, or until it is asked to stop; the summary's `status` says which.

        `resume`: go on with the run that is in the run directory, from its last whole checkpoint.
        """
        from sortedrl.run.build.parts import build_run

        self.stop_requested = False
        check_writable(self.run_dir)
        with ExitStack() as stack:
            checkpoint = self._take_up(stack) if resume else None
            metrics, emit = RunMetrics(), Fanout([])
            clock = WallClock(at=saved_clock(checkpoint))
            starting = stack.enter_context(ExitStack())
            starting.enter_context(clock.stopped())  # what it takes to start, or to start again, is not the run's time
            with self._status_of_start():
                parts = build_run(
                    self.config,
                    emit=emit,
                    clock=clock,
                    should_stop=lambda: self.stop_requested,
                    task=self.task,
                    model=self.model,
                    tokenizer=self.tokenizer,
                    checkpoint=checkpoint,
                    peft_config=self.peft_config,
                )
            stack.callback(parts.close)
            parts.learner.inspect_dir = self.run_dir
            if not resume:
                # Only when all else is well: a run that cannot start leaves an earlier one of its name alone.
                prepare_run_dir(self.run_dir)
                stack.enter_context(RunLock(self.run_dir))
            write_config(self.run_dir / "config.toml", self.config)
            (self.run_dir / "summary.json").unlink(missing_ok=True)  # it speaks of an end that was none
            files = self._open_files(parts, metrics, checkpoint)
            stack.push(
                lambda kind, error, at: files.store.close(commit=kind is None or issubclass(kind, SortedRLError))
            )
            stack.callback(emit.close)
            shown = ConsoleSink(self.console, metrics, quiet=self.quiet)
            track = self.config.track
            settings = TrackSettings(
                project=track.project, name=self.config.run.name, mode=track.mode, config=redact(self.config.resolved())
            )
            trackers = open_trackers(track.to, self.run_dir, metrics, settings)
            for sink in (metrics, files.events, files.metrics, shown, *trackers, *self.sinks):
                emit.add(sink)
            saver = self._saver(parts, files, clock, emit)
            self._tell_progress(parts, files, emit)
            starting.close()
            try:
                return self._train(parts, saver, emit, metrics, clock, is_new=checkpoint is None)
            except SortedRLError as error:
                if saver.checkpoints.versions():
                    error.add_note(f"go on from the last checkpoint with: {self.resume_command}")
                raise

    def stop(self) -> None:
        """Ask the run to stop after the update that it may be in: it is saved, and can be resumed."""
        self.stop_requested = True

    @property
    def resume_command(self) -> str:
        return f"sortedrl train --resume {shlex.quote(str(self.run_dir))}"

    def _status_of_start(self) -> AbstractContextManager[object]:
        """Some parts take their time: say so."""
        slow = ["vLLM"] if self.config.engine.kind == "vllm" else []
        slow += ["the learner's ranks"] if self.config.learner.ranks > 1 else []
        return self.console.status(f"starting {' and '.join(slow)}") if slow and not self.quiet else nullcontext()

    def _call_back(self, callbacks: Sequence[Any]) -> CallbackSink:
        from sortedrl.run.callbacks import CallbackSink

        sink = CallbackSink(callbacks, config=self.config, epoch_samples=self._epoch_samples(), stop=self.stop)
        sink.call("on_init_end")
        return sink

    def _epoch_samples(self) -> int | None:
        size = None if self.task is None else self.task.train.size
        return None if size is None else size * self.config.learner.group_size

    def _tell_progress(self, parts: RunParts, files: RunFiles, emit: Fanout) -> None:
        """Let reward functions and callbacks know how far the run is, one that is resumed included."""
        from sortedrl.run.callbacks import ProgressSink, RequestedEvaluation, RequestedSave, TrainingProgress

        progress = TrainingProgress(
            total_samples=self.config.run.samples,
            update_batch=self.config.schedule.update_batch,
            epoch_samples=self._epoch_samples(),
        )
        told = ProgressSink(progress, [parts.rewards.progress, parts.heldout_rewards.progress])
        told.replay(read_events(files.events.path))
        emit.add(told)
        sink = self.callbacks
        if sink is None:
            return
        sink.attach(model=parts.model, processing_class=parts.tokenizer, optimizer=parts.learner.optimizer)
        sink.replay(read_events(files.events.path))
        emit.add(sink)
        controller, evaluator = parts.controller, parts.evaluator
        controller.pause = RequestedEvaluation(
            inner=evaluator, is_requested=lambda: sink.control.should_evaluate and bool(evaluator.prompts)
        )
        if controller.save is not None:
            controller.save = RequestedSave(inner=controller.save, is_requested=lambda: sink.control.should_save)

    def _take_up(self, stack: ExitStack) -> Path | None:
        """Lock the run that is to go on and find its checkpoint; None if it died before the first."""
        from sortedrl.run.checkpoint import Checkpoints, load_state

        saved = self.run_dir / "config.toml"
        if not saved.is_file():
            raise RunDirError(f"{self.run_dir} holds no run to resume: it has no config.toml")
        stack.enter_context(RunLock(self.run_dir))
        checkpoint = Checkpoints(self.run_dir / "checkpoints").latest()
        if checkpoint is None:
            check_nothing_trained(self.run_dir)
            self.config.check_resumable(SortedConfig.load(saved).resolved())
        else:  # not the file's: somebody may have edited it since
            self.config.check_resumable(load_state(checkpoint)["config"])
        return checkpoint

    def _open_files(self, parts: RunParts, metrics: RunMetrics, checkpoint: Path | None) -> RunFiles:
        """The run's files, and the controller's buffer with them."""
        from sortedrl.run.run_checkpoint import RunFiles, restore

        if checkpoint is not None:
            files = RunFiles.reopen(self.run_dir, metrics, checkpoint)
            restore(parts, files, metrics, checkpoint)
            return files
        knobs = asdict(parts.controller.knobs)
        files = RunFiles.create(self.run_dir, metrics, grouped=self.config.is_grouped, knobs=knobs)
        parts.controller.buffer = files.store.restore()
        return files

    def _saver(self, parts: RunParts, files: RunFiles, clock: WallClock, emit: Fanout) -> RunSaver:
        from sortedrl.run.checkpoint import Checkpoints
        from sortedrl.run.run_checkpoint import RunSaver

        settings = self.config.checkpoint
        saver = RunSaver(
            config=self.config,
            parts=parts,
            files=files,
            checkpoints=Checkpoints(self.run_dir / "checkpoints", keep=settings.keep),
            clock=clock,
            emit=emit,
            every_updates=settings.every_updates,
        )
        if settings.save:
            parts.controller.save = saver
        return saver

    def _train(
        self, parts: RunParts, saver: RunSaver, emit: Fanout, metrics: RunMetrics, clock: WallClock, *, is_new: bool
    ) -> Summary:
        controller = parts.controller
        metrics.probe = lambda: (parts.stats(), controller.timing())
        if is_new:
            emit(run_started(self.config, clock.now()))
        else:
            assert metrics.run is not None, "a run that is resumed was started"
            metrics.run = replace(metrics.run, total_samples=self.config.run.samples)
            lineage = saver.files.store.lineage or 0
            emit(RunResumed(t=clock.now(), version=controller.buffer.version, lineage=lineage))
        with self._stop_on_signal():
            if is_new:
                with clock.stopped():
                    parts.evaluator.run(controller.buffer.version, 0)
            with rare_collections():
                complete = controller.run()
            timing, stats = controller.timing(), parts.stats()
            with clock.stopped():
                if complete:
                    parts.evaluator.run(controller.buffer.version, controller.buffer.num_trained)
                if self.config.checkpoint.save:
                    saver.run()
        emit(RunEnded(t=clock.now(), reason="complete" if complete else "stopped"))
        summary = summary_of(parts, metrics, stats, timing, ledger_s=saver.files.store.seconds, emit_s=emit.seconds)
        summary.write(self.run_dir / "summary.json")
        if self.config.run.report:
            write_report([self.run_dir], self.run_dir / "report.html")
        self._end(parts)
        return summary

    def _end(self, parts: RunParts) -> None:
        """Once everything is saved: tell what could not be scored, and raise what ended the run."""
        if parts.rewards.errors:
            counts = ", ".join(f"{name} {count}" for name, count in parts.rewards.errors.most_common())
            log.warning("answers that could not be scored, by reward function and kind of error: %s", counts)
        if parts.rewards.failure is not None:
            raise parts.rewards.failure
        if self.callbacks is not None and self.callbacks.error is not None:
            raise self.callbacks.error

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM asks the run to stop between two steps; a second one ends it at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop()

        if threading.current_thread() is not threading.main_thread():  # whoever owns that handles signals
            yield
            return
        previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def saved_clock(checkpoint: Path | None) -> float:
    """What the run's clock showed at a checkpoint."""
    from sortedrl.run.checkpoint import load_state

    return 0.0 if checkpoint is None else load_state(checkpoint)["clock_s"]


def check_nothing_trained(run_dir: Path) -> None:
    """A run without a checkpoint starts over; what one has trained that never made any is not thrown away for that."""
    path = run_dir / "events.jsonl"
    if path.is_file() and any(isinstance(event, RunEnded) for event in read_events(path)):
        raise RunDirError(f"{run_dir} has ended and left no checkpoint to go on from: start a new run")


def write_config(path: Path, config: SortedConfig) -> None:
    """Aside first: half a configuration would be another one."""
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(config.to_toml())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}; check space and permissions") from error


def run_started(config: SortedConfig, t: float) -> RunStarted:
    return RunStarted(
        t=t,
        strategy=config.schedule.strategy.value,
        seed=config.run.seed,
        slots=config.slots,
        update_batch=config.schedule.update_batch,
        total_samples=config.run.samples,
    )


def summary_of(
    parts: RunParts,
    metrics: RunMetrics,
    stats: EngineStats,
    timing: Timing,
    *,
    ledger_s: float | None = None,
    emit_s: float | None = None,
) -> Summary:
    knobs = parts.controller.knobs
    return summarize(
        metrics,
        stats=stats,
        timing=timing,
        held=list(parts.controller.buffer.samples),
        cohort_batches=knobs.cohort_batches,
        lookahead="none" if knobs.lookahead is None else knobs.lookahead,
        calibration=parts.controller.buffer.lengths.calibration,
        ledger_s=ledger_s,
        reward_errors=parts.rewards.errors,
        emit_s=emit_s,
    )


def _dataset_task(
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
    train_dataset: RowSequence | None,
    eval_dataset: RowSequence | None,
) -> Task | None:
    if train_dataset is None and reward_funcs is None and eval_dataset is None:
        return None
    if train_dataset is None or reward_funcs is None:
        raise ConfigError("a dataset needs reward functions and reward functions need a dataset: pass both or neither")
    funcs: list[Callable[..., list[float]]] = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    return DatasetTask(rows=train_dataset, reward_funcs=funcs, eval_rows=eval_dataset)
