"""Costs fitted to real runs: what their engine, learner and host took, as the simulator can use them.

`plan --from-run` and benchmarks/forecast.py call `fit_runs`. Everything comes from the run directories: the step at
which each attempt ended follows from its token counts, since all running sequences make one token per step and the
first token of an attempt comes from its prefill. Between two endings lies a *stretch*: one call of the engine, in which
the number of running sequences is constant. A stretch takes

    poll_s + base_s x steps + slot_s x slot-steps + context_s x context-steps
           + (call_s + start_s x samples started + token_s x cached tokens, if it has a prefill)

Weighted least squares, no coefficient below zero, scaled so that the stretches' sum is the measured one. What a run
cannot tell is said in `Fit.assumed`, and taken as follows: where every prefill started equally many samples, half of
its time is the call's and half the samples'; where nothing cached was prefilled, a token costs a third of what it does
in an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sortedrl.errors import DataError
from sortedrl.telemetry import events
from sortedrl.telemetry.sinks import read_events
from sortedrl.telemetry.summary import Summary

FORWARD_SHARE = 1 / 3  # of an update's time per token: forward once, backward twice as much
MIN_STRETCHES = 20  # fewer say nothing


@dataclass(slots=True, kw_only=True, frozen=True)
class FittedCost:
    """A cost model for the simulated engine and learner, in seconds."""

    base_s: float  # of a decode step
    slot_s: float  # more per running sequence and step
    context_s: float  # more per token of context and step
    call_s: float  # of a prefill
    start_s: float  # more per sample that it starts, the prompt included
    token_s: float  # more per cached token that it takes up again
    poll_s: float  # host work between two endings
    update_base_s: float
    update_token_s: float
    publication_s: float
    harvest_s: float  # rollout time around an update: scoring what came last, loading, admitting
    prompt_tokens: int  # the mean
    kv_tokens: int | None = None

    def decode_s(self, running: int, context: int, steps: int) -> float:
        """The engine decodes from one ending to the next in one call: a stretch, with its host work."""
        contexts = steps * context + running * steps * (steps - 1) / 2
        return self.poll_s + steps * (self.base_s + self.slot_s * running) + self.context_s * contexts

    def prefill_s(self, lengths: Iterable[int]) -> float:
        lengths = list(lengths)
        """Lengths include prompts, which are all taken as the mean one."""
        cached = max(sum(lengths) - self.prompt_tokens * len(lengths), 0)
        return self.call_s + self.start_s * len(lengths) + self.token_s * cached if lengths else 0.0

    def publish_s(self) -> float:
        return self.publication_s

    def update_s(self, tokens: int) -> float:
        """Harvesting is host work that stops rollout, as an update does."""
        return self.harvest_s + self.update_base_s + self.update_token_s * tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True, frozen=True)
class Fit:
    """A cost model, and how well it explains the runs it came from."""

    cost: FittedCost
    num_stretches: int
    r2: float  # of the stretches' times
    update_r2: float
    assumed: list[str]  # coefficients that the runs could not tell

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cost": self.cost.as_dict()}


@dataclass(slots=True, kw_only=True)
class Running:
    length: int  # answer tokens at `step`
    step: int


@dataclass(slots=True, kw_only=True)
class Observed:
    """What the events of runs say about time."""

    # Per stretch: seconds, has a prefill, samples started, cached tokens, steps, slot-steps, context-steps.
    stretches: list[list[float]] = field(default_factory=list)
    # Per update: seconds, tokens without prompts, samples.
    updates: list[tuple[float, int, int]] = field(default_factory=list)
    publications: list[float] = field(default_factory=list)
    num_prompt_tokens: float = 0.0
    rollout_s: float = 0.0


class Observer:
    """Folds a run's events into `observed`, one by one."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self._running: dict[int, Running] = {}
        self._step = 0
        self._since = 0.0
        self._num_started = self._num_cached = 0
        self._batch: events.BatchTaken | None = None

    def see(self, event: events.Event) -> None:
        match event:
            case events.AttemptStarted():
                self._start(event)
            case events.AttemptVerified(sample=sample, accepted=accepted):
                self._running[sample].length = accepted + 1
            case events.AttemptEnded():
                self._end(event)
            case events.BatchTaken():
                self._batch = event
                if self._running:
                    raise DataError(
                        "costs cannot be told from a run whose updates overlap rollout: name one with overlap = false"
                    )
            case events.UpdateDone():
                assert self._batch is not None, f"update {event.update} is done, but its batch was never taken"
                self.observed.updates.append((event.seconds, sum(self._batch.lengths), len(self._batch.samples)))
                computed, learned = (event.metrics.get(name, 0.0) for name in ("computed_tokens", "learned_tokens"))
                self.observed.num_prompt_tokens += max(computed - learned, 0.0)
            case events.WeightsPublished(seconds=seconds):
                self.observed.publications.append(seconds)
            case _:
                pass

    def _start(self, event: events.AttemptStarted) -> None:
        if not self._running:
            self._since = event.t
        self._num_started += 1
        self._num_cached += event.cached
        self._running[event.sample] = Running(length=event.cached + 1, step=self._step)

    def _end(self, event: events.AttemptEnded) -> None:
        running = self._running[event.sample]
        end = running.step + max(event.num_tokens - running.length, 0)
        if event.outcome in ("stop", "length"):
            if end > self._step or self._num_started:
                self._close_stretch(event.t, end)
            self._since = event.t
        del self._running[event.sample]

    def _close_stretch(self, t: float, end: int) -> None:
        count, steps = len(self._running), end - self._step
        context = sum(running.length + self._step - running.step for running in self._running.values())
        contexts = steps * context + count * steps * (steps - 1) / 2
        prefill = [float(self._num_started > 0), self._num_started, self._num_cached]
        self.observed.stretches.append([t - self._since, *prefill, steps, steps * count, contexts])
        self._step, self._num_started, self._num_cached = end, 0, 0


