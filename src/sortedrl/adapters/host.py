"""Control turned round: another trainer (the host) asks for batches, and our unchanged controller makes them.

    host's thread                                 thread "sortedrl-rollout"
    next_batch()  <------- a batch ------------   Controller: load, admit, collect, harvest
      scores answers meanwhile --- rewards --->
    trains
    publish()     ------- the update is done -->  settle: publish the weights to the engine, decide fates
      returns when the engine has the weights

The controller's learner is a `HostLearner`: its update begins when a batch is harvested and ends when the host calls
`publish`. Rewards are the host's too: a function of the host scores complete answers, in the thread that calls
`next_batch`. With `overlap` the controller goes on with rollout while the host trains.

Guarantees: those of docs/reference/guarantees.md, because controller, buffer and schedule are the same; an error of one
side ends the other with that error; every event and every change of the buffer is in the run directory, as in our own
runs. Importing this module needs neither torch nor an engine or a learner of ours.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sortedrl import schedule as sorted_schedule
from sortedrl.adapters.host_files import HostFiles
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import Engine, EngineStats, InFlight, Sampling
from sortedrl.errors import ConfigError, LearnerError, SortedRLError
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch, Prompt, Sample
from sortedrl.schedule import Fate, Knobs, Schedule
from sortedrl.tasks.loader import SampleLoader, Stream
from sortedrl.telemetry.events import BatchTaken, Event, FunctionsScored, RunEnded, RunStarted, WeightsPublished
from sortedrl.telemetry.summary import Summary, summarize

log = logging.getLogger(__name__)

SCORE_GRACE_S = 30.0  # a batch that lacks only scores waits so long, so that decisions do not depend on their speed
CLOSE_S = 60.0  # longest wait for the controller's thread when a run is closed


@dataclass(slots=True, kw_only=True, frozen=True)
class HostSettings:
    """What a run inside another trainer works with. `strategy` is a name for reports; `knobs` decide."""

    strategy: str
    knobs: Knobs
    total_samples: int
    siblings: int  # answers per prompt; they are trained together if there are several
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    run_dir: Path | None = None  # without it nothing is written
    in_flight: InFlight = InFlight.REPREFILL
    replay_tolerance: float = 0.0
    score_grace_s: float = SCORE_GRACE_S

    def __post_init__(self) -> None:
        knobs = self.knobs
        if not knobs.exact_batch:
            raise ConfigError("another trainer takes exactly update_batch samples: set exact_batch = true")
        for what, count in (("update_batch", knobs.update_batch), ("total_samples", self.total_samples)):
            if count % self.siblings:
                raise ConfigError(f"{what} {count} must be a multiple of the {self.siblings} answers per prompt")
        if self.total_samples % knobs.update_batch:
            raise ConfigError(
                f"total_samples {self.total_samples} must be a multiple of update_batch {knobs.update_batch}: the "
                "trainer takes whole batches"
            )


@dataclass(slots=True, kw_only=True, frozen=True)
class Answer:
    """A complete answer to score. The sample itself belongs to the controller's thread."""

    sample: int
    attempt: int
    prompt: Prompt
    tokens: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        return (self.sample, self.attempt)


@dataclass(slots=True, kw_only=True, frozen=True)
class FunctionRewards:
    """The reward of an answer, and what each of several reward functions gave it, for reports."""

    total: float
    by_function: Mapping[str, float]

    @classmethod
    def of(cls, names: Sequence[str], values: Sequence[float], total: float) -> FunctionRewards:
        """Without functions that gave no reward (NaN), and without any if there is only one function."""
        given = {name: value for name, value in zip(names, values, strict=True) if not math.isnan(value)}
        return cls(total=total, by_function=given if len(names) > 1 else {})


@dataclass(slots=True, kw_only=True, frozen=True)
class HostScore:
    key: tuple[int, int]
    reward: float
    by_function: Mapping[str, float] = field(default_factory=dict)


