"""The parts that a pool is made of: remote engines, the launcher that starts them, and the pool's members.

`ray_launcher.py` implements `RemoteEngine` and `EngineLauncher` with Ray actors, `child_launcher.py` with child
processes. A `PoolMember` is one of the pool's places: its engine changes when it is restarted, the member stays.

Guarantees: every call to a remote engine returns at once, with a future that fails if the engine is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from sortedrl.engine.base import EngineStats, InFlight, Request
from sortedrl.engine.pool.actor_loop import Report

MAX_DEATHS = 5  # deaths in a row without a finished answer after which the pool gives a member up


class RemoteEngine(Protocol):
    """An engine in another process."""

    def slots(self) -> Future[int]: ...

    def submit(self, requests: list[Request]) -> Future[None]: ...

    def take(self, wait_s: float, pause_id: int) -> Future[Report]: ...

    def interrupt(self, samples: list[int] | None, pause_id: int) -> Future[Report]:
        """Stop these samples, or all, and begin a pause: nothing is decoded until a `take` with this `pause_id`."""
        ...

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]: ...

    def sleep(self) -> Future[None]: ...

    def wake(self) -> Future[None]: ...

    def stats(self) -> Future[EngineStats]: ...

    def kill(self) -> None: ...


class WeightRoute(Protocol):
    """A way for weights from the learner's processes to the engines that does not pass through this one."""

    def begin(self, source: Any, engines: Sequence[RemoteEngine]) -> list[Any]:
        """Start to send the weights to these engines; returns what each one's `publish` needs, in their order."""
        ...

    def finish(self) -> str | None:
        """Wait until sending has ended; returns why it failed, or None. Raises the learner's errors."""
        ...

    def close(self) -> None:
        """Release what is held for sending; the engines are gone."""
        ...


class EngineLauncher(Protocol):
    """Starts remote engines and stores weights for them."""

    def launch(self, index: int) -> RemoteEngine: ...

    def prepare_spare(self) -> None:
        """The pool calls it when an engine has started: a good moment to prepare for the next start."""
        ...

    def put(self, source: Any) -> Any:
        """Store a learner's weights once for all engines. The pool passes the result to their `publish`."""
        ...

    def wait_any(self, futures: Sequence[Future[Any]], seconds: float) -> None:
        """Wait until one of these answers of the engines has come, at most so many seconds."""
        ...

    def close(self) -> None: ...


def sibling_key(request: Request) -> int:
    """A key of the prompt. The router sends requests with the same key to the same engine if it can.

    Two prompts may have the same key by chance; this does no harm.
    """
    return hash(tuple(request.prompt))


@dataclass(slots=True, kw_only=True)
class PoolMember:
    index: int
    engine: RemoteEngine | None = None  # None: dead, or still starting
    starting: Future[Any] | None = None  # the call that a starting engine has to answer next
    starting_engine: RemoteEngine | None = None
    start_version: int | None = None  # the weights that the starting engine was given
    taking: Future[Report] | None = None
    asked_at: float = 0.0  # when `taking` or `starting` was called
    submitting: list[tuple[Future[None], list[Request]]] = field(default_factory=list)
    running: dict[int, Request] = field(default_factory=dict)  # by sample
    keys: dict[int, int] = field(default_factory=dict)  # `sibling_key` of each running sample
    num_siblings: dict[int, int] = field(default_factory=dict)  # running samples by `sibling_key`
    free: int = 0  # slots
    num_deaths: int = 0  # since it last finished an answer
    died_at: float = 0.0
    restart_at: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)  # as last reported
    stats_of_dead: EngineStats = field(default_factory=EngineStats)  # sum over this member's earlier engines

    @property
    def is_given_up(self) -> bool:
        return self.num_deaths >= MAX_DEATHS

    @property
    def needs_restart(self) -> bool:
        return self.engine is None and self.starting is None and not self.is_given_up

    @property
    def has_started(self) -> bool:
        """Whether its new engine has started and waits for weights."""
        starting = self.starting
        return starting is not None and starting.done() and starting.exception() is None

    def assign(self, request: Request, key: int) -> None:
        """Take a slot for a request with this `sibling_key`."""
        self.free -= 1
        self.running[request.sample] = request
        self.keys[request.sample] = key
        self.num_siblings[key] = self.num_siblings.get(key, 0) + 1

    def release(self, sample: int) -> None:
        """Free the slot of a sample whose attempt has ended."""
        del self.running[sample]
        self.free += 1
        key = self.keys.pop(sample)
        if (left := self.num_siblings[key] - 1) > 0:
            self.num_siblings[key] = left
        else:
            del self.num_siblings[key]

    def remove_engine(self) -> list[Request]:
        """Forget a dead engine, and return the requests that it was running."""
        lost = list(self.running.values())
        self.engine = self.taking = self.starting_engine = self.starting = None
        self.running.clear()
        self.keys.clear()
        self.num_siblings.clear()
        self.submitting.clear()
        self.free = 0
        self.stats_of_dead = self.stats_of_dead.plus(self.stats)
        self.stats = EngineStats()
        return lost