def fit_runs(run_dirs: Sequence[str | Path]) -> Fit:
    """Fit one cost model to finished runs of the same engine, model and machine."""
    observed = Observed()
    for run_dir in map(Path, run_dirs):
        observed.rollout_s += Summary.read(run_dir / "summary.json").rollout_s or 0.0
        observer = Observer(observed)
        for event in read_events(run_dir / "events.jsonl"):
            observer.see(event)
    if len(observed.stretches) < MIN_STRETCHES or not observed.updates:
        raise DataError(
            f"{run_dirs[0]} has {len(observed.stretches)} endings and {len(observed.updates)} updates: too few to fit "
            f"costs to; name a run with at least {MIN_STRETCHES} samples"
        )
    return fit(observed)


def read_lengths(run_dir: str | Path) -> list[int]:
    """Lengths of what a run trained, in load order."""
    lengths: dict[int, int] = {}
    for event in read_events(Path(run_dir) / "events.jsonl"):
        if isinstance(event, events.BatchTaken):
            lengths.update(zip(event.samples, event.lengths, strict=True))
    return [lengths[sample] for sample in sorted(lengths)]


def fit(observed: Observed) -> Fit:
    prompt_tokens = observed.num_prompt_tokens / sum(samples for _, _, samples in observed.updates)
    update_base_s, update_token_s, update_r2 = _line(
        [(seconds, tokens + prompt_tokens * samples) for seconds, tokens, samples in observed.updates]
    )
    seconds, calls, started, cached, steps, slot_steps, contexts = np.array(observed.stretches).T
    assumed: list[str] = []
    num_started = started[calls > 0]
    usual = float(num_started.mean())
    decode = [np.ones_like(seconds), steps, slot_steps, contexts + prompt_tokens * slot_steps]
    if num_started.min() == num_started.max():
        assumed += ["call_s", "start_s"]
        prefill = [calls / 2 + started / (2 * usual)]
    else:
        prefill = [calls, started]
    rows = np.stack([*decode, *prefill, cached], 1)
    # Errors grow with the time that a stretch takes.
    weights = 1 / np.sqrt(np.maximum(seconds, 1e-9))
    solution = _least_squares(rows * weights[:, None], seconds * weights)
    solution = solution * (seconds.sum() / (rows @ solution).sum())
    poll_s, base_s, slot_s, context_s, *prefill_s, token_s = solution.tolist()
    call_s, start_s = prefill_s if len(prefill_s) == 2 else (prefill_s[0] / 2, prefill_s[0] / (2 * usual))
    if not cached.any():
        assumed.append("token_s")
        token_s = update_token_s * FORWARD_SHARE
    cost = FittedCost(
        base_s=base_s,
        slot_s=slot_s,
        context_s=context_s,
        call_s=call_s,
        start_s=start_s,
        token_s=token_s,
        poll_s=poll_s,
        update_base_s=update_base_s,
        update_token_s=update_token_s,
        publication_s=float(np.mean(observed.publications)) if observed.publications else 0.0,
        harvest_s=max(observed.rollout_s - float(seconds.sum()), 0.0) / len(observed.updates),
        prompt_tokens=round(prompt_tokens),
    )
    return Fit(
        cost=cost,
        num_stretches=len(seconds),
        r2=_r2(seconds, rows @ solution),
        update_r2=update_r2,
        assumed=assumed,
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Intercept, slope and R2 of seconds against tokens; the intercept is not below zero."""
    seconds, tokens = np.array(points, dtype=float).T
    rows = np.stack([np.ones_like(tokens), tokens], 1)
    solution = _least_squares(rows, seconds)
    return float(solution[0]), float(solution[1]), _r2(seconds, rows @ solution)


def _least_squares(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The least squares solution without negative coefficients: the most negative one is set to zero in turn."""
    scale = np.linalg.norm(rows, axis=0)
    kept = [column for column in range(rows.shape[1]) if scale[column] > 0]
    solution = np.zeros(rows.shape[1])
    while kept:
        found = np.linalg.lstsq(rows[:, kept] / scale[kept], target, rcond=None)[0] / scale[kept]
        worst = int(np.argmin(found * scale[kept]))
        if found[worst] >= 0:
            solution[kept] = found
            break
        kept.pop(worst)
    return solution


def _r2(measured: np.ndarray, predicted: np.ndarray) -> float:
    spread = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((measured - predicted) ** 2).sum()) / spread if spread else 1.0
