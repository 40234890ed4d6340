"""One simulated run: the real buffer, schedule and controller of the training loop on a virtual clock.

`compare.py`, the planner and benchmarks call `simulate`. Guarantees: no strategy is implemented here. The same trace
and seed give every strategy the same answers. The summary is that of a training run, without accuracy.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sortedrl import schedule
from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.config.plug_points import STRATEGY, own_schedule, preset_of
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import InFlight, Sampling
from sortedrl.engine.sim.cost import UnitCost
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.errors import ConfigError
from sortedrl.external.plugins import name_of
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch, Prompt, Sample
from sortedrl.schedule import Knobs, defining_knobs, resolve_knobs
from sortedrl.schedule.checked import CheckedSchedule
from sortedrl.simulate.answers import TraceAnswers
from sortedrl.simulate.costs import CostModel
from sortedrl.simulate.traces import Trace
from sortedrl.telemetry.events import Emit, Event, RunEnded, RunStarted
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.summary import Summary, summarize

PROMPT_TOKENS = 256
MAX_COUNT = 10**7  # of slots and of prompt tokens; more would not fit in memory


@dataclass(slots=True)
class SimScore:
    key: tuple[int, int]
    reward: float = 0.0


@dataclass(slots=True, kw_only=True)
class InstantScorer:
    """Scores every answer at once with reward 0, because rewards have no effect in a simulation."""

    scores: list[SimScore] = field(default_factory=list)

    def submit(self, sample: Sample) -> None:
        self.scores.append(SimScore((sample.id, sample.attempt)))

    def poll(self, timeout: float) -> list[SimScore]:
        done, self.scores = self.scores, []
        return done


@dataclass(slots=True, kw_only=True)
class SimUpdate:
    clock: VirtualClock
    ready_at: float

    def done(self) -> bool:
        return self.clock.now() >= self.ready_at

    def result(self) -> UpdateResult:
        if not self.done():
            self.clock.advance(self.ready_at)
        return UpdateResult(optimizer_steps=1)


@dataclass(slots=True, kw_only=True)
class SimLearner:
    """An update takes `seconds` if given, otherwise the cost model's time for its tokens."""

    clock: VirtualClock
    cost: CostModel
    seconds: float | None = None
    source: object = None

    def start(self, batch: Batch) -> SimUpdate:
        seconds = self.seconds
        if seconds is None and isinstance(self.cost, UnitCost):
            seconds = 0.0  # unit updates are free, so skip counting the tokens
        elif seconds is None:
            seconds = self.cost.update_s(sum([len(s.prompt.tokens) + s.num_tokens for s in batch.samples]))
        ready_at = self.clock.now() + seconds
        if seconds:
            self.clock.set_timer(ready_at)
        return SimUpdate(clock=self.clock, ready_at=ready_at)


class TraceLoader:
    """Loads samples in the order of the trace, with seeds that are the same for all strategies."""

    def __init__(self, trace: Trace, *, seed: int, prompt_tokens: int) -> None:
        self.trace = trace
        self.seeds: list[int] = np.random.default_rng((seed, 1)).integers(0, 2**62, size=trace.num_samples).tolist()
        self.prompt_tokens = tuple(range(prompt_tokens))
        self.columns: dict[str, Any] = {}  # shared by all prompts
        # Objects that outlive a sample are made first. Between short-lived objects they would fragment the memory.
        self.numbers = list(range(trace.num_samples))
        self.prompt_ids = list(map(str, trace.prompts))
        self.num_loaded = 0
        self.prompt: Prompt | None = None

    def load(self, cohort: int, count: int) -> list[Sample]:
        trace, samples, epoch = self.trace, [], 0
        first, self.num_loaded = self.num_loaded, min(self.num_loaded + count, self.trace.num_samples)
        prompt_ids, seeds, tokens, cap, prompt = self.prompt_ids, self.seeds, self.prompt_tokens, trace.cap, self.prompt
        columns = self.columns
        for number in self.numbers[first : self.num_loaded]:
            prompt_id = prompt_ids[number]
            if prompt is None or prompt.id != prompt_id:
                prompt = self.prompt = Prompt(prompt_id, tokens, "", columns)
            # A sample's id and index are both its position in the trace; the seeds make siblings different.
            samples.append(Sample(number, prompt, number, epoch, cohort, seeds[number], cap))
        return samples


def knobs_for(strategy: Any, update_batch: int, **requested: Any) -> Knobs:
    """A strategy's knobs, changed by the requested ones except those that define a strategy of ours."""
    if strategy not in STRATEGY.names:
        return resolve_knobs(preset_of(strategy), update_batch, **requested)
    fixed = defining_knobs(strategy)
    open_knobs = {name: value for name, value in requested.items() if name not in fixed}
    return resolve_knobs(strategy, update_batch, **open_knobs)


