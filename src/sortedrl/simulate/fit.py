"""Cost models that are fitted to real runs: what their engine, learner and host took, in a form the simulator can use.

`plan --from-run`, `run/estimate.py` and benchmarks/schedule/forecast.py call `fit_runs`. It reads only run directories.
An attempt's token count gives the decode step at which the attempt ended, because every running sequence makes one
token per step and the first token of an attempt comes from its prefill. Between two endings lies a *steady span*: one
call of the engine, during which the number of running sequences is constant. A span takes

    poll_s + base_s x steps + several_s x (steps with more than one sequence) + slot_s x slot-steps
           + window_s x window-steps + (call_s + start_s x samples started + token_s x cached tokens, if it prefills)

The window of a step is the number of positions that its sequences attend to, including prompts. The local engine splits
its slots into runs that attend together, each up to the length of its longest slot, and chooses the cheapest split. The
window is computed in the same way, for slots in order of length, because a `sync` run, in which all sequences have
about the same length, cannot show it.

The fit is a weighted least squares fit without negative coefficients, scaled so that the spans' predicted times sum to
the measured sum. A part of poll_s is engine time: host_s, the time of a span in which the engine does not run, follows
from the measured bubble. `Fit.assumed` names the coefficients that the runs do not determine. If every prefill started
the same number of samples, half of its time is assigned to the call and half to the samples. If no cached token was
prefilled, such a token is assumed to cost a third of a token in an update.
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
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.summary import Summary

FORWARD_SHARE = 1 / 3  # of the update time per token: the backward pass takes twice as long as the forward pass
APART_ELEMENTS = 16384  # cost of one more attention call, in key elements; the figure of engine/local/cache.py
MIN_SPANS = 20  # fewer do not determine the coefficients


@dataclass(slots=True, kw_only=True, frozen=True)
class FittedCost:
    """A cost model for the simulated engine and learner, in seconds."""

    base_s: float  # of a decode step
    several_s: float  # added to a step in which more than one sequence runs
    slot_s: float  # added per running sequence and step
    window_s: float  # added per position attended to and step
    call_s: float  # of a prefill call
    start_s: float  # added per sample that the prefill starts, including its prompt
    token_s: float  # added per cached token that is prefilled again
    poll_s: float  # of every span, whatever its work
    host_s: float  # the part of a span in which slots are occupied but the engine does not run
    update_base_s: float
    update_token_s: float
    publication_s: float
    harvest_s: float  # rollout time around an update: scoring the last answers, loading, admission
    prompt_tokens: int  # the mean
    apart: float | None = None  # cost of one more attention call, in positions; None: always a single call
    kv_tokens: int | None = None

    def decode_s(self, running: int, context: int, steps: int) -> float:
        """The cost of a span as the simulated engine asks for it: all sequences count with the mean context."""
        contexts = steps * context + running * steps * (steps - 1) / 2
        return self.poll_s + steps * self.step_s(running) + self.window_s * contexts

    def step_s(self, running: int) -> float:
        """A decode step without attention."""
        return self.base_s + self.several_s * (running > 1) + self.slot_s * running

    def prefill_s(self, lengths: Iterable[int]) -> float:
        """`lengths` include the prompts, each of which counts with the mean prompt length."""
        lengths = list(lengths)
        return self._prefill_s(len(lengths), max(sum(lengths) - self.prompt_tokens * len(lengths), 0))

    def verify_s(self, tokens: int) -> float:
        return 0.0  # `token_s` was measured with it

    def _prefill_s(self, started: int, cached: int) -> float:
        return self.call_s + self.start_s * started + self.token_s * cached if started else 0.0

    def span_s(self, span: SteadySpan) -> float:
        attention_s = self.window_s * span.window(self.prompt_tokens, self.apart)
        decode_s = span.steps * self.step_s(span.running) + attention_s
        return self.poll_s + decode_s + self._prefill_s(span.started, span.cached)

    def publish_s(self) -> float:
        return self.publication_s

    def update_s(self, tokens: int) -> float:
        """Includes harvest_s, because harvesting stops rollout as an update does."""
        return self.harvest_s + self.update_base_s + self.update_token_s * tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True, frozen=True)
class Fit:
    """A cost model, and how well it explains the runs that it was fitted to."""

    cost: FittedCost
    num_stretches: int  # steady spans; the name is a key of `plan --json`
    r2: float  # of the spans' times
    update_r2: float
    assumed: list[str]  # coefficients that the runs do not determine

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cost": self.cost.as_dict()}


@dataclass(slots=True, kw_only=True, frozen=True)
class SteadySpan:
    """One call of the engine, from one ending to the next, during which the number of running sequences is constant."""

    seconds: float
    started: int  # samples that were prefilled
    cached: int  # answer tokens that these samples already had
    steps: int
    lengths: tuple[int, ...]  # answer tokens of each running sequence before the first step

    @property
    def running(self) -> int:
        return len(self.lengths)

    def window(self, prompt_tokens: float, apart: float | None) -> float:
        """The cost of attention in all steps, in positions. Every step is counted like the middle one.

        In one attention call every sequence costs as much as the longest. `apart` is the cost of one more call
        (None: there is only one). The sequences are divided into calls so that the total is smallest.
        """
        middle = prompt_tokens + (self.steps - 1) / 2
        lengths = sorted(self.lengths, reverse=True)
        if apart is None:
            return self.steps * len(lengths) * (lengths[0] + middle)
        best = [-apart]  # best[n]: cost of the n longest sequences; the first call is free
        for end in range(1, len(lengths) + 1):
            splits = (best[start] + (end - start) * (lengths[start] + middle) for start in range(end))
            best.append(min(splits) + apart)
        return self.steps * best[-1]


@dataclass(slots=True, kw_only=True)
class RunningSpan:
    """One running sequence, as the observer follows it."""

    length: int  # answer tokens at `step`
    step: int
    waited: int | None = None  # tokens it had when it was last counted as prefilled under new weights


@dataclass(slots=True, kw_only=True)
class Observed:
    """The measured times in the events of one or more runs."""

    spans: list[SteadySpan] = field(default_factory=list)
    updates: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, tokens without prompts, samples
    publications: list[float] = field(default_factory=list)
    num_prompt_tokens: float = 0.0
    rollout_s: float = 0.0
    busy_slot_s: float = 0.0
    apart: float | None = None


class Observer:
    """Adds a run's events to `observed`. `prefilled` is the number of new tokens that a prefill gives an attempt."""

    def __init__(self, observed: Observed, *, prefilled: int = 1) -> None:
        self.observed = observed
        self.prefilled = prefilled
        self._running: dict[int, RunningSpan] = {}
        self._step = 0
        self._since = 0.0
        self._num_started = self._num_cached = 0
        self._is_halted = False  # from a harvest until samples start again
        self._batch: events.BatchTaken | None = None

    def observe(self, event: events.Event) -> None:
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
                        "a run whose updates overlap rollout does not determine costs: name a run with overlap = false"
                    )
            case events.UpdateDone():
                assert self._batch is not None, f"UpdateDone of update {event.update} came without its BatchTaken"
                self.observed.updates.append((event.seconds, sum(self._batch.lengths), len(self._batch.samples)))
                computed, learned = (event.metrics.get(name, 0.0) for name in ("computed_tokens", "learned_tokens"))
                self.observed.num_prompt_tokens += max(computed - learned, 0.0)
            case events.WeightsPublished(seconds=seconds):
                self.observed.publications.append(seconds)
                self._continue(event.t)
            case _:
                pass

    def _start(self, event: events.AttemptStarted) -> None:
        if not self._running or self._is_halted:
            self._since, self._is_halted = event.t, False
        self._num_started += 1
        self._num_cached += event.cached
        self._running[event.sample] = RunningSpan(length=event.cached + self.prefilled, step=self._step)

    def _continue(self, t: float) -> None:
        """Count samples that were paused in their slots as started: they are prefilled under the new weights."""
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
                self._close_span(event.t, end)
            self._since = event.t
        elif running.waited is not None:  # a checkpoint interrupted it before its prefill
            self._num_started -= 1
            self._num_cached -= running.waited
        del self._running[event.sample]

    def _close_span(self, t: float, end: int) -> None:
        self.observed.spans.append(
            SteadySpan(
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
            observer.observe(event)
    if len(observed.spans) < MIN_SPANS or not observed.updates:
        raise DataError(
            f"{run_dirs[0]} has {len(observed.spans)} ends of answers and {len(observed.updates)} updates, too few to "
            f"fit costs: name a run with at least {MIN_SPANS} samples"
        )
    return _fit(observed)


def _apart(run_dir: Path) -> float | None:
    """The cost of one more attention call, in positions of the run's model; None without a checkpoint."""
    for path in sorted(run_dir.glob("checkpoints/*/config.json")):
        model = json.loads(path.read_text(encoding="utf-8"))
        heads = model.get("num_attention_heads")
        size = model.get("head_dim") or (model["hidden_size"] // heads if heads else None)
        if size:
            return APART_ELEMENTS / (size * (model.get("num_key_value_heads") or heads))
    return None


def _fit(observed: Observed) -> Fit:
    prompt_tokens = observed.num_prompt_tokens / sum(samples for _, _, samples in observed.updates)
    update_base_s, update_token_s, update_r2 = _line(
        [(seconds, tokens + prompt_tokens * samples) for seconds, tokens, samples in observed.updates]
    )
    seconds, started, cached, steps, running, windows = np.array(
        [
            [s.seconds, s.started, s.cached, s.steps, s.running, s.window(prompt_tokens, observed.apart)]
            for s in observed.spans
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
    # Longer spans have larger errors.
    weights = 1 / np.sqrt(np.maximum(seconds, 1e-9))
    solution = least_squares(rows * weights[:, None], seconds * weights)
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
    """Intercept, slope and R2 of seconds over tokens, without negative coefficients."""
    seconds, tokens = np.array(points, dtype=float).T
    rows = np.stack([np.ones_like(tokens), tokens], 1)
    solution = least_squares(rows, seconds)
    return float(solution[0]), float(solution[1]), _r2(seconds, rows @ solution)


def least_squares(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients: the most negative one is set to zero until none is left."""
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
