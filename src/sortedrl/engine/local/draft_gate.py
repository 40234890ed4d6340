"""The gate of drafts: how many tokens to draft, from what is measured, so that a pass with drafts is worth its time.

`speculation.py` asks before every decode pass and reports the seconds and the accepted tokens of every pass. A draft
token costs one more row in the pass and saves a pass of its slot with the probability that it is right. For small
models a row costs nearly as much as a pass, for large ones almost nothing, so the gate measures both.
Guarantees: without drafts that pay, the gate closes and tries again after ever longer pauses. It decides about time
only: answers are the same whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sortedrl.engine.local.drafts import NUM_KINDS, Draft

MAX_DRAFT = 8  # tokens; the pass draws one more
_MIN_PLAIN = 3  # passes without drafts that must be measured first, for a number of running slots
_PLAIN_EVERY = 32  # one pass in so many runs without drafts, so that its time stays known
_MIN_GAIN = 0.05  # the share of time that drafts must promise to save
_MIN_PAUSE, _MAX_PAUSE = 16, 4096  # passes until the gate opens again
_MEMORY = 0.98  # the weight of a measurement falls by this factor with each later one
_OUTLIER = 2.0  # a pass that takes more than so many times the expected time counts as if it took this
_GUESSED_OVERHEAD, _GUESSED_ROW = 1.3, 0.1  # of a pass with drafts, and of one more row, in passes without drafts
_PRIOR_TRIALS, _PRIOR_RATE = 4.0, 0.6  # of drafts that are not measured yet


@dataclass(slots=True, kw_only=True)
class _Line:
    """Seconds of a pass as a line over its rows, by least squares with exponentially fading weights."""

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
        """Seconds of one more row; 0 as long as all passes had the same number of rows."""
        spread = self.rows_rows * self.weight - self.rows**2
        return max((self.rows_seconds * self.weight - self.rows * self.seconds) / spread, 0.0) if spread > 1 else 0.0

    def at(self, rows: float) -> float:
        return (self.seconds + self.slope * (rows * self.weight - self.rows)) / self.weight


@dataclass(slots=True, kw_only=True)
class _Running:
    """What is known about passes with one number of running slots."""

    plain_s: float = 0.0  # mean seconds of a pass without drafts
    num_plain: int = 0
    num_since_plain: int = 0
    resume_at: int = 0  # the number of the pass before which the gate is closed
    pause: int = _MIN_PAUSE


@dataclass(slots=True, kw_only=True)
class _Rate:
    """How often a draft token is right, given that those before it were."""

    trials: float = _PRIOR_TRIALS
    hits: float = _PRIOR_TRIALS * _PRIOR_RATE

    @property
    def value(self) -> float:
        return self.hits / self.trials

    def add(self, drafted: int, accepted: int) -> None:
        self.trials = _MEMORY * self.trials + min(accepted + 1, drafted)
        self.hits = _MEMORY * self.hits + accepted

    def forget(self) -> None:
        """Move halfway back to the rate that an unknown source has, so that it is tried again some day."""
        self.trials = (self.trials + _PRIOR_TRIALS) / 2
        self.hits = (self.hits + _PRIOR_TRIALS * _PRIOR_RATE) / 2


@dataclass(slots=True, kw_only=True)
class DraftGate:
    """`slots`: of the engine. Drafts are considered while at most a quarter of them run."""

    slots: int
    _num_passes: int = 0
    _plain: _Line = field(default_factory=_Line)
    _drafted: _Line = field(default_factory=_Line)
    _running: dict[int, _Running] = field(default_factory=dict)
    _rates: list[_Rate] = field(default_factory=lambda: [_Rate() for _ in range(NUM_KINDS)])

    def limits(self, num_running: int) -> list[int] | None:
        """How many tokens to draft at most, by the kind of the draft; None: run the pass without drafts."""
        if num_running > max(1, self.slots // 4):
            return None
        known = self._running.setdefault(num_running, _Running())
        if known.num_plain < _MIN_PLAIN or known.num_since_plain >= _PLAIN_EVERY or self._num_passes < known.resume_at:
            return None
        # A row is worth its time if its token is right with at least this probability.
        needed = self._row_s * num_running / known.plain_s
        limits = [_length(rate.value, needed) for rate in self._rates]
        if any(limits):
            return limits
        self._close(known)
        return None

    def pays(self, drafts: Iterable[Draft], num_running: int) -> bool:
        """Whether a pass with these drafts is expected to take less time per token than one without."""
        known = self._running[num_running]
        rows = expected = float(num_running)
        for kind, tokens in drafts:
            rate = self._rates[kind].value
            rows += len(tokens)
            expected += sum(rate**depth for depth in range(1, len(tokens) + 1))
        if not self._drafted.weight:
            self._guess_drafted(num_running)
        if self._drafted.at(rows) * num_running < (1 - _MIN_GAIN) * known.plain_s * expected:
            known.pause = _MIN_PAUSE
            return True
        if rows > num_running:  # an attempt without a draft now may have one after the next token
            self._close(known)
        return False

    def _guess_drafted(self, num_running: int) -> None:
        """Before any pass with drafts: guess its time from those without."""
        slope = self._plain.slope or _GUESSED_ROW * self._plain.at(num_running)
        start = _GUESSED_OVERHEAD * self._plain.at(num_running)
        for rows in (num_running, num_running * MAX_DRAFT):
            self._drafted.add(rows, start + slope * (rows - num_running))

    def _close(self, known: _Running) -> None:
        known.resume_at = self._num_passes + known.pause
        known.pause = min(2 * known.pause, _MAX_PAUSE)
        for rate in self._rates:
            rate.forget()

    @property
    def _row_s(self) -> float:
        return self._drafted.slope or self._plain.slope

    def count_plain(self, num_running: int, seconds: float) -> None:
        self._num_passes += 1
        if num_running > max(1, self.slots // 4):
            if self._num_passes % 8 == 0:  # for the slope; more would only cost time
                self._plain.add(num_running, seconds)
            return
        known = self._running.setdefault(num_running, _Running())
        known.num_plain += 1
        known.num_since_plain = 0
        if known.num_plain > 1:
            seconds = min(seconds, _OUTLIER * known.plain_s)
        known.plain_s += (seconds - known.plain_s) / min(known.num_plain, 16)
        self._plain.add(num_running, seconds)

    def count_drafted(self, num_running: int, rows: int, seconds: float) -> None:
        self._num_passes += 1
        self._running[num_running].num_since_plain += 1
        self._drafted.add(rows, min(seconds, _OUTLIER * self._drafted.at(rows)))

    def count_draft(self, kind: int, drafted: int, accepted: int) -> None:
        self._rates[kind].add(drafted, accepted)


def _length(rate: float, needed: float) -> int:
    """The largest number of tokens of which the last is right with a probability of at least `needed`."""
    length, probability = 0, rate
    while length < MAX_DRAFT and probability >= needed:
        length += 1
        probability *= rate
    return length


class OpenGate:
    """Drafts in every pass, for tests and measurements: what it does depends on no clock."""

    def limits(self, num_running: int) -> list[int] | None:
        return [MAX_DRAFT] * NUM_KINDS

    def pays(self, drafts: Iterable[Draft], num_running: int) -> bool:
        return any(draft.tokens for draft in drafts)

    def count_plain(self, num_running: int, seconds: float) -> None:
        pass

    def count_drafted(self, num_running: int, rows: int, seconds: float) -> None:
        pass

    def count_draft(self, kind: int, drafted: int, accepted: int) -> None:
        pass
