"""An engine that must answer: wraps any other, and ends the wait for one that hangs.

`run/builders/parts.py` puts it around the engine of a run; the controller sees an engine like any other. Every call
notes what it is about, and a thread looks at that note about once a second. A call past its limit gets an `EngineError`
by a signal, which also ends the system call that it may wait in. One that does not react within the grace period is
stuck in foreign code: the stacks of all threads go to stderr and the process ends with `EXIT_CODE`. Nothing durable is
lost, since the ledger commits as it goes.

What it keeps true:
- a call that returns in time is passed on as it is, at the price of about a microsecond;
- whatever else the engine raises, the caller gets an `EngineError`;
- waiting is no hanging: a long `poll` is made of short ones, and the time that a caller allows comes on top;
- time during which this process was stopped or the machine slept does not count, since the thread counts its own
  beats and was stopped too.
Only the main thread can be given an error; a call from another one has but the second stage. A call that blocks and
keeps the interpreter lock blocks the thread as well: that is for a supervisor outside of the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, TypeVar

from sortedrl.engine.base import Capabilities, Engine, EngineEvent, EngineStats, Handle, InFlight, Request
from sortedrl.errors import ConfigError, EngineError, SortedRLError

EXIT_CODE: Final = 70  # EX_SOFTWARE of sysexits.h
GRACE_S = 10.0
MAX_TICK_S = 1.0
# One that hardly anybody else uses: SIGALRM and SIGUSR1 belong to test runners and batch systems.
SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)

_Call = tuple[str, float, int]  # name, limit, thread; a tuple of its own for each call: identity tells calls apart
_Result = TypeVar("_Result")


class Watchdog:
    """`limit_s`: how long a call may take; `grace_s`: how long it may then take to react before the process ends."""

    def __init__(self, engine: Engine, limit_s: float, *, grace_s: float = GRACE_S) -> None:
        if not limit_s > 0:
            raise ConfigError(f"the engine's time limit is {limit_s} s: give it some, or leave the watchdog out")
        self.engine = engine
        self.limit_s = limit_s
        self.grace_s = grace_s
        self._tick_s = min(MAX_TICK_S, limit_s / 20, grace_s / 4)
        self._call: _Call | None = None
        self._accused: _Call | None = None
        self._closing = threading.Event()
        self._previous: Any = None
        # Signal handlers run in the main thread only, and only it may set them.
        self._main = threading.get_ident() if threading.current_thread() is threading.main_thread() else None
        if self._main is not None:
            self._previous = signal.signal(SIGNAL, self._raise)
        self._thread = threading.Thread(target=self._watch, name="sortedrl-watchdog", daemon=True)
        self._thread.start()

    # ---- the engine's protocol --------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    def submit(self, requests: Iterable[Request]) -> None:
        self._watched("submit", self.limit_s, self.engine.submit, requests)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        """As the engine's own. A long wait is cut up: an engine at work on long answers is not one that hangs."""
        longest = self.limit_s / 2
        if timeout is not None and timeout <= longest:
            return self._watched("poll", self.limit_s + timeout, self.engine.poll, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            share = longest if deadline is None else max(0.0, min(longest, deadline - began))
            events = self._watched("poll", self.limit_s + share, self.engine.poll, share)
            now = time.monotonic()
            # An engine that returns early with nothing has nothing to wait for.
            if events or now - began < share or (deadline is not None and now >= deadline):
                return events

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        return self._watched("interrupt", self.limit_s, self.engine.interrupt, samples)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        handle = self._watched("publish", self.limit_s, self.engine.publish, version, source, in_flight)
        return _WatchedHandle(self, handle)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Close the engine, under watch like the rest, and stop watching."""
        if self._closing.is_set():
            return
        try:
            self._watched("close", self.limit_s, self.engine.close)
        finally:
            self._closing.set()
            self._thread.join()
            if self._main == threading.get_ident() and signal.getsignal(SIGNAL) == self._raise:
                signal.signal(SIGNAL, self._previous)

    def wait_for(self, handle: Handle) -> None:
        """Wait for a publication, under watch."""
        self._watched("publish", self.limit_s, handle.wait)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _watched(self, name: str, limit_s: float, call: Callable[..., _Result], *arguments: Any) -> _Result:
        self._call = (name, limit_s, threading.get_ident())
        try:
            return call(*arguments)
        except (SortedRLError, AssertionError):  # what it says on purpose, and mistakes in the program
            raise
        except Exception as error:
            raise EngineError(
                f"the engine failed in {name} ({type(error).__name__}: {error}): see to its device or process, then "
                "resume the run"
            ) from error
        finally:
            self._call = None

    def _watch(self) -> None:
        """Count for how many beats the same call has been under way."""
        seen: _Call | None = None
        age_s = 0.0
        last = time.monotonic()
        while not self._closing.wait(self._tick_s):
            now = time.monotonic()
            # A longer gap between two beats means that the process did not run: not the engine's fault.
            beat_s, last = min(now - last, 2 * self._tick_s), now
            call = self._call
            if call is None or call is not seen:
                seen, age_s = call, 0.0
                continue
            age_s += beat_s
            if self._accused is not call:
                if age_s >= call[1]:
                    self._accuse(call)
                    age_s = 0.0
            elif age_s >= self.grace_s:
                self._end(call)

    def _accuse(self, call: _Call) -> None:
        self._accused = call
        if call[2] == self._main:
            signal.pthread_kill(call[2], SIGNAL)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler. A call may have ended between the decision and this: then nothing is wrong."""
        call = self._call
        if call is not None and call is self._accused:
            raise EngineError(_complaint(call))
        if callable(self._previous):  # another watchdog's
            self._previous(number, frame)

    def _end(self, call: _Call) -> None:
        # Straight to the descriptor: the main thread may be stuck with the lock of a logger or console in its hands.
        message = f"sortedrl: {_complaint(call)}\nIt is stuck in foreign code; the process ends. Its threads:\n"
        try:
            os.write(2, message.encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
        finally:
            os._exit(EXIT_CODE)


class _WatchedHandle:
    def __init__(self, watchdog: Watchdog, handle: Handle) -> None:
        self._watchdog = watchdog
        self._handle = handle

    def wait(self) -> None:
        self._watchdog.wait_for(self._handle)


def _complaint(call: _Call) -> str:
    name, limit_s, _ = call
    return (
        f"the engine did not answer for {limit_s:g} s in {name}: see whether its process or device hangs, then resume "
        "the run, or raise engine.watchdog_s if its steps take that long"
    )
