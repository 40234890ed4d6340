"""Checks that run the whole loop: the real controller, buffer and schedule drive the engine, with a stub learner.

They are part of the conformance suite (`checks.py`), because many bugs that users of other systems report are not in
the engine but in the code that drives it.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sortedrl.buffer import Buffer
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import InFlight, Sampling
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch, Prompt, Sample, sample_seed
from sortedrl.schedule import Knobs, Strategy, resolve_knobs
from sortedrl.testing.case import EngineCase
from sortedrl.testing.checks import DIES, SLEEPS, check

_SAMPLES = 24


@dataclass(slots=True, kw_only=True, frozen=True)
class StubScore:
    key: tuple[int, int]
    reward: float = 0.0


@dataclass(slots=True, kw_only=True)
class StubScorer:
    """Scores at once; with `is_slow`, every third answer is scored only when the loop has nothing else to do."""

    is_slow: bool = False
    quick: list[StubScore] = field(default_factory=list)
    slow: list[StubScore] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return len(self.quick) + len(self.slow)

    def submit(self, sample: Sample) -> None:
        queue = self.slow if self.is_slow and sample.id % 3 == 0 else self.quick
        queue.append(StubScore(key=(sample.id, sample.attempt)))

    def poll(self, timeout: float) -> list[StubScore]:
        ready, self.quick = self.quick, []
        if timeout > 0 and not ready:  # nothing runs: the loop waits for scores
            ready, self.slow = self.slow, []
        return ready


class StubUpdate:
    def done(self) -> bool:
        return True

    def result(self) -> UpdateResult:
        return UpdateResult(optimizer_steps=1)


@dataclass(slots=True, kw_only=True)
class StubLearner:
    """Keeps its batches, and counts the scores that were still missing when they came."""

    case: EngineCase
    scorer: StubScorer
    kill_at: int | None = None  # number of the batch at which to kill the engine
    is_colocated: bool = False
    batches: list[Batch] = field(default_factory=list)
    num_unscored: int = 0
    last_batch: float = field(default_factory=time.monotonic)

    @property
    def source(self) -> Any:
        return self.case.source(self.batches[-1].version + 1)

    def start(self, batch: Batch) -> StubUpdate:
        if self.is_colocated and self.case.during_update is not None:
            self.case.during_update()
        if len(self.batches) == self.kill_at and self.case.kill is not None:
            self.case.kill()
        self.batches.append(batch)
        self.last_batch = time.monotonic()
        self.num_unscored += self.scorer.num_waiting
        return StubUpdate()


def run_loop(
    case: EngineCase, knobs: Knobs, *, is_slow: bool = False, kill_at: int | None = None, is_colocated: bool = False
) -> StubLearner:
    """Train `_SAMPLES` samples of different lengths; the controller itself checks staleness, budgets and versions."""
    buffer = Buffer()
    buffer.version = case.version  # earlier checks have published versions
    scorer = StubScorer(is_slow=is_slow)
    learner = StubLearner(case=case, scorer=scorer, kill_at=kill_at, is_colocated=is_colocated)

    def load(cohort: int, count: int) -> list[Sample]:
        numbers = range(buffer.num_loaded, min(buffer.num_loaded + count, _SAMPLES))
        return [_sample(case, number, cohort) for number in numbers]

    controller = Controller(
        buffer,
        LoopParts(engine=case.engine, learner=learner, scorer=scorer, load_samples=load),
        LoopSettings(
            knobs=knobs,
            total_samples=_SAMPLES,
            sampling=Sampling(),
            in_flight=InFlight.REPREFILL,
            score_grace_s=0.0,
            colocated=is_colocated,
        ),
        clock=case.clock,
        should_stop=lambda: time.monotonic() - learner.last_batch > case.limit_s,
    )
    try:
        is_complete = controller.run()
    finally:
        case.version = buffer.version
    assert is_complete, f"no batch was complete within {case.limit_s:g} s, with {buffer.num_running} samples running"
    trained = Counter(sample.id for batch in learner.batches for sample in batch.samples)
    assert trained == Counter(range(_SAMPLES)), "samples were lost, or trained twice"
    return learner


def _sample(case: EngineCase, number: int, cohort: int) -> Sample:
    prompt = Prompt(id=str(number), tokens=tuple(case.prompts[number % len(case.prompts)]), content="")
    budget = 4 + number % 5 * (case.answer_tokens // 5)  # different lengths, so that there is something to interrupt
    seed = sample_seed(case.version, 0, prompt.id, 0)
    return Sample(id=number, prompt=prompt, index=0, epoch=0, cohort=cohort, seed=seed, budget=budget)


@check("an update does not wait for slow rewards of other samples", guarantee="loop", issue="slime #2176")
def updates_do_not_wait_for_slow_rewards(case: EngineCase) -> None:
    knobs = resolve_knobs(Strategy.SORTED_PARTIAL, update_batch=4, cohort_batches=3)
    learner = run_loop(case, knobs, is_slow=True)
    assert learner.num_unscored > 0, "no update was taken while a score was missing"


@check("a run on this engine trains every sample exactly once, within its staleness bound", guarantee="loop")
def a_run_is_exact(case: EngineCase) -> None:
    interrupted = "replay" if case.engine.capabilities.exact_replay else "restart"
    knobs = resolve_knobs(
        Strategy.SORTED_ON_POLICY, update_batch=4, cohort_batches=3, interrupted=interrupted, on_bound=interrupted
    )
    for batch in run_loop(case, knobs).batches:
        assert all(sample.staleness(batch.version) == 0 for sample in batch.samples)


@check("a run whose engine sleeps during updates trains every sample exactly once", guarantee="loop", requires=[SLEEPS])
def a_run_with_sleeps_is_exact(case: EngineCase) -> None:
    for strategy in (Strategy.SORTED_PARTIAL, Strategy.SORTED_ON_POLICY):
        knobs = resolve_knobs(strategy, update_batch=4, cohort_batches=3)
        learner = run_loop(case, knobs, is_colocated=True)
        bound = knobs.max_staleness
        stale = [sample.staleness(batch.version) for batch in learner.batches for sample in batch.samples]
        assert bound is None or max(stale) <= bound


@check(
    "staleness stays within its bound when the engine dies and is started again",
    guarantee="loop",
    issue="AReaL #1388",
    requires=[DIES],
)
def staleness_survives_a_recovery(case: EngineCase) -> None:
    knobs = resolve_knobs(
        Strategy.SORTED_PARTIAL, update_batch=4, cohort_batches=3, max_staleness=1, on_bound="restart"
    )
    for batch in run_loop(case, knobs, kill_at=2).batches:
        assert all(sample.staleness(batch.version) <= 1 for sample in batch.samples)
