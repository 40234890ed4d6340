"""The figures of a run, computed from its events one by one.

This is the light fold: a run or a simulation passes every event to `RunMetrics.emit`. The sinks for `metrics.jsonl`,
console and trackers read the figures so far; `summary.py` reads those of the whole run; `view.py`, the full fold for
pages and traces, contains one. Engine and controller measure busy time and wall time themselves (`EngineStats`,
`Timing`); without them bubble, goodput and speed are estimated from the events' clock.

Guarantees: every figure follows its definition in docs/concepts.md. The ledger counts come from the events alone, so
they check the buffer rather than repeat it. Generated tokens = trained + discarded + in flight. Memory follows the
samples that are not trained yet, not the length of the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from sortedrl.clock import Timing
from sortedrl.engine.base import EngineStats
from sortedrl.telemetry.alarms import Alarms
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CheckpointBegun,
    CheckpointSaved,
    CohortLoaded,
    Evaluated,
    Event,
    FunctionsScored,
    LearnerRestarted,
    MachineMeasured,
    RewardCalled,
    RewardFailed,
    RunEnded,
    RunResumed,
    RunStarted,
    SampleRequeued,
    SampleScored,
    ScoresAwaited,
    ToolsCalled,
    ToolsReturned,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.slot_time import Cause, SlotTime

# Slots were paused before the first four. The next four overlap other events. The last two may follow the end of
# training, and that time does not count.
_OWN_TIMING = frozenset(
    {
        ScoresAwaited,
        WeightsPublished,
        CheckpointBegun,
        CheckpointSaved,
        LearnerRestarted,
        RewardCalled,
        FunctionsScored,
        MachineMeasured,
        Evaluated,
        RunEnded,
    }
)

_RECENT = 4  # updates whose mean reward is the current one

Probe = Callable[[], tuple[EngineStats, Timing]]
"""Returns what engine and controller have measured so far."""


class LedgerCounts(BaseModel):
    """Samples loaded, samples trained, samples lost, and trainings of a sample that was not waiting for one."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    loaded: int
    trained: int
    lost: int
    duplicated: int


