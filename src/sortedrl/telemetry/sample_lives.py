"""Samples on their way from load to training: when each step came, and which version wrote which of their tokens.

`view.py` tells it what happened. What it keeps true: samples that are trained are forgotten but for the most recent, so
that memory follows what is under way, not the length of the run. Token versions follow from where attempts began and
ended; where weights changed in the middle of one, tokens are taken to be evenly spaced in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sortedrl.telemetry.series import Thinned

MAX_LIVES = 512
MAX_TRAINED = 192
_MAX_CUTS = 64
_NUM_POSITIONS = 96
_MAX_ROWS = 96

Runs = list[tuple[int, int]]
"""Tokens in order as (version, how many)."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One sample, in seconds of the run."""

    sample: int
    cohort: int
    loaded: float
    started: float | None = None
    cuts: list[float] = field(default_factory=list)  # interruptions
    finished: float | None = None
    trained: float | None = None
    reward: float | None = None
    runs: Runs = field(default_factory=list)
    pieces: list[tuple[int, float]] = field(default_factory=list)  # of the attempt under way: (version, seconds)

    def keep(self, num_tokens: int) -> None:
        """Only the first tokens are left."""
        if not self.runs:
            return
        total = sum(count for _, count in self.runs)
        while self.runs and total > num_tokens:
            version, count = self.runs.pop()
            total -= count
            if total < num_tokens:
                self.runs.append((version, num_tokens - total))
                total = num_tokens

    def extend(self, num_tokens: int) -> None:
        """The attempt ends with so many tokens in all: what it added is spread over its pieces."""
        added = num_tokens
        for _, count in self.runs:
            added -= count
        pieces, self.pieces = self.pieces, []
        if added <= 0 or not pieces:
            self.keep(num_tokens)
            return
        if len(pieces) == 1:  # nearly all
            self._put(pieces[0][0], added)
            return
        whole = sum(seconds for _, seconds in pieces)
        done = passed = 0
        for version, seconds in pieces[:-1]:
            passed += seconds
            until = round(added * passed / whole) if whole else 0
            self._put(version, until - done)
            done = until
        self._put(pieces[-1][0], added - done)

    def _put(self, version: int, count: int) -> None:
        if self.runs and self.runs[-1][0] == version:
            count += self.runs.pop()[1]
        if count:
            self.runs.append((version, count))


@dataclass(slots=True, kw_only=True)
class CohortWait:
    """How long the samples of one cohort, or of several neighbours, waited from load to training."""

    cohort: int  # the first
    num_samples: int
    num_cut: int = 0  # samples that were interrupted
    waits: list[float] = field(default_factory=list)  # until all are trained
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0

    def settle(self) -> CohortWait:
        self.low, self.middle, self.high = (float(value) for value in np.quantile(self.waits, [0.0, 0.5, 1.0]))
        self.waits = []
        return self


def _join(first: CohortWait, second: CohortWait) -> CohortWait:
    count = first.num_samples + second.num_samples
    return CohortWait(
        cohort=first.cohort,
        num_samples=count,
        num_cut=first.num_cut + second.num_cut,
        low=min(first.low, second.low),
        middle=(first.middle * first.num_samples + second.middle * second.num_samples) / count,
        high=max(first.high, second.high),
    )


