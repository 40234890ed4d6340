"""What a run directory tells after the fact: its summary, its updates, every attempt, and when slots were busy.

Read by the report. Nothing here knows a live run; a run that crashed reads as far as its files go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sortedrl.errors import RunDirError
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CohortLoaded,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.sinks import read_events
from sortedrl.telemetry.summary import Summary, summarize


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One stay of a sample in a slot."""

    sample: int
    attempt: int
    slot: int
    version: int  # of the weights it began with
    mode: str
    start: float
    end: float
    outcome: str  # of AttemptEnded; paused: it waited for an update; empty: the events end first
    num_tokens: int


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdatePoint:
    """One update and the batch it trained on."""

    update: int
    t: float  # when it was done
    taken: float  # when its batch was taken
    samples_trained: int
    reward: float
    lengths: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayPoint:
    """The replays between two harvests."""

    update: int  # that follows them
    num_replays: int
    share: float  # of its cached tokens that a replay kept, mean over replays
    token_share: float


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """Times are seconds since the first cohort was loaded; an evaluation before that is at 0."""

    name: str
    slots: int
    summary: Summary
    is_estimate: bool  # the run left no summary.json: figures come from its events
    seconds: float = 0.0  # until the last step of training
    updates: list[UpdatePoint] = field(default_factory=list)
    evaluations: list[tuple[float, Evaluated]] = field(default_factory=list)  # when, what
    attempts: list[Attempt] = field(default_factory=list)
    updating: list[tuple[float, float]] = field(default_factory=list)  # from harvest to the new weights
    cohort_updates: list[int] = field(default_factory=list)  # updates done when a cohort was loaded
    staleness: Counter[int] = field(default_factory=Counter)
    replays: list[ReplayPoint] = field(default_factory=list)

    @property
    def num_interrupted(self) -> int:
        return sum(attempt.outcome == "interrupted" for attempt in self.attempts)


def read_history(run_dir: str | Path) -> RunHistory:
    """The history of one run directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunDirError(f"{run_dir} is not a directory; name the directory of a run")
    events = list(read_events(run_dir / "events.jsonl"))
    metrics = RunMetrics()
    for event in events:
        metrics.emit(event)
    if metrics.run is None:
        raise RunDirError(f"{run_dir / 'events.jsonl'} tells of no run: it lacks RunStarted; run it again")
    path = run_dir / "summary.json"
    has_summary = path.is_file()
    history = RunHistory(
        name=run_dir.resolve().name,
        slots=metrics.run.slots,
        summary=Summary.read(path) if has_summary else _estimate(metrics),
        is_estimate=not has_summary,
    )
    _fill(history, events, metrics.run)
    return history


def _estimate(metrics: RunMetrics) -> Summary:
    """Figures by the events' clock; what only engine and controller know, and the ledger, stay null."""
    stats, timing = metrics.measured()
    summary = summarize(metrics, stats=stats, timing=timing, held=None)
    unknown = ("recomputed_tokens", "decode_steps", "update_s", "publish_s", "save_s")
    return summary.model_copy(update=dict.fromkeys(unknown))


def _fill(history: RunHistory, events: Sequence[Event], run: RunStarted) -> None:
    origin = next((event.t for event in events if isinstance(event, CohortLoaded)), run.t)
    running: dict[tuple[int, int], Attempt] = {}
    taken: dict[int, tuple[BatchTaken, int]] = {}
    verified: list[AttemptVerified] = []
    harvested: float | None = None
    num_trained = 0
    for event in events:
        t = max(event.t - origin, 0.0)
        if not isinstance(event, Evaluated | RunEnded):
            history.seconds = max(history.seconds, t)
        match event:
            case CohortLoaded():
                history.cohort_updates.append(event.update)
            case AttemptStarted():
                attempt = _begun(event, t)
                running[event.sample, event.attempt] = attempt
                history.attempts.append(attempt)
            case AttemptVerified():
                verified.append(event)
            case AttemptEnded():
                attempt = running.pop((event.sample, event.attempt), None)
                if attempt is not None:
                    attempt.end, attempt.outcome, attempt.num_tokens = t, event.outcome, event.num_tokens
            case BatchTaken():
                num_trained += len(event.samples)
                taken[event.update] = (event, num_trained)
                history.staleness.update(event.staleness)
                history.replays.extend(_replay_point(event.update, verified))
                verified = []
                harvested = t
                if event.num_paused:
                    _pause(running.values(), t)
            case UpdateDone() if event.update in taken and taken[event.update][0].samples:
                batch, samples = taken.pop(event.update)
                history.updates.append(_update_point(batch, samples, taken=batch.t - origin, done=t))
            case WeightsPublished() if harvested is not None:
                history.updating.append((harvested, t))
                harvested = None
                for key, attempt in running.items():
                    if attempt.outcome == "paused":
                        running[key] = replace(attempt, version=event.version, start=t, end=t, outcome="")
                        history.attempts.append(running[key])
            case Evaluated():
                history.evaluations.append((t, event))
            case _:
                pass
    for attempt in running.values():
        attempt.end = max(attempt.end, history.seconds) if attempt.outcome == "" else attempt.end


def _pause(attempts: Iterable[Attempt], t: float) -> None:
    """Rollout stands still for an update: bars end here, and the next begin with the weights that they go on with."""
    for attempt in attempts:
        attempt.end, attempt.outcome = t, "paused"


def _begun(event: AttemptStarted, t: float) -> Attempt:
    return Attempt(
        sample=event.sample,
        attempt=event.attempt,
        slot=event.slot,
        version=event.version,
        mode=event.mode,
        start=t,
        end=t,
        outcome="",
        num_tokens=event.cached,
    )


def _update_point(batch: BatchTaken, samples: int, *, taken: float, done: float) -> UpdatePoint:
    return UpdatePoint(
        update=batch.update,
        t=done,
        taken=taken,
        samples_trained=samples,
        reward=sum(batch.rewards) / len(batch.rewards),
        lengths=tuple(batch.lengths),
    )


def _replay_point(update: int, verified: Iterable[AttemptVerified]) -> Iterable[ReplayPoint]:
    checked = [event for event in verified if event.cached]
    if checked:
        yield ReplayPoint(
            update=update,
            num_replays=len(checked),
            share=sum(event.accepted / event.cached for event in checked) / len(checked),
            token_share=sum(event.accepted for event in checked) / sum(event.cached for event in checked),
        )


def mean_overlap(spans: Sequence[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """How many spans are open, on average, between each pair of neighbouring edges.

    The number open is a step function; its integral is piecewise linear and read off at the edges.
    """
    if not spans:
        return np.zeros(len(edges) - 1)
    times = np.array([t for span in spans for t in span])
    steps = np.tile([1.0, -1.0], len(spans))
    order = np.argsort(times, kind="stable")
    times, num_open = times[order], np.cumsum(steps[order])
    integral = np.concatenate([[0.0], np.cumsum(num_open[:-1] * np.diff(times))])
    return np.diff(np.interp(edges, times, integral)) / np.diff(edges)
