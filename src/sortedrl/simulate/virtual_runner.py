"""Tools on a virtual clock: a turn's result is ready when the time that its tools take has passed.

The simulator gives it traces of tool seconds (`simulate/tools.py`), property tests real environments. It is a
`TurnRunner` of `environment/loop.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from sortedrl.clock import VirtualClock
from sortedrl.environment.base import Turn, TurnResult

Work = Callable[[Turn], tuple[TurnResult, float]]
"""Returns the result of a turn and the seconds that it takes."""


@dataclass(slots=True, kw_only=True)
class VirtualRunner:
    """Any number of turns are worked on at the same time."""

    clock: VirtualClock
    work: Work
    _ready: list[tuple[float, int, TurnResult]] = field(default_factory=list)  # a heap by time
    _num_submitted: int = 0

    def submit(self, turn: Turn) -> None:
        result, seconds = self.work(turn)
        self._num_submitted += 1
        heapq.heappush(self._ready, (self.clock.now() + seconds, self._num_submitted, result))
        if seconds:
            self.clock.set_timer(self.clock.now() + seconds)

    def poll(self, timeout: float) -> list[TurnResult]:
        """What is ready now; with a `timeout`, the clock first goes on to the next thing that happens."""
        if timeout > 0 and self._ready and self._ready[0][0] > self.clock.now():
            timer = self.clock.next_timer()
            assert timer is not None, "a tool works, and no timer is set for its end"
            self.clock.advance(timer)
        results: list[TurnResult] = []
        while self._ready and self._ready[0][0] <= self.clock.now():
            results.append(heapq.heappop(self._ready)[2])
        return results

    def forget(self, sample: int) -> None:
        pass