class Lives:
    """All samples that are not trained, and the most recent ones whatever became of them."""

    def __init__(self) -> None:
        self.under_way: dict[int, Life] = {}
        self.recent: deque[Life] = deque(maxlen=MAX_LIVES)
        self.num_loaded = 0
        self.trained: deque[tuple[int, Runs]] = deque(maxlen=MAX_TRAINED)  # sample, tokens as (age, how many)
        self.waits: Thinned[CohortWait] = Thinned(256, _join)
        self.ages = TokenAges()
        self._open: dict[int, CohortWait] = {}

    def load(self, t: float, cohort: int, samples: Sequence[int]) -> None:
        self.num_loaded += len(samples)
        if samples:
            self._open[cohort] = CohortWait(cohort=cohort, num_samples=len(samples))
        for sample in samples:
            life = Life(sample=sample, cohort=cohort, loaded=t)
            self.under_way[sample] = life
            self.recent.append(life)

    def start(self, t: float, sample: int, *, version: int, cached: int) -> None:
        life = self.under_way.get(sample)
        if life is not None:
            life.started = t if life.started is None else life.started
            life.finished = None
            life.keep(cached)
            life.pieces = [(version, 0.0)]

    def verify(self, sample: int, accepted: int) -> None:
        life = self.under_way.get(sample)
        if life is not None and life.pieces:
            life.runs = [(life.pieces[0][0], accepted)] if accepted else []

    def turn(self, sample: int, version: int, seconds: float, *, paused: float | None) -> None:
        """The weights change in the middle of an attempt, after it has decoded for so long with the last ones.

        `paused`: when it had to stop for that.
        """
        life = self.under_way.get(sample)
        if life is None or not life.pieces:
            return
        life.pieces[-1] = (life.pieces[-1][0], seconds)
        life.pieces.append((version, 0.0))
        if paused is not None and len(life.cuts) < _MAX_CUTS:
            life.cuts.append(paused)

    def end(self, t: float, sample: int, *, outcome: str, num_tokens: int, seconds: float) -> None:
        life = self.under_way.get(sample)
        if life is None:
            return
        if life.pieces:
            life.pieces[-1] = (life.pieces[-1][0], seconds)
        life.extend(num_tokens)
        if outcome in ("stop", "length"):
            life.finished = t
        elif len(life.cuts) < _MAX_CUTS:
            life.cuts.append(t)

    def requeue(self, sample: int, discarded: int) -> None:
        life = self.under_way.get(sample)
        if life is not None:
            life.finished = None
            life.keep(sum(count for _, count in life.runs) - discarded)

    def train(self, t: float, update: int, version: int, samples: Sequence[int], rewards: Sequence[float]) -> None:
        batch: list[Runs] = []
        for sample, reward in zip(samples, rewards, strict=True):
            life = self.under_way.pop(sample, None)
            if life is None:
                continue
            life.trained, life.reward = t, reward
            runs = [(version - written, count) for written, count in life.runs]
            life.runs = []
            batch.append(runs)
            self.trained.append((sample, runs))
            self._close(life)
        self.ages.add(update, batch)

    def _close(self, life: Life) -> None:
        wait = self._open.get(life.cohort)
        if wait is None or life.trained is None:
            return
        wait.waits.append(life.trained - life.loaded)
        wait.num_cut += bool(life.cuts)
        if len(wait.waits) == wait.num_samples:
            self.waits.append(self._open.pop(life.cohort).settle())


@dataclass(slots=True, kw_only=True)
class AgeRow:
    """Trained tokens by position for one update, or for several neighbours."""

    update: int  # the first
    tokens: np.ndarray
    ages: np.ndarray  # summed over tokens


class TokenAges:
    """How many versions trained tokens lag behind, by update and by position in the answer."""

    def __init__(self) -> None:
        self.rows: Thinned[AgeRow] = Thinned(
            _MAX_ROWS,
            lambda a, b: AgeRow(update=a.update, tokens=a.tokens + b.tokens, ages=a.ages + b.ages),
        )
        self.width = 1  # positions a column

    def add(self, update: int, batch: Sequence[Runs]) -> None:
        starts, ends, ages = [], [], []
        for runs in batch:
            at = 0
            for age, count in runs:
                starts.append(at)
                at += count
                ends.append(at)
                ages.append(age)
        if not starts:
            return
        while max(ends) > self.width * _NUM_POSITIONS:
            self._double()
        edges = np.arange(_NUM_POSITIONS + 1) * self.width
        covered = np.diff(np.clip(edges, np.array(starts)[:, None], np.array(ends)[:, None]), axis=1)
        self.rows.append(AgeRow(update=update, tokens=covered.sum(axis=0), ages=np.array(ages) @ covered))

    def _double(self) -> None:
        for row in self.rows:
            row.tokens, row.ages = _halved(row.tokens), _halved(row.ages)
        self.width *= 2


def _halved(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values.reshape(-1, 2).sum(axis=1), np.zeros(len(values) // 2, dtype=values.dtype)])
