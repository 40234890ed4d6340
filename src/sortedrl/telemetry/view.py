"""One run as its pages show it: folded from its events one by one, in memory that does not grow with the run.

The report folds a whole file, the dashboard goes on folding while a run writes; both hand the view to the charts. What
it keeps true: what is summed is exact; what would grow without end is merged or left out between the ends, and says so;
times are seconds since the first cohort was loaded, and an evaluation before that is at 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sortedrl.errors import RunDirError
from sortedrl.telemetry.event_file import Record
from sortedrl.telemetry.events import SCHEMA_VERSION
from sortedrl.telemetry.metrics import ratio
from sortedrl.telemetry.points import (
    QUANTILES,
    Evaluation,
    ReplayPoint,
    Segment,
    UpdatePoint,
    join_replays,
    join_updates,
)
from sortedrl.telemetry.sample_lives import Lives
from sortedrl.telemetry.series import Ends, Thinned, TimeBins
from sortedrl.telemetry.sinks import KINDS
from sortedrl.telemetry.summary import Summary

MAX_SEGMENTS = 2000  # drawn at either end of a run
MAX_POINTS = 1024
MAX_SLOT_ROWS = 64


@dataclass(slots=True)
class Totals:
    """What the run comes to so far."""

    updates: int = 0
    optimizer_steps: int = 0
    samples: int = 0
    tokens: int = 0
    discarded: int = 0
    staleness_sum: int = 0
    staleness_token_sum: int = 0
    num_interrupted: int = 0
    slot_s: float = 0.0  # that decoded trained tokens
    busy_slot_s: float = 0.0
    rollout_s: float = 0.0


class RunView:
    """Everything that a page shows of one run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.place = 0  # among the runs of a page: its colour follows it
        self.run: Record | None = None  # its RunStarted
        self.slots = 1
        self.seconds = 0.0  # until the last step of training
        self.num_events = 0
        self.unknown: Counter[str] = Counter()  # kinds of event that this version does not know
        self.notes: list[str] = []
        self.recorded: Summary | None = None  # summary.json
        self.latest: Record = {}  # the last line of metrics.jsonl
        self.slot_time: dict[str, float] = {}  # shares by cause, as the run itself reckons them

        self.total = Totals()
        self.updates: Thinned[UpdatePoint] = Thinned(MAX_POINTS, join_updates)
        self.evaluations: Thinned[Evaluation] = Thinned(256, lambda first, second: second)
        self.replays: Thinned[ReplayPoint] = Thinned(MAX_POINTS, join_replays)
        self.staleness: Counter[int] = Counter()
        self.cohort_updates: Ends[int] = Ends(200)  # updates done when a cohort was loaded
        self.harvests: Ends[float] = Ends(MAX_SEGMENTS)
        self.segments: Ends[Segment] = Ends(MAX_SEGMENTS)
        self.occupancy = TimeBins(2)  # slots that decode; slots that stand still for an update
        self.busy = TimeBins(1)  # by slot
        self.lives = Lives()

        self._origin: float | None = None
        self._now = 0.0
        self._running: dict[int, Segment] = {}  # by sample
        self._row_of: dict[int, int] = {}  # of `busy`, by slot
        self._is_paused = False
        self._is_updating = False
        self._taken: dict[int, UpdatePoint] = {}
        self._replays = ReplayPoint(update=0, num_replays=0, share_sum=0.0, cached=0, accepted=0)
        self._fold: dict[str, Callable[[Record, float], None]] = {
            "AttemptStarted": self._started,
            "AttemptEnded": self._ended,
            "SampleRequeued": self._requeued,
            "AttemptVerified": self._verified,
            "BatchTaken": self._harvested,
            "UpdateDone": self._updated,
            "WeightsPublished": self._published,
            "CohortLoaded": self._loaded,
            "Evaluated": self._evaluated,
            "RunStarted": self._begun,
            "RunResumed": self._resumed,
        }

    @property
    def stride(self) -> int:
        """Updates that one point of a curve stands for."""
        return self.updates.stride

    @property
    def running(self) -> int:
        return len(self._running)

    def fold(self, record: Record) -> None:
        self.num_events += 1
        kind = record.get("kind")
        if not isinstance(kind, str):
            raise RunDirError(f"{self.name}: an event without a kind; is it an event file of a run?")
        act = self._fold.get(kind)
        if act is None:
            if kind not in KINDS:
                self.unknown[kind] += 1
            return
        try:
            t = record["t"]
            if self._origin is None:
                if kind == "CohortLoaded":
                    self._origin = t
                t = 0.0
            else:
                t = max(t - self._origin, 0.0)
            if t > self._now and kind != "Evaluated":
                self._advance(t)
            act(record, t)
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirError(
                f"{self.name}: an incomplete {kind} ({type(error).__name__}: {error}); write the run's events again"
            ) from error

    # ---- event by event ---------------------------------------------------------------------------------------------

    def _advance(self, t: float) -> None:
        decoding = 0 if self._is_paused else len(self._running)
        elapsed = t - self._now
        if decoding:
            self.total.busy_slot_s += elapsed * decoding
            self.total.rollout_s += elapsed
            self.occupancy.add(0, self._now, t, decoding)
        if self._is_updating and decoding < self.slots:
            self.occupancy.add(1, self._now, t, self.slots - decoding)
        self._now = self.seconds = t

    def _begun(self, record: Record, t: float) -> None:
        if self.run is not None:
            return
        found = record.get("schema_version", 1)
        if not isinstance(found, int) or found > SCHEMA_VERSION:
            raise RunDirError(
                f"the events of {self.name} have schema version {found}, this package reads {SCHEMA_VERSION}: "
                "upgrade it"
            )
        if found < SCHEMA_VERSION:
            self.notes.append(
                f"its events are of schema version {found}, older than this package's {SCHEMA_VERSION}: "
                "what they lack is left out"
            )
        self.run = record
        self.slots = max(int(record["slots"]), 1)
        rows = min(self.slots, MAX_SLOT_ROWS)
        self.busy = TimeBins(rows)
        self._row_of = {slot: slot * rows // self.slots for slot in range(self.slots)}

    def _loaded(self, record: Record, t: float) -> None:
        self.cohort_updates.append(record["update"])
        self.lives.load(t, record["cohort"], record["samples"])

    def _started(self, record: Record, t: float) -> None:
        sample, cached, version = record["sample"], record["cached"], record["version"]
        segment = Segment(
            sample=sample,
            attempt=record["attempt"],
            slot=record["slot"],
            version=version,
            mode=record["mode"],
            start=t,
            num_tokens=cached,
        )
        self._running[sample] = segment
        self.segments.append(segment)
        self.lives.start(t, sample, version=version, cached=cached)

    def _verified(self, record: Record, t: float) -> None:
        cached, accepted = record["cached"], record["accepted"]
        self.lives.verify(record["sample"], accepted)
        if cached:
            self.total.discarded += cached - accepted
            point = ReplayPoint(update=0, num_replays=1, share_sum=accepted / cached, cached=cached, accepted=accepted)
            self._replays = join_replays(self._replays, point)

    def _ended(self, record: Record, t: float) -> None:
        sample, outcome, num_tokens = record["sample"], record["outcome"], record["num_tokens"]
        segment = self._running.pop(sample, None)
        seconds = 0.0
        if segment is not None:
            seconds = self._close(segment, t, outcome)
            segment.num_tokens = num_tokens
        self.total.num_interrupted += outcome == "interrupted"
        self.lives.end(t, sample, outcome=outcome, num_tokens=num_tokens, seconds=seconds)

    def _close(self, segment: Segment, t: float, outcome: str) -> float:
        """The bar ends here, or where it was paused; returns how long it is."""
        end = t if segment.end is None else segment.end
        segment.end, segment.outcome = end, outcome
        if end > segment.start:
            self.busy.add(self._row_of.get(segment.slot, 0), segment.start, end)
        return end - segment.start

    def _requeued(self, record: Record, t: float) -> None:
        discarded = record["discarded"]
        self.total.discarded += discarded
        self.lives.requeue(record["sample"], discarded)

    def _harvested(self, record: Record, t: float) -> None:
        samples, lengths, update = record["samples"], record["lengths"], record["update"]
        rewards = [0.0 if value is None else value for value in record["rewards"]]
        total, count = self.total, len(samples)
        total.samples += count
        total.tokens += sum(lengths)
        total.staleness_sum += sum(record["staleness"])
        total.staleness_token_sum += sum(record["staleness_token_sum"])
        total.slot_s += record["slot_s"]
        self.staleness.update(record["staleness"])
        self.harvests.append(t)
        self._is_updating = True
        if record.get("num_paused"):
            self._is_paused = True
            for segment in self._running.values():
                segment.end = t
        self.lives.train(t, update, record["version"], samples, rewards)
        if self._replays.num_replays:
            self.replays.append(replace(self._replays, update=update))
            self._replays = ReplayPoint(update=0, num_replays=0, share_sum=0.0, cached=0, accepted=0)
        if count:
            self._taken[update] = UpdatePoint(
                update=update,
                t=t,
                samples_trained=total.samples,
                num_samples=count,
                reward_sum=float(sum(rewards)),
                token_sum=sum(lengths),
                lengths=tuple(float(value) for value in np.quantile(lengths, QUANTILES)),
            )

    def _updated(self, record: Record, t: float) -> None:
        self.total.updates += 1
        self.total.optimizer_steps += record["optimizer_steps"]
        point = self._taken.pop(record["update"], None)
        if point is not None:
            self.updates.append(replace(point, t=t))

    def _published(self, record: Record, t: float) -> None:
        """What runs goes on under other weights: its bar ends, and one of their colour begins."""
        version = record["version"]
        self._is_updating = self._is_paused = False
        for sample, segment in self._running.items():
            if segment.version == version:
                segment.end = None
                continue
            paused = segment.end
            self.lives.turn(sample, version, self._close(segment, t, "published"), paused=paused)
            goes_on = Segment(
                sample=sample,
                attempt=segment.attempt,
                slot=segment.slot,
                version=version,
                mode=segment.mode,
                start=t,
                num_tokens=segment.num_tokens,
            )
            self._running[sample] = goes_on
            self.segments.append(goes_on)

    def _evaluated(self, record: Record, t: float) -> None:
        accuracies = [math.nan if value is None else float(value) for value in _accuracies(record)]
        self.evaluations.append(
            Evaluation(t=t, samples_trained=record["samples_trained"], sampled=accuracies[0], greedy=accuracies[1])
        )

    def _resumed(self, record: Record, t: float) -> None:
        """What ran when its process ended runs no more."""
        for sample, segment in self._running.items():
            seconds = self._close(segment, t, "cut")
            self.lives.end(t, sample, outcome="cut", num_tokens=segment.num_tokens, seconds=seconds)
        self._running.clear()
        self._is_updating = self._is_paused = False

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def summary(self) -> Summary:
        """The run's own, or what its events come to so far: that lacks what only engine and controller know."""
        if self.recorded is not None:
            return self.recorded
        assert self.run is not None, "a run that never started has no summary"
        total, slot_s = self.total, self.slots * self.total.rollout_s
        busy = ratio(total.busy_slot_s, slot_s)
        evaluations = [point for point in self.evaluations if not math.isnan(point.sampled)]
        before = next((point for point in evaluations if point.samples_trained == 0), None)
        after = next((point for point in reversed(evaluations) if point.samples_trained > 0), None)
        measured = {name: self.latest.get(name) for name in ("bubble_ratio", "goodput", "tokens_per_s")}
        if None in measured.values():  # nobody measured: by the events' clock
            measured = {
                "bubble_ratio": None if busy is None else 1.0 - busy,
                "goodput": ratio(total.slot_s, slot_s),
                "tokens_per_s": ratio(total.tokens, self.seconds),
            }
        return Summary(
            strategy=str(self.run["strategy"]),
            seed=self.run["seed"],
            slots=self.slots,
            update_batch=self.run["update_batch"],
            updates=total.updates,
            optimizer_steps=total.optimizer_steps,
            samples=total.samples,
            trained_tokens=total.tokens,
            discarded_tokens=total.discarded,
            rollout_s=total.rollout_s,
            wall_s=self.seconds,
            staleness_mean=ratio(total.staleness_sum, total.samples),
            staleness_token_mean=ratio(total.staleness_token_sum, total.tokens),
            staleness_max=max(self.staleness, default=None),
            mean_length=ratio(total.tokens, total.samples),
            accuracy_before=before.sampled if before else None,
            accuracy_after=after.sampled if after else None,
            greedy_accuracy_before=before.greedy if before else None,
            greedy_accuracy_after=after.greedy if after else None,
        ).model_copy(update=measured)


def _accuracies(record: Record) -> tuple[float | None, float | None]:
    return record["sampled_accuracy"], record["greedy_accuracy"]