def simulate(
    trace: Trace,
    *,
    strategy: Any,
    slots: int,
    update_batch: int,
    group_size: int = 1,
    cost: CostModel | None = None,
    divergence: float = 0.0,
    drift: float = 1.0,
    seed: int = 0,
    update_s: float | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    in_flight: InFlight = InFlight.REPREFILL,
    emit: Emit | None = None,
    exact: Knobs | None = None,
    **knobs: Any,
) -> Summary:
    """Run one strategy over the trace: one of ours by its name, or the user's own.

    `knobs` are fields of `Knobs`; the value "none" removes a bound. `exact` replaces the strategy's knobs, those that
    define it included.
    """
    _check(trace, slots=slots, update_batch=update_batch, group_size=group_size, divergence=divergence, drift=drift)
    _check_sizes(slots=slots, prompt_tokens=prompt_tokens, update_s=update_s)
    resolved, own = exact or knobs_for(strategy, update_batch, **knobs), own_schedule(strategy)
    cost, clock, metrics = cost or UnitCost(), VirtualClock(), RunMetrics()
    loader = TraceLoader(trace, seed=seed, prompt_tokens=prompt_tokens)
    siblings = _siblings(trace) if trace.has_siblings else None
    answers = TraceAnswers(
        trace.lengths,
        loader.seeds,
        siblings=siblings,
        divergence=divergence,
        drift=drift,
        cap=trace.cap,
        keeps_cache=resolved.goes_on_unverified,
    )

    def emit_to_all(event: Event) -> None:
        metrics.emit(event)
        if emit is not None:
            emit(event)

    engine = SimEngine(answers, slots=slots, clock=clock, cost=cost)
    controller = Controller(
        Buffer(grouped=group_size > 1),
        LoopParts(
            engine=engine,
            learner=SimLearner(clock=clock, cost=cost, seconds=update_s),
            scorer=InstantScorer(),
            load_samples=loader.load,
            schedule=schedule if own is None else CheckedSchedule(own, name_of(strategy)),
        ),
        LoopSettings(
            knobs=resolved,
            total_samples=trace.num_samples,
            sampling=Sampling(),
            # If updates overlap rollout, only the attempts show which slots were busy during an update.
            follows_attempts=emit is not None or resolved.overlap,
            in_flight=in_flight,
        ),
        clock=clock,
        emit=emit_to_all if emit is not None else metrics.emit,
    )
    emit_to_all(
        RunStarted(
            t=0.0,
            strategy=name_of(strategy),
            seed=seed,
            slots=slots,
            update_batch=update_batch,
            total_samples=trace.num_samples,
            max_staleness=resolved.max_staleness,
        )
    )
    with gc_paused():
        complete = controller.run()
    assert complete, "the simulation stopped before the end of its trace"
    emit_to_all(RunEnded(t=clock.now(), reason="complete"))
    return summarize(metrics, stats=engine.stats(), **controller.summary_facts())


def _check(trace: Trace, *, slots: int, update_batch: int, group_size: int, divergence: float, drift: float) -> None:
    if slots < 1:
        raise ConfigError(f"slots must be at least 1, not {slots}: raise --slots")
    if update_batch > trace.num_samples:
        raise ConfigError(
            f"update_batch {update_batch} is larger than the trace, which has only {trace.num_samples} samples: "
            "lower --update-batch or raise --samples"
        )
    if update_batch % group_size:
        raise ConfigError(
            f"update_batch {update_batch} must be a multiple of group_size {group_size}, because siblings train "
            "together: change --update-batch"
        )
    if trace.num_samples % group_size:
        raise ConfigError(
            f"{trace.num_samples} samples do not make whole groups of {group_size}: make --samples a multiple of it"
        )
    if not 0.0 <= divergence < 1.0:
        raise ConfigError(f"divergence must be a share from 0 to below 1, not {divergence:g}: change --divergence")
    if not drift > 0.0:
        raise ConfigError(f"drift must be a factor above 0 (1 changes nothing), not {drift:g}: change --drift")


def _check_sizes(*, slots: int, prompt_tokens: int, update_s: float | None) -> None:
    for name, value in (("slots", slots), ("prompt_tokens", prompt_tokens)):
        if value > MAX_COUNT:
            raise ConfigError(f"{name} must be at most {MAX_COUNT:,}, not {value}: lower --{name.replace('_', '-')}")
    if update_s is not None and not math.isfinite(update_s):
        raise ConfigError(f"update_s must be a finite number of seconds, not {update_s:g}: change --update-s")


def _siblings(trace: Trace) -> list[range]:
    """For every sample, the range of the samples that have its prompt."""
    ranges: list[range] = []
    first = 0
    while first < trace.num_samples:
        last = first
        while last < trace.num_samples and trace.prompts[last] == trace.prompts[first]:
            last += 1
        ranges += [range(first, last)] * (last - first)
        first = last
    return ranges


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn the garbage collector off: a simulation makes millions of objects and no reference cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
