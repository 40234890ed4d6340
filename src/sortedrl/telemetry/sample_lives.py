"""Samples from load to training: when each step happened, and which version wrote which of their tokens.

`RunView` reports every step here, so that cohorts, token ages, timeline and trace share one record of each sample.

Guarantees: trained samples are forgotten except the most recent ones, so memory follows the samples not trained yet.
(With `keep_cohorts` the figures of every cohort are kept too.) Token versions follow from where attempts began and
ended. If weights changed during an attempt, its tokens are assumed to be evenly spaced in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sortedrl.telemetry.cohorts import CohortFigures, CohortTally, CohortWait, join_waits
from sortedrl.telemetry.events import AttemptStarted, BatchTaken, CohortLoaded
from sortedrl.telemetry.series import Thinned

MAX_LIVES = 512
_MAX_TRAINED = 192
_MAX_INTERRUPTIONS = _MAX_TURNS = 64
_NUM_POSITIONS = 96
_MAX_ROWS = 96
_UNLOADED = -1  # the cohort of a sample whose CohortLoaded is missing

VersionRuns = list[tuple[int, int]]
"""Tokens in order, as (version, number of tokens)."""


@dataclass(slots=True, kw_only=True)
class TimelineBar:
    """A stay of a sample in a slot under one version."""

    sample: int
    attempt: int
    slot: int
    version: int
    mode: str
    start: float
    end: float | None = None  # None: still running. A paused bar has an end but no outcome
    outcome: str = ""  # of AttemptEnded; published: continues under the next version; cut: its process ended
    num_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class ToolBar:
    """The time that the environment of a sample worked on one turn. `row` is the lowest one that was free then."""

    sample: int
    turn: int
    num_calls: int
    row: int
    start: float
    end: float | None = None  # None: still working
    outcome: str = ""  # of ToolsReturned; cut: its process ended
    num_failed: int = 0


@dataclass(slots=True, kw_only=True)
class SampleLife:
    """One sample; times are seconds of the run."""

    sample: int
    cohort: int
    loaded: float
    started: float | None = None
    interruptions: list[float] = field(default_factory=list)
    tools: list[ToolBar] = field(default_factory=list)
    trained: float | None = None
    longest: int | None = None  # tokens of its longest answer in any attempt
    runs: VersionRuns = field(default_factory=list)
    # The attempt under way.
    attempt: AttemptStarted | None = None
    bar: TimelineBar | None = None
    accepted: int | None = None  # cached tokens that its replay kept
    decoded: list[tuple[int, float]] = field(default_factory=list)  # (version, seconds) in order

    def start(self, t: float, event: AttemptStarted) -> TimelineBar:
        """Begin an attempt and return its first bar."""
        self.started = t if self.started is None else self.started
        self.keep(event.cached)
        self.attempt, self.accepted, self.decoded = event, None, [(event.version, 0.0)]
        self.bar = self._new_bar(t, event.version, event.cached)
        return self.bar

    def _new_bar(self, t: float, version: int, num_tokens: int) -> TimelineBar:
        event = self.attempt
        assert event is not None, f"sample {self.sample} has a bar but no attempt"
        return TimelineBar(
            sample=self.sample,
            attempt=event.attempt,
            slot=event.slot,
            version=version,
            mode=event.mode,
            start=t,
            num_tokens=num_tokens,
        )

    def verify(self, accepted: int) -> None:
        """Record that a replay kept the first tokens: they now count as written by the version that checked them."""
        self.accepted = accepted
        if self.decoded:
            self.runs = [(self.decoded[0][0], accepted)] if accepted else []

    def change_version(self, t: float, version: int, seconds: float, *, paused: float | None) -> TimelineBar:
        """Continue the attempt under new weights, after `seconds` of decoding with the last ones; return the new bar.

        `paused` is when the attempt was paused for that, if it was.
        """
        bar = self.bar
        assert bar is not None, f"sample {self.sample} changes its version but does not run"
        self.decoded[-1] = (self.decoded[-1][0], seconds)
        self.decoded.append((version, 0.0))
        if paused is not None:
            self._interrupt(paused)
        self.bar = self._new_bar(t, version, bar.num_tokens)
        return self.bar

    def end(self, t: float, *, outcome: str, num_tokens: int, seconds: float) -> None:
        """End the attempt, `seconds` after its last change of version."""
        if self.decoded:
            self.decoded[-1] = (self.decoded[-1][0], seconds)
        self._extend(num_tokens)
        self.attempt = self.bar = None
        if outcome not in ("stop", "length"):
            self._interrupt(t)

    def call(self, bar: ToolBar) -> None:
        """Begin a turn's time in tools."""
        if len(self.tools) < _MAX_TURNS:
            self.tools.append(bar)

    def _interrupt(self, t: float) -> None:
        if len(self.interruptions) < _MAX_INTERRUPTIONS:
            self.interruptions.append(t)

    def discard(self, num_tokens: int) -> None:
        """Drop the last tokens."""
        self.keep(sum(count for _, count in self.runs) - num_tokens)

    def keep(self, num_tokens: int) -> None:
        """Drop all but the first tokens."""
        if not self.runs:
            return
        total = sum(count for _, count in self.runs)
        while self.runs and total > num_tokens:
            version, count = self.runs.pop()
            total -= count
            if total < num_tokens:
                self.runs.append((version, num_tokens - total))
                total = num_tokens

    def _extend(self, num_tokens: int) -> None:
        """Grow the answer to `num_tokens`, and divide the new tokens among the versions that decoded."""
        added = num_tokens
        for _, count in self.runs:
            added -= count
        decoded, self.decoded = self.decoded, []
        if added <= 0 or not decoded:
            self.keep(num_tokens)
            return
        if len(decoded) == 1:  # nearly always
            self._append(decoded[0][0], added)
            return
        whole = sum(seconds for _, seconds in decoded)
        done = passed = 0
        for version, seconds in decoded[:-1]:
            passed += seconds
            until = round(added * passed / whole) if whole else 0
            self._append(version, until - done)
            done = until
        self._append(decoded[-1][0], added - done)

    def _append(self, version: int, count: int) -> None:
        if self.runs and self.runs[-1][0] == version:
            count += self.runs.pop()[1]
        if count:
            self.runs.append((version, count))


