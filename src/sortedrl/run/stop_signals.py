"""Signals that ask a run to stop: SIGINT, SIGTERM and SIGHUP. The trainer saves a run that trains before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask` with the number of each such signal that comes meanwhile.

    An ignored SIGHUP stays ignored: `nohup` starts a run that way, so that it outlives its terminal.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        ask(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:
        numbers.append(hang_up)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def leave_on_signal() -> Iterator[None]:
    """Raise an exception at each such signal: while a run starts, so that what was started and opened so far is closed.

    A library may catch what a signal's handler raises or wrap it, as pydantic does. Then it is raised again at the end.
    """
    raised: list[BaseException] = []

    def leave(number: int) -> None:
        raised.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise raised[-1]

    with stop_on_signal(leave):
        try:
            yield
        except Exception as error:
            if raised:
                raise raised[-1] from error
            raise
    if raised:
        raise raised[-1]