@dataclass(slots=True, kw_only=True)
class ToolCounts:
    """Turns that called tools, their calls, and the time that trajectories spent with their environments."""

    turns: int = 0
    calls: int = 0
    failed: int = 0  # calls with an error, which was fed back
    repeated: int = 0  # calls of kept turns that were made again
    lost: int = 0  # trajectories that started over because their environment was lost
    seconds: float = 0.0
    fed_tokens: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateRow:
    """One line of `metrics.jsonl`: reward, length and staleness of the update's batch; the rest for the run so far."""

    update: int
    version: int
    t: float
    samples_trained: int
    reward_mean: float | None
    reward_recent: float | None  # mean over the samples of the last updates, which is less noisy
    mean_length: float | None
    staleness_mean: float | None
    staleness_max: int | None
    bubble_ratio: float | None
    idle_slot_steps: float | None
    goodput: float | None
    tokens_per_s: float | None
    slot_time: dict[str, float] | None  # shares of slot time by cause
    learner_wait_s: float
    unscored_samples: int  # samples whose reward could not be computed
    alarms: list[str]
    learner: dict[str, float]


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """All figures of one run. `probe` returns what engine and controller measured."""

    probe: Probe | None = None
    run: RunStarted | None = None
    end_reason: str | None = None
    gap: str = ""  # why events are missing, if a resumed run found that some are
    first_evaluation: Evaluated | None = None  # before any training
    last_evaluation: Evaluated | None = None  # after some training

    updates: int = 0
    optimizer_steps: int = 0
    samples: int = 0  # trainings: a sample trained twice counts twice
    trained_tokens: int = 0
    discarded_tokens: int = 0
    staleness_sum: int = 0
    staleness_token_sum: int = 0
    staleness_max: int | None = None
    trained_slot_s: float = 0.0
    learner_wait_s: float = 0.0  # time without an update under way, from the first cohort to the last harvest
    num_flat_groups: int | None = None  # siblings with equal rewards; None: the learner did not report it
    num_filtered: int | None = None  # samples trained with weight 0 for that reason

    num_replays: int = 0
    num_rejected: int = 0  # replays that rejected a token
    accepted_tokens: int = 0
    accepted_share_sum: float = 0.0

    tools: ToolCounts = field(default_factory=ToolCounts)
    occupancy: SlotTime = field(default_factory=SlotTime)
    alarms: Alarms = field(default_factory=Alarms)
    last_batch: BatchTaken | None = None
    _num_untold: int = 0  # trained samples whose BatchTaken is missing
    _num_loaded: int = 0
    _num_duplicated: int = 0
    _longest_sum: int = 0  # over trained samples, the longest answer of each in any attempt
    _untrained: set[int] = field(default_factory=set)
    _unscored: set[int] = field(default_factory=set)  # of the untrained samples, those that could not be scored
    _num_unscored_trained: int = 0
    _held: dict[int, int] = field(default_factory=dict)  # answer tokens of samples that are not trained yet
    _longest: dict[int, int] = field(default_factory=dict)
    _batches: dict[int, tuple[BatchTaken, int]] = field(default_factory=dict)  # updates under way; samples so far
    _done: tuple[BatchTaken, int] | None = None  # the entry of the last update done
    _learner_idle_since: float | None = None
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))  # reward, samples

    @property
    def recent_reward(self) -> float | None:
        """Mean reward of the last updates, or None before the first one."""
        return ratio(sum(total for total, _ in self._recent), sum(count for _, count in self._recent))

    def emit(self, event: Event) -> None:
        """Add one event. The most frequent kinds come first: a simulation has millions."""
        if event.t > self.occupancy.now:
            if type(event) in _OWN_TIMING:
                self._record_wait(event)
            else:
                self.occupancy.advance(event.t)
        match event:
            case AttemptEnded():
                self._end_attempt(event)
            case AttemptStarted():
                self.occupancy.running += 1
                self._held[event.sample] = event.cached
                self._unscored.discard(event.sample)  # the new attempt will be scored too
            case SampleScored():
                pass
            case SampleRequeued():
                self.tools.lost += event.decision == "lost"
                self.discarded_tokens += event.discarded
                self._reach(event.sample, event.discarded)
                self._held[event.sample] = max(self._held.get(event.sample, 0) - event.discarded, 0)
            case AttemptVerified():
                self._verify_attempt(event)
            case ToolsCalled():
                self.occupancy.calling += 1
                self.tools.calls += event.num_calls
            case ToolsReturned():
                self._return_tools(event)
            case RewardFailed():
                self._unscored.add(event.sample)
            case BatchTaken():
                self._take_batch(event)
            case UpdateDone():
                self._finish_update(event)
            case WeightsPublished():
                self.occupancy.paused, self.occupancy.waiting_for = 0, None
            case CohortLoaded():
                if self.occupancy.started is None:
                    self.occupancy.started = self._learner_idle_since = event.t
                before = len(self._untrained)
                self._untrained.update(event.samples)
                self._num_loaded += len(self._untrained) - before
            case Evaluated():
                if event.samples_trained:
                    self.last_evaluation = event
                elif self.first_evaluation is None:
                    self.first_evaluation = event
            case RunStarted():
                self.run = event
                if self.occupancy.started is not None:  # a resumed run repeats the event if it was lost
                    self.occupancy = SlotTime(started=event.t)
                self.occupancy.begin(event.t, event.slots)
            case MachineMeasured():
                self.alarms.measure(event)
            case RunEnded():
                self.end_reason = event.reason
            case RunResumed():  # the attempts of the earlier process are gone
                self.occupancy.running = self.occupancy.paused = self.occupancy.calling = 0
                if event.gap:
                    self._close_gap(event)
            case _:
                pass

    def close(self) -> None:
        """Do nothing: a sink must have this method, and nothing is open here."""

    def _record_wait(self, event: Event) -> None:
        slots = self.occupancy
        match event:
            case ScoresAwaited():
                slots.record_wait(event.t, Cause.REWARD, seconds=event.seconds, paused=event.num_paused)
            case WeightsPublished():
                slots.record_wait(event.t, Cause.PUBLISH, seconds=event.seconds, paused=slots.running)
            case CheckpointBegun() | CheckpointSaved():
                slots.record_wait(event.t, Cause.SAVE, seconds=event.seconds, paused=0)
            case _:
                pass

    def _return_tools(self, event: ToolsReturned) -> None:
        self.occupancy.calling = max(self.occupancy.calling - 1, 0)
        self.tools.turns += 1
        self.tools.failed += event.num_failed
        self.tools.repeated += event.num_repeated
        self.tools.lost += event.outcome == "lost"
        self.tools.seconds += event.seconds
        self.tools.fed_tokens += event.num_fed
        self._held[event.sample] = self._held.get(event.sample, 0) + event.num_fed
        self._reach(event.sample, self._held[event.sample])

    def _verify_attempt(self, event: AttemptVerified) -> None:
        self._held[event.sample] = event.accepted
        self._reach(event.sample, event.cached)
        if event.cached == 0:
            return
        self.num_replays += 1
        self.num_rejected += event.accepted < event.cached
        self.accepted_tokens += event.accepted
        self.accepted_share_sum += event.accepted / event.cached
        self.discarded_tokens += event.cached - event.accepted

    def _end_attempt(self, event: AttemptEnded) -> None:
        slots = self.occupancy
        if event.slot >= 0 and slots.running:  # without a slot, there was no AttemptStarted either
            slots.running -= 1
        if slots.paused:  # while attempts are paused, only paused ones end
            slots.paused -= 1
        self._held[event.sample] = event.num_tokens
        self._reach(event.sample, event.num_tokens)

    def _reach(self, sample: int, num_tokens: int) -> None:
        """Record that an attempt at the sample got this long.

        Its AttemptEnded says so, and so does the event that takes the tokens up again or discards them.
        """
        if num_tokens > self._longest.get(sample, 0):
            self._longest[sample] = num_tokens

    def _take_batch(self, event: BatchTaken) -> None:
        self.last_batch = event
        self._recent.append((sum(reward for reward in event.rewards if not math.isnan(reward)), len(event.samples)))
        self.alarms.take_batch(event, self.max_staleness)
        if self._learner_idle_since is not None:
            self.learner_wait_s += event.t - self._learner_idle_since
            self._learner_idle_since = None
        self.occupancy.record_harvest(
            busy_s=event.busy_s,
            prefill_s=event.prefill_s,
            prompt_tokens=event.prompt_tokens,
            recomputed_tokens=event.recomputed_tokens,
            paused=event.num_paused,
        )
        self.samples += len(event.samples)
        self.trained_tokens += sum(event.lengths)
        self.staleness_sum += sum(event.staleness)
        self.staleness_token_sum += sum(event.staleness_token_sum)
        self.staleness_max = max([*event.staleness, self.staleness_max or 0])
        self.trained_slot_s += event.slot_s
        for sample, length in zip(event.samples, event.lengths, strict=True):
            self._held.pop(sample, None)
            if sample in self._unscored:
                self._unscored.remove(sample)
                self._num_unscored_trained += 1
            longest = self._longest.pop(sample, 0)
            if sample in self._untrained:
                self._untrained.remove(sample)
                self._longest_sum += max(longest, length)
            else:
                self._num_duplicated += 1
        self._batches[event.update] = (event, self.samples)

    def _finish_update(self, event: UpdateDone) -> None:
        self.updates += 1
        self.optimizer_steps += event.optimizer_steps
        self.alarms.finish_update(event)
        if "filtered_samples" in event.metrics:
            self.num_flat_groups = (self.num_flat_groups or 0) + int(event.metrics["degenerate_groups"])
            self.num_filtered = (self.num_filtered or 0) + int(event.metrics["filtered_samples"])
        self._done = self._batches.pop(event.update, None)
        self.occupancy.waiting_for = Cause.PUBLISH
        self._learner_idle_since = event.t

    def _close_gap(self, event: RunResumed) -> None:
        """Take the counts from the ledger. Means and totals of tokens are those of the events that are there."""
        self.gap = event.gap
        self.updates = event.updates
        self._num_untold += event.samples_trained - self.samples
        self.samples = event.samples_trained
        self._num_loaded, self._num_duplicated = event.samples_trained + len(event.waiting), 0
        self._untrained = set(event.waiting)
        self._unscored &= self._untrained
        for by_sample in (self._held, self._longest):
            for sample in by_sample.keys() - self._untrained:
                del by_sample[sample]
        self._batches.clear()

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self.run.slots if self.run is not None else 0

    @property
    def max_staleness(self) -> int | None:
        """The schedule's bound on staleness; None without one."""
        return self.run.max_staleness if self.run is not None else None

    def alarm_messages(self) -> list[str]:
        return self.alarms.messages(num_unscored=self.num_unscored, bound=self.max_staleness)

    @property
    def in_flight_tokens(self) -> int:
        """Answer tokens of samples that are loaded and not trained, as far as their attempts have reported."""
        return sum(self._held.values())

    @property
    def generated_tokens(self) -> int:
        return self.trained_tokens + self.discarded_tokens + self.in_flight_tokens

    @property
    def mean_length(self) -> float | None:
        return ratio(self.trained_tokens, self.samples - self._num_untold)

    @property
    def mean_longest(self) -> float | None:
        """Mean over trained samples of the longest answer in any attempt.

        It exceeds `mean_length` where a restart replaces long answers with shorter ones.
        """
        return ratio(self._longest_sum, self._num_loaded - len(self._untrained) - self._num_untold)

    @property
    def staleness_mean(self) -> float | None:
        return ratio(self.staleness_sum, self.samples - self._num_untold)

    @property
    def staleness_token_mean(self) -> float | None:
        return ratio(self.staleness_token_sum, self.trained_tokens)

    @property
    def num_unscored(self) -> int:
        """Samples, trained or waiting, whose reward could not be computed."""
        return self._num_unscored_trained + len(self._unscored)

    @property
    def divergence_rate(self) -> float | None:
        """Rejections per checked token; tokens after a rejected one were not checked."""
        return ratio(self.num_rejected, self.accepted_tokens + self.num_rejected)

    @property
    def accepted_prefix(self) -> float | None:
        """Share of its cached tokens that a replay accepts, mean over replays."""
        return ratio(self.accepted_share_sum, self.num_replays)

    def agrees_with(self, num_trained: int, waiting: Iterable[int]) -> bool:
        """Return whether the events tell of as many trained samples, and of the same untrained ones, as the ledger."""
        return self.samples == num_trained and self._untrained == set(waiting)

    def ledger(self, held: Iterable[int]) -> LedgerCounts:
        """Return the ledger counts; `held` are the samples that the buffer still holds."""
        return LedgerCounts(
            loaded=self._num_loaded,
            trained=self._num_loaded - len(self._untrained),
            lost=len(self._untrained.difference(held)),
            duplicated=self._num_duplicated,
        )

    def bubble_ratio(self, stats: EngineStats, timing: Timing) -> float | None:
        """1 - busy slot time (counted by the engine) / (slots x rollout time by the controller's clock)."""
        busy = ratio(stats.busy_slot_s, self.slots * timing.rollout_s)
        return None if busy is None else 1.0 - busy

    def idle_slot_steps(self, stats: EngineStats) -> float | None:
        """1 - slot-steps in which a slot ran / (decode steps x slots), counted by the engine; time plays no part."""
        busy = ratio(stats.busy_slot_steps, stats.slot_steps)
        return None if busy is None else 1.0 - busy

    def goodput(self, timing: Timing) -> float | None:
        """Slot time of trained tokens / (slots x rollout time)."""
        return ratio(self.trained_slot_s, self.slots * timing.rollout_s)

    def slot_time(self) -> dict[str, float] | None:
        """Return shares of slot time by cause (telemetry/slot_time.py); they add up to 1."""
        return self.occupancy.shares(
            trained_s=self.trained_slot_s,
            discarded_tokens=self.discarded_tokens,
            in_flight_tokens=self.in_flight_tokens,
        )

    def tokens_per_s(self, timing: Timing) -> float | None:
        return ratio(self.trained_tokens, timing.wall_s)

    def measured(self) -> tuple[EngineStats, Timing]:
        """Return what the probe measured, or without a probe the estimate from the events' clock."""
        if self.probe is not None:
            return self.probe()
        seen = self.occupancy
        timing = Timing(rollout_s=seen.rollout_s, update_s=0.0, publish_s=0.0, wall_s=seen.wall_s)
        return EngineStats(running=seen.running, busy_slot_s=seen.busy_slot_s), timing

    def row(self, event: UpdateDone) -> UpdateRow:
        """Return the line of `metrics.jsonl` for `event`, the last update that was added."""
        assert self._done is not None, f"update {event.update} is done, but its batch was never taken"
        batch, samples_trained = self._done
        assert batch.update == event.update, f"the last update done is {batch.update}, not {event.update}"
        stats, timing = self.measured()
        count = len(batch.samples)
        return UpdateRow(
            update=event.update,
            version=event.version,
            t=event.t,
            samples_trained=samples_trained,
            reward_mean=ratio(sum(batch.rewards), count),
            reward_recent=self.recent_reward,
            mean_length=ratio(sum(batch.lengths), count),
            staleness_mean=ratio(sum(batch.staleness), count),
            staleness_max=max(batch.staleness, default=None),
            bubble_ratio=self.bubble_ratio(stats, timing),
            idle_slot_steps=self.idle_slot_steps(stats),
            goodput=self.goodput(timing),
            tokens_per_s=self.tokens_per_s(timing),
            slot_time=self.slot_time(),
            learner_wait_s=self.learner_wait_s,
            unscored_samples=self.num_unscored,
            alarms=self.alarm_messages(),
            learner=dict(event.metrics),
        )


def ratio(part: float, whole: float) -> float | None:
    """Return `part / whole`, or None if `whole` is 0: a figure that does not apply is null, never 0."""
    return part / whole if whole else None
