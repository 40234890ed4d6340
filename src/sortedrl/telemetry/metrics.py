"""The figures of a run, folded from its events one by one.

A run hands every event to `RunMetrics.emit`; the sinks for `metrics.jsonl` and the console read the figures so far, and
`summary.py` those of the whole run. What engine and controller measured themselves (`EngineStats`, `Timing`) is passed
in; without it bubble ratio, goodput and speed are estimated from the events' own clock.

What it keeps true: every figure follows its definition in the design page; the ledger is counted from the events alone,
so that it checks the buffer instead of repeating it; generated = trained + discarded + in flight, in tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sortedrl.clock import Timing
from sortedrl.engine.base import EngineStats
from sortedrl.telemetry.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CheckpointSaved,
    CohortLoaded,
    Evaluated,
    Event,
    RewardCalled,
    RunEnded,
    RunStarted,
    SampleRequeued,
    SampleScored,
    ScoresAwaited,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.slot_time import Cause, SlotTime

# Before the first three the slots stood still, and the next is told in between; the others may come after the last step
# of training.
_APART = frozenset({ScoresAwaited, WeightsPublished, CheckpointSaved, RewardCalled, Evaluated, RunEnded})

Probe = Callable[[], tuple[EngineStats, Timing]]
"""What engine and controller have measured so far."""


@dataclass(slots=True, kw_only=True, frozen=True)
class LedgerCount:
    """Distinct samples loaded and trained; those that vanished; trainings beyond a sample's first."""

    loaded: int
    trained: int
    lost: int
    duplicated: int


