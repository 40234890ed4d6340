"""`SortedTrainer`: one training run from start to end, as Python users and the command line start it.

It owns the run directory: configuration, events, metrics, ledger, checkpoints, summary and report. The controller does
the training; nothing that is written here influences its decisions.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.config.plug_points import ADVANTAGE, ALGORITHM, ENGINE, ENVIRONMENT, TASK, TRACKER
from sortedrl.config.trl_args import from_trl, is_trl_args
from sortedrl.engine.base import EngineStats
from sortedrl.environment.scorer import no_reward
from sortedrl.errors import ConfigError, RunDirError, SortedRLError
from sortedrl.ledger.atomic_file import atomic_file, remove_unfinished
from sortedrl.ledger.run_lock import RunLock
from sortedrl.redact import redact, redact_text
from sortedrl.run.rundir import check_writable, prepare_run_dir
from sortedrl.run.saved_run import find_result, how_to_extend, saved_settings
from sortedrl.run.session import Session
from sortedrl.run.stop_signals import leave_on_signal, stop_on_signal
from sortedrl.tasks.base import DatasetTask, RewardFunc, RowSequence, Task
from sortedrl.tasks.reward_model import RewardModel
from sortedrl.telemetry.console import ConsoleSink
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import Evaluated, Event, RunEnded
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.sinks import Fanout, Sink
from sortedrl.telemetry.summary import Summary, summarize
from sortedrl.telemetry.trackers import TrackSettings
from sortedrl.weights import is_adapted

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from transformers.trainer_callback import TrainerState

    from sortedrl.protocols import CheckpointHook, EvaluationHook
    from sortedrl.run.builders.parts import RunParts
    from sortedrl.run.callbacks import CallbackSink
    from sortedrl.run.evaluate import Evaluator
    from sortedrl.run.model_card import RunFacts
    from sortedrl.run.save_and_resume import RunSaver

log = logging.getLogger(__name__)


class SortedTrainer:
    """Trains a causal language model with sorted scheduling.

    `args` is the configuration, or TRL's `GRPOConfig`, which is converted; a line says what has no equivalent.
    `model`: a folder that `from_pretrained` loads, an id on the Hugging Face hub, or a model object with its tokenizer
    as `processing_class` (an object, a folder or an id); without it, the configured model. `reward_funcs` (functions,
    or reward models by folder or id) and `train_dataset` (rows with a `prompt`) replace the configured task.
    `callbacks` are transformers' `TrainerCallback`s. `peft_config` is one of peft's, to train adapters in place of all
    weights. Every event of the run also goes to each of `sinks`.

    `environment_factory` is a class of environments with tools, as TRL takes it (docs/guides/tools.md).

    `engine`, `algorithm`, `advantage`, `strategy`, `task` and `trackers` are objects of your own, or names as in the
    configuration; they replace the configured ones (docs/reference/plug_points.md). A run with such an object can be
    resumed from Python only, with the object given again.
    """

    def __init__(
        self,
        model: str | Path | Any = None,
        reward_funcs: RewardFunc | str | Sequence[RewardFunc | str] | None = None,
        args: SortedConfig | Any = None,
        train_dataset: RowSequence | None = None,
        eval_dataset: RowSequence | None = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        *,
        engine: Any = None,
        algorithm: Any = None,
        advantage: Any = None,
        strategy: Any = None,
        task: Any = None,
        trackers: Sequence[Any] | None = None,
        environment_factory: Any = None,
        sinks: Sequence[Sink] = (),
        console: Console | None = None,
        quiet: bool = False,
    ) -> None:
        config = _as_config(args, train_dataset, eval_dataset)
        if isinstance(model, str | Path):
            config, model = config.with_model(str(model)), None
        if isinstance(processing_class, str | Path):
            config, processing_class = config.replaced(model={"tokenizer": str(processing_class)}), None
        if task is not None and (reward_funcs is not None or train_dataset is not None or eval_dataset is not None):
            raise ConfigError("task brings its own rows and reward functions: leave out the datasets and reward_funcs")
        given = {
            ENGINE: engine,
            ALGORITHM: algorithm,
            ADVANTAGE: advantage,
            TASK: task,
            TRACKER: None if trackers is None else tuple(trackers),
            ENVIRONMENT: environment_factory,
        }
        config = config if strategy is None else config.with_strategy(strategy)
        self.config = config = config.with_objects(
            {point: value for point, value in given.items() if value is not None}
        )
        self.model = model
        self.tokenizer = processing_class
        if reward_funcs is None and train_dataset is not None and environment_factory is not None:
            reward_funcs = no_reward  # the environment gives the reward
        self.task = _dataset_task(reward_funcs, train_dataset, eval_dataset)
        self.sinks = sinks
        self.console = console or Console(stderr=True, emoji=False)
        self.quiet = quiet
        self.run_dir = config.run_dir
        self.stop_requested = False
        self.stop_signal: int | None = None  # the signal that asked the run to stop
        self.peft_config = peft_config
        self.callbacks = self._make_callbacks(callbacks) if callbacks else None
        self._trained: _Trained | None = None  # what the last call of `train` made

    def train(self, *, resume: bool = False) -> Summary:
        """Run to the end, or until the run is asked to stop; the summary's `status` says which.

        `resume`: continue the run in the run directory from its last complete checkpoint. A run that is complete is
        left as it is. A run that cannot learn raises NothingLearnedError once it is saved, unless `run.on_no_signal` is
        "warn".
        """
        self.stop_requested, self.stop_signal = False, None
        self.config.check_startable()
        if not resume:
            self.config = self.config.replaced(run={"started_in": str(Path.cwd())})
        elif (result := self._check_saved_run()) is not None:
            return result
        from sortedrl.run.builders.parts import build_parts  # imports torch
        from sortedrl.run.save_and_resume import check_noise

        check_writable(self.run_dir)
        with ExitStack() as stack:
            starting = stack.enter_context(ExitStack())
            starting.enter_context(leave_on_signal())  # until the run can be saved
            checkpoint = self._lock_and_find_checkpoint(stack) if resume else None
            clock = WallClock(at=_saved_clock(checkpoint))
            starting.enter_context(clock.stopped())  # the time it takes to start does not count for the run
            with self._start_status():
                parts = build_parts(
                    self.config,
                    task=self.task,
                    model=self.model,
                    tokenizer=self.tokenizer,
                    checkpoint=checkpoint,
                    peft_config=self.peft_config,
                )
            stack.callback(parts.close)
            self.config = parts.config
            if parts.notice and not self.quiet:
                self.console.print(escape(parts.notice), highlight=False, soft_wrap=True)
            if checkpoint is not None:
                check_noise(checkpoint, parts.engine.capabilities.noise)
            if not resume:
                # Only now that all parts are built: a run that cannot start leaves an earlier run of its name alone.
                prepare_run_dir(self.run_dir)
                stack.enter_context(RunLock(self.run_dir))
            _write_config(self.run_dir / "config.toml", self.config)
            (self.run_dir / "summary.json").unlink(missing_ok=True)  # it would tell of an end that did not last
            session = self._open_session(stack, parts, clock, checkpoint)
            starting.close()
            # Also when the run fails; not on a second signal, which ends it at once.
            stack.push(lambda kind, error, at: session.saver.wait_after(kind))
            try:
                return self._train(session, is_new=checkpoint is None)
            except SortedRLError as error:
                if versions := session.saver.checkpoints.versions():
                    error.add_note(f"continue from checkpoint {versions[-1]} with: {self.resume_command}")
                raise

    def stop(self) -> None:
        """Ask the run to stop after the current update. It is saved and can be resumed."""
        self.stop_requested = True

    def _ask_to_stop(self, number: int) -> None:
        """A first signal asks the run to stop after the current update, a second one ends it."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_signal = number
        self.stop()

    # ---- before and after training, as transformers' Trainer has it -------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """transformers' `TrainerState`, as callbacks get it: steps, epochs and the log history of this run."""
        if self.callbacks is None:
            self.callbacks = self._make_callbacks([])
            if self._trained is not None:
                self.callbacks.replay(read_events(self.run_dir / "events.jsonl"))
        return self.callbacks.state

    def add_callback(self, callback: Any) -> None:
        """Add one of transformers' `TrainerCallback`s, an instance or a class. It is called from the next event on."""
        if self.callbacks is None:
            self.callbacks = self._make_callbacks([])
        self.callbacks.add(callback)

    def evaluate(self, eval_dataset: RowSequence | None = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Answer held-out prompts with the current model and return the metrics, as callbacks get them.

        At most `eval.prompts` rows are used, of `eval_dataset` or else of the held-out rows. Before training, the
        initial model is evaluated.
        """
        from sortedrl.run.builders.evaluation import standalone_evaluator
        from sortedrl.run.callbacks import evaluation_logs

        found: list[Event] = []
        trained = self._trained
        with standalone_evaluator(
            self.config,
            emit=found.append,
            task=self.task,
            rows=eval_dataset,
            model=self.model if trained is None else trained.model,
            tokenizer=self.tokenizer if trained is None else trained.tokenizer,
            peft_config=self.peft_config,
            commits=None if trained is None else trained.facts.commits,
        ) as evaluator:
            version, num_trained = (0, 0) if trained is None else (trained.facts.version, trained.num_samples)
            evaluator.run(version, num_trained)
        (event,) = found
        assert isinstance(event, Evaluated), "an evaluator emits its result"
        if self.callbacks is not None:
            self.callbacks.emit(event)
            if self.callbacks.error is not None:
                raise self.callbacks.error
        return {f"{metric_key_prefix}{name.removeprefix('eval')}": v for name, v in evaluation_logs(event).items()}

    def save_model(self, output_dir: str | Path | None = None, *, merge: bool = False) -> Path:
        """Save the trained model, its tokenizer and a model card to a folder; returns it.

        Default: `model` in the run directory. Of a model with adapters only the adapters are saved, unless `merge`.
        """
        from sortedrl.run.export import save_weights

        trained = self._need_trained()
        folder = Path(output_dir) if output_dir is not None else self.run_dir / "model"
        save_weights(trained.model, trained.tokenizer, folder, trained.facts, merge=merge)
        return folder

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "End of training",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        merge: bool = False,
    ) -> CommitInfo:
        """Upload what `save_model` saves to a model repository, which is created if it is new."""
        from sortedrl.external.hub import upload

        self._need_trained()
        with TemporaryDirectory() as scratch:
            folder = self.save_model(Path(scratch) / "model", merge=merge)
            options = {"private": private, "token": token, "revision": revision, "create_pr": create_pr}
            return upload(folder, repo_id, commit_message=commit_message, **options)

    def _need_trained(self) -> _Trained:
        if self._trained is None:
            raise ConfigError(
                "nothing has been trained here: call train() first; weights of an earlier run come from sortedrl export"
            )
        return self._trained

    @property
    def resume_command(self) -> str:
        return f"sortedrl train --resume {shlex.quote(str(self.run_dir))}"

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _start_status(self) -> AbstractContextManager[object]:
        """A status line for parts that take long to start."""
        slow = ["vLLM"] if self.config.engine.kind == "vllm" else []
        slow += ["the learner's ranks"] if self.config.has_rank_actors else []
        return self.console.status(f"starting {' and '.join(slow)}") if slow and not self.quiet else nullcontext()

    def _make_callbacks(self, callbacks: Sequence[Any]) -> CallbackSink:
        from sortedrl.run.callbacks import CallbackSink

        sink = CallbackSink(callbacks, config=self.config, epoch_samples=self._epoch_samples(), stop=self.stop)
        sink.call("on_init_end")
        return sink

    def _epoch_samples(self) -> int | None:
        size = None if self.task is None else self.task.train.size
        return None if size is None else size * self.config.learner.group_size

    def _check_saved_run(self) -> Summary | None:
        """Refuse changed settings before anything is loaded; returns the result of a run that is complete."""
        saved = saved_settings(self.run_dir, self.config)
        self.config = self.config.continuing(saved)
        self.config.check_resumable(saved)
        result = find_result(self.run_dir, self.config)
        remove_unfinished(self.run_dir)
        if result is not None and not self.quiet:
            self.console.print(escape(how_to_extend(self.run_dir, result)), highlight=False, soft_wrap=True)
        return result

    def _lock_and_find_checkpoint(self, stack: ExitStack) -> Path | None:
        """Lock the run to resume and find its last checkpoint; None if it died before the first one."""
        from sortedrl.run.checkpoint_folder import Checkpoints, load_state

        stack.enter_context(RunLock(self.run_dir))
        checkpoint = Checkpoints(self.run_dir / "checkpoints").latest()
        if checkpoint is None:
            _check_not_ended(self.run_dir)
        else:  # it may not be the newest, whose settings were checked
            self.config.check_resumable(load_state(checkpoint)["config"])
        return checkpoint

    def _open_session(self, stack: ExitStack, parts: RunParts, clock: WallClock, checkpoint: Path | None) -> Session:
        """Open the run's files and put evaluation, checkpoints, sinks and the controller together."""
        from sortedrl.run.builders.loop import build_evaluator, build_loop
        from sortedrl.run.checkpoint_folder import Checkpoints
        from sortedrl.run.save_and_resume import CHECKPOINTS, RunFiles, RunSaver, restore

        metrics, emit, settings = RunMetrics(), Fanout([]), self.config.checkpoint
        if checkpoint is None:
            knobs = asdict(self.config.knobs)
            noise = parts.engine.capabilities.noise
            files = RunFiles.create(self.run_dir, metrics, grouped=self.config.is_grouped, knobs=knobs, noise=noise)
        else:
            files = RunFiles.reopen(self.run_dir, metrics, checkpoint, self.config)
        stack.push(lambda kind, error, at: files.store.close(commit=kind is None or issubclass(kind, SortedRLError)))
        stack.callback(emit.close)
        evaluator = build_evaluator(self.config, parts, emit=emit, clock=clock)
        state = None if checkpoint is None else restore(parts, evaluator, files.buffer.version, checkpoint)
        carried = EngineStats() if state is None else EngineStats(**state["stats"])
        at_start = parts.engine.stats()  # a probe may have used the engine

        def stats() -> EngineStats:
            """The engine's counters over the whole run, without those of evaluations."""
            return parts.engine.stats().minus(at_start).minus(evaluator.used).plus(carried)

        saver = RunSaver(
            config=self.config,
            parts=parts,
            files=files,
            evaluator=evaluator,
            stats=stats,
            checkpoints=Checkpoints(self.run_dir / CHECKPOINTS, keep=settings.keep),
            clock=clock,
            emit=emit,
            every_updates=settings.every_updates,
        )
        evaluation, checkpoints = self._hooks(evaluator, saver)
        controller = build_loop(
            self.config,
            parts,
            files.buffer,
            emit=emit,
            clock=clock,
            should_stop=lambda: self.stop_requested,
            evaluation=evaluation,
            checkpoints=checkpoints,
        )
        if state is not None:
            controller.load_state_dict(state["controller"])
        session = Session(
            parts=parts,
            files=files,
            metrics=metrics,
            emit=emit,
            clock=clock,
            evaluator=evaluator,
            saver=saver,
            controller=controller,
            stats=stats,
        )
        self._add_sinks(session)
        return session

    def _hooks(self, evaluator: Evaluator, saver: RunSaver) -> tuple[EvaluationHook, CheckpointHook | None]:
        """When the controller evaluates and saves: as configured, and when a callback asks for it."""
        from sortedrl.run.callbacks import DueOnRequest

        is_saved, sink = self.config.checkpoint.save, self.callbacks
        if sink is None:
            return evaluator, saver if is_saved else None
        evaluation = DueOnRequest(
            inner=evaluator, is_requested=lambda: sink.control.should_evaluate and bool(evaluator.prompts)
        )
        checkpoints = DueOnRequest(inner=saver, is_requested=lambda: sink.control.should_save)
        return evaluation, checkpoints if is_saved else None

    def _add_sinks(self, session: Session) -> None:
        """Connect everything that listens to events; sinks of a resumed run first read what it has told so far."""
        from sortedrl.run.builders.trackers import open_trackers
        from sortedrl.run.callbacks import ProgressSink, TrainingProgress
        from sortedrl.run.machine_load import MachineSink

        files, metrics, parts, track = session.files, session.metrics, session.parts, self.config.track
        metrics.probe = lambda: (session.stats(), session.controller.timing())
        progress = ProgressSink(
            TrainingProgress(
                total_samples=self.config.run.samples,
                update_batch=self.config.schedule.update_batch,
                epoch_samples=self._epoch_samples(),
            ),
            [parts.rewards.progress, parts.heldout_rewards.progress],
        )
        callbacks = [] if self.callbacks is None else [self.callbacks]
        for sink in callbacks:
            sink.restart()
            sink.attach(model=parts.model, processing_class=parts.tokenizer, optimizer=parts.learner.optimizer)
        session.replay([progress, *callbacks])
        shown = ConsoleSink(self.console, metrics, quiet=self.quiet)
        settings = TrackSettings(
            project=track.project, name=self.config.run.name, mode=track.mode, config=redact(self.config.resolved())
        )
        trackers = open_trackers(track.trackers, self.run_dir, metrics, settings)
        load = MachineSink(emit_measured=session.emit, run_dir=self.run_dir)  # last: what it emits follows for all
        for sink in (metrics, files.events, files.metrics, shown, *trackers, *self.sinks, progress, *callbacks, load):
            session.emit.add(sink)

    # ---- running ----------------------------------------------------------------------------------------------------

    def _train(self, session: Session, *, is_new: bool) -> Summary:
        controller, clock, emit, saver = session.controller, session.clock, session.emit, session.saver
        buffer, alarm = controller.buffer, session.parts.alarm
        with stop_on_signal(self._ask_to_stop):
            session.announce(self.config, is_new=is_new)
            complete = session.run_loop()
            facts, stats = controller.summary_facts(), session.stats()
            if self.config.checkpoint.save:
                with clock.stopped():
                    saver.run_to_end(buffer, controller.state_dict())
        emit(RunEnded(t=clock.now(), reason="complete" if complete else "stopped"))
        summary = summarize(
            session.metrics,
            stats=stats,
            **facts,
            ledger_s=session.files.store.seconds,
            reward_errors=session.parts.rewards.errors,
            emit_s=emit.seconds,
            alarm=None if alarm.message is None else redact_text(alarm.message),
        )
        summary.write(self.run_dir / "summary.json")
        self._trained = _Trained.of(session, self.config, summary)
        if complete:
            self._export(session.parts)
        if self.config.run.report:
            decode = session.parts.tokenizer.decode
            write_report([self.run_dir], self.run_dir / "report.html", find_decode=lambda _: decode)
        self._raise_failures(session.parts)
        return summary

    def _export(self, parts: RunParts) -> None:
        """At the end of a run whose checkpoints are shards, write its weights for `from_pretrained` too."""
        settings, has_adapters = self.config.checkpoint, is_adapted(parts.model)
        if settings.save and settings.export and self.config.has_sharded_checkpoints(has_adapters=has_adapters):
            self.save_model()

    def _raise_failures(self, parts: RunParts) -> None:
        """Once everything is saved: report answers without a score, and raise the error that ended the run."""
        if parts.alarm.error is not None:
            raise parts.alarm.error
        if parts.rewards.errors:
            counts = ", ".join(f"{name} {count}" for name, count in parts.rewards.errors.most_common())
            log.warning("answers that could not be scored, by reward function and kind of error: %s", counts)
        if parts.environment is not None and parts.environment.runner.errors:
            counts = ", ".join(f"{name} {count}" for name, count in parts.environment.runner.errors.most_common())
            log.warning("failures of environments, by tool and kind of error: %s", counts)
        if parts.rewards.failure is not None:
            raise parts.rewards.failure
        if self.callbacks is not None and self.callbacks.error is not None:
            raise self.callbacks.error


@dataclass(slots=True, kw_only=True, frozen=True)
class _Trained:
    """The result of a call of `train`."""

    model: Any
    tokenizer: Any
    num_samples: int
    facts: RunFacts

    @classmethod
    def of(cls, session: Session, config: SortedConfig, summary: Summary) -> _Trained:
        from sortedrl.run.model_card import RunFacts

        parts, buffer = session.parts, session.controller.buffer
        facts = RunFacts(
            config=config,
            summary=summary,
            version=buffer.version,
            base_model=parts.base_model,
            commits=parts.commits,
            from_python=parts.from_python,
        )
        return cls(model=parts.learner.model, tokenizer=parts.tokenizer, num_samples=buffer.num_trained, facts=facts)


def _saved_clock(checkpoint: Path | None) -> float:
    """The time on the run's clock when the checkpoint was written."""
    from sortedrl.run.checkpoint_folder import load_state

    return 0.0 if checkpoint is None else load_state(checkpoint)["clock_s"]


def _check_not_ended(run_dir: Path) -> None:
    """A run without a checkpoint starts over on resume, unless it had ended: its results must not be lost."""
    path = run_dir / "events.jsonl"
    has_ended = path.is_file() and any(isinstance(event, RunEnded) for event in read_events(path))
    if has_ended or (run_dir / "summary.json").is_file():  # the line that tells of the end may be damaged
        raise RunDirError(f"{run_dir} has ended and has no checkpoint to continue from: start a new run")


def _write_config(path: Path, config: SortedConfig) -> None:
    try:
        with atomic_file(path) as file:
            file.write(config.to_toml())
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}; check free space and permissions") from error


