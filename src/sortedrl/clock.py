"""Time as the controller sees it: wall time, or the virtual time that the parts of a simulation share.

Nothing waits on a virtual clock: a part that needs time sets a timer, and a part that would wait advances the clock.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, kw_only=True, frozen=True)
class Timing:
    """How a run's time divides, in seconds of its clock."""

    rollout_s: float
    update_s: float
    publish_s: float
    wall_s: float
    save_s: float = 0.0  # checkpoints between two updates


class Clock(Protocol):
    def now(self) -> float: ...

    def stopped(self) -> AbstractContextManager[None]:
        """Context in which the clock stands still, such as during an evaluation."""
        ...


class WallClock:
    """Seconds since it was created, plus `at`, without the time in `stopped`."""

    def __init__(self, at: float = 0.0) -> None:
        self._start = time.perf_counter() - at
        self._stopped_at: float | None = None

    def now(self) -> float:
        return (time.perf_counter() if self._stopped_at is None else self._stopped_at) - self._start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        assert self._stopped_at is None, "the clock is stopped already"
        self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - self._stopped_at
            self._stopped_at = None


class VirtualClock:
    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[float] = []

    def now(self) -> float:
        return self._now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        before = self._now
        yield
        self._now = before

    def set_timer(self, at: float) -> None:
        """Make `next_timer` return `at` before any later time."""
        heapq.heappush(self._timers, at)

    def next_timer(self) -> float | None:
        while self._timers and self._timers[0] <= self._now:
            heapq.heappop(self._timers)
        return self._timers[0] if self._timers else None

    def advance(self, to: float) -> None:
        assert to >= self._now, f"the clock cannot go back from {self._now} to {to}"
        self._now = to
