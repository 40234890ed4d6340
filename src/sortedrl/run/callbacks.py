"""transformers' `TrainerCallback`s, called at the points of a run that match those of its `Trainer`.

`trainer.py` makes a `CallbackSink` when callbacks are given and adds it to the run's sinks, so they see what events
tell: a step is one update. It imports transformers then, not before. What it keeps true: a callback that raises ends
the run as it would end transformers' training, but the run is saved first (the trainer raises `error` at its end); a
resumed run goes on with the state that its events tell, log history included.

What a callback asks for through its `TrainerControl` is done between two updates: `should_training_stop`,
`should_evaluate` and `should_save`. Logging is at every update, and there is no stopping of a single epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.protocols import Pause, Save
from sortedrl.telemetry.events import (
    BatchTaken,
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunResumed,
    RunStarted,
    UpdateDone,
)

BEST_METRIC = "eval_reward"
# What the learner calls a figure, and what TRL's users look for.
LOG_NAMES = {"lr": "learning_rate", "reward_mean": "reward"}
_NOT_LOGGED = ("num_tokens", "truncated_fraction")  # told of the run so far, or by another name

Call = tuple[str, dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far training is. `epoch_samples`: samples in one pass over the data, None where it has no end."""

    total_samples: int
    update_batch: int
    epoch_samples: int | None
    num_updates: int = 0
    num_samples: int = 0

    @property
    def max_steps(self) -> int:
        """Updates in all; ties make batches larger, so that there may be fewer."""
        return math.ceil(self.total_samples / self.update_batch)

    @property
    def epoch(self) -> float:
        return self.num_samples / (self.epoch_samples or self.total_samples)

    def take(self, event: Event) -> None:
        match event:
            case BatchTaken():
                self.num_samples += len(event.samples)
            case UpdateDone():
                self.num_updates += 1
            case _:
                pass

    def as_state(self) -> dict[str, float]:
        """What reward functions are told as `trainer_state`."""
        return {"global_step": self.num_updates, "max_steps": self.max_steps, "epoch": self.epoch}


class ProgressSink:
    """Keeps `told`, which reward functions see, up to date."""

    kinds = frozenset({RunStarted, RunResumed, BatchTaken, UpdateDone})

    def __init__(self, progress: Progress, told: Sequence[dict[str, float]]) -> None:
        self._progress = progress
        self._told = told

    def emit(self, event: Event) -> None:
        self._progress.take(event)
        if isinstance(event, RunStarted | RunResumed | UpdateDone):
            for state in self._told:
                state.update(self._progress.as_state())

    def replay(self, events: Iterable[Event]) -> None:
        for event in events:
            self._progress.take(event)

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class AskedEvaluation:
    """The run's evaluation, which callbacks may ask for besides."""

    inner: Pause
    is_asked: Callable[[], bool]

    def is_due(self, num_trained: int) -> bool:
        return self.is_asked() or self.inner.is_due(num_trained)

    def run(self, version: int, num_trained: int) -> None:
        self.inner.run(version, num_trained)


@dataclass(slots=True, kw_only=True, frozen=True)
class AskedSave:
    """The run's checkpoints, which callbacks may ask for besides."""

    inner: Save
    is_asked: Callable[[], bool]

    def is_due(self, num_updates: int) -> bool:
        return self.is_asked() or self.inner.is_due(num_updates)

    def run(self) -> None:
        self.inner.run()