Score = Callable[[Sequence[Answer]], Sequence[float | FunctionRewards]]
"""The host's rewards of complete answers."""


class _Stopped(Exception):
    """Ends the controller's wait for an update that the host will not finish."""


class HostUpdate:
    """An update that the host makes."""

    def __init__(self, run: HostRun) -> None:
        self._run = run
        self.outcome: UpdateResult | None = None

    def done(self) -> bool:
        return self.outcome is not None

    def result(self) -> UpdateResult:
        with self._run.changed:
            self._run.changed.wait_for(lambda: self.outcome is not None or self._run.is_stopping)
        if self.outcome is None:
            raise _Stopped
        return self.outcome


class HostLearner:
    """A `Learner` whose updates are made elsewhere. `source` is what engines read the host's weights from."""

    def __init__(self, run: HostRun, source: Any) -> None:
        self._run = run
        self.source = source

    def start(self, batch: Batch) -> HostUpdate:
        update = HostUpdate(self._run)
        self._run.offer(batch, update)
        return update


class HostScorer:
    """A `Scorer` whose answers are scored in the thread that calls `HostRun.next_batch`."""

    def __init__(self, run: HostRun) -> None:
        self._run = run
        self.asked: list[Answer] = []
        self.scores: list[HostScore] = []
        self.on_score: Callable[[HostScore], None] = lambda score: None  # in the controller's thread

    def submit(self, sample: Sample) -> None:
        answer = Answer(sample=sample.id, attempt=sample.attempt, prompt=sample.prompt, tokens=tuple(sample.tokens))
        with self._run.changed:
            self.asked.append(answer)
            self._run.changed.notify_all()

    def poll(self, timeout: float) -> list[HostScore]:
        with self._run.changed:
            if timeout > 0:
                self._run.changed.wait_for(lambda: self.scores or self._run.is_stopping, timeout)
            scores, self.scores = self.scores, []
        for score in scores:
            self.on_score(score)
        return scores