@dataclass(slots=True, kw_only=True)
class CohortLength:
    """How long the trained answers of a cohort are, against the longest seen of the same samples in any attempt.

    A restart with fresh noise gives a long answer another chance to be short: then the two means part.
    """

    loaded: int
    trained: int = 0
    trained_tokens: int = 0
    longest_tokens: int = 0

    @property
    def mean_length(self) -> float | None:
        return ratio(self.trained_tokens, self.trained)

    @property
    def mean_longest(self) -> float | None:
        return ratio(self.longest_tokens, self.trained)


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateRow:
    """One line of `metrics.jsonl`: reward, length and staleness of the update's batch, the rest of the run so far."""

    update: int
    version: int
    t: float
    samples_trained: int
    reward_mean: float | None
    mean_length: float | None
    staleness_mean: float | None
    staleness_max: int | None
    bubble_ratio: float | None
    goodput: float | None
    tokens_per_s: float | None
    slot_time: dict[str, float] | None  # shares of slot time by cause
    learner_wait_s: float
    learner: dict[str, float]


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """All figures of one run. `probe` supplies what engine and controller measured."""

    probe: Probe | None = None
    run: RunStarted | None = None
    end_reason: str | None = None
    evaluations: list[Evaluated] = field(default_factory=list)

    updates: int = 0
    optimizer_steps: int = 0
    samples: int = 0  # trainings, a sample trained twice counted twice
    trained_tokens: int = 0
    discarded_tokens: int = 0
    reward_sum: float = 0.0
    staleness_sum: int = 0
    staleness_token_sum: int = 0
    staleness_max: int | None = None
    trained_slot_s: float = 0.0
    learner_wait_s: float = 0.0  # without an update under way, from the first cohort to the last harvest
    num_truncated: int = 0
    num_interrupted: int = 0  # attempts
    num_failed: int = 0  # attempts
    num_without_spread: int = 0  # batches whose rewards are all equal
    num_all_truncated: int = 0  # batches
    num_flat_groups: int | None = None  # siblings that were all rewarded alike; None: no learner told
    num_filtered: int | None = None  # samples that were trained without weight for that

    num_replays: int = 0
    num_rejected: int = 0  # replays that found a difference
    checked_tokens: int = 0
    accepted_tokens: int = 0
    accepted_share_sum: float = 0.0

    occupancy: SlotTime = field(default_factory=SlotTime)
    cohorts: dict[int, CohortLength] = field(default_factory=dict)
    last_batch: BatchTaken | None = None
    _cohort_of: dict[int, int] = field(default_factory=dict)  # every sample ever loaded
    _trained: Counter[int] = field(default_factory=Counter)
    _held: dict[int, int] = field(default_factory=dict)  # answer tokens of samples that are not trained yet
    _longest: dict[int, int] = field(default_factory=dict)
    _batches: dict[int, tuple[BatchTaken, int]] = field(default_factory=dict)  # update under way; samples so far
    _done: tuple[BatchTaken, int] | None = None  # those of the update done last
    _free_since: float | None = None  # when the learner came to wait

    def emit(self, event: Event) -> None:
        """Fold one event in. The most frequent come first: a simulation has millions."""
        if event.t > self.occupancy.now:
            if type(event) in _APART:
                self._stood_still(event)
            else:
                self.occupancy.advance(event.t)
        match event:
            case AttemptEnded():
                self._fold_ended(event)
            case AttemptStarted():
                self.occupancy.running += 1
                self._held[event.sample] = event.cached
            case SampleScored():
                pass
            case SampleRequeued():
                self.discarded_tokens += event.discarded
                self._reached(event.sample, event.discarded)
                self._held[event.sample] = max(self._held.get(event.sample, 0) - event.discarded, 0)
            case AttemptVerified():
                self._fold_verified(event)
            case BatchTaken():
                self._fold_batch(event)
            case UpdateDone():
                self.updates += 1
                self.optimizer_steps += event.optimizer_steps
                if "filtered_samples" in event.metrics:
                    self.num_flat_groups = (self.num_flat_groups or 0) + int(event.metrics["degenerate_groups"])
                    self.num_filtered = (self.num_filtered or 0) + int(event.metrics["filtered_samples"])
                self._done = self._batches.pop(event.update, None)
                self.occupancy.waiting_for = Cause.PUBLISH
                self._free_since = event.t
            case WeightsPublished():
                self.occupancy.paused, self.occupancy.waiting_for = 0, None
            case CohortLoaded():
                if self.occupancy.started is None:
                    self.occupancy.started = self._free_since = event.t
                self.cohorts[event.cohort] = CohortLength(loaded=len(event.samples))
                self._cohort_of.update(dict.fromkeys(event.samples, event.cohort))
            case Evaluated():
                self.evaluations.append(event)
            case RunStarted():
                self.run = event
                self.occupancy.begin(event.t, event.slots)
            case RunEnded():
                self.end_reason = event.reason
            case _:
                pass

    def close(self) -> None:
        """Nothing is held open."""

    def _stood_still(self, event: Event) -> None:
        slots = self.occupancy
        match event:
            case ScoresAwaited():
                slots.stood_still(event.t, Cause.REWARD, seconds=event.seconds, paused=event.num_paused)
            case WeightsPublished():
                slots.stood_still(event.t, Cause.PUBLISH, seconds=event.seconds, paused=slots.running)
            case CheckpointSaved():
                slots.stood_still(event.t, Cause.SAVE, seconds=event.seconds, paused=0)
            case _:
                pass

    def _fold_verified(self, event: AttemptVerified) -> None:
        self._held[event.sample] = event.accepted
        self._reached(event.sample, event.cached)
        if event.cached == 0:
            return
        self.num_replays += 1
        self.num_rejected += event.accepted < event.cached
        self.checked_tokens += event.cached
        self.accepted_tokens += event.accepted
        self.accepted_share_sum += event.accepted / event.cached
        self.discarded_tokens += event.cached - event.accepted

    def _fold_ended(self, event: AttemptEnded) -> None:
        slots = self.occupancy
        slots.running -= event.slot >= 0  # without a slot, its start was not told either
        if slots.paused:  # nothing ends but what stands still
            slots.paused -= 1
        self._held[event.sample] = event.num_tokens
        self._reached(event.sample, event.num_tokens)
        self.num_interrupted += event.outcome == "interrupted"
        self.num_failed += event.outcome == "failed"

    def _reached(self, sample: int, num_tokens: int) -> None:
        """An attempt at the sample got so far: told by its end, and again by whatever takes the tokens up or away."""
        if num_tokens > self._longest.get(sample, 0):
            self._longest[sample] = num_tokens

    def _fold_batch(self, event: BatchTaken) -> None:
        self.last_batch = event
        if self._free_since is not None:
            self.learner_wait_s += event.t - self._free_since
            self._free_since = None
        self.occupancy.harvest(
            busy_s=event.busy_s,
            prefill_s=event.prefill_s,
            prompt_tokens=event.prompt_tokens,
            recomputed_tokens=event.recomputed_tokens,
            paused=event.num_paused,
        )
        self.samples += len(event.samples)
        self.trained_tokens += sum(event.lengths)
        self.reward_sum += sum(event.rewards)
        self.staleness_sum += sum(event.staleness)
        self.staleness_token_sum += sum(event.staleness_token_sum)
        self.staleness_max = max([*event.staleness, self.staleness_max or 0])
        self.trained_slot_s += event.slot_s
        self.num_truncated += event.truncated
        self.num_without_spread += len(set(event.rewards)) == 1
        self.num_all_truncated += event.truncated == len(event.samples)
        self._trained.update(event.samples)
        longest = event.lengths
        if self._held or self._longest:  # nothing is held where nobody tells of attempts, as in a simulation
            longest = [max(self._longest.pop(s, 0), n) for s, n in zip(event.samples, longest, strict=True)]
            for sample in event.samples:
                self._held.pop(sample, None)
        places = map(self._cohort_of.get, event.samples)
        for place, length, most in zip(places, event.lengths, longest, strict=True):
            if place is not None:
                cohort = self.cohorts[place]
                cohort.trained += 1
                cohort.trained_tokens += length
                cohort.longest_tokens += most
        self._batches[event.update] = (event, self.samples)

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self.run.slots if self.run is not None else 0

    @property
    def in_flight_tokens(self) -> int:
        """Answer tokens of samples that are loaded and not trained, as far as their attempts have reported."""
        return sum(self._held.values())

    @property
    def generated_tokens(self) -> int:
        return self.trained_tokens + self.discarded_tokens + self.in_flight_tokens

    @property
    def reward_mean(self) -> float | None:
        return ratio(self.reward_sum, self.samples)

    @property
    def mean_length(self) -> float | None:
        return ratio(self.trained_tokens, self.samples)

    @property
    def mean_longest(self) -> float | None:
        """Mean over trained samples of the longest answer seen in any attempt; past `mean_length` where long ones fall
        away."""
        trained = sum(cohort.trained for cohort in self.cohorts.values())
        return ratio(sum(cohort.longest_tokens for cohort in self.cohorts.values()), trained)

    @property
    def staleness_mean(self) -> float | None:
        return ratio(self.staleness_sum, self.samples)

    @property
    def staleness_token_mean(self) -> float | None:
        return ratio(self.staleness_token_sum, self.trained_tokens)

    @property
    def divergence_rate(self) -> float | None:
        """First differences per token checked; what lies behind a difference was not checked."""
        return ratio(self.num_rejected, self.accepted_tokens + self.num_rejected)

    @property
    def accepted_prefix(self) -> float | None:
        """Share of its cached tokens that a replay accepts, mean over replays."""
        return ratio(self.accepted_share_sum, self.num_replays)

    @property
    def accepted_prefix_token(self) -> float | None:
        """The same share, weighted by tokens."""
        return ratio(self.accepted_tokens, self.checked_tokens)

    def ledger(self, held: Iterable[int]) -> LedgerCount:
        """`held`: the samples that the buffer still holds, as its owner says at the end."""
        lost = self._cohort_of.keys() - self._trained.keys() - set(held)
        return LedgerCount(
            loaded=len(self._cohort_of),
            trained=len(self._trained),
            lost=len(lost),
            duplicated=self._trained.total() - len(self._trained),
        )

    def bubble_ratio(self, stats: EngineStats, timing: Timing) -> float | None:
        busy = ratio(stats.busy_slot_s, self.slots * timing.rollout_s)
        return None if busy is None else 1.0 - busy

    def goodput(self, timing: Timing) -> float | None:
        return ratio(self.trained_slot_s, self.slots * timing.rollout_s)

    def slot_time(self) -> dict[str, float] | None:
        """Shares of slot time by cause (telemetry/slot_time.py), which add up to 1."""
        return self.occupancy.shares(
            trained_s=self.trained_slot_s,
            discarded_tokens=self.discarded_tokens,
            in_flight_tokens=self.in_flight_tokens,
        )

    def tokens_per_s(self, timing: Timing) -> float | None:
        return ratio(self.trained_tokens, timing.wall_s)

    def measured(self) -> tuple[EngineStats, Timing]:
        """What the probe measured, or the estimate from the events' clock."""
        if self.probe is not None:
            return self.probe()
        seen = self.occupancy
        timing = Timing(rollout_s=seen.rollout_s, update_s=0.0, publish_s=0.0, wall_s=seen.wall_s)
        return EngineStats(running=seen.running, busy_slot_s=seen.busy_slot_s), timing

    def row(self, event: UpdateDone) -> UpdateRow:
        """The line of `metrics.jsonl` for the update that was folded in last."""
        assert self._done is not None, f"update {event.update} is done, but its batch was never taken"
        batch, samples_trained = self._done
        assert batch.update == event.update, f"the update done last is {batch.update}, not {event.update}"
        stats, timing = self.measured()
        count = len(batch.samples)
        return UpdateRow(
            update=event.update,
            version=event.version,
            t=event.t,
            samples_trained=samples_trained,
            reward_mean=ratio(sum(batch.rewards), count),
            mean_length=ratio(sum(batch.lengths), count),
            staleness_mean=ratio(sum(batch.staleness), count),
            staleness_max=max(batch.staleness, default=None),
            bubble_ratio=self.bubble_ratio(stats, timing),
            goodput=self.goodput(timing),
            tokens_per_s=self.tokens_per_s(timing),
            slot_time=self.slot_time(),
            learner_wait_s=self.learner_wait_s,
            learner=dict(event.metrics),
        )


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide by: a figure that does not apply is null, never 0."""
    return part / whole if whole else None