class RunArguments(SimpleNamespace):
    """What callbacks find as `args`: the names that transformers and TRL give to settings of a run."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_sanitized_dict(self) -> dict[str, Any]:
        plain = (bool, int, float, str)
        return {name: value if isinstance(value, plain) else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_sanitized_dict(), indent=2)


def run_arguments(config: SortedConfig, progress: Progress) -> RunArguments:
    folder, steps = str(config.run_dir), progress.max_steps
    every = config.eval.every_samples // config.schedule.update_batch
    return RunArguments(
        output_dir=folder,
        logging_dir=folder,
        run_name=config.run.name,
        report_to=[],
        seed=config.run.seed,
        max_steps=steps,
        num_train_epochs=math.ceil(config.run.samples / (progress.epoch_samples or config.run.samples)),
        per_device_train_batch_size=config.schedule.update_batch,
        gradient_accumulation_steps=1,
        num_generations=config.learner.group_size,
        max_completion_length=config.engine.max_new_tokens,
        temperature=config.engine.temperature,
        learning_rate=config.learner.lr,
        weight_decay=config.learner.weight_decay,
        max_grad_norm=config.learner.grad_clip,
        logging_strategy="steps",
        logging_steps=1,
        logging_first_step=True,
        eval_strategy="steps" if config.eval.prompts else "no",
        eval_steps=max(every, 1) if config.eval.every_samples else steps,
        eval_delay=0,
        save_strategy="steps" if config.checkpoint.save else "no",
        save_steps=config.checkpoint.every_updates,
        load_best_model_at_end=False,
        metric_for_best_model=BEST_METRIC,
        greater_is_better=True,
        disable_tqdm=False,
    )


class CallbackSink:
    """Calls `callbacks` (instances or classes) on a run's events; `stop` asks the run to end."""

    def __init__(
        self, callbacks: Sequence[Any], *, config: SortedConfig, epoch_samples: int | None, stop: Callable[[], None]
    ) -> None:
        from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        for callback in self.callbacks:
            if not isinstance(callback, TrainerCallback):
                raise ConfigError(f"callback {callback!r:.80} is no transformers.TrainerCallback: derive it from that")
        self.progress = Progress(
            total_samples=config.run.samples, update_batch=config.schedule.update_batch, epoch_samples=epoch_samples
        )
        self.args = run_arguments(config, self.progress)
        self.state = TrainerState(
            max_steps=self.args.max_steps,
            logging_steps=self.args.logging_steps,
            eval_steps=self.args.eval_steps,
            save_steps=self.args.save_steps,
            num_train_epochs=self.args.num_train_epochs,
            train_batch_size=self.args.per_device_train_batch_size,
        )
        self.control = TrainerControl()
        self.error: Exception | None = None  # what a callback raised; no other is called after it
        self._parts: dict[str, Any] = {}
        self._stop = stop
        self._batch: BatchTaken | None = None
        self._num_tokens = 0

    def attach(self, *, model: Any, processing_class: Any, optimizer: Any) -> None:
        """What callbacks get besides args, state and control."""
        self._parts = {"model": model, "processing_class": processing_class, "optimizer": optimizer}

    def call(self, name: str, **extra: Any) -> None:
        parts = {"model": None, "processing_class": None, "optimizer": None, **self._parts}
        absent = {"lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None}
        for callback in self.callbacks:
            answer = getattr(callback, name)(self.args, self.state, self.control, **parts, **absent, **extra)
            self.control = answer or self.control

    def emit(self, event: Event) -> None:
        if self.error is not None:
            return
        try:
            for name, extra in self._calls(event):
                self.call(name, **extra)
        except Exception as error:  # whatever users' code raises: the run is to be saved before they see it
            self.error = error
        if self.error is not None or self.control.should_training_stop:
            self._stop()

    def replay(self, events: Iterable[Event]) -> None:
        """Take up the state of a run that is resumed, without calling anybody."""
        for event in events:
            for _ in self._calls(event):
                pass

    def close(self) -> None: ...

    # ---- from events to calls ---------------------------------------------------------------------------------------

    def _calls(self, event: Event) -> Iterator[Call]:
        """Bring the state up to an event, and say whom to call meanwhile."""
        epoch = math.floor(self.progress.epoch)
        self.progress.take(event)
        match event:
            case RunStarted() | RunResumed():
                self.control.should_training_stop = False
                yield "on_train_begin", {}
                yield "on_epoch_begin", {}
            case BatchTaken():
                self._batch = event
                self.control.should_save = self.control.should_evaluate = self.control.should_log = False
                yield "on_step_begin", {}
                if math.floor(self.progress.epoch) > epoch and self.progress.num_samples < self.progress.total_samples:
                    yield "on_epoch_end", {}
                    yield "on_epoch_begin", {}
            case UpdateDone():
                self.state.global_step, self.state.epoch = self.progress.num_updates, self.progress.epoch
                yield "on_step_end", {}
                yield self._log(self._update_logs(event))
            case Evaluated():
                metrics = _evaluation(event)
                yield self._log(metrics)
                yield "on_evaluate", {"metrics": metrics}
                self._note_best(metrics[BEST_METRIC])
            case CheckpointSaved():
                yield "on_save", {}
            case RunEnded():
                yield "on_epoch_end", {}
                yield "on_train_end", {}
            case _:
                pass

    def _log(self, logs: Mapping[str, float]) -> Call:
        entry = {**logs, "epoch": round(self.progress.epoch, 6)}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        return "on_log", {"logs": entry}

    def _update_logs(self, event: UpdateDone) -> dict[str, float]:
        batch = self._batch
        assert batch is not None, "an update without a batch"
        self._num_tokens += sum(batch.lengths)
        count = len(batch.samples)
        logs = {LOG_NAMES.get(name, name): value for name, value in event.metrics.items() if name not in _NOT_LOGGED}
        return {
            "reward": sum(batch.rewards) / count,
            **logs,
            "completions/mean_length": sum(batch.lengths) / count,
            "completions/min_length": min(batch.lengths),
            "completions/max_length": max(batch.lengths),
            "completions/clipped_ratio": batch.truncated / count,
            "staleness": sum(batch.staleness) / count,
            "num_tokens": self._num_tokens,
            "step_time": event.seconds,
        }

    def _note_best(self, value: float) -> None:
        if self.state.best_metric is None or value > self.state.best_metric:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step


def _evaluation(event: Evaluated) -> dict[str, float]:
    return {
        BEST_METRIC: event.sampled_accuracy,
        "eval_greedy_reward": event.greedy_accuracy,
        "eval_completions/mean_length": event.mean_length,
    }