class HostRun:
    """One run inside another trainer. The host calls `start`, then `next_batch` and `publish` in turn, then `close`.

    `engine` belongs to the run from `start` on and is closed with it. `source` is what `engine.publish` reads;
    `score` gives the rewards of complete answers; `stream` gives the prompts. A `tokenizer` is saved in the run
    directory, so that reports show answers as text.
    """

    def __init__(
        self,
        settings: HostSettings,
        *,
        engine: Engine,
        source: Any,
        stream: Stream,
        score: Score,
        schedule: Schedule = sorted_schedule,
        tokenizer: Any = None,
    ) -> None:
        check_engine(engine, settings.knobs, tolerance=settings.replay_tolerance)
        self.settings = settings
        self.engine = engine
        self.score = score
        self.changed = threading.Condition()
        self.is_stopping = False
        self.version = 0  # published to the engine
        self.decode_steps = 0  # of the engine, at the last batch
        self.summary: Summary | None = None  # once the run has ended
        self._learner = HostLearner(self, source)
        self._scorer = HostScorer(self)
        self._schedule = schedule
        self._tokenizer = tokenizer
        self._loader = SampleLoader(
            stream=stream,
            seed=settings.seed,
            total_samples=settings.total_samples,
            siblings=settings.siblings,
            max_new_tokens=settings.max_new_tokens,
        )
        self._batch: Batch | None = None  # harvested, and not taken by the host yet
        self._update: HostUpdate | None = None  # under way
        self._error: BaseException | None = None
        self._has_ended = False
        self._thread: threading.Thread | None = None

    # ---- calls of the host ------------------------------------------------------------------------------------------

    def start(self, updates_done: int = 0) -> None:
        """Start rollout. `updates_done`: the host continues from its own checkpoint after so many updates.

        The weights in `source` must be those of that checkpoint.
        """
        assert self._thread is None, "a run is started once"
        self._thread = threading.Thread(target=self._main, args=(updates_done,), name="sortedrl-rollout", daemon=True)
        self._thread.start()

    def next_batch(self) -> Batch | None:
        """Wait for the next batch, and score answers meanwhile; None when all samples are trained, or after `stop`."""
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self._batch or self._scorer.asked or self._error or self._has_ended or self.is_stopping
                )
                self._raise_error()
                if self._batch is not None:
                    batch, self._batch = self._batch, None
                    return batch
                if self._has_ended or self.is_stopping:
                    return None
                answers, self._scorer.asked = self._scorer.asked, []
            scores = self._score(answers)
            with self.changed:
                self._scorer.scores += scores
                self.changed.notify_all()

    def publish(self, *, optimizer_steps: int = 1, metrics: dict[str, float] | None = None) -> None:
        """Tell that the host's update is done; returns when the engine has read its weights from `source`."""
        with self.changed:
            self._raise_error()
            update = self._update
            if update is None:
                raise LearnerError("publish() was called without a batch: call next_batch() before it")
            version = self.version + 1
            update.outcome = UpdateResult(optimizer_steps=optimizer_steps, metrics=dict(metrics or {}))
            self._update = None
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.version >= version or self._error or self._has_ended or self.is_stopping)
            self._raise_error()

    @property
    def has_open_update(self) -> bool:
        """Whether the host has a batch whose update it has not published."""
        with self.changed:
            return self._update is not None and self._batch is None

    def stop(self) -> None:
        """Ask the controller to stop. What runs is interrupted, and its tokens stay in the ledger."""
        with self.changed:
            self.is_stopping = True
            self.changed.notify_all()

    def close(self) -> Summary | None:
        """End the run and its thread, and write the summary; a run that is not complete can be continued later.

        Raises the error that ended the controller, if there is one.
        """
        if self._thread is None:
            self.engine.close()
            return None
        with self.changed:  # a run whose last update is published ends by itself
            all_trained = self._has_ended or (self._update is None and self._is_complete())
        if not all_trained:
            self.stop()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise LearnerError(f"the rollout thread did not end within {CLOSE_S:g} s: its engine hangs")
        with self.changed:
            self._raise_error()
        return self.summary

    def fail(self, error: BaseException) -> None:
        """End the run because of an error of the host; `check` and the other calls raise it from now on."""
        with self.changed:
            self._error = self._error or error
            self.is_stopping = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the error that ended the controller, if there is one."""
        with self.changed:
            self._raise_error()

    # ---- calls of the controller's parts ----------------------------------------------------------------------------

    def offer(self, batch: Batch, update: HostUpdate) -> None:
        with self.changed:
            self._batch, self._update = batch, update
            self.changed.notify_all()

    # ---- the controller's thread ------------------------------------------------------------------------------------

    def _main(self, updates_done: int) -> None:
        try:
            self._run(updates_done)
        except BaseException as error:
            with self.changed:
                self._error = error
            if not isinstance(error, SortedRLError):
                log.exception("the rollout thread failed")
        finally:
            try:
                self.engine.close()
            finally:
                with self.changed:
                    self._has_ended = True
                    self.changed.notify_all()

    def _run(self, updates_done: int) -> None:
        settings = self.settings
        started = RunStarted(
            t=0.0,
            strategy=settings.strategy,
            seed=settings.seed,
            slots=self.engine.capabilities.slots,
            update_batch=settings.knobs.update_batch,
            total_samples=settings.total_samples,
        )
        files = HostFiles.open(
            settings.run_dir,
            updates_done=updates_done,
            grouped=settings.siblings > 1,
            knobs=settings.knobs,
            noise=self.engine.capabilities.noise,
            started=started,
        )
        is_sound = False
        try:
            files.save_tokenizer(self._tokenizer)
            controller = self._controller(files)
            files.metrics.probe = lambda: (self.engine.stats(), controller.timing())
            complete = self._drive(controller, files, is_resumed=updates_done > 0)
            self._summarize(controller, files, self.engine.stats(), complete)
            is_sound = True
        except SortedRLError:
            is_sound = True
            raise
        finally:
            files.close(commit=is_sound)

    def _controller(self, files: HostFiles) -> Controller:
        settings = self.settings

        def emit(event: Event) -> None:
            files.emit(event)
            if isinstance(event, WeightsPublished):
                with self.changed:
                    self.version = event.version
                    self.changed.notify_all()
            elif isinstance(event, BatchTaken):
                self.decode_steps = self.engine.stats().decode_steps
                files.flush()

        def tell(score: HostScore) -> None:
            if score.by_function:
                sample, attempt = score.key
                emit(FunctionsScored(files.clock.now(), sample, attempt, dict(score.by_function)))

        self._scorer.on_score = tell
        return Controller(
            files.buffer,
            LoopParts(
                engine=self.engine,
                learner=self._learner,
                scorer=self._scorer,
                load_samples=self._loader.load,
                schedule=self._schedule,
            ),
            LoopSettings(
                knobs=settings.knobs,
                total_samples=settings.total_samples,
                sampling=settings.sampling,
                replay_tolerance=settings.replay_tolerance,
                in_flight=settings.in_flight,
                score_grace_s=settings.score_grace_s,
            ),
            clock=files.clock,
            emit=emit,
            should_stop=lambda: self.is_stopping,
        )

    def _drive(self, controller: Controller, files: HostFiles, *, is_resumed: bool) -> bool:
        """Run the loop to its end or until it is stopped; returns whether all samples are trained."""
        buffer = files.buffer
        try:
            if is_resumed:
                # The ledger ends where the batch was taken whose update the host's weights have.
                self._loader.load_state_dict(
                    {
                        "num_loaded": buffer.num_loaded,
                        "stream": {"cursor": buffer.num_loaded // self.settings.siblings},
                    }
                )
                self.version = buffer.version
                controller.began = 0.0
                controller.has_data = buffer.num_loaded < self.settings.total_samples
                controller.update, controller.update_began = _Made(), files.clock.now()
                controller.settle()
            return controller.run()
        except _Stopped:
            controller.apply_events(self.engine.interrupt())
            return False

    def _summarize(self, controller: Controller, files: HostFiles, stats: EngineStats, complete: bool) -> None:
        files.emit(RunEnded(t=files.clock.now(), reason="complete" if complete else "stopped"))
        self.summary = summarize(
            files.metrics,
            stats=stats,
            **controller.summary_facts(),
            ledger_s=None if files.store is None else files.store.seconds,
            emit_s=files.emit.seconds,
        )
        files.write_summary(self.summary)

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        return self.version * self.settings.knobs.update_batch >= self.settings.total_samples

    def _score(self, answers: Sequence[Answer]) -> list[HostScore]:
        rewards = self.score(answers)
        if len(rewards) != len(answers):
            raise ConfigError(f"the score function returned {len(rewards)} rewards for {len(answers)} answers")
        return [_host_score(answer, reward) for answer, reward in zip(answers, rewards, strict=True)]

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _host_score(answer: Answer, reward: float | FunctionRewards) -> HostScore:
    if not isinstance(reward, FunctionRewards):
        return HostScore(key=answer.key, reward=float(reward))
    return HostScore(key=answer.key, reward=reward.total, by_function=reward.by_function)


class _Made:
    """The update that a resumed host has made before: its weights are in the host's checkpoint."""

    def done(self) -> bool:
        return True

    def result(self) -> UpdateResult:
        return UpdateResult(optimizer_steps=0)


def check_engine(engine: Engine, knobs: Knobs, *, tolerance: float = 0.0) -> None:
    """Refuse an engine that cannot do what the schedule asks of it."""
    is_exact = engine.capabilities.exact_replay
    if Fate.REPLAY in (knobs.interrupted, knobs.on_bound) and not is_exact and not tolerance:
        raise ConfigError(
            "this strategy verifies answers by replay, and the engine's replay is not exact: choose sorted-partial "
            "with max_staleness = 1, or an engine that computes in float32, or set replay_tolerance = 0.1"
        )
