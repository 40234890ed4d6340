"""Pool members that run in threads of the test process, so that tests of the pool need no Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from sortedrl.engine.base import Engine, EngineEvent, EngineStats, Handle, InFlight, Request
from sortedrl.engine.pool.actor_loop import ActorLoop, Report
from sortedrl.weights import arrays_of, load_arrays


@dataclass(slots=True)
class PausingEngine:
    """An engine that pauses after `num_steps` polls, until `may_go_on` is set or new weights are published.

    A test that acts during the pause acts on unfinished answers, however fast or busy the machine is.
    """

    engine: Engine
    may_go_on: threading.Event = field(default_factory=threading.Event)
    num_steps: int = 20

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        if not self.may_go_on.is_set():
            if self.num_steps == 0:
                time.sleep(0.001)
                return []
            self.num_steps -= 1
        return self.engine.poll(timeout)

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Handle:
        handle = self.engine.publish(version, weights, in_flight)
        self.may_go_on.set()
        return handle


class MemberDied(Exception):
    """Raised by every call to a member that was killed."""


class ThreadMember:
    def __init__(self, make_engine: Callable[[], tuple[Engine, Any]]) -> None:
        self.is_dead = False
        self.submitted: list[Request] = []
        self._module: Any = None
        self._threads = ThreadPoolExecutor(8)

        def make() -> Engine:
            engine, self._module = make_engine()
            return engine

        def take_up(engine: Engine, version: int, weights: Any, in_flight: InFlight) -> None:
            engine.publish(version, load_arrays(weights, self._module), in_flight).wait()

        self.host = ActorLoop(make, take_up)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        def run() -> Any:
            if self.is_dead:
                raise MemberDied("the member was killed")
            result = method(*arguments)
            if self.is_dead:  # killed during the call: the result is lost
                raise MemberDied("the member was killed")
            return result

        return self._threads.submit(run)

    def slots(self) -> Future[int]:
        return self._call(self.host.slots)

    def submit(self, requests: list[Request]) -> Future[None]:
        self.submitted.extend(requests)
        return self._call(self.host.submit, requests)

    def take(self, wait_s: float, pause_id: int) -> Future[Report]:
        return self._call(self.host.take, wait_s, pause_id)

    def interrupt(self, samples: list[int] | None, pause_id: int) -> Future[Report]:
        return self._call(self.host.interrupt, samples, pause_id)

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]:
        return self._call(self.host.publish, version, weights, in_flight)

    def sleep(self) -> Future[None]:
        return self._call(self.host.sleep)

    def wake(self) -> Future[None]:
        return self._call(self.host.wake)

    def stats(self) -> Future[EngineStats]:
        return self._call(self.host.stats)

    def kill(self) -> None:
        self.is_dead = True
        self._threads.shutdown(wait=False)


class ThreadMembers:
    """Starts members and keeps every one of them in `started`, so that a test can kill one."""

    def __init__(self, make_engine: Callable[[int], tuple[Engine, Any]]) -> None:
        self._make_engine = make_engine
        self.started: list[ThreadMember] = []

    def launch(self, index: int) -> ThreadMember:
        member = ThreadMember(lambda: self._make_engine(index))
        self.started.append(member)
        return member

    def prepare_spare(self) -> None:
        pass

    def put(self, source: Any) -> Any:
        return arrays_of(source.module)

    def wait_any(self, futures: Sequence[Future[Any]], seconds: float) -> None:
        wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        for member in self.started:
            member.host.close()
