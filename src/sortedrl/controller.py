"""The controller: the loop that loads prompts, admits samples, collects answers, harvests batches and settles updates.

    data --load--> buffer --admit--> engine --collect--> buffer --submit--> scorer
                     ^                                     |
                     +---- requeue <-- publish <-- learner <-- harvest

It asks the schedule what to do, and it alone changes the buffer (with `turns`, its part for tools), the engine and the
learner. It runs in one thread and waits in three places: in `engine.poll` while samples run, in `scorer.poll` or
`turns.collect` when only scores or tools are missing, and for the result of an update. (An engine in another process
also makes it wait for the answer to a call; a publication takes the longest, and meanwhile the controller decides how
samples continue.) With `overlap` it waits for the update only when there is nothing else to do. All times come from the
clock that is passed in, so a simulation runs this same code on virtual time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sortedrl import schedule as sorted_schedule
from sortedrl.buffer import Buffer
from sortedrl.clock import Clock, Timing
from sortedrl.engine import base as engine_events
from sortedrl.engine.base import Engine, InFlight, Request, Sampling, SleepingEngine, Span
from sortedrl.errors import EngineError
from sortedrl.learner.base import Learner, Update, UpdateResult
from sortedrl.protocols import CheckpointHook, EvaluationHook, Score, Scorer, Turns
from sortedrl.records import Batch, FinishReason, Mode, Sample, Segment, State, restart_seed
from sortedrl.schedule import Fate, Knobs, RestartNoise, Schedule, admission_needs_scores, is_provisional
from sortedrl.telemetry import events
from sortedrl.telemetry.batch_event import EngineAccount, batch_taken
from sortedrl.telemetry.events import Emit

IDLE_POLL_S = 0.05  # longest wait for one source of news while another one may have some
TOOL_POLL_S = 0.005  # longest wait for one source of news while a tool may return and a slot is free
STOP_POLL_S = 0.5  # longest wait before a request to stop is noticed
MIN_TOLD_WAIT_S = 1e-4  # shorter waits for scores are not worth an event
MAX_FAILED_UPDATES = 3  # updates in a row without one good answer before the run stops
# Module names, because Python 3.11 looks up enum members slowly.
FRESH, FAILED, STOP, FINISHED = Mode.FRESH, FinishReason.FAILED, FinishReason.STOP, State.FINISHED
CALLING = State.CALLING
_SAVED = ("began", "update_s", "publish_s", "save_s", "num_failed_updates")  # the loop's own state in a checkpoint


@dataclass(slots=True, kw_only=True, frozen=True)
class LoopParts:
    """The parts that the controller calls.

    `load_samples(cohort, count)` returns the next samples: fewer than asked for, or none, when the data ends.
    `on_update` gets the result of each update.
    """

    engine: Engine
    learner: Learner
    scorer: Scorer
    load_samples: Callable[[int, int], list[Sample]]
    evaluation: EvaluationHook | None = None
    checkpoints: CheckpointHook | None = None
    schedule: Schedule = sorted_schedule
    on_update: Callable[[UpdateResult], None] | None = None
    turns: Turns | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class LoopSettings:
    """The numbers that the controller works with.

    `follows_attempts`: whether to emit an event for every attempt and score. A simulation that needs only its summary
    turns it off and runs a fifth faster; then only attempts that end without an answer are told.
    """

    knobs: Knobs
    total_samples: int
    sampling: Sampling
    replay_tolerance: float = 0.0
    in_flight: InFlight = InFlight.REPREFILL
    update_poll_s: float = IDLE_POLL_S  # with overlap, how long the end of an update may go unnoticed
    score_grace_s: float = 0.25  # how long after the last answer a batch that lacks only scores may wait for them
    max_failures: int = 3  # failed attempts after which a sample is trained as an empty answer
    colocated: bool = False  # the engine sleeps during updates, because the learner needs the memory of its device
    follows_attempts: bool = True


class Controller:
    """Drives one run: call `run` once."""

    def __init__(
        self,
        buffer: Buffer,
        parts: LoopParts,
        settings: LoopSettings,
        *,
        clock: Clock,
        emit: Emit = events.ignore,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.buffer = buffer
        self.engine, self.learner, self.scorer = parts.engine, parts.learner, parts.scorer
        self.load_samples, self.schedule = parts.load_samples, parts.schedule
        self.turns = parts.turns
        self.evaluation, self.checkpoints, self.on_update = parts.evaluation, parts.checkpoints, parts.on_update
        assert not (settings.colocated and settings.knobs.overlap), "a sleeping engine cannot decode during updates"
        self.settings = settings
        self.knobs = settings.knobs
        if settings.colocated or not parts.engine.capabilities.keep_kv:  # answers are read again at each update
            self.knobs = replace(settings.knobs, max_unverified=0)
        self.follows_attempts = settings.follows_attempts
        self.clock = clock
        self.emit = emit
        self.should_stop = should_stop
        self.began: float | None = None  # on the clock; for a resumed run, before its checkpoint
        self.update_s = self.publish_s = self.save_s = 0.0
        self.slots = parts.engine.capabilities.slots
        self.has_data = True
        self.update: Update | None = None
        self.update_began = self.last_finish = 0.0
        self.last_error, self.num_failed_updates = "", 0
        self.asked: dict[int, int] = {}  # attempts whose answers the scorer has, by sample
        self.early: dict[int, float] = {}  # rewards that came while their answers were being verified, by sample
        self.free_rows = list(range(self.slots))  # rows of the slot timeline, a heap
        self.row_of: dict[int, int] = {}

    def run(self) -> bool:
        """Train on all samples. Returns False if it was asked to stop before the end."""
        if self.began is None:
            self.began = self.clock.now()
        self.account = EngineAccount(self.engine)
        for sample in self.buffer.finished.values():  # a restored buffer may hold answers that no scorer works on
            self.ask_score(sample)
            self.last_finish = self.clock.now()
        if self.turns is not None:
            self.turns.resume()
        while self.has_data or self.buffer.samples or self.update is not None:
            self.load()
            self.admit()
            self.collect()
            self.harvest()
            self.settle()
            if self.should_stop() and self.update is None:
                break
        complete = not (self.has_data or self.buffer.samples)
        if not complete:
            self.apply_events(self.engine.interrupt())
        return complete

    def timing(self) -> Timing:
        """Where the time since `run` began went. With overlap, rollout and update times overlap too."""
        wall_s = 0.0 if self.began is None else self.clock.now() - self.began
        rollout_s = wall_s - self.publish_s - self.save_s - (0.0 if self.knobs.overlap else self.update_s)
        return Timing(
            rollout_s=rollout_s, update_s=self.update_s, publish_s=self.publish_s, save_s=self.save_s, wall_s=wall_s
        )

    def summary_facts(self) -> dict[str, Any]:
        """The arguments of `telemetry.summary.summarize` that the loop knows."""
        return {
            "timing": self.timing(),
            "held": list(self.buffer.samples),
            "cohort_batches": self.knobs.cohort_batches,
            "lookahead": "none" if self.knobs.lookahead is None else self.knobs.lookahead,
            "calibration": self.buffer.lengths.calibration,
            "replay_law": self.replay_law(),
        }

    def replay_law(self) -> str | None:
        """What a replay keeps: the tokens that the new weights draw, or also tokens close to them."""
        if Fate.REPLAY not in (self.knobs.interrupted, self.knobs.on_bound):
            return None
        capabilities, tolerance = self.engine.capabilities, self.settings.replay_tolerance
        law = f"within {tolerance:g} of the best score" if tolerance else "exact"
        return f"{law}; at the start {capabilities.replay_probe}" if capabilities.replay_probe else law

    def state_dict(self) -> dict[str, float | int | None]:
        """The loop's own state for a checkpoint; the ledger holds the buffer's."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        for name in _SAVED:
            setattr(self, name, state[name])

    # ---- the five steps ---------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load cohorts while the schedule wants them and there is data."""
        while self.has_data and self.schedule.wants_cohort(self.buffer, self.knobs, self.slots):
            samples = self.load_samples(self.buffer.next_cohort, self.knobs.cohort_samples)
            if not samples:
                self.has_data = False
                return
            cohort = self.buffer.load(samples)
            self.has_data = self.buffer.num_loaded < self.settings.total_samples
            self.emit(
                events.CohortLoaded(
                    t=self.clock.now(), cohort=cohort.id, update=cohort.loaded_update, samples=[s.id for s in samples]
                )
            )

    def admit(self) -> None:
        """Give free slots to pending samples."""
        requests = [self.start(sample) for sample in self.schedule.admit(self.buffer, self.knobs, self.slots)]
        if requests:
            self.engine.submit(requests)

    def collect(self) -> None:
        """Wait for the engine, or for scores and tools when nothing runs, and record in the buffer what they report."""
        buffer, turns = self.buffer, self.turns
        may_go_on = bool(buffer.running)
        if buffer.running:
            self.apply_events(self.engine.poll(self.poll_timeout()))
        if turns is not None and turns.num_calling:
            may_go_on |= self.collect_turns(turns, self.turn_timeout())
        may_go_on |= self.collect_scores()
        if turns is not None and buffer.calling and buffer.finished and not may_go_on:
            self.collect_turns(turns, TOOL_POLL_S)  # only tools and scores are under way, and none has come

    def harvest(self) -> None:
        """Take an update batch out of the buffer, if the schedule gives one, and start its update."""
        if self.update is not None:
            return
        chosen = self.schedule.choose_batch(self.buffer, self.knobs, has_data=self.has_data)
        if chosen is None:
            return
        num_interrupted = 0 if self.knobs.overlap else self.pause_rollout()
        progress = self.buffer.num_trained / self.settings.total_samples
        samples = tuple(self.buffer.take(chosen))
        for sample in samples if self.turns is not None else ():
            self.turns.forget(sample.id)  # type: ignore[union-attr]
        batch = Batch(
            update=self.buffer.num_updates - 1, version=self.buffer.version, samples=samples, progress=progress
        )
        num_paused = 0 if self.knobs.overlap else self.buffer.num_running
        since_last = self.account.since_last()
        if self.turns is not None:
            self.buffer.lengths.learn_speed(since_last.decoded_tokens, since_last.busy_slot_s)
        taken = batch_taken(self.clock.now(), batch, since_last, num_interrupted, num_paused)
        self.check_guarantees(batch, taken)
        self.emit(taken)
        self.update_began = self.clock.now()
        if self.settings.colocated:
            self.sleeping_engine.sleep()
        self.update = self.learner.start(batch)
        if self.knobs.overlap and not self.buffer.running and not self.update.done():
            self.load()  # all slots are empty: fill them, or `settle` waits for the update with an idle engine
            self.admit()

    def settle(self) -> None:
        """When the update is done: publish its weights and decide how waiting samples continue."""
        if self.update is None or (self.knobs.overlap and self.is_rolling_out and not self.update.done()):
            return
        result = self.update.result()
        self.update = None
        if self.on_update is not None:
            self.on_update(result)
        now = self.clock.now()
        self.update_s += now - self.update_began
        version = self.buffer.version + 1
        self.emit(
            events.UpdateDone(
                t=now,
                update=self.buffer.num_updates - 1,
                version=version,
                optimizer_steps=result.optimizer_steps,
                seconds=now - self.update_began,
                metrics=result.metrics,
            )
        )
        interrupted = [s.id for s in self.schedule.interrupts_at_publication(self.buffer, self.knobs)]
        if interrupted:
            self.apply_events(self.engine.interrupt(interrupted))
        evaluation, checkpoints = self.evaluation, self.checkpoints
        is_evaluation = evaluation is not None and evaluation.is_due(self.buffer.num_trained)
        is_checkpoint = checkpoints is not None and checkpoints.is_due(self.buffer.num_updates)
        must_pause = is_evaluation or is_checkpoint
        for sample, fate, discarded in self.publish(version, must_pause=must_pause):
            self.emit(events.SampleRequeued(self.clock.now(), sample, fate, discarded))
        if evaluation is not None and is_evaluation:
            self.evaluate(evaluation)
        if checkpoints is not None and is_checkpoint:
            self.save(checkpoints)
        if self.knobs.overlap and not self.should_stop():
            self.harvest()  # a batch that waited for this update must not wait for the engine's next event too
            if self.update is not None and self.update.done():
                self.settle()  # simulated updates may take no time

    def poll_timeout(self) -> float:
        """How long the engine may work before the loop looks for other news: the end of an update, or scores."""
        if self.update is not None:
            return self.settings.update_poll_s
        if self.buffer.calling and self.buffer.num_running < self.slots:
            return TOOL_POLL_S
        return IDLE_POLL_S if self.buffer.finished else STOP_POLL_S

    # ---- tools ------------------------------------------------------------------------------------------------------

    @property
    def is_rolling_out(self) -> bool:
        """Whether a slot or an environment works, so that an update need not be waited for."""
        return bool(self.buffer.running or self.buffer.calling)

    def turn_timeout(self) -> float:
        """How long to wait for environments: not at all if something else is under way."""
        if self.buffer.running or self.buffer.finished:
            return 0.0
        return IDLE_POLL_S if self.update is None else self.settings.update_poll_s

    def collect_turns(self, turns: Turns, timeout: float) -> bool:
        """Take what environments returned; returns whether any sample is no longer there."""
        num_before = len(self.buffer.calling)
        for sample in turns.collect(timeout):
            self.score_finished(sample, is_same=False)
            self.last_finish = self.clock.now()
        return len(self.buffer.calling) < num_before

    # ---- scores -----------------------------------------------------------------------------------------------------

    def collect_scores(self) -> bool:
        """Record the scores that are there, and wait for those that alone are missing; returns whether any came."""
        any_came = False
        while scores := self.poll_scores(self.score_timeout()):
            any_came = True
            for score in scores:
                self.apply_score(score)
            if not self.lacks_only_scores():
                break
        return any_came

    def ask_score(self, sample: Sample) -> None:
        self.asked[sample.id] = sample.attempt
        self.scorer.submit(sample)

    def apply_score(self, score: Score) -> None:
        """Record a score, unless the tokens of its answer have changed since the scorer was asked."""
        number, attempt = score.key
        if self.asked.get(number) != attempt:
            return
        sample = self.buffer.samples[number]
        del self.asked[number]
        is_finished = sample.state is FINISHED
        if getattr(score, "is_lost", False):  # an answer that is being verified is asked for again if it stays
            if is_finished and self.turns is not None:
                self.turns.start_over(sample)
        elif getattr(score, "is_skipped", False) and not (is_finished and sample.attempt == attempt):
            if is_finished:  # the learner leaves out answers by their attempts, so this attempt needs its own score
                self.ask_score(sample)
        elif is_finished:
            self.record_score(sample, score.reward)
        elif sample.finish_reason is not None:
            self.early[number] = score.reward

    def record_score(self, sample: Sample, reward: float) -> None:
        self.buffer.score(sample.id, sample.attempt, reward)
        if self.follows_attempts:
            self.emit(events.SampleScored(self.clock.now(), sample.id, sample.attempt, reward))

    def score_finished(self, sample: Sample, *, is_same: bool) -> None:
        """Score a complete answer. If it is the same as before (`is_same`), its old score holds, also one to come."""
        early = self.early.pop(sample.id, None)
        if not is_same:
            self.ask_score(sample)
        elif sample.reward is not None or early is not None:
            reward = early if sample.reward is None else sample.reward
            assert reward is not None
            self.record_score(sample, reward)
        elif sample.id not in self.asked:
            self.ask_score(sample)

    def forget_score(self, sample: Sample) -> None:
        """Ignore scores that were asked for earlier: the trajectory has other tokens now, and goes on."""
        self.asked.pop(sample.id, None)
        self.early.pop(sample.id, None)

    def lacks_only_scores(self) -> bool:
        """Whether no update is under way, and the schedule waits for scores that are being computed."""
        buffer, knobs = self.buffer, self.knobs
        if self.update is not None or not buffer.finished:
            return False
        if self.schedule.lacks_only_scores(buffer, knobs):
            return True
        return admission_needs_scores(buffer, knobs, self.slots, has_data=self.has_data)

    def score_timeout(self) -> float:
        """How long to wait for scores.

        A batch that lacks only scores waits for them until `score_grace_s` after the last answer ended. So batches do
        not depend on the timing of quick rewards, and slow ones cost each answer at most that time.
        """
        idle = 0.0 if self.is_rolling_out or self.update else IDLE_POLL_S
        if not self.lacks_only_scores():
            return idle
        return max(idle, self.last_finish + self.settings.score_grace_s - self.clock.now())

    def poll_scores(self, timeout: float) -> Sequence[Score]:
        if timeout <= 0.0:
            return self.scorer.poll(timeout)
        began, scores = self.clock.now(), self.scorer.poll(timeout)
        if (waited := self.clock.now() - began) > MIN_TOLD_WAIT_S:
            num_paused = self.buffer.num_running if self.engine.capabilities.waits else 0
            self.emit(events.ScoresAwaited(t=began + waited, seconds=waited, num_paused=num_paused))
        return scores

    # ---- the engine -------------------------------------------------------------------------------------------------

    def start(self, sample: Sample) -> Request:
        """Mark a sample as running and make the request for its attempt."""
        mode = sample.mode if sample.segments else FRESH
        self.buffer.start(sample)
        cached, spans = (), ()
        if mode is not FRESH:
            cached, spans = sample.tokens, [Span(s.version, len(s.tokens), s.is_masked) for s in sample.segments]
        number, attempt = sample.id, sample.attempt
        if self.follows_attempts:
            now, version = self.clock.now(), self.buffer.version
            row = self.row_of[number] = heapq.heappop(self.free_rows)
            self.emit(events.AttemptStarted(now, number, attempt, mode, len(cached), row, version))
        return Request(
            number,
            attempt,
            sample.prompt.tokens,
            sample.budget,
            self.seed_of(sample) if sample.num_restarts else sample.seed,
            self.settings.sampling,
            mode,
            cached,
            spans,
            self.settings.replay_tolerance,
        )

    def seed_of(self, sample: Sample) -> int:
        """The sample's own seed, or a new one for each restart if restarts draw fresh noise."""
        is_fresh = self.knobs.restart_noise == RestartNoise.FRESH and sample.num_restarts > 0
        return restart_seed(sample.seed, sample.num_restarts) if is_fresh else sample.seed

    @property
    def sleeping_engine(self) -> SleepingEngine:
        assert isinstance(self.engine, SleepingEngine), "`colocated` needs an engine that sleeps"
        return self.engine

    def pause_rollout(self) -> int:
        """Stop rollout for an update; returns the number of samples that were interrupted.

        Samples that simply continue under the next weights keep their slots, if the engine can hold them there.
        """
        interrupted = None  # all
        if self.engine.capabilities.waits and not self.settings.colocated:
            interrupted = [s.id for s in self.schedule.interrupts_at_publication(self.buffer, self.knobs)]
        num_before = self.buffer.num_running
        if num_before:
            self.apply_events(self.engine.interrupt(interrupted))  # an empty list still pauses decoding
        return num_before - self.buffer.num_running

    def apply_events(self, reported: Sequence[engine_events.EngineEvent]) -> None:
        """Record engine events in the buffer. Events of attempts that are over are ignored."""
        buffer, running, now = self.buffer, self.buffer.running, self.clock.now()
        follows, extend, finish = self.follows_attempts, buffer.extend, buffer.finish
        is_late = self.knobs.goes_on_unverified
        for event in reported:
            sample = running.get(event.sample)
            if sample is None or sample.attempt != event.attempt:
                continue
            match event:
                case engine_events.Finished():  # first, because it is the most frequent in a simulation
                    if event.segments:
                        extend(sample, event.segments, start=event.start)
                    reason = sample.finish_reason or event.reason
                    is_same = sample.finish_reason is not None  # a replay has changed no token
                    must_verify = is_late and is_provisional(buffer, self.knobs, sample, buffer.version)
                    finish(sample, reason)
                    if follows:
                        self.tell_end(sample, reason, now)
                    is_turn = self.turns is not None and reason is STOP and not is_same
                    if is_turn and self.turns.take(sample, must_verify=must_verify):  # type: ignore[union-attr]
                        self.forget_score(sample)
                        continue
                    self.score_finished(sample, is_same=is_same)
                    self.last_finish = now
                    if must_verify:
                        self.await_verification(sample)
                case engine_events.Delta():
                    segment = Segment(event.version, event.tokens, event.logprobs, event.slot_s)
                    buffer.append(sample, segment, start=event.start, verified=event.verified)
                case engine_events.SegmentDelta(start=start, segments=segments):
                    extend(sample, segments, start=start)
                case engine_events.Verified(cached=cached, accepted=accepted):
                    self.emit(events.AttemptVerified(now, sample.id, sample.attempt, cached, accepted))
                case engine_events.Partial():
                    must_verify = is_late and is_provisional(buffer, self.knobs, sample, buffer.version)
                    buffer.interrupt(sample)
                    self.tell_end(sample, "interrupted", now)
                    if must_verify:
                        self.await_verification(sample)
                case engine_events.Failed(error=error):
                    self.fail(sample, error, now)
                case _:
                    raise AssertionError(f"unknown engine event {event}")

    def fail(self, sample: Sample, error: str, now: float) -> None:
        """Retry a failed sample; after `max_failures` attempts, train it as an empty answer with reward 0."""
        self.last_error = error
        if sample.num_failures + 1 < self.settings.max_failures:
            must_verify = is_provisional(self.buffer, self.knobs, sample, self.buffer.version)
            self.buffer.fail(sample)
            self.tell_end(sample, "failed", now, error)
            if must_verify:
                self.await_verification(sample)
            return
        self.forget_score(sample)
        discarded = self.buffer.give_up(sample)
        self.tell_end(sample, "failed", now, error)
        self.emit(events.SampleRequeued(now, sample.id, "give-up", discarded))
        self.buffer.score(sample.id, sample.attempt, 0.0)
        if self.follows_attempts:
            self.emit(events.SampleScored(now, sample.id, sample.attempt, 0.0))

    def await_verification(self, sample: Sample) -> None:
        """An attempt whose answer went on unverified has ended: a replay must verify its tokens."""
        if sample.segments:
            self.buffer.requeue(sample, Mode.REPLAY)
            self.emit(events.SampleRequeued(self.clock.now(), sample.id, Fate.REPLAY, 0))

    def tell_end(self, sample: Sample, outcome: str, now: float, error: str = "") -> None:
        row = -1
        if self.follows_attempts:
            row = self.row_of.pop(sample.id)
            heapq.heappush(self.free_rows, row)
        self.emit(events.AttemptEnded(now, sample.id, sample.attempt, outcome, sample.num_tokens, row, error))

    # ---- updates ----------------------------------------------------------------------------------------------------

    def publish(self, version: int, *, must_pause: bool) -> list[tuple[int, Fate, int]]:
        """Hand the learner's weights to the engine, make `version` the current one, and decide how samples continue.

        What is decided does not depend on the engine, so it is decided while the weights travel; with `must_pause`
        running samples are interrupted first, which needs the engine. Returns the samples that go back to the queue.
        """
        began = self.clock.now()
        in_flight = self.settings.in_flight if self.buffer.num_running else InFlight.ABORT
        if self.buffer.num_running and all(
            is_provisional(self.buffer, self.knobs, sample, version) for sample in self.buffer.running.values()
        ):
            in_flight = InFlight.KEEP  # nothing is trained before it is verified, so no cache is computed for it
        must_pause = must_pause and self.buffer.num_running > 0
        publication = self.engine.publish(version, self.learner.source, in_flight)
        self.buffer.publish(version)
        requeued = [] if must_pause else self.requeue()
        publication.wait()
        if self.settings.colocated:
            self.sleeping_engine.wake()
        seconds = self.clock.now() - began
        self.publish_s += seconds
        self.emit(events.WeightsPublished(t=self.clock.now(), version=version, seconds=seconds))
        if must_pause:
            self.apply_events(self.engine.interrupt())
            requeued = self.requeue()
        return requeued

    def requeue(self) -> list[tuple[int, Fate, int]]:
        """Decide how waiting samples continue under new weights: samples, their fates and numbers of lost tokens."""
        requeued: list[tuple[int, Fate, int]] = []
        for sample, fate in self.schedule.decide_fates(self.buffer, self.knobs):
            if self.turns is not None and sample.state is CALLING:
                self.turns.drop(sample)
            requeued.append((sample.id, fate, self.buffer.requeue(sample, fate.mode)))
        return requeued

    def evaluate(self, evaluation: EvaluationHook) -> None:
        """Run an evaluation on the engine; its time and tokens do not count for the run."""
        with self.clock.stopped(), self.account.left_out():
            evaluation.run(self.buffer.version, self.buffer.num_trained)

    def save(self, checkpoints: CheckpointHook) -> None:
        """Write a checkpoint. No sample runs, and waiting samples keep their tokens."""
        assert self.buffer.num_running == 0, "running samples cannot be saved"
        began = self.clock.now()
        checkpoints.run(self.buffer, self.state_dict())
        self.save_s += self.clock.now() - began

    def check_guarantees(self, batch: Batch, taken: events.BatchTaken) -> None:
        """Check the guarantees again on the batch that is about to be trained."""
        bound = self.knobs.max_staleness
        assert bound is None or max(taken.staleness) <= bound, f"update {batch.update} has samples past the bound"
        assert min(taken.staleness) >= 0, f"update {batch.update} has tokens of a version that does not exist yet"
        is_failed = all(sample.finish_reason is FAILED for sample in batch.samples)
        self.num_failed_updates = self.num_failed_updates + 1 if is_failed else 0
        if self.num_failed_updates >= MAX_FAILED_UPDATES:
            raise EngineError(
                f"every answer of {MAX_FAILED_UPDATES} updates in a row failed, the last one with: {self.last_error}; "
                "if the weights are broken, lower learner.lr and start again from an earlier checkpoint"
            )
