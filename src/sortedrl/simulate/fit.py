"""Costs fitted to real runs: what their engine, learner and host took, as the simulator can use them.

`plan --from-run` and benchmarks/forecast.py call `fit_runs`. Everything comes from the run directories: the step at
which each attempt ended follows from its token counts, since all running sequences make one token per step and the
first token of an attempt comes from its prefill. Between two endings lies a *stretch*: one call of the engine, in which
the number of running sequences is constant. A stretch takes

    poll_s + base_s x steps + several_s x (steps with more than one sequence) + slot_s x slot-steps
           + window_s x window-steps + (call_s + start_s x samples started + token_s x cached tokens, if it prefills)

where a step's window counts the positions that sequences attend to, prompts included. The local engine lets runs of
slots attend together, as far as the longest of them, in as many calls as are cheapest; `sync` runs, in which all are
about equally long, cannot tell that, so it is computed as the engine does, for slots that lie in order of length.
Weighted least squares, no
coefficient below zero, scaled so that the stretches' sum is the measured one. Of poll_s the engine itself takes a part;
for how much of a stretch it does not run, host_s, follows from the measured bubble. What a run cannot tell is said in
`Fit.assumed`, and taken as follows: where every prefill started equally many samples, half of its time is the call's
and half the samples'; where nothing cached was prefilled, a token costs a third of what it does in an update.
"""

from __future__ import annotations

import json
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
APART_ELEMENTS = 16384  # what another call of attention costs, in elements of keys: engine/cache.py's own figure
MIN_STRETCHES = 20  # fewer say nothing


@dataclass(slots=True, kw_only=True, frozen=True)
class FittedCost:
    """A cost model for the simulated engine and learner, in seconds."""

    base_s: float  # of a decode step
    several_s: float  # more per step if more than one sequence runs
    slot_s: float  # more per running sequence and step
    window_s: float  # more per position attended to and step
    call_s: float  # of a prefill
    start_s: float  # more per sample that it starts, the prompt included
    token_s: float  # more per cached token that it takes up again
    poll_s: float  # from one ending to the next, whatever lies between
    host_s: float  # of a stretch: slots are held, but the engine does not run
    update_base_s: float
    update_token_s: float
    publication_s: float
    harvest_s: float  # rollout time around an update: scoring what came last, loading, admitting
    prompt_tokens: int  # the mean
    apart: float | None = None  # positions that another call of attention costs; None: all attend in one
    kv_tokens: int | None = None

    def decode_s(self, running: int, context: int, steps: int) -> float:
        """A stretch as the simulated engine asks for it: by the sum of contexts, as if all were equally long."""
        contexts = steps * context + running * steps * (steps - 1) / 2
        return self.poll_s + steps * self.step_s(running) + self.window_s * contexts

    def step_s(self, running: int) -> float:
        """A step but for attention."""
        return self.base_s + self.several_s * (running > 1) + self.slot_s * running

    def prefill_s(self, lengths: Iterable[int]) -> float:
        """Lengths include prompts, which are all taken as the mean one."""
        lengths = list(lengths)
        return self.started_s(len(lengths), max(sum(lengths) - self.prompt_tokens * len(lengths), 0))

    def started_s(self, started: int, cached: int) -> float:
        return self.call_s + self.start_s * started + self.token_s * cached if started else 0.0

    def stretch_s(self, stretch: Stretch) -> float:
        decode_s = stretch.steps * self.step_s(stretch.running) + self.window_s * stretch.window(
            self.prompt_tokens, self.apart
        )
        return self.poll_s + decode_s + self.started_s(stretch.started, stretch.cached)

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


@dataclass(slots=True, kw_only=True, frozen=True)
class Stretch:
    """One call of the engine, from the last ending to the next."""

    seconds: float
    started: int  # samples that it prefilled
    cached: int  # tokens of theirs that were there before
    steps: int
    lengths: tuple[int, ...]  # answer tokens of what runs, before the first step

    @property
    def running(self) -> int:
        return len(self.lengths)

    def window(self, prompt_tokens: float, apart: float | None) -> float:
        """Positions attended to in all steps, as if each were the middle one: the cheapest split, as the engine's."""
        middle = prompt_tokens + (self.steps - 1) / 2
        lengths = sorted(self.lengths, reverse=True)
        if apart is None:
            return self.steps * len(lengths) * (lengths[0] + middle)
        best = [-apart]  # cost of the first so many; the first call is the step's own
        for end in range(1, len(lengths) + 1):
            runs = (best[start] + (end - start) * (lengths[start] + middle) for start in range(end))
            best.append(min(runs) + apart)
        return self.steps * best[-1]


@dataclass(slots=True, kw_only=True)
class Running:
    length: int  # answer tokens at `step`
    step: int
    waited: int | None = None  # tokens it held when it was last counted as prefilled for new weights


@dataclass(slots=True, kw_only=True)
class Observed:
    """What the events of runs say about time."""

    stretches: list[Stretch] = field(default_factory=list)
    # Per update: seconds, tokens without prompts, samples.
    updates: list[tuple[float, int, int]] = field(default_factory=list)
    publications: list[float] = field(default_factory=list)
    num_prompt_tokens: float = 0.0
    rollout_s: float = 0.0
    busy_slot_s: float = 0.0
    apart: float | None = None