class SampleLives:
    """All samples that are not trained yet, and the most recent ones in any state."""

    def __init__(self, *, keep_cohorts: bool = False) -> None:
        self.untrained: dict[int, SampleLife] = {}
        self.recent: deque[SampleLife] = deque(maxlen=MAX_LIVES)
        self.num_loaded = 0
        self.trained: deque[tuple[int, VersionRuns]] = deque(maxlen=_MAX_TRAINED)  # sample, tokens by age
        self.waits: Thinned[CohortWait] = Thinned(256, join_waits)
        self.ages = TokenAges()
        self._open_cohorts: dict[int, CohortTally] = {}
        self._trained_cohorts: list[CohortFigures] | None = [] if keep_cohorts else None

    def load(self, t: float, event: CohortLoaded) -> None:
        self.num_loaded += len(event.samples)
        if event.samples:
            self._open_cohorts[event.cohort] = CohortTally(
                cohort=event.cohort, loaded_update=event.update, num_samples=len(event.samples)
            )
        for sample in event.samples:
            life = SampleLife(sample=sample, cohort=event.cohort, loaded=t)
            self.untrained[sample] = life
            self.recent.append(life)

    def started(self, t: float, sample: int) -> SampleLife:
        """Return the sample that starts an attempt; its CohortLoaded may be missing from a damaged file."""
        life = self.untrained.get(sample)
        if life is None:
            life = self.untrained[sample] = SampleLife(sample=sample, cohort=_UNLOADED, loaded=t)
        return life

    def count_replay(self, sample: int, share: float) -> None:
        life = self.untrained.get(sample)
        tally = None if life is None else self._open_cohorts.get(life.cohort)
        if tally is not None:
            tally.accepted.append(share)

    def train(self, t: float, event: BatchTaken) -> None:
        batch: list[VersionRuns] = []
        for position, sample in enumerate(event.samples):
            life = self.untrained.pop(sample, None)
            if life is None:
                continue
            life.trained = t
            runs = [(event.version - version, count) for version, count in life.runs]
            life.runs = []
            batch.append(runs)
            self.trained.append((sample, runs))
            tally = self._open_cohorts.get(life.cohort)
            if tally is not None:
                tally.waits.append(t - life.loaded)
                tally.num_interrupted += bool(life.interruptions)
                tally.lengths.append(event.lengths[position])
                tally.rewards.append(event.rewards[position])
                tally.staleness.append(event.staleness[position])
                if life.longest is not None:
                    tally.longest.append(life.longest)
                if tally.is_trained:
                    self._close_cohort(tally)
        self.ages.add(event.update, batch)

    def _close_cohort(self, tally: CohortTally) -> None:
        del self._open_cohorts[tally.cohort]
        self.waits.append(tally.wait())
        if self._trained_cohorts is not None:
            self._trained_cohorts.append(tally.figures())

    def cohort_figures(self) -> list[CohortFigures]:
        """Return the figures of every cohort, trained completely or not. Needs `keep_cohorts`."""
        assert self._trained_cohorts is not None, "figures of trained cohorts were not kept: pass keep_cohorts"
        untrained: dict[int, list[int]] = {cohort: [] for cohort in self._open_cohorts}
        for life in self.untrained.values():
            if life.longest is not None and life.cohort in untrained:
                untrained[life.cohort].append(life.longest)
        partial = [tally.figures(untrained[cohort]) for cohort, tally in self._open_cohorts.items()]
        return sorted([*self._trained_cohorts, *partial], key=lambda figures: figures.cohort)


@dataclass(slots=True, kw_only=True)
class AgeRow:
    """Trained tokens by position in the answer, for one update or for several neighbours."""

    update: int  # the first one
    tokens: np.ndarray
    ages: np.ndarray  # summed over tokens


class TokenAges:
    """How many versions trained tokens lag behind, by update and by position in the answer."""

    def __init__(self) -> None:
        self.rows: Thinned[AgeRow] = Thinned(
            _MAX_ROWS,
            lambda a, b: AgeRow(update=a.update, tokens=a.tokens + b.tokens, ages=a.ages + b.ages),
        )
        self.width = 1  # positions per column

    def add(self, update: int, batch: Sequence[VersionRuns]) -> None:
        starts, ends, ages = [], [], []
        for runs in batch:
            position = 0
            for age, count in runs:
                starts.append(position)
                position += count
                ends.append(position)
                ages.append(age)
        if not starts:
            return
        while max(ends) > self.width * _NUM_POSITIONS:
            self._double_width()
        edges = np.arange(_NUM_POSITIONS + 1) * self.width
        covered = np.diff(np.clip(edges, np.array(starts)[:, None], np.array(ends)[:, None]), axis=1)
        self.rows.append(AgeRow(update=update, tokens=covered.sum(axis=0), ages=np.array(ages) @ covered))

    def _double_width(self) -> None:
        for row in self.rows:
            row.tokens, row.ages = _halved(row.tokens), _halved(row.ages)
        self.width *= 2


def _halved(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values.reshape(-1, 2).sum(axis=1), np.zeros(len(values) // 2, dtype=values.dtype)])
