"""The gate of drafts: whether a pass should check drafts and how likely their tokens must be, from what is measured.

`speculation.py` asks before every decode pass and reports the seconds and tokens of every pass. A draft token costs one
more row in the pass, and saves its slot a pass with the probability that it is right. For a small model a row costs
almost as much as a pass, for a large one almost nothing, so the gate measures both, for each number of running slots.
It also keeps an account of the time that drafts have saved: their tokens, at the price of passes without drafts, minus
the time of the passes with drafts.
Guarantees: where the account falls below a loss of `_LOSS` passes, drafts stop, and are tried again after pauses that
grow fourfold. The gate decides about time only: answers are the same whatever it says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sortedrl.engine.local.drafts import NUM_KINDS

_MIN_PLAIN = 4  # passes without drafts that are measured before drafts are tried
_PLAIN_MEMORY = 16  # their time is a mean over about so many
_PLAIN_EVERY = 64  # after so many passes with drafts the time without them is measured again
_LOSS = 4.0  # in passes: the account's lower limit, and how much of a gain it remembers
_FIRST_PAUSE, _MAX_PAUSE = 256, 1 << 14  # passes without drafts after a loss
_MEMORY = 0.98  # the weight of a measurement falls by this factor with each later one
_OUTLIER = 3.0  # a pass that takes more than so many times the expected time counts as if it took this
_MIN_PASSES = 6.0  # before they tell what a row costs
_GUESSED_ROW = 0.1  # the cost of one more row in passes, before it is measured
_LEAST = 0.05  # a draft token less likely than this is never worth its row
_PRIOR_TRIALS, _PRIOR_RATE = 4.0, 0.6  # of a kind of guess that is not measured yet


@dataclass(slots=True, kw_only=True)
class _Line:
    """Seconds of a pass as a line over its rows, by least squares with fading weights."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_seconds: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self.weight = _MEMORY * self.weight + 1
        self.rows = _MEMORY * self.rows + rows
        self.seconds = _MEMORY * self.seconds + seconds
        self.rows_rows = _MEMORY * self.rows_rows + rows * rows
        self.rows_seconds = _MEMORY * self.rows_seconds + rows * seconds

    @property
    def slope(self) -> float:
        """Seconds of one more row; 0 after too few passes, or if all had the same number of rows."""
        spread = self.rows_rows * self.weight - self.rows**2
        if self.weight < _MIN_PASSES or spread < 1:
            return 0.0
        return max((self.rows_seconds * self.weight - self.rows * self.seconds) / spread, 0.0)


@dataclass(slots=True, kw_only=True)
class _Running:
    """What is known about passes with one number of running slots."""

    plain_s: float = 0.0  # mean seconds of a pass without drafts
    num_plain: int = 0
    num_measured: int = 0  # passes without drafts since the last one with drafts
    num_drafted: int = 0  # passes with drafts since the last measurement
    saved: float = 0.0  # the account, in passes without drafts
    line: _Line = field(default_factory=_Line)  # of passes with drafts
    wake_at: float = 0  # the number of the pass before which the gate is closed
    pause: int = _FIRST_PAUSE


@dataclass(slots=True, kw_only=True)
class DraftGate:
    """`slots`: of the engine. Drafts are tried with one running slot, then with one more as long as they pay, up to a
    quarter of the slots."""

    slots: int
    rates: list[float] = field(default_factory=lambda: [_PRIOR_RATE] * NUM_KINDS)  # how often a guess is right, by kind
    is_measuring: bool = False  # the time of the current pass, without drafts, is wanted
    _trials: list[float] = field(default_factory=lambda: [_PRIOR_TRIALS] * NUM_KINDS)
    _num_passes: int = 0
    _running: list[_Running] = field(init=False)  # by the number of running slots

    def __post_init__(self) -> None:
        self._running = [_Running(wake_at=0 if number <= 1 else math.inf) for number in range(self.slots + 1)]

    def least(self, num_running: int) -> float | None:
        """With which probability a draft token must be right to be worth its row; None: a pass without drafts."""
        self._num_passes += 1
        known = self._running[num_running]
        if self._num_passes < known.wake_at:  # first, because most passes end here and are short
            self.is_measuring = False
            return None
        self.is_measuring = known.num_measured < _MIN_PLAIN or known.num_drafted >= _PLAIN_EVERY
        if self.is_measuring:
            return None
        row_s = known.line.slope or _GUESSED_ROW * known.plain_s
        return max(row_s * num_running / known.plain_s, _LEAST)

    def count_plain(self, num_running: int, seconds: float) -> None:
        """Count a pass without drafts."""
        known = self._running[num_running]
        known.num_plain += 1
        known.num_measured += 1
        known.num_drafted = 0
        if known.num_plain > 1:
            seconds = min(seconds, _OUTLIER * known.plain_s)
        known.plain_s += (seconds - known.plain_s) / min(known.num_plain, _PLAIN_MEMORY)

    def count_drafted(
        self, num_running: int, rows: int, num_tokens: int, seconds: float, *, is_first: bool = False
    ) -> None:
        """Count a pass with drafts, which appended so many tokens. `is_first`: it also indexed whole answers."""
        known = self._running[num_running]
        known.num_drafted += 1
        seconds = min(seconds, _OUTLIER * known.plain_s * rows / num_running)
        if not is_first:
            known.line.add(rows, seconds)
        known.saved = min(known.saved + num_tokens / num_running - seconds / known.plain_s, _LOSS)
        if known.saved < -_LOSS:
            self._close(num_running)
        elif known.saved == _LOSS and num_running < self.slots // 4:
            more = self._running[num_running + 1]
            more.wake_at = min(more.wake_at, self._num_passes)

    def count_guesses(self, kinds: Sequence[int], num_right: int) -> None:
        """Count a draft's guesses up to the first wrong one; the others have not been tested."""
        for kind in kinds[: num_right + 1]:
            self._trials[kind] = _MEMORY * self._trials[kind] + 1
            self.rates[kind] += ((num_right > 0) - self.rates[kind]) / self._trials[kind]
            num_right -= 1

    def _close(self, num_running: int) -> None:
        """Stop drafts for a while here; where more slots run, until they pay here: a row saves less of a pass there.

        Afterwards new guesses count as much as all earlier ones: the model may have changed.
        """
        known = self._running[num_running]
        for other in self._running[num_running:]:
            other.wake_at = math.inf
        known.wake_at = self._num_passes + known.pause
        known.pause = min(4 * known.pause, _MAX_PAUSE)
        known.saved, known.num_measured = 0.0, 0
        self._trials = [min(trials, _PRIOR_TRIALS) for trials in self._trials]


class OpenGate:
    """Drafts in every pass, for tests and measurements: what it does depends on no clock."""

    rates: Sequence[float] = [1.0] * NUM_KINDS
    is_measuring = False

    def least(self, num_running: int) -> float | None:
        return 1.0

    def count_plain(self, num_running: int, seconds: float) -> None:
        pass

    def count_drafted(
        self, num_running: int, rows: int, num_tokens: int, seconds: float, *, is_first: bool = False
    ) -> None:
        pass

    def count_guesses(self, kinds: Sequence[int], num_right: int) -> None:
        pass
