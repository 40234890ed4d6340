"""The members of a pool, as the pool knows them: what they can be asked, where they come from, and their places.

What it keeps true: every call to a member returns at once, with a future that fails when the member is dead.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from sortedrl.engine.base import EngineStats, InFlight, Request
from sortedrl.engine.pool.actor_loop import Report

MAX_DEATHS = 5  # in a row without an answer in between: then a member is given up


class Member(Protocol):
    """One engine, far away."""

    def slots(self) -> Future[int]: ...

    def submit(self, requests: list[Request]) -> Future[None]: ...

    def take(self, wait_s: float, turn: int) -> Future[Report]: ...

    def interrupt(self, samples: list[int] | None, turn: int) -> Future[Report]:
        """Begin a turn: nothing is decoded until a `take` of it."""
        ...

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]: ...

    def stats(self) -> Future[EngineStats]: ...

    def kill(self) -> None: ...


class Members(Protocol):
    """Where members come from."""

    def launch(self, index: int) -> Member: ...

    def stock_up(self) -> None:
        """Called when a member has come up: the moment to prepare for the next."""
        ...

    def put(self, source: Any) -> Any:
        """Store a learner's weights once, for all members to read; what it returns goes into their `publish`."""
        ...

    def close(self) -> None: ...


def sibling_key(request: Request) -> int:
    """The same for requests with the same prompt. Two prompts that share one are merely kept together."""
    return hash(tuple(request.prompt))


@dataclass(slots=True, kw_only=True)
class Seat:
    """The place of a member in the pool: the member changes when it is started again, the place stays."""

    index: int
    member: Member | None = None  # None: dead, or not up yet
    starting: Future[Any] | None = None
    start_member: Member | None = None
    start_version: int | None = None  # of the weights that it was given since
    taking: Future[Report] | None = None
    asked_at: float = 0.0
    submitting: list[tuple[Future[None], list[Request]]] = field(default_factory=list)
    running: dict[int, Request] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)  # of what runs, the `sibling_key`
    prompts: dict[int, int] = field(default_factory=dict)  # how many of them run, by key
    free: int = 0
    num_deaths: int = 0  # since it last finished an answer
    died_at: float = 0.0
    restart_at: float = 0.0
    stats: EngineStats = field(default_factory=EngineStats)  # as last heard
    buried: EngineStats = field(default_factory=EngineStats)  # of members that died

    @property
    def is_given_up(self) -> bool:
        return self.num_deaths >= MAX_DEATHS

    @property
    def is_vacant(self) -> bool:
        return self.member is None and self.starting is None and not self.is_given_up

    def seat(self, request: Request, key: int) -> None:
        """A request goes to this member; `key` is its `sibling_key`."""
        self.free -= 1
        self.running[request.sample] = request
        self.keys[request.sample] = key
        self.prompts[key] = self.prompts.get(key, 0) + 1

    def unseat(self, sample: int) -> None:
        """Its attempt is over."""
        del self.running[sample]
        self.free += 1
        key = self.keys.pop(sample)
        if (left := self.prompts[key] - 1) > 0:
            self.prompts[key] = left
        else:
            del self.prompts[key]

    def vacate(self) -> list[Request]:
        """The member is dead: what it ran, which is nowhere any more."""
        left = list(self.running.values())
        self.member = self.taking = self.start_member = self.starting = None
        self.running.clear()
        self.keys.clear()
        self.prompts.clear()
        self.submitting.clear()
        self.free = 0
        self.buried = self.buried.plus(self.stats)
        self.stats = EngineStats()
        return left
