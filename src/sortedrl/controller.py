"""The controller: the loop that loads, admits, listens, harvests and settles.

    data --load--> buffer --admit--> engine --listen--> buffer --score--> scorer
                     ^                                    |
                     +---- requeue <-- publish <-- learner <-- harvest

It asks `schedule` what to do and is the only one to do it. It waits in three places: `engine.poll` while samples run,
`scorer.poll` when all that is left is being scored, and the update's result (unless updates overlap rollout, when it
waits only if nothing else is left to do). Time is the injected clock's, so a simulation runs this very code.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from sortedrl import schedule
from sortedrl.buffer import Buffer
from sortedrl.clock import Clock, Timing
from sortedrl.engine import base as engine_events
from sortedrl.engine.base import Engine, InFlight, Request, Sampling, Span
from sortedrl.errors import EngineError
from sortedrl.learner.base import Learner, Update
from sortedrl.protocols import Pause, Save, Score, Scorer
from sortedrl.records import Batch, FinishReason, Mode, Sample, Segment, restart_seed
from sortedrl.schedule import Knobs, RestartNoise
from sortedrl.telemetry import events
from sortedrl.telemetry.batch_event import EngineAccount, batch_taken
from sortedrl.telemetry.events import Emit

IDLE_POLL_S = 0.05  # how long to wait for one thing before looking at the others
FRESH, FAILED = Mode.FRESH, FinishReason.FAILED  # every sample needs them, and Python 3.11 finds members slowly
MAX_FAILED_UPDATES = 3  # in a row: more is no bad luck
STOP_POLL_S = 0.5  # how long a request to stop may go unheard
TOLD_WAIT_S = 1e-4  # a shorter wait for scores is not worth an event
_KEPT = ("began", "update_s", "publish_s", "save_s", "num_failed_updates")  # over a resume


class Controller:
    """`load_samples(cohort, count)` gives the next samples, fewer or none when the data is used up.

    `follows_attempts`: whether anybody wants to hear of every attempt and every score. For a simulation that ends in a
    summary nobody does; then, of these events, only those of attempts that end without an answer are made.
    """

    def __init__(
        self,
        *,
        buffer: Buffer,
        knobs: Knobs,
        engine: Engine,
        learner: Learner,
        scorer: Scorer,
        load_samples: Callable[[int, int], list[Sample]],
        total_samples: int,
        sampling: Sampling,
        clock: Clock,
        emit: Emit = events.ignore,
        follows_attempts: bool = True,
        replay_tolerance: float = 0.0,
        in_flight: InFlight = InFlight.REPREFILL,
        score_grace_s: float = 0.25,
        max_failures: int = 3,
        should_stop: Callable[[], bool] = lambda: False,
        pause: Pause | None = None,
        save: Save | None = None,
    ) -> None:
        self.buffer = buffer
        self.knobs = knobs
        self.engine = engine
        self.learner = learner
        self.scorer = scorer
        self.load_samples = load_samples
        self.total_samples = total_samples
        self.sampling = sampling
        self.clock = clock
        self.emit = emit
        self.follows_attempts = follows_attempts
        self.replay_tolerance = replay_tolerance
        self.in_flight = in_flight
        self.score_grace_s = score_grace_s
        self.max_failures = max_failures
        self.should_stop = should_stop
        self.pause = pause
        self.save = save
        self.began: float | None = None  # on the clock; a run that is resumed began before it was saved
        self.update_s = self.publish_s = self.save_s = 0.0
        self.slots = engine.capabilities.slots
        self.has_data = True
        self.update: Update | None = None
        self.update_began = self.last_finish = 0.0
        self.last_error, self.num_failed_updates = "", 0
        self.rows = list(range(self.slots))  # free rows of the timeline, a heap
        self.row_of: dict[int, int] = {}

    def run(self) -> bool:
        """Train on everything; returns False if it was told to stop before."""
        if self.began is None:
            self.began = self.clock.now()
        self.account = EngineAccount(self.engine)
        for sample in self.buffer.finished.values():
            self.scorer.submit(sample)  # of a buffer that was read back: nobody is scoring them
        while self.has_data or self.buffer.samples or self.update is not None:
            self.load()
            self.admit()
            self.listen()
            self.harvest()
            self.settle()
            if self.should_stop() and self.update is None:
                break
        complete = not (self.has_data or self.buffer.samples)
        if not complete:
            self.hear(self.engine.interrupt())
        return complete

    def timing(self) -> Timing:
        """Where the time since `run` went; with overlap, rollout goes on during updates and the parts overlap too."""
        wall_s = 0.0 if self.began is None else self.clock.now() - self.began
        rollout_s = wall_s - self.publish_s - self.save_s - (0.0 if self.knobs.overlap else self.update_s)
        return Timing(
            rollout_s=rollout_s, update_s=self.update_s, publish_s=self.publish_s, save_s=self.save_s, wall_s=wall_s
        )

    # ---- the five steps ---------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Take in cohorts, as long as the schedule wants them and there is data."""
        while self.has_data and schedule.wants_cohort(self.buffer, self.knobs, self.slots):
            samples = self.load_samples(self.buffer.next_cohort, self.knobs.cohort_samples)
            if not samples:
                self.has_data = False
                return
            cohort = self.buffer.load(samples)
            self.has_data = self.buffer.num_loaded < self.total_samples
            self.emit(
                events.CohortLoaded(
                    t=self.clock.now(), cohort=cohort.id, update=cohort.loaded_update, samples=[s.id for s in samples]
                )
            )

    def admit(self) -> None:
        """Give free slots to pending samples."""
        chosen = schedule.admit(self.buffer, self.knobs, self.slots)
        requests = [self.start(sample) for sample in chosen]
        if requests:
            self.engine.submit(requests)

    def listen(self) -> None:
        """Wait for the engine, or for scores when nothing runs, and write down what happened."""
        buffer = self.buffer
        if buffer.running:
            is_expecting = self.update is not None or bool(buffer.finished)
            self.hear(self.engine.poll(IDLE_POLL_S if is_expecting else STOP_POLL_S))
        while True:
            scores = self.await_scores(self.patience())
            for score in scores:
                if buffer.score(*score.key, score.reward) is not None and self.follows_attempts:
                    self.emit(events.SampleScored(self.clock.now(), *score.key, score.reward))
            if not scores or not (buffer.finished and self.hinges_on_scores()):
                return

    def await_scores(self, timeout: float) -> Sequence[Score]:
        if timeout <= 0.0:
            return self.scorer.poll(timeout)
        began, scores = self.clock.now(), self.scorer.poll(timeout)
        if (waited := self.clock.now() - began) > TOLD_WAIT_S:
            num_paused = self.buffer.num_running if self.engine.capabilities.waits else 0
            self.emit(events.ScoresAwaited(t=began + waited, seconds=waited, num_paused=num_paused))
        return scores

    def hinges_on_scores(self) -> bool:
        return self.update is None and bool(self.buffer.finished) and schedule.hinges_on_scores(self.buffer, self.knobs)

    def patience(self) -> float:
        """How long to wait for scores.

        A batch that only lacks scores is worth a short wait: quick rewards then never depend on timing, and slow ones
        cost each answer at most that much.
        """
        idle = 0.0 if self.buffer.running or self.update else IDLE_POLL_S
        return max(idle, self.last_finish + self.score_grace_s - self.clock.now()) if self.hinges_on_scores() else idle

    def harvest(self) -> None:
        """Take an update batch if there is one, and start the update."""
        if self.update is not None:
            return
        chosen = schedule.harvest(self.buffer, self.knobs, has_data=self.has_data)
        if chosen is None:
            return
        num_interrupted = 0 if self.knobs.overlap else self.halt()
        progress = self.buffer.num_trained / self.total_samples
        samples = tuple(self.buffer.take(chosen))
        batch = Batch(
            update=self.buffer.num_updates - 1, version=self.buffer.version, samples=samples, progress=progress
        )
        num_paused = 0 if self.knobs.overlap else self.buffer.num_running
        taken = batch_taken(self.clock.now(), batch, self.account.since_last(), num_interrupted, num_paused)
        self.check(batch, taken)
        self.emit(taken)
        self.update_began = self.clock.now()
        self.update = self.learner.start(batch)

    def settle(self) -> None:
        """When the update is done: publish its weights, and decide what becomes of the samples that waited."""
        if self.update is None or (self.knobs.overlap and self.buffer.num_running and not self.update.done()):
            return
        result = self.update.result()
        self.update = None
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
        stopped = [s.id for s in schedule.interrupts_at_publication(self.buffer, self.knobs)]
        if stopped:
            self.hear(self.engine.interrupt(stopped))
        self.publish(version)
        is_evaluation, is_save = self.due_pauses()
        if self.buffer.num_running and (is_evaluation or is_save):
            self.hear(self.engine.interrupt())
        for sample, fate in schedule.fates(self.buffer, self.knobs):
            discarded = self.buffer.requeue(sample, fate.mode)
            self.emit(events.SampleRequeued(self.clock.now(), sample.id, fate, discarded))
        if is_evaluation:
            self.evaluate()
        if is_save:
            self.make_checkpoint()
        if self.knobs.overlap and not self.should_stop():
            self.harvest()  # what waited for this update must not wait for the engine's next word as well
            if self.update is not None and self.update.done():
                self.settle()  # an update that takes no time, as a simulation may have them

    # ---- what they are made of --------------------------------------------------------------------------------------

    def halt(self) -> int:
        """Stop rollout for an update; returns how many samples that interrupts.

        Those that simply go on under the next weights wait in their slots, if the engine can do that.
        """
        stopped = None
        if self.engine.capabilities.waits:
            stopped = [s.id for s in schedule.interrupts_at_publication(self.buffer, self.knobs)]
        running = self.buffer.num_running
        if running:
            self.hear(self.engine.interrupt(stopped))  # be it of nobody: the engine stands still from here on
        return running - self.buffer.num_running

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
            row = self.row_of[number] = heapq.heappop(self.rows)
            self.emit(events.AttemptStarted(now, number, attempt, mode, len(cached), row, version))
        return Request(
            number,
            attempt,
            sample.prompt.tokens,
            sample.budget,
            self.seed_of(sample) if sample.num_restarts else sample.seed,
            self.sampling,
            mode,
            cached,
            spans,
            self.replay_tolerance,
        )

    def seed_of(self, sample: Sample) -> int:
        """A sample's own seed, or, if restarts draw fresh noise, one for each restart."""
        is_fresh = self.knobs.restart_noise == RestartNoise.FRESH and sample.num_restarts > 0
        return restart_seed(sample.seed, sample.num_restarts) if is_fresh else sample.seed

    def hear(self, heard: Sequence[engine_events.EngineEvent]) -> None:
        """Write engine events into the buffer; those of attempts that are over are ignored."""
        buffer, running, now = self.buffer, self.buffer.running, self.clock.now()
        follows, extend, finish, submit = self.follows_attempts, buffer.extend, buffer.finish, self.scorer.submit
        for event in heard:
            sample = running.get(event.sample)
            if sample is None or sample.attempt != event.attempt:
                continue
            match event:
                case engine_events.Finished():  # first, as the most frequent in a simulation
                    if event.segments:
                        extend(sample, event.segments, start=event.start)
                    finish(sample, event.reason)
                    if follows:
                        self.ended(sample, event.reason, now)
                    submit(sample)
                    self.last_finish = now
                case engine_events.Delta():
                    segment = Segment(event.version, event.tokens, event.logprobs, event.slot_s)
                    buffer.append(sample, segment, start=event.start, verified=event.verified)
                case engine_events.SegmentDelta(start=start, segments=segments):
                    extend(sample, segments, start=start)
                case engine_events.Verified(cached=cached, accepted=accepted):
                    self.emit(events.AttemptVerified(now, sample.id, sample.attempt, cached, accepted))
                case engine_events.Partial():
                    buffer.interrupt(sample)
                    self.ended(sample, "interrupted", now)
                case engine_events.Failed(error=error):
                    self.fail(sample, error, now)
                case _:
                    raise AssertionError(f"unknown engine event {event}")

    def fail(self, sample: Sample, error: str, now: float) -> None:
        """One failed sample is data: tried again, and in the end trained as an empty answer without reward."""
        self.last_error = error
        if sample.num_failures + 1 < self.max_failures:
            self.buffer.fail(sample)
            self.ended(sample, "failed", now, error)
            return
        discarded = self.buffer.give_up(sample)
        self.ended(sample, "failed", now, error)
        self.emit(events.SampleRequeued(now, sample.id, "give-up", discarded))
        self.buffer.score(sample.id, sample.attempt, 0.0)
        if self.follows_attempts:
            self.emit(events.SampleScored(now, sample.id, sample.attempt, 0.0))

    def ended(self, sample: Sample, outcome: str, now: float, error: str = "") -> None:
        row = -1
        if self.follows_attempts:
            row = self.row_of.pop(sample.id)
            heapq.heappush(self.rows, row)
        self.emit(events.AttemptEnded(now, sample.id, sample.attempt, outcome, sample.num_tokens, row, error))

    def publish(self, version: int) -> None:
        began = self.clock.now()
        in_flight = self.in_flight if self.buffer.num_running else InFlight.ABORT
        self.engine.publish(version, self.learner.source, in_flight).wait()
        self.buffer.publish(version)
        seconds = self.clock.now() - began
        self.publish_s += seconds
        self.emit(events.WeightsPublished(t=self.clock.now(), version=version, seconds=seconds))

    def due_pauses(self) -> tuple[bool, bool]:
        """Whether an evaluation, and whether a checkpoint, comes before anything runs again."""
        is_evaluation = self.pause is not None and self.pause.is_due(self.buffer.num_trained)
        return is_evaluation, self.save is not None and self.save.is_due(self.buffer.num_updates)

    def evaluate(self) -> None:
        """Let an evaluation have the engine; its time is not the run's."""
        assert self.pause is not None, "there is no evaluation"
        with self.clock.stopped(), self.account.left_out():
            self.pause.run(self.buffer.version, self.buffer.num_trained)

    def make_checkpoint(self) -> None:
        """Save the run as it is: nothing runs, but whatever waits keeps its tokens."""
        assert self.save is not None, "there is nothing to save to"
        assert self.buffer.num_running == 0, "samples that run cannot be saved"
        began = self.clock.now()
        self.save.run()
        self.save_s += self.clock.now() - began

    # ---- durable form -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float | int | None]:
        """What the loop itself remembers; the buffer keeps its own."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        for name in _KEPT:
            setattr(self, name, state[name])

    def check(self, batch: Batch, taken: events.BatchTaken) -> None:
        """The guarantees, once more, on what is about to be trained."""
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
