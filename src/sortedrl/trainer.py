"""`SortedTrainer`: a run from start to end, as Python users and the command line start it.

It owns the run directory: configuration, events, metrics, checkpoint, summary and report. What happens in between is
the controller's; everything written here is read by nobody who decides.
"""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.engine.base import EngineStats
from sortedrl.errors import ConfigError, RunDirError
from sortedrl.tasks.base import DatasetTask, RewardFunc, RowSequence, Task
from sortedrl.telemetry.console import ConsoleSink
from sortedrl.telemetry.events import RunEnded, RunStarted
from sortedrl.telemetry.metrics import RunMetrics, Timing
from sortedrl.telemetry.report import write_report
from sortedrl.telemetry.sinks import Fanout, JsonlSink, MetricsSink
from sortedrl.telemetry.summary import Summary, summarize

if TYPE_CHECKING:
    from sortedrl.build import RunParts

log = logging.getLogger(__name__)


class SortedTrainer:
    """Trains a causal language model with sorted scheduling.

    `model`: a folder that `from_pretrained` loads, or a model object with its tokenizer as `processing_class`; left
    out, the configured one. `reward_funcs` and `train_dataset` (rows with a `prompt`) replace the configured task.
    """

    def __init__(
        self,
        model: str | Path | Any = None,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: SortedConfig | None = None,
        train_dataset: RowSequence | None = None,
        eval_dataset: RowSequence | None = None,
        processing_class: Any = None,
        *,
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
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.run_dir = config.run_dir
        self.stop_requested = False

    def train(self) -> Summary:
        """Run to the end, or until the first interrupt; the summary's `status` says which."""
        from sortedrl.build import build_run

        config, clock, metrics = self.config, WallClock(), RunMetrics()
        check_writable(self.run_dir)
        emit = Fanout([metrics])
        parts = build_run(
            config,
            emit=emit,
            clock=clock,
            should_stop=lambda: self.stop_requested,
            task=self.task,
            model=self.model,
            tokenizer=self.tokenizer,
        )
        try:
            # Only when all else is well: a run that cannot start leaves an earlier one of its name alone.
            prepare_run_dir(self.run_dir)
            (self.run_dir / "config.toml").write_text(config.to_toml(), encoding="utf-8")
            emit.add(JsonlSink(self.run_dir / "events.jsonl"))
            emit.add(MetricsSink(self.run_dir / "metrics.jsonl", metrics))
            emit.add(ConsoleSink(self.console, metrics, quiet=self.quiet))
            return self._train(parts, emit, metrics, clock)
        finally:
            emit.close()
            parts.close()

    def _train(self, parts: RunParts, emit: Fanout, metrics: RunMetrics, clock: WallClock) -> Summary:
        config, controller = self.config, parts.controller
        metrics.probe = lambda: (parts.stats(), controller.timing())
        emit(run_started(config, clock.now()))
        with self._stop_on_interrupt():
            with clock.stopped():
                parts.evaluator.run(controller.buffer.version, 0)
            complete = controller.run()
            timing, stats = controller.timing(), parts.stats()
            if complete:
                with clock.stopped():
                    parts.evaluator.run(controller.buffer.version, controller.buffer.num_trained)
        emit(RunEnded(t=clock.now(), reason="complete" if complete else "stopped"))
        summary = summary_of(parts, metrics, stats, timing)
        self._save(parts, summary)
        return summary

    def _save(self, parts: RunParts, summary: Summary) -> None:
        from sortedrl.learner.checkpoint import save_checkpoint

        summary.write(self.run_dir / "summary.json")
        if self.config.run.checkpoint:
            version = parts.controller.buffer.version
            folder = self.run_dir / "checkpoints" / str(version)
            save_checkpoint(folder, parts.model, parts.tokenizer, learner=parts.learner, extra={"version": version})
        if self.config.run.report:
            write_report([self.run_dir], self.run_dir / "report.html")

    @contextmanager
    def _stop_on_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C asks the run to stop between two steps; a second one ends it at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True

        try:
            previous = signal.signal(signal.SIGINT, ask)
        except ValueError:  # not in the main thread: whoever owns it handles signals
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def run_started(config: SortedConfig, t: float) -> RunStarted:
    return RunStarted(
        t=t,
        strategy=config.schedule.strategy.value,
        seed=config.run.seed,
        slots=config.engine.slots,
        update_batch=config.schedule.update_batch,
        total_samples=config.run.samples,
    )


def summary_of(parts: RunParts, metrics: RunMetrics, stats: EngineStats, timing: Timing) -> Summary:
    knobs = parts.controller.knobs
    return summarize(
        metrics,
        stats=stats,
        timing=timing,
        held=list(parts.controller.buffer.samples),
        cohort_batches=knobs.cohort_batches,
        lookahead="none" if knobs.lookahead is None else knobs.lookahead,
        calibration=parts.controller.buffer.lengths.calibration,
    )


def check_writable(run_dir: Path) -> None:
    """Refuse a place where no run directory can be made, before anything else is done."""
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise _unwritable(run_dir, f"{there} is no folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(run_dir, error.strerror or str(error)) from None


def prepare_run_dir(run_dir: Path) -> None:
    """Make an empty run directory; an earlier run of that name is moved aside, never overwritten."""
    try:
        if run_dir.exists() and any(run_dir.iterdir()):
            number = 1
            while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
                number += 1
            run_dir.rename(aside)
            log.info("%s existed: moved to %s", run_dir, aside)
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run_dir, error.strerror or str(error)) from None


def _unwritable(run_dir: Path, why: str) -> RunDirError:
    return RunDirError(f"cannot write the run directory {run_dir}: {why}; choose another with run.dir=PATH")


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
