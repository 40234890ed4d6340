"""The controller on the simulated engine: failures, late events, slow scores, pauses, stops, time and overlap."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from sortedrl.clock import VirtualClock
from sortedrl.controller import TOOL_POLL_S
from sortedrl.engine.base import (
    Capabilities,
    CompletedHandle,
    Delta,
    EngineEvent,
    Failed,
    Finished,
    InFlight,
    Partial,
    Verified,
)
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.errors import EngineError
from sortedrl.records import FinishReason, Mode, Sample, State
from sortedrl.schedule import Strategy, resolve_knobs
from sortedrl.telemetry import events
from tests.support.scripted_runs import DelayedScorer, ScriptedPolicy, ScriptedRun, ScriptedScore, scripted_run


def make_run(strategy: Strategy, lengths: list[int], *, slots: int, update_batch: int, **more: Any) -> ScriptedRun:
    """A run of samples 0, 1, ... with these lengths under every version; `more` are options of the run and knobs."""
    names = ("siblings", "grouped", "update_s", "score_lag", "fails", "budget", "max_failures", "score_grace_s")
    options = {name: more.pop(name) for name in names if name in more}
    return scripted_run(
        resolve_knobs(strategy, update_batch, **more),
        policy=ScriptedPolicy(lengths=dict(enumerate(lengths))),
        slots=slots,
        num_samples=len(lengths),
        seed_of=lambda number: number,
        **options,
    )


def told(run: ScriptedRun, kind: type[Any]) -> list[Any]:
    return [event for event in run.events if isinstance(event, kind)]


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_attempt_is_tried_again_from_its_tokens() -> None:
    # Sample 1 (length 6) fails with 2 tokens, then at once, then runs from 2 to 6.
    run = make_run(
        Strategy.SYNC,
        [3, 6],
        slots=2,
        update_batch=2,
        fails=lambda request: 2 if request.sample == 1 and request.attempt < 3 else None,
    )
    assert run.controller.run()
    sample = next(s for s in run.trained if s.id == 1)
    assert (sample.num_tokens, sample.attempt, sample.num_failures) == (6, 3, 2)
    assert (sample.finish_reason, run.clock.now()) == (FinishReason.STOP, 6)
    ended = [(e.outcome, e.num_tokens, e.error) for e in told(run, events.AttemptEnded) if e.sample == 1]
    assert ended == [("failed", 2, "scripted failure")] * 2 + [("stop", 6, "")]
    started = [(e.mode, e.cached) for e in told(run, events.AttemptStarted) if e.sample == 1]
    assert started == [("fresh", 0), ("resume", 2), ("resume", 2)]


@pytest.mark.parametrize("max_failures", [1, 3])
def test_a_hopeless_sample_is_trained_as_an_empty_answer(max_failures: int) -> None:
    setting = {"slots": 2, "update_batch": 2, "fails": lambda request: 2 if request.sample == 1 else None}
    run = make_run(Strategy.SORTED_PARTIAL, [3, 6, 4, 5], max_failures=max_failures, **setting)
    assert run.controller.run()
    assert sorted(s.id for s in run.trained) == [0, 1, 2, 3]
    sample = next(s for s in run.trained if s.id == 1)
    assert (sample.tokens, sample.reward, sample.finish_reason) == ([], 0.0, FinishReason.FAILED)
    assert (sample.attempt, sample.num_failures) == (max_failures, max_failures)
    given_up = [(e.sample, e.discarded) for e in told(run, events.SampleRequeued) if e.decision == "give-up"]
    assert given_up == [(1, 2)]
    assert [(e.sample, e.reward) for e in told(run, events.SampleScored) if e.sample == 1] == [(1, 0.0)]
    taken = next(e for e in told(run, events.BatchTaken) if 1 in e.samples)
    assert taken.lengths[taken.samples.index(1)] == 0


def test_no_row_of_the_timeline_is_held_twice() -> None:
    run = make_run(
        Strategy.SORTED_REPLAY,
        [3, 9, 4, 5, 2, 8],
        slots=3,
        update_batch=2,
        fails=lambda request: 3 if request.sample % 2 and request.attempt == 1 else None,
    )
    assert run.controller.run()
    held: dict[int, int] = {}
    for event in run.events:
        if isinstance(event, events.AttemptStarted):
            assert 0 <= event.slot < 3
            assert event.slot not in held
            held[event.slot] = event.sample
        elif isinstance(event, events.AttemptEnded):
            assert held.pop(event.slot) == event.sample
    assert not held


# ---- scores during a verification -----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, frozen=True)
class SkippedScore(ScriptedScore):
    is_skipped: bool = True


@dataclass(slots=True, kw_only=True)
class FailingScorer(DelayedScorer):
    """Cannot score any answer; keeps the keys that it returned."""

    keys: list[tuple[int, int]] = field(default_factory=list)

    def poll(self, timeout: float) -> list[ScriptedScore]:
        done = DelayedScorer.poll(self, timeout)
        self.keys += [score.key for score in done]
        return [SkippedScore(key=score.key, reward=0.0) for score in done]


@pytest.mark.parametrize("lag", [0, 2, 4, 6])
@pytest.mark.parametrize("lengths", [[1] * 10, [1, 2, 3, 4, 1, 2, 3, 4]])
def test_an_answer_without_a_score_is_trained_under_the_attempt_that_was_reported(lag: int, lengths: list[int]) -> None:
    run = make_run(Strategy.ASYNC_ON_POLICY, lengths, slots=4, update_batch=2, cohort_batches=5, update_s=2.0)
    scorer = run.controller.scorer = FailingScorer(lag=lag)
    assert run.controller.run()
    assert sum(sample.attempt > 1 for sample in run.trained) > 0
    last = dict(scorer.keys)  # the last attempt of each sample that was reported
    assert {sample.id: sample.reward_attempt for sample in run.trained} == last


# ---- late events ----------------------------------------------------------------------------------------------------


def late_events(sample: int, attempt: int) -> list[EngineEvent]:
    stamp = {"sample": sample, "attempt": attempt, "clock": 0.0}
    return [
        Verified(cached=1, accepted=1, **stamp),
        Delta(start=0, tokens=[1], logprobs=[0.0], version=0, **stamp),
        Finished(reason=FinishReason.STOP, **stamp),
        Partial(**stamp),
        Failed(error="late", **stamp),
    ]


@pytest.mark.parametrize(("sample", "attempt"), [(0, 0), (0, 2), (1, 1), (99, 1)])
def test_events_of_attempts_that_are_over_change_nothing(sample: int, attempt: int) -> None:
    run = make_run(Strategy.SORTED_PARTIAL, [5, 9], slots=1, update_batch=2, cohort_batches=1)
    run.controller.load()
    run.controller.admit()  # sample 0 runs as attempt 1, sample 1 waits
    before, num_events = json.dumps(run.controller.buffer.state_dict()), len(run.events)
    run.controller.apply_events(late_events(sample, attempt))
    assert json.dumps(run.controller.buffer.state_dict()) == before
    assert len(run.events) == num_events
    assert run.controller.run()


def test_scores_of_attempts_that_are_over_change_nothing() -> None:
    run = make_run(Strategy.SORTED_PARTIAL, [2, 2], slots=2, update_batch=2, cohort_batches=1)
    run.controller.load()
    run.controller.admit()
    run.controller.apply_events(run.engine.poll())
    num_events = len(run.events)
    for key in ((0, 0), (0, 2), (99, 1)):
        assert run.controller.buffer.score(*key, 5.0) is None
    assert len(run.events) == num_events
    assert run.controller.run()
    assert all(sample.reward != 5.0 for sample in run.trained)


@dataclass(slots=True, kw_only=True)
class CountingScorer(DelayedScorer):
    """Scores some samples at once and others late."""

    delivered: list[tuple[int, int]] = field(default_factory=list)

    def submit(self, sample: Sample) -> None:
        self.lag = 5 if sample.id % 3 == 0 else 0
        DelayedScorer.submit(self, sample)

    def poll(self, timeout: float) -> list[ScriptedScore]:
        scores = DelayedScorer.poll(self, timeout)
        self.delivered += [score.key for score in scores]
        return scores


def test_a_late_score_never_reaches_another_answer() -> None:
    """Answers that wait for another update are replayed and change; the score of the old text comes later."""
    run = scripted_run(
        resolve_knobs(Strategy.SORTED_REPLAY, 4, cohort_batches=3),
        policy=ScriptedPolicy(longest=25, length_change=0.5, divergence=0.2),
        slots=6,
        num_samples=60,
    )
    run.controller.scorer = scorer = CountingScorer()
    assert run.controller.run()
    assert sorted(sample.id for sample in run.trained) == list(range(60))
    assert all(sample.reward == sum(sample.tokens) % 2 for sample in run.trained)
    trained = {(sample.id, sample.attempt) for sample in run.trained}
    assert set(scorer.delivered) - trained, "no score was late: the test shows nothing"


# ---- an engine at its own pace --------------------------------------------------------------------------------------


class SteppingEngine(SimEngine):
    """Decodes one more step before it interrupts, so that answers may end during the call."""

    num_late = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, waits=False)

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        chosen = list(self.running) if samples is None else list(samples)
        heard: list[EngineEvent] = []
        for running in [self.running[sample] for sample in chosen if sample in self.running]:
            if running.end - running.length == 1:
                running.length += 1
                self._finish(running, self.clock.now(), heard)
                self.num_late += 1
        return [*heard, *super().interrupt(chosen)]


@pytest.mark.parametrize("strategy", [s for s in Strategy if s not in (Strategy.SYNC, Strategy.SYNC_LARGE)])
def test_answers_that_end_while_they_are_interrupted_are_kept(strategy: Strategy) -> None:
    run = scripted_run(
        resolve_knobs(strategy, 4),
        policy=ScriptedPolicy(longest=8, length_change=0.3, divergence=0.1),
        slots=8,
        num_samples=96,
        update_s=2.5,
    )
    engine = SteppingEngine(run.engine.script, slots=8, clock=run.clock)
    run.controller.engine = engine
    run.controller.should_stop = lambda: run.controller.buffer.num_trained >= 48
    assert not run.controller.run()  # the interrupt at a stop may end answers too
    run.controller.should_stop = lambda: False
    assert run.controller.run()
    assert engine.num_late > 0
    assert sorted(sample.id for sample in run.trained) == list(range(96))
    bound = run.controller.knobs.max_staleness
    ages = [sample.staleness(batch.version) for batch in run.learner.batches for sample in batch.samples]
    assert bound is None or max(ages) <= bound


# ---- scores that take time ------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class TimedScorer:
    """Scores an answer `delay` seconds after it ended; waiting advances the virtual clock."""

    clock: VirtualClock
    delay: float
    queue: list[tuple[float, tuple[int, int]]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def submit(self, sample: Sample) -> None:
        self.queue.append((self.clock.now() + self.delay, (sample.id, sample.attempt)))

    def poll(self, timeout: float) -> list[ScriptedScore]:
        began = self.clock.now()
        if self.queue and timeout > 0:
            self.clock.advance(min(began + timeout, max(began, min(at for at, _ in self.queue))))
        self.waits.append(self.clock.now() - began)
        done = [key for at, key in self.queue if at <= self.clock.now()]
        self.queue = [(at, key) for at, key in self.queue if at > self.clock.now()]
        return [ScriptedScore(key=key, reward=1.0) for key in done]


@pytest.mark.parametrize(
    ("delay", "grace", "taken"),
    [
        # 0 and 1 end at 1 and fill the batch; 2 would end at 9.
        (0.125, 0.25, [(1.125, [0, 1]), (9.25, [2])]),  # scored within the grace; 2 goes on from 1.125
        # No grace: the engine continues until the next end, at 9; nothing runs then, so the last poll waits 0.05 s.
        (0.125, 0.0, [(9.05, [0, 1]), (9.125, [2])]),
        (5.0, 0.25, [(9.5, [0, 1]), (14.25, [2])]),  # the grace of 0.25 s passes at 1, and again at 9.25 for sample 2
        (5.0, 8.0, [(6.0, [0, 1]), (19.0, [2])]),  # a grace that long holds the engine from 1 to 6
    ],
)
def test_a_harvest_waits_for_scores_no_longer_than_the_grace(
    delay: float, grace: float, taken: list[tuple[float, list[int]]]
) -> None:
    knobs = {"slots": 3, "update_batch": 2, "cohort_batches": 2}
    run = make_run(Strategy.SORTED_PARTIAL, [1, 1, 9], score_grace_s=grace, **knobs)
    run.controller.scorer = scorer = TimedScorer(clock=run.clock, delay=delay)
    assert run.controller.run()
    assert [e.samples for e in told(run, events.BatchTaken)] == [samples for _, samples in taken]
    assert [e.t for e in told(run, events.BatchTaken)] == pytest.approx([t for t, _ in taken], abs=1e-6)
    assert max(scorer.waits) <= max(grace, 0.05) + 1e-9


def test_answers_that_end_together_wait_for_each_others_scores() -> None:
    """The batch is the same in whatever order the scores of one step arrive."""

    @dataclass(slots=True, kw_only=True)
    class Trickle(DelayedScorer):
        def poll(self, timeout: float) -> list[ScriptedScore]:
            return [self.queue.pop(0)[1]] if self.queue and timeout > 0 else []

    knobs = {"slots": 4, "update_batch": 2, "cohort_batches": 2}
    run = make_run(Strategy.SORTED_PARTIAL, [2, 2, 2, 5], score_grace_s=1.0, **knobs)
    run.controller.scorer = Trickle()
    assert run.controller.run()
    assert run.batches == [[0, 1, 2], [3]]


def test_siblings_that_only_lack_scores_are_waited_for() -> None:
    # Prompts (0, 1), (2, 3), (4, 5), U = 4. At step 3 all but 5 have ended; the scores of 0 to 2 are there and that of
    # 3, the last one missing for the second prompt, needs 0.125 s. One score is missing, but two samples depend on it.
    setting = {"slots": 6, "update_batch": 4, "cohort_batches": 2, "siblings": 2, "grouped": True}
    run = make_run(Strategy.SORTED_PARTIAL, [1, 1, 1, 3, 2, 9], **setting)
    run.controller.scorer = TimedScorer(clock=run.clock, delay=0.125)
    assert run.controller.run()
    first = told(run, events.BatchTaken)[0]
    assert (sorted(first.samples), first.t) == ([0, 1, 2, 3], 3.125)


@pytest.mark.parametrize("delay", [0.0, 0.125, 50.0])
def test_scores_are_not_waited_for_while_an_update_waits_for_running_answers(delay: float) -> None:
    # Staleness 0 and U = 2: 0 and 1 end at 1 and fill the batch, so 4 and 5 do not start. The update waits for 2 and 3,
    # which end at 5 and 9, whatever the scores do.
    knobs = {"slots": 4, "update_batch": 2, "cohort_batches": 3, "max_staleness": 0, "on_bound": "wait"}
    run = make_run(Strategy.SORTED_PARTIAL, [1, 1, 5, 9, 1, 1], score_grace_s=8.0, **knobs)
    run.controller.scorer = TimedScorer(clock=run.clock, delay=delay)
    assert run.controller.run()
    assert [e.t for e in told(run, events.AttemptEnded) if e.sample in (2, 3)] == pytest.approx([5.0, 9.0])
    assert [sorted(batch) for batch in run.batches] == [[0, 1, 2, 3], [4, 5]]


def test_answers_of_before_a_resume_wait_for_their_scores_too() -> None:
    # Samples 0 and 1 were complete when the process before ended. Their scores need 1.125 s; 2 runs for 9 s.
    run = make_run(Strategy.SORTED_PARTIAL, [1, 1, 9], slots=3, update_batch=2, cohort_batches=2, score_grace_s=2.0)
    run.controller.scorer = TimedScorer(clock=run.clock, delay=1.125)
    run.controller.load()
    buffer = run.controller.buffer
    for number in (0, 1):
        buffer.start(buffer.samples[number])
        buffer.finish(buffer.samples[number], FinishReason.STOP)
    run.clock.advance(100.0)
    run.clock.set_timer(100.5)  # the engine returns after the step of that time, at 101
    assert run.controller.run()
    first = told(run, events.BatchTaken)[0]
    assert (sorted(first.samples), first.t) == ([0, 1], 101.125)


@dataclass(slots=True, kw_only=True)
class SlowTools:
    """Environments that return nothing; remembers how long the loop waited for them."""

    num_calling: int = 1
    waits: list[float] = field(default_factory=list)

    def collect(self, timeout: float) -> list[Sample]:
        self.waits.append(timeout)
        return []


def test_the_loop_does_not_spin_while_only_a_tool_and_a_score_are_missing() -> None:
    run = make_run(Strategy.SORTED_PARTIAL, [1, 1], slots=4, update_batch=2)
    controller, buffer, tools = run.controller, run.controller.buffer, SlowTools()
    controller.turns = tools  # type: ignore[assignment]
    controller.scorer = scorer = TimedScorer(clock=run.clock, delay=5.0)
    controller.load()
    for sample in buffer.samples.values():
        buffer.start(sample)
        buffer.finish(sample, FinishReason.STOP)
    buffer.call(buffer.samples[1], 1)
    controller.ask_score(buffer.samples[0])
    controller.collect()
    assert sum(tools.waits) + sum(scorer.waits) == TOOL_POLL_S
    run.clock.advance(5.0)
    tools.waits.clear()
    controller.collect()
    assert (list(buffer.scored), tools.waits) == ([0], [0.0]), "what comes at once is not kept waiting"


def test_slow_scores_do_not_stall_the_engine_when_no_sample_can_start() -> None:
    # All samples have started, and at staleness 0 the update waits for them all. Scores come late, after 50 s.
    knobs = {"max_staleness": 0, "on_bound": "wait", "cohort_batches": 2, "flat_extra": 2}
    run = make_run(Strategy.SORTED_PARTIAL, [1, 3, 5, 9], slots=4, update_batch=2, score_grace_s=8.0, **knobs)
    run.controller.scorer = TimedScorer(clock=run.clock, delay=50.0)
    assert run.controller.run()
    assert [e.t for e in told(run, events.AttemptEnded)] == pytest.approx([1.0, 3.0, 5.0, 9.0])


# ---- pauses, stops and time -----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class LongEvaluation:
    """A pause of many seconds after every `every` samples, for which the engine must be empty."""

    run_of: ScriptedRun
    every: int
    seconds: float = 100.0
    pauses: list[tuple[int, int]] = field(default_factory=list)

    def is_due(self, num_trained: int) -> bool:
        return num_trained - (self.pauses[-1][1] if self.pauses else 0) >= self.every

    def run(self, version: int, num_trained: int) -> None:
        assert not self.run_of.engine.running, "the engine is not free"
        assert self.run_of.engine.version == version
        self.pauses.append((version, num_trained))
        self.run_of.clock.advance(self.run_of.clock.now() + self.seconds)


@pytest.mark.parametrize("strategy", [Strategy.SORTED_PARTIAL, Strategy.SORTED_REPLAY, Strategy.ASYNC])
def test_a_pause_is_no_time_of_the_run(strategy: Strategy) -> None:
    lengths = [1, 9, 2, 3, 4, 2, 7, 1]
    plain, paused = (make_run(strategy, lengths, slots=3, update_batch=2, update_s=1.0) for _ in range(2))
    paused.controller.evaluation = evaluation = LongEvaluation(run_of=paused, every=4)
    assert plain.controller.run()
    assert paused.controller.run()
    assert len(evaluation.pauses) >= 1
    assert [num_trained for _, num_trained in evaluation.pauses] == sorted({n for _, n in evaluation.pauses})
    assert sorted(sample.id for sample in paused.trained) == list(range(8))
    wall_s = paused.controller.timing().wall_s
    assert wall_s == pytest.approx(paused.clock.now())
    if strategy != Strategy.ASYNC:  # with async, a pause interrupts answers that would have continued
        assert paused.batches == plain.batches
        assert wall_s == pytest.approx(plain.controller.timing().wall_s)


def test_unverified_answers_keep_their_cache_and_a_pause_verifies_them() -> None:
    # 0 and 2 are trained at 3, when 1 has three tokens. With verification at the end it runs on over its cache. An
    # evaluation needs its slot; then its tokens are read again anyhow, and verified.
    given = {"slots": 2, "update_batch": 2, "cohort_batches": 2, "max_unverified": "none"}
    plain, paused = (with_slow_publish(make_run(Strategy.SORTED_REPLAY, [1, 9, 2, 3], **given)) for _ in range(2))
    paused.controller.evaluation = LongEvaluation(run_of=paused, every=2)
    for run, expected in ((plain, (9, 9)), (paused, (3, 3))):
        assert run.controller.run()
        assert run.batches == [[0, 2], [3, 1]]
        assert run.engine.published == [InFlight.KEEP, InFlight.ABORT]
        assert [(e.cached, e.accepted) for e in told(run, events.AttemptVerified)] == [expected]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_a_stop_leaves_no_update_half_done(strategy: Strategy) -> None:
    run = scripted_run(
        resolve_knobs(strategy, 4), policy=ScriptedPolicy(longest=30), slots=6, num_samples=80, update_s=7.0
    )
    asked = iter([False] * 6)
    run.controller.should_stop = lambda: next(asked, True)
    assert not run.controller.run()
    buffer = run.controller.buffer
    assert run.controller.update is None
    assert len(told(run, events.BatchTaken)) == len(told(run, events.UpdateDone)) == buffer.version
    assert not run.engine.running
    assert not buffer.in_state[State.RUNNING]
    assert buffer.num_loaded == buffer.num_trained + len(buffer.samples)
    assert sum(len(batch) for batch in run.batches) == buffer.num_trained


class SlowPublish(SimEngine):
    published: list[InFlight]

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        self.published.append(in_flight)
        super().publish(version, source, in_flight)
        self.clock.advance(self.clock.now() + 0.5)
        return CompletedHandle()


def with_slow_publish(run: ScriptedRun) -> ScriptedRun:
    engine = SlowPublish(run.engine.script, slots=run.engine.slots, clock=run.clock)
    engine.published = []
    run.engine = run.controller.engine = engine
    return run


def test_the_parts_of_the_time_add_up() -> None:
    # Rollout as in the schedule tests: 9 steps; two updates of 4 s, two publications of 0.5 s.
    run = with_slow_publish(
        make_run(Strategy.SORTED_PARTIAL, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2, update_s=4.0)
    )
    assert run.controller.run()
    timing = run.controller.timing()
    assert (timing.rollout_s, timing.update_s, timing.publish_s, timing.wall_s) == (9.0, 8.0, 1.0, 18.0)
    assert [e.seconds for e in told(run, events.UpdateDone)] == [4.0, 4.0]
    assert [e.seconds for e in told(run, events.WeightsPublished)] == [0.5, 0.5]
    assert run.engine.published == [InFlight.REPREFILL, InFlight.ABORT]  # one answer is paused in its slot, then none


def test_samples_are_requeued_while_weights_travel() -> None:
    """Sample 1 is interrupted by the first update, and starts over under the next weights."""
    run = make_run(Strategy.SORTED_ON_POLICY, [1, 9, 2, 3], slots=2, update_batch=2, cohort_batches=2)
    buffer, seen = run.controller.buffer, []

    class Travelling(SimEngine):
        def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Any:
            inner = super().publish(version, source, in_flight)
            assert buffer.version == version - 1

            def wait() -> None:
                inner.wait()
                seen.append((buffer.version, {s.id: (s.mode, s.num_tokens) for s in buffer.pending.values()}))

            return SimpleNamespace(wait=wait)

    run.engine = run.controller.engine = Travelling(run.engine.script, slots=2, clock=run.clock)
    assert run.controller.run()
    assert [version for version, _ in seen] == [1, 2]
    assert seen[0][1][1] == (Mode.FRESH, 0)
    order = [type(e).__name__ for e in run.events if isinstance(e, events.WeightsPublished | events.SampleRequeued)]
    assert order == ["WeightsPublished", "SampleRequeued", "WeightsPublished"]


def test_with_overlap_rollout_is_all_but_publishing() -> None:
    # U = 1. 0 ends at 1, its update at 5; then 0.5 s in which nothing decodes. 1 needs its 6th step: 5.5 -> 6.5. 2 has
    # 6 tokens then and ends at 9.5, during the update that lasts to 10.5.
    run = with_slow_publish(
        make_run(Strategy.ASYNC, [1, 6, 9], slots=3, update_batch=1, cohort_batches=3, lookahead=0, update_s=4.0)
    )
    assert run.controller.run()
    assert run.batches == [[0], [1], [2]]
    taken = [e.t for e in told(run, events.BatchTaken)]
    done = [e.t for e in told(run, events.UpdateDone)]
    assert (taken, done) == ([1.0, 6.5, 11.0], [5.0, 10.5, 15.0])
    timing = run.controller.timing()
    assert (timing.update_s, timing.publish_s, timing.wall_s) == (12.0, 1.5, 15.5)
    assert timing.rollout_s == 14.0
    # Two samples run at the first publication and go on; nothing runs at the others.
    assert run.engine.published == [InFlight.REPREFILL, InFlight.ABORT, InFlight.ABORT]
    assert [segment.version for segment in run.trained[1].segments] == [0, 1]
    assert run.trained[1].num_interrupts == 0
    assert [e.num_interrupted for e in told(run, events.BatchTaken)] == [0, 0, 0]


def test_with_overlap_samples_start_during_an_update() -> None:
    run = make_run(Strategy.ASYNC, [2, 2, 1, 3, 1, 2, 1, 4], slots=2, update_batch=2, update_s=6.0, cohort_batches=4)
    assert run.controller.run()
    updates = zip(told(run, events.BatchTaken), told(run, events.UpdateDone), strict=True)
    starts = [event.t for event in told(run, events.AttemptStarted)]
    assert any(taken.t <= start < done.t for taken, done in updates for start in starts)
    assert max(sample.staleness(batch.version) for batch in run.learner.batches for sample in batch.samples) <= 2


def test_updates_without_any_answer_stop_the_run() -> None:
    run = make_run(Strategy.SYNC, [3] * 12, slots=2, update_batch=2, fails=lambda request: 1)
    with pytest.raises(EngineError, match="3 updates in a row failed, the last one with: scripted failure"):
        run.controller.run()
    assert run.controller.buffer.num_trained == 6


def test_single_updates_without_any_answer_do_not() -> None:
    fails = lambda request: 1 if request.sample in (0, 1, 4, 5) else None  # noqa: E731
    run = make_run(Strategy.SYNC, [3] * 8, slots=2, update_batch=2, fails=fails)
    assert run.controller.run()
