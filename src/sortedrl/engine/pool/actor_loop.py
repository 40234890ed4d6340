"""An engine with a thread of its own: what stands on the far side of a pool's members.

A pool (`pool.py`) talks to many of these, each in a process of its own (`ray_members.py`). The engine that is hosted
knows nothing of that. Its thread alternates between what it was told and one step of decoding, so that a call waits
for one decode step at most; whatever the engine says is kept in an outbox until somebody takes it. An interrupt begins
a new turn: nothing is decoded until a `take` of that turn comes, so that what was not interrupted waits in its slot. A
`take` that was sent earlier, and may arrive later, is of the turn before and changes nothing.

What it keeps true: only the host's thread touches the engine; events are taken once, in the order in which they came;
what the engine raises is raised to every caller from then on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sortedrl.engine.base import Engine, EngineEvent, EngineStats, Failed, Finished, InFlight, Request
from sortedrl.errors import EngineError

IDLE_S = 0.05  # an engine that waits in `poll` for events of other processes is left there so long


@dataclass(slots=True, kw_only=True, frozen=True)
class Report:
    """Events in the order in which they came; a report of a lower number comes before, whenever it arrives."""

    number: int
    events: list[EngineEvent]


class EngineHost:
    """`make_engine` is called in the host's thread; `take_up(engine, version, weights, in_flight)` publishes."""

    def __init__(
        self, make_engine: Callable[[], Engine], take_up: Callable[[Engine, int, Mapping[str, Any], InFlight], None]
    ) -> None:
        self._take_up = take_up
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[Engine], Any]] | None] = queue.SimpleQueue()
        self._outbox: list[EngineEvent] = []
        self._has_news = threading.Condition()
        self._has_ended = False  # whether an attempt in the outbox is over
        self._turn = self._taken_turn = self._num_reports = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(make_engine,), name="engine-host", daemon=True)
        self._thread.start()

    def slots(self) -> int:
        """How many sequences the engine runs at once; returns once the engine is up."""
        return self._do(lambda engine: engine.capabilities.slots)

    def submit(self, requests: list[Request]) -> None:
        self._do(lambda engine: engine.submit(requests))

    def take(self, wait_s: float, turn: int = 0) -> Report:
        """Events since the last time. Waits for an attempt to end, at most so long, unless `interrupt` comes."""
        with self._has_news:
            if turn > self._taken_turn:
                self._taken_turn = turn
                self._commands.put((Future(), lambda engine: None))  # the thread may be waiting to be told something
            self._has_news.wait_for(lambda: self._has_ended or self._failure or self._turn > turn, wait_s)
            if self._failure is not None:
                raise self._failure
            return self._empty()

    def interrupt(self, samples: Iterable[int] | None, turn: int = 0) -> Report:
        """Stop these samples, or all; what else is in the outbox comes with it, in order, and a `take` returns."""

        def stop(engine: Engine) -> Report:
            stopped = engine.interrupt(samples)
            with self._has_news:
                self._turn = turn
                self._has_news.notify_all()
                self._outbox.extend(stopped)
                return self._empty()

        return self._do(stop)

    def publish(self, version: int, weights: Mapping[str, Any], in_flight: InFlight) -> None:
        self._do(lambda engine: self._take_up(engine, version, weights, in_flight))

    def stats(self) -> EngineStats:
        return self._do(lambda engine: engine.stats())

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _do(self, command: Callable[[Engine], Any]) -> Any:
        future: Future[Any] = Future()
        self._commands.put((future, command))
        return future.result()

    def _run(self, make_engine: Callable[[], Engine]) -> None:
        try:
            engine = make_engine()
            while self._obey(engine):
                if not self._is_resting:
                    self._listen(engine)
            engine.close()
        except Exception as error:
            self._fail(error)

    @property
    def _is_resting(self) -> bool:
        return self._taken_turn < self._turn

    def _obey(self, engine: Engine) -> bool:
        """Do what was told; without anything to decode, wait for it. False when told to close."""
        while True:
            is_idle = self._is_resting or engine.stats().running == 0
            try:
                told = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if told is None:
                return False
            future, command = told
            try:
                future.set_result(command(engine))
            except Exception as error:  # the caller's to judge: a request that is refused is no broken engine
                future.set_exception(error)
            if is_idle:
                return True  # it may have refused what it was given: hear it

    def _listen(self, engine: Engine) -> None:
        heard = engine.poll(0.0 if engine.capabilities.waits else IDLE_S)
        if not heard:
            return
        with self._has_news:
            self._outbox.extend(heard)
            if any(isinstance(event, Failed | Finished) for event in heard):
                self._has_ended = True
                self._has_news.notify_all()

    def _empty(self) -> Report:
        taken, self._outbox, self._has_ended = self._outbox, [], False
        self._num_reports += 1
        return Report(number=self._num_reports, events=taken)

    def _fail(self, error: Exception) -> None:
        with self._has_news:
            self._failure = error
            self._has_news.notify_all()
        while True:  # nobody may wait for an answer that will not come
            told = self._commands.get()
            if told is None:
                return
            told[0].set_exception(EngineError(f"this engine has failed ({type(error).__name__}: {error})"))
