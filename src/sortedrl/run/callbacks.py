"""Call transformers' `TrainerCallback`s at the points of a run that match those of transformers' `Trainer`.

If the user gives callbacks, `trainer.py` adds a `CallbackSink` to the run's event sinks; one step is one update.
transformers is imported only then. A callback's requests in `TrainerControl` (`should_training_stop`,
`should_evaluate`, `should_save`) are carried out between two updates. Every update is logged; `should_epoch_stop` has
no effect.

Guarantees: a callback that raises ends the run, but the run is saved first (the trainer raises `error` at its end); a
resumed run has the state, log history included, that its recorded events give.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.protocols import CheckpointHook, EvaluationHook
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
# The learner's metric names, and the names that TRL uses for them.
LOG_NAMES = {"lr": "learning_rate", "reward_mean": "reward"}
_NOT_LOGGED = ("num_tokens", "truncated_fraction")  # logged for the whole run, or under another name

Call = tuple[str, dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """How far training has come. `epoch_samples`: samples in one pass over the data; None for endless data."""

    total_samples: int
    update_batch: int
    epoch_samples: int | None
    num_updates: int = 0
    num_samples: int = 0

    @property
    def max_steps(self) -> int:
        """Upper bound on the number of updates: a batch may be larger than `update_batch`."""
        return math.ceil(self.total_samples / self.update_batch)

    @property
    def epoch(self) -> float:
        return self.num_samples / (self.epoch_samples or self.total_samples)

    def apply(self, event: Event) -> None:
        match event:
            case BatchTaken():
                self.num_samples += len(event.samples)
            case UpdateDone():
                self.num_updates += 1
            case RunResumed(gap=gap) if gap:  # the events before were incomplete
                self.num_samples, self.num_updates = event.samples_trained, event.updates
            case _:
                pass

    def as_state(self) -> dict[str, float]:
        """The dict that reward functions get as `trainer_state`."""
        return {"global_step": self.num_updates, "max_steps": self.max_steps, "epoch": self.epoch}


class ProgressSink:
    """Keeps `states`, the `trainer_state` dicts of reward functions, up to date."""

    kinds = frozenset({RunStarted, RunResumed, BatchTaken, UpdateDone})

    def __init__(self, progress: TrainingProgress, states: Sequence[dict[str, float]]) -> None:
        self._progress = progress
        self._states = states

    def emit(self, event: Event) -> None:
        self._progress.apply(event)
        if isinstance(event, RunStarted | RunResumed | UpdateDone):
            for state in self._states:
                state.update(self._progress.as_state())

    def replay(self, events: Iterable[Event]) -> None:
        for event in events:
            self._progress.apply(event)

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class DueOnRequest:
    """An evaluation or checkpoint hook that is also due when a callback asks for it."""

    inner: EvaluationHook | CheckpointHook
    is_requested: Callable[[], bool]

    def is_due(self, count: int) -> bool:
        return self.is_requested() or self.inner.is_due(count)

    def run(self, *arguments: Any) -> None:
        self.inner.run(*arguments)


class RunArguments(SimpleNamespace):
    """The `args` of callbacks: settings of the run under the names that transformers and TRL use."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_sanitized_dict(self) -> dict[str, Any]:
        plain = (bool, int, float, str)
        return {name: value if isinstance(value, plain) else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_sanitized_dict(), indent=2)


def _run_arguments(config: SortedConfig, progress: TrainingProgress) -> RunArguments:
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

        self._callback_type = TrainerCallback
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add(callback)
        self.progress = TrainingProgress(
            total_samples=config.run.samples, update_batch=config.schedule.update_batch, epoch_samples=epoch_samples
        )
        self.args = _run_arguments(config, self.progress)
        self._state_type = TrainerState
        self.state = self._new_state()
        self.control = TrainerControl()
        self.error: Exception | None = None  # raised by a callback; after it no callback is called
        self._parts: dict[str, Any] = {}
        self._stop = stop
        self._batch: BatchTaken | None = None
        self._num_tokens = 0

    def add(self, callback: Any) -> None:
        """Add a callback, an instance or a class, after the others."""
        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, self._callback_type):
            raise ConfigError(f"callback {made!r:.80} is not a transformers.TrainerCallback: derive it from that")
        self.callbacks.append(made)

    def restart(self) -> None:
        """Forget an earlier call of `train`: a new run counts from 0, a resumed one replays its events."""
        self.progress = replace(self.progress, num_updates=0, num_samples=0)
        self.state = self._new_state()
        self.error, self._batch, self._num_tokens = None, None, 0

    def _new_state(self) -> Any:
        return self._state_type(
            max_steps=self.args.max_steps,
            logging_steps=self.args.logging_steps,
            eval_steps=self.args.eval_steps,
            save_steps=self.args.save_steps,
            num_train_epochs=self.args.num_train_epochs,
            train_batch_size=self.args.per_device_train_batch_size,
        )

    def attach(self, *, model: Any, processing_class: Any, optimizer: Any) -> None:
        """Set the objects that callbacks get in addition to args, state and control."""
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
        except Exception as error:  # any error of a user's callback: save the run before it is raised
            self.error = error
        if self.error is not None or self.control.should_training_stop:
            self._stop()

    def replay(self, events: Iterable[Event]) -> None:
        """Set the state from the events of a resumed run, without calling the callbacks."""
        for event in events:
            for _ in self._calls(event):
                pass

    def close(self) -> None: ...

    # ---- from events to calls ---------------------------------------------------------------------------------------

    def _calls(self, event: Event) -> Iterator[Call]:
        """Apply an event to the state, and yield the callback methods to call on the way."""
        epoch = math.floor(self.progress.epoch)
        self.progress.apply(event)
        match event:
            case RunStarted() | RunResumed():
                self.control.should_training_stop = False
                if isinstance(event, RunResumed) and event.gap:
                    self.state.global_step, self.state.epoch = self.progress.num_updates, self.progress.epoch
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
                if self._batch is not None:  # None: a damaged event file lacks it
                    yield self._log(self._update_logs(self._batch, event))
            case Evaluated():
                metrics = evaluation_logs(event)
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

    def _update_logs(self, batch: BatchTaken, event: UpdateDone) -> dict[str, float]:
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


def evaluation_logs(event: Evaluated) -> dict[str, float]:
    return {
        BEST_METRIC: event.sampled_accuracy,
        "eval_greedy_reward": event.greedy_accuracy,
        "eval_completions/mean_length": event.mean_length,
    }
