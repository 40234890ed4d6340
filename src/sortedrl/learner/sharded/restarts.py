"""Ranks that are started again when one of them is lost, so that the run goes on.

`run/builders/learner.py` puts `RestartingRanks` around the ranks of a `ShardedLearner`. New ranks are set to the last
restart point (the last checkpoint that has its name, or the start of the run). Then they repeat the updates since that
point, with the same samples in the same batches, which are kept here for this purpose. So buffer, ledger and engines do
not take part: every sample is still trained once, and the version that engines have is the version of the new ranks.

Guarantees: the weights after a restart are those of the same updates in the same order, computed again (bit by bit the
same where the arithmetic is deterministic); a call that changes nothing outside the ranks is repeated on the new ranks;
no more than `max_restarts` restarts, then the last failure is raised; errors of this package never cause a restart,
because they would come again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sortedrl.channel import Numbers
from sortedrl.errors import RankLostError
from sortedrl.learner.forked import pack_batch, unpack_batch
from sortedrl.records import Batch

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """Processes that all run the same method at the same time, such as `ray_ranks.RayRanks`."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank and return their results by rank. Raises if a rank raises."""
        ...

    def start(self, method: str) -> Callable[[], list[Any]]:
        """Call a method that runs beside others on every rank; returns a function that waits for the results."""
        ...

    @property
    def gpus(self) -> list[tuple[str, int]]:
        """The machine and the GPU of each rank that has one."""
        ...

    def close(self) -> None: ...


class RanksRestarted(ConnectionError):
    """The ranks were started again while they sent weights: the receivers must connect to the new ones."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RestartPoint:
    """A state that new ranks can be set to."""

    name: str
    weights: Callable[[Any], Mapping[str, Any]]  # for the skeleton of the model: the weights to build ranks with
    load: Callable[[Ranks], None] = lambda ranks: None  # sets the ranks to the rest of the state


@dataclass(slots=True, kw_only=True, frozen=True)
class Restart:
    """What happened at a restart, for telemetry."""

    number: int
    reason: str
    point: str
    num_repeated: int  # updates that were computed again
    seconds: float


class RestartingRanks:
    """`launch` starts ranks. `on_close` ends what they share, such as a connection to Ray."""

    def __init__(
        self, launch: Callable[[], Ranks], *, max_restarts: int, on_close: Callable[[], None] | None = None
    ) -> None:
        self._launch = launch
        self._max_restarts = max_restarts
        self._on_close = on_close
        self._ranks = launch()
        self._built: tuple[Any, ...] | None = None  # the arguments of `build`, without the weights
        self._point: RestartPoint | None = None
        self._kept: deque[_KeptUpdate] = deque()  # the updates since the restart point
        self._calling = threading.RLock()
        self._state = threading.RLock()  # of point and updates; a thread that saves changes them too
        self._told: deque[Restart] = deque()
        self.num_updates = 0  # that succeeded
        self.num_restarts = 0

    @property
    def place(self) -> Hashable:
        """Changes with every restart: connections to the ranks before are void."""
        return ("ranks", self.num_restarts)

    @property
    def gpus(self) -> list[tuple[str, int]]:
        return self._ranks.gpus

    @property
    def can_restart(self) -> bool:
        return self.num_restarts < self._max_restarts

    def call(self, method: str, *arguments: Any) -> list[Any]:
        with self._calling:
            while True:
                try:
                    results = self._ranks.call(method, *arguments)
                except RankLostError as error:
                    if method == "build":
                        raise  # the run has not begun
                    self._restart(error)
                    if method == "apply":
                        raise RanksRestarted("the ranks of the learner were started again") from error
                    continue
                if method == "build":
                    skeleton, _, *rest = arguments
                    self._built = (skeleton, *rest)
                elif method == "update":
                    self._keep(*arguments)
                return results

    def start(self, method: str) -> Callable[[], list[Any]]:
        """As of `Ranks`. A failure is raised and restarts nothing: the next call will meet it too."""
        return self._ranks.start(method)

    def set_point(self, point: RestartPoint, num_updates: int) -> None:
        """Restart from `point` from now on, which has the state after `num_updates` updates of these ranks."""
        with self._state:
            self._point = point
            while self._kept and self._kept[0].number <= num_updates:
                self._kept.popleft()

    def take_restarts(self) -> list[Restart]:
        """The restarts since the last call of this."""
        return [self._told.popleft() for _ in range(len(self._told))]

    def close(self) -> None:
        self._ranks.close()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def _keep(self, batch: Batch, *rest: Any) -> None:
        with self._state:
            self.num_updates += 1
            if self._max_restarts:
                header, numbers = pack_batch(batch)
                self._kept.append(
                    _KeptUpdate(number=self.num_updates, header=header, data=bytes(numbers.data), rest=rest)
                )

    def _restart(self, error: RankLostError) -> None:
        """Start new ranks and repeat the updates since the restart point; tries again if one of them is lost too."""
        with self._state:
            while True:
                if self._point is None or self._built is None or not self.can_restart:
                    raise error
                self.num_restarts += 1
                began, point = time.monotonic(), self._point
                log.warning(
                    "%s: the ranks start again from %s and repeat %d updates (restart %d of %d)",
                    error.what,
                    point.name,
                    len(self._kept),
                    self.num_restarts,
                    self._max_restarts,
                )
                try:
                    self._rebuild(point, self._built)
                except RankLostError as again:
                    error = again
                    continue
                seconds = time.monotonic() - began
                self._told.append(
                    Restart(
                        number=self.num_restarts,
                        reason=error.what,
                        point=point.name,
                        num_repeated=len(self._kept),
                        seconds=seconds,
                    )
                )
                return

    def _rebuild(self, point: RestartPoint, built: tuple[Any, ...]) -> None:
        self._ranks.close()
        self._ranks = ranks = self._launch()
        skeleton, *rest = built
        ranks.call("build", skeleton, point.weights(skeleton), *rest)
        point.load(ranks)
        for update in self._kept:
            ranks.call("update", update.batch, *update.rest)


@dataclass(slots=True, kw_only=True, frozen=True)
class _KeptUpdate:
    """An update that may have to be repeated, packed: Python's lists of numbers take several times the memory."""

    number: int
    header: list[Any]
    data: bytes
    rest: tuple[Any, ...]  # the other arguments of the update

    @property
    def batch(self) -> Batch:
        return unpack_batch(self.header, Numbers(self.data))