class Observer:
    """Folds a run's events into `observed`, one by one. `prefilled`: tokens that an attempt has after its prefill."""

    def __init__(self, observed: Observed, *, prefilled: int = 1) -> None:
        self.observed = observed
        self.prefilled = prefilled
        self._running: dict[int, Running] = {}
        self._step = 0
        self._since = 0.0
        self._num_started = self._num_cached = 0
        self._is_halted = False  # by a harvest, until samples start again
        self._batch: events.BatchTaken | None = None

    def see(self, event: events.Event) -> None:
        match event:
            case events.AttemptStarted():
                self._start(event)
            case events.AttemptVerified(sample=sample, accepted=accepted):
                self._running[sample].length = accepted + self.prefilled
            case events.AttemptEnded():
                self._end(event)
            case events.BatchTaken():
                self._batch = event
                self._is_halted = True
                if len(self._running) > event.num_paused:
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
                self._go_on(event.t)
            case _:
                pass

    def _start(self, event: events.AttemptStarted) -> None:
        if not self._running or self._is_halted:
            self._since, self._is_halted = event.t, False
        self._num_started += 1
        self._num_cached += event.cached
        self._running[event.sample] = Running(length=event.cached + self.prefilled, step=self._step)

    def _go_on(self, t: float) -> None:
        """What waited in its slot for the weights is prefilled under them, like what starts then."""
        self._since = t
        self._num_started += len(self._running)
        for running in self._running.values():
            running.waited = running.length + self._step - running.step
            self._num_cached += running.waited
            running.length, running.step = running.waited + self.prefilled, self._step

    def _end(self, event: events.AttemptEnded) -> None:
        running = self._running[event.sample]
        end = running.step + max(event.num_tokens - running.length, 0)
        if event.outcome in ("stop", "length"):
            if end > self._step or self._num_started:
                self._close_stretch(event.t, end)
            self._since = event.t
        elif running.waited is not None:  # a checkpoint stopped it before it was prefilled
            self._num_started -= 1
            self._num_cached -= running.waited
        del self._running[event.sample]

    def _close_stretch(self, t: float, end: int) -> None:
        self.observed.stretches.append(
            Stretch(
                seconds=t - self._since,
                started=self._num_started,
                cached=self._num_cached,
                steps=end - self._step,
                lengths=tuple(running.length + self._step - running.step for running in self._running.values()),
            )
        )
        self._is_halted = False
        self._step, self._num_started, self._num_cached = end, 0, 0
        for running in self._running.values():
            running.waited = None


def fit_runs(run_dirs: Sequence[str | Path]) -> Fit:
    """Fit one cost model to finished runs of the same engine, model and machine."""
    observed = Observed()
    for run_dir in map(Path, run_dirs):
        summary = Summary.read(run_dir / "summary.json")
        observed.rollout_s += summary.rollout_s or 0.0
        observed.busy_slot_s += (
            (1.0 - (summary.bubble_ratio or 0.0)) * (summary.slots or 0) * (summary.rollout_s or 0.0)
        )
        observed.apart = _apart(run_dir)
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


def _apart(run_dir: Path) -> float | None:
    """What another call of attention costs, in positions of the run's model; None if no checkpoint tells."""
    for path in sorted(run_dir.glob("checkpoints/*/config.json")):
        model = json.loads(path.read_text(encoding="utf-8"))
        heads = model.get("num_attention_heads")
        size = model.get("head_dim") or (model["hidden_size"] // heads if heads else None)
        if size:
            return APART_ELEMENTS / (size * (model.get("num_key_value_heads") or heads))
    return None


def fit(observed: Observed) -> Fit:
    prompt_tokens = observed.num_prompt_tokens / sum(samples for _, _, samples in observed.updates)
    update_base_s, update_token_s, update_r2 = _line(
        [(seconds, tokens + prompt_tokens * samples) for seconds, tokens, samples in observed.updates]
    )
    seconds, started, cached, steps, running, windows = np.array(
        [
            [s.seconds, s.started, s.cached, s.steps, s.running, s.window(prompt_tokens, observed.apart)]
            for s in observed.stretches
        ]
    ).T
    calls = (started > 0).astype(float)
    assumed: list[str] = []
    num_started = started[started > 0]
    usual = float(num_started.mean())
    decode = [np.ones_like(seconds), steps, steps * (running > 1), steps * running, windows]
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
    poll_s, base_s, several_s, slot_s, window_s, *prefill_s, token_s = solution.tolist()
    call_s, start_s = prefill_s if len(prefill_s) == 2 else (prefill_s[0] / 2, prefill_s[0] / (2 * usual))
    if not cached.any():
        assumed.append("token_s")
        token_s = update_token_s * FORWARD_SHARE
    cost = FittedCost(
        base_s=base_s,
        several_s=several_s,
        slot_s=slot_s,
        window_s=window_s,
        call_s=call_s,
        start_s=start_s,
        token_s=token_s,
        poll_s=poll_s,
        host_s=max(float((seconds * running).sum()) - observed.busy_slot_s, 0.0) / float(running.sum()),
        update_base_s=update_base_s,
        update_token_s=update_token_s,
        publication_s=float(np.mean(observed.publications)) if observed.publications else 0.0,
        harvest_s=max(observed.rollout_s - float(seconds.sum()), 0.0) / len(observed.updates),
        prompt_tokens=round(prompt_tokens),
        apart=observed.apart,
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
