"""The thread that drives one engine inside an actor of a pool.

A pool (`pool.py`) talks to many of these, each in its own process (`ray_launcher.py`). The engine does not know about
the pool. The thread alternates between commands and one decode step, so a command waits for one decode step at most.
Events stay in an outbox until a `take`. An interrupt begins a pause: the thread decodes nothing until a `take` with the
pause's id arrives, so samples that were not interrupted wait in their slots. A `take` that was sent before the
interrupt may arrive after it; it has an older id and does not end the pause.

Guarantees: only this thread touches the engine; every event is taken once, in order; an error that the engine raises in
`poll` is raised to every later caller.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sortedrl.engine.base import (
    Engine,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    InFlight,
    Request,
    as_sleeping,
)
from sortedrl.errors import EngineError

POLL_S = 0.05  # timeout of `poll` for engines that decode in other processes: commands wait that long


@dataclass(slots=True, kw_only=True, frozen=True)
class Report:
    """Events in order. Reports can arrive out of order: a lower number is the earlier report."""

    number: int
    events: list[EngineEvent]


class ActorLoop:
    """Calls `make_engine`, and `load_weights(engine, version, weights, in_flight)` to publish, in its thread."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        load_weights: Callable[[Engine, int, Any, InFlight], None],
    ) -> None:
        self._load_weights = load_weights
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[Engine], Any]] | None] = queue.SimpleQueue()
        self._outbox: list[EngineEvent] = []
        self._changed = threading.Condition()
        self._has_ended = False  # whether the outbox holds the end of an attempt
        self._pause_id = self._taken_pause_id = self._num_reports = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(make_engine,), name="actor-loop", daemon=True)
        self._thread.start()

    def slots(self) -> int:
        """The engine's number of slots. Returns when the engine has started."""
        return self._call(lambda engine: engine.capabilities.slots)

    def submit(self, requests: list[Request]) -> None:
        self._call(lambda engine: engine.submit(requests))

    def take(self, wait_s: float, pause_id: int = 0) -> Report:
        """The events since the last report. Waits up to `wait_s` until an attempt ends or an interrupt comes."""
        with self._changed:
            if pause_id > self._taken_pause_id:
                self._taken_pause_id = pause_id
                self._commands.put((Future(), lambda engine: None))  # wakes the thread, which waits for commands
            self._changed.wait_for(lambda: self._has_ended or self._failure or self._pause_id > pause_id, wait_s)
            if self._failure is not None:
                raise self._failure
            return self._empty_outbox()

    def interrupt(self, samples: Iterable[int] | None, pause_id: int = 0) -> Report:
        """Stop these samples, or all, and return their last events after the rest of the outbox. Ends a `take`."""

        def stop(engine: Engine) -> Report:
            stopped = engine.interrupt(samples)
            with self._changed:
                self._pause_id = pause_id
                self._changed.notify_all()
                self._outbox.extend(stopped)
                return self._empty_outbox()

        return self._call(stop)

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> None:
        self._call(lambda engine: self._load_weights(engine, version, weights, in_flight))

    def sleep(self) -> None:
        self._call(lambda engine: as_sleeping(engine).sleep())

    def wake(self) -> None:
        self._call(lambda engine: as_sleeping(engine).wake())

    def apply(self, function: Callable[[Engine], Any]) -> Any:
        return self._call(function)

    def stats(self) -> EngineStats:
        return self._call(lambda engine: engine.stats())

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _call(self, command: Callable[[Engine], Any]) -> Any:
        future: Future[Any] = Future()
        self._commands.put((future, command))
        return future.result()

    def _run(self, make_engine: Callable[[], Engine]) -> None:
        try:
            engine = make_engine()
            while self._run_commands(engine):
                if not self._is_paused:
                    self._poll(engine)
            engine.close()
        except Exception as error:
            self._refuse_commands(error)

    @property
    def _is_paused(self) -> bool:
        return self._taken_pause_id < self._pause_id

    def _run_commands(self, engine: Engine) -> bool:
        """Run the waiting commands; wait for one if there is nothing to decode. Returns False after `close`."""
        while True:
            is_idle = self._is_paused or engine.stats().running == 0
            try:
                entry = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if entry is None:
                return False
            future, command = entry
            try:
                future.set_result(command(engine))
            except Exception as error:  # the caller decides: an engine that refuses a request still works
                future.set_exception(error)
            if is_idle:
                return True  # a request may have failed at once: poll for its event

    def _poll(self, engine: Engine) -> None:
        events = engine.poll(0.0 if engine.capabilities.waits else POLL_S)
        if not events:
            return
        with self._changed:
            self._outbox.extend(events)
            if any(isinstance(event, Failed | Finished) for event in events):
                self._has_ended = True
                self._changed.notify_all()

    def _empty_outbox(self) -> Report:
        taken, self._outbox, self._has_ended = self._outbox, [], False
        self._num_reports += 1
        return Report(number=self._num_reports, events=taken)

    def _refuse_commands(self, error: Exception) -> None:
        """After a failure: end a waiting `take`, and refuse all commands so that no caller waits forever."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        while True:
            entry = self._commands.get()
            if entry is None:
                return
            entry[0].set_exception(EngineError(f"this engine has failed ({type(error).__name__}: {error})"))
