"""Sinks that write a run's scalars to TensorBoard, Weights & Biases, or a tracker of the user's.

`run/builders/trackers.py` opens those that the configuration names; ours need optional packages. The shared
`RunMetrics` must receive each event before them. Guarantees: the step of every scalar is the number of samples trained,
so that strategies can be compared. Nothing leaves the machine unless the configuration says `online`. A tracker that
fails warns once, and the run continues (`Fanout`).
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from sortedrl.telemetry.events import Evaluated, Event, RunResumed, UpdateDone
from sortedrl.telemetry.metrics import RunMetrics, UpdateRow

_FLUSH_S = 10


@dataclass(slots=True, kw_only=True, frozen=True)
class TrackSettings:
    """How a tracker labels this run; `config` contains no secrets."""

    project: str
    name: str
    mode: Literal["offline", "online"] = "offline"
    config: Mapping[str, Any] = field(default_factory=dict)


def _update_scalars(row: UpdateRow) -> dict[str, float]:
    """Return the scalars of an update by name, without those that do not apply or are not finite."""
    named = {
        "batch/reward": row.reward_mean,
        "batch/length": row.mean_length,
        "batch/staleness": row.staleness_mean,
        "batch/staleness_max": row.staleness_max,
        "run/updates": row.update + 1,
        "run/seconds": row.t,
        "run/tokens_per_s": row.tokens_per_s,
        "run/learner_wait_s": row.learner_wait_s,
        "slots/bubble": row.bubble_ratio,
        "slots/idle_steps": row.idle_slot_steps,
        "slots/goodput": row.goodput,
        **{f"slot_time/{cause}": share for cause, share in (row.slot_time or {}).items()},
        **{f"learner/{name}": value for name, value in row.learner.items()},
    }
    return _finite(named)


def _evaluation_scalars(event: Evaluated) -> dict[str, float]:
    named: dict[str, float | None] = {
        "eval/accuracy": event.sampled_accuracy,
        "eval/greedy_accuracy": event.greedy_accuracy,
        "eval/reward": event.sampled_reward,
        "eval/length": event.mean_length,
    }
    for group, figures in event.by_group.items():
        named |= {f"eval/{group}/{name}": value for name, value in figures.items()}
    return _finite(named)


def _finite(named: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in named.items() if value is not None and math.isfinite(value)}


class TrackerSink(ABC):
    """Base of the trackers: turns events into scalars and steps."""

    kinds = frozenset({UpdateDone, Evaluated, RunResumed})

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def emit(self, event: Event) -> None:
        match event:
            case UpdateDone():
                row = self._metrics.row(event)
                self.write(row.samples_trained, _update_scalars(row))
            case Evaluated():
                self.write(event.samples_trained, _evaluation_scalars(event))
            case RunResumed():
                self.go_back(self._metrics.samples)
            case _:
                pass

    @abstractmethod
    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    @abstractmethod
    def go_back(self, step: int) -> None:
        """Drop what was written after this step, because the run was resumed there."""

    @abstractmethod
    def close(self) -> None: ...


class TensorBoardSink(TrackerSink):
    """Event files in `folder`, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, metrics: RunMetrics) -> None:
        super().__init__(metrics)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Imported by name: type checkers do not see the classes of generated modules.
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_S)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        make = self._summaries.Summary
        self._add(step, summary=make(value=[make.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]))

    def go_back(self, step: int) -> None:
        make = self._events.SessionLog
        self._add(step + 1, session_log=make(status=make.START))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self._writer.close()


class WandbSink(TrackerSink):
    """A run of Weights & Biases in `folder`; `wandb sync` uploads an offline run.

    It records nothing about the machine: no host name, command line, environment or code.
    """

    def __init__(self, folder: Path, metrics: RunMetrics, settings: TrackSettings) -> None:
        super().__init__(metrics)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb reads it on import
        import wandb

        quiet = wandb.Settings(
            mode=settings.mode,
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=settings.project,
            name=settings.name,
            group=settings.name,
            dir=str(folder),
            config=dict(settings.config),
            settings=quiet,
        )
        self._run.define_metric("samples")
        self._run.define_metric("*", step_metric="samples")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"samples": step, **scalars})

    def go_back(self, step: int) -> None:
        """Do nothing: a resumed run is a new run of the same group."""

    def close(self) -> None:
        self._run.finish()


class Tracker(Protocol):
    """A tracker of the user's: it gets the scalars of every update and evaluation. `step` counts trained samples.

    It may also have `go_back(step)`: the run was resumed there, and what was written after that step is void.
    """

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class OwnTrackerSink(TrackerSink):
    """Passes scalars on to a tracker of the user's."""

    def __init__(self, tracker: Tracker, metrics: RunMetrics) -> None:
        super().__init__(metrics)
        self._tracker = tracker

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._tracker.write(step, scalars)

    def go_back(self, step: int) -> None:
        go_back = getattr(self._tracker, "go_back", None)
        if go_back is not None:
            go_back(step)

    def close(self) -> None:
        self._tracker.close()
