"""A watchdog around any engine: it ends the wait for an engine that hangs.

`run/builders/engine.py` puts it around the engine of a run; the controller uses it like any other engine. Every call
notes its name and limit, and a thread checks that note about once a second. A call past its limit gets an `EngineError`
by a signal, which also ends a blocking system call. A call that does not react within the grace period is stuck in
native code: then the stacks of all threads go to stderr and the process ends with `EXIT_CODE`. The ledger is up to
date, so the run can be resumed.

Guarantees:
- a call that returns in time is passed on unchanged, at a cost of about a microsecond;
- whatever error the engine raises, the caller gets an `EngineError`;
- a long wait is not a hang: a long `poll` is split into short ones, and a caller's timeout is added to the limit;
- time in which this process was stopped or the machine slept does not count, because the thread counts its own ticks.
Only the main thread can receive the error; for a call in another thread, only the end of the process remains. A call
that blocks and holds the interpreter lock blocks the thread too: only a supervisor outside the process can help there.
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

from sortedrl.engine.base import (
    Capabilities,
    Engine,
    EngineEvent,
    EngineStats,
    Handle,
    InFlight,
    Request,
    as_sleeping,
)
from sortedrl.errors import ConfigError, EngineError, SortedRLError

EXIT_CODE: Final = 70  # EX_SOFTWARE of sysexits.h
GRACE_S = 10.0
MAX_TICK_S = 1.0
# A signal that few programs use: test runners and batch systems use SIGALRM and SIGUSR1.
SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)

_Call = tuple[str, float, int]  # name, limit, thread; each call makes a new tuple, so calls are compared by identity
_Result = TypeVar("_Result")


class Watchdog:
    """`limit_s`: how long a call may take; `grace_s`: how long it may then take to react before the process ends.

    `start_s` and `publish_s`: how much longer a call may take that has to start an engine, or to load weights twice.
    `poll_s`: how much longer a poll may take, because a pool gives weights to an engine that was started again.
    """

    def __init__(
        self,
        engine: Engine,
        limit_s: float,
        *,
        grace_s: float = GRACE_S,
        start_s: float = 0.0,
        publish_s: float = 0.0,
        poll_s: float = 0.0,
    ) -> None:
        if not limit_s > 0:
            raise ConfigError(f"the engine's time limit is {limit_s} s: give it some, or leave the watchdog out")
        self.engine = engine
        self.limit_s = limit_s
        self.grace_s = grace_s
        self._publish_limit_s = limit_s + 2 * publish_s
        self._poll_limit_s = limit_s + poll_s
        self._submit_limit_s = limit_s + start_s + 2 * publish_s
        self._tick_s = min(MAX_TICK_S, limit_s / 20, grace_s / 4)
        self._call: _Call | None = None
        self._overdue: _Call | None = None
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
        self._watched("submit", self._submit_limit_s, self.engine.submit, requests)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        """The engine's poll. A long wait is split, because an engine that works on long answers does not hang."""
        longest = self.limit_s / 2
        if timeout is not None and timeout <= longest:
            return self._watched("poll", self._poll_limit_s + timeout, self.engine.poll, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            share = longest if deadline is None else max(0.0, min(longest, deadline - began))
            events = self._watched("poll", self._poll_limit_s + share, self.engine.poll, share)
            now = time.monotonic()
            # An engine that returns early without events has nothing to do.
            if events or now - began < share or (deadline is not None and now >= deadline):
                return events

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        return self._watched("interrupt", self.limit_s, self.engine.interrupt, samples)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        handle = self._watched("publish", self._publish_limit_s, self.engine.publish, version, source, in_flight)
        return _WatchedHandle(self, handle)

    def sleep(self) -> None:
        self._watched("sleep", self._submit_limit_s, as_sleeping(self.engine).sleep)  # a pool may wait for a start

    def wake(self) -> None:
        self._watched("wake", self.limit_s, as_sleeping(self.engine).wake)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Close the engine, also under watch, and stop watching."""
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
        """Wait for a publication under watch."""
        self._watched("publish", self._publish_limit_s, handle.wait)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _watched(self, name: str, limit_s: float, call: Callable[..., _Result], *arguments: Any) -> _Result:
        self._call = (name, limit_s, threading.get_ident())
        try:
            return call(*arguments)
        except (SortedRLError, AssertionError):  # errors with a clear message, and broken invariants
            raise
        except Exception as error:
            raise EngineError(
                f"the engine failed in {name} ({type(error).__name__}: {error}): check its device or process, then "
                "resume the run"
            ) from error
        finally:
            self._call = None

    def _watch(self) -> None:
        timer = _CallTimer(self._tick_s, time.monotonic())
        while not self._closing.wait(self._tick_s):
            call = self._call
            age_s = timer.tick(call, time.monotonic())
            if call is None:
                continue
            if self._overdue is not call:
                if age_s >= call[1]:
                    self._signal_overdue(call)
                    timer.age_s = 0.0
            elif age_s >= self.grace_s:
                self._end_process(call)

    def _signal_overdue(self, call: _Call) -> None:
        self._overdue = call
        if call[2] == self._main:
            signal.pthread_kill(call[2], SIGNAL)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. If the call has ended meanwhile, nothing is wrong."""
        call = self._call
        if call is not None and call is self._overdue:
            raise EngineError(_message(call))
        if callable(self._previous):  # the handler of another watchdog
            self._previous(number, frame)

    def _end_process(self, call: _Call) -> None:
        # Write to the file descriptor: the main thread may be stuck while it holds the lock of a logger or of stderr.
        message = f"sortedrl: {_message(call)}\nIt is stuck in native code; the process ends. Its threads:\n"
        try:
            os.write(2, message.encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
        finally:
            os._exit(EXIT_CODE)


class _CallTimer:
    """Measures how long the current call has been running, in ticks of the thread that watches it."""

    def __init__(self, tick_s: float, now: float) -> None:
        self.age_s = 0.0
        self._tick_s = tick_s
        self._last = now
        self._seen: _Call | None = None

    def tick(self, call: _Call | None, now: float) -> float:
        # A longer gap between two ticks means that the process did not run, which is not the engine's fault.
        gap_s, self._last = min(now - self._last, 2 * self._tick_s), now
        self.age_s = self.age_s + gap_s if call is not None and call is self._seen else 0.0
        self._seen = call
        return self.age_s


class _WatchedHandle:
    def __init__(self, watchdog: Watchdog, handle: Handle) -> None:
        self._watchdog = watchdog
        self._handle = handle

    def wait(self) -> None:
        self._watchdog.wait_for(self._handle)


def _message(call: _Call) -> str:
    name, limit_s, _ = call
    return (
        f"the engine did not answer for {limit_s:g} s in {name}: check whether its process or device hangs, then "
        "resume the run, or raise engine.watchdog_s if its steps take that long"
    )