def _as_config(args: Any, train_dataset: RowSequence | None, eval_dataset: RowSequence | None) -> SortedConfig:
    """The configuration; arguments of TRL's trainer are converted, and what has no equivalent is logged."""
    if args is None or isinstance(args, SortedConfig):
        return args or SortedConfig()
    if not is_trl_args(args):
        raise ConfigError(f"args must be a SortedConfig or TRL's GRPOConfig, not {type(args).__name__}")
    sizes = [None if rows is None else len(rows) for rows in (train_dataset, eval_dataset)]
    config, left = from_trl(args, num_rows=sizes[0], num_eval_rows=sizes[1])
    if left:
        log.warning("TRL's %s has settings without an equivalent here: %s", type(args).__name__, "; ".join(left))
    return config


def _dataset_task(
    reward_funcs: RewardFunc | str | Sequence[RewardFunc | str] | None,
    train_dataset: RowSequence | None,
    eval_dataset: RowSequence | None,
) -> Task | None:
    if train_dataset is None and reward_funcs is None and eval_dataset is None:
        return None
    if train_dataset is None or reward_funcs is None:
        raise ConfigError("a dataset needs reward functions and reward functions need a dataset: pass both or neither")
    given = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs)
    funcs: list[RewardFunc] = [RewardModel(name=func) if isinstance(func, str) else func for func in given]
    for func in funcs:
        if hasattr(func, "from_pretrained"):
            raise ConfigError("reward_funcs holds a model object: pass the folder or the hub id of the reward model")
    return DatasetTask(rows=train_dataset, reward_funcs=funcs, eval_rows=eval_dataset)
