"""The program of an engine's child process: `python -m sortedrl.engine.pool.child_program SOCKET WEIGHTS`.

`child_launcher.py` starts it with the descriptors of a socket (`channel.py`) and of the weights (`shared_weights.py`).
One thread alternates between commands and decode steps, so a command waits for one step at most, and no interpreter
lock is shared with anybody. A command is [number, name, arguments...], an answer [number, result, error]; `wire.py`
says how requests and events are written.

It speaks the protocol of `member.RemoteEngine`, like `actor_loop.py` in a Ray actor. A `take` is answered when an
attempt has ended, when its time is over, or before the answer to an interrupt. An interrupt begins a pause, which the
next `take` ends.

Guarantees: every event is taken once, in order; after the engine has failed, every command is answered with its error;
the process ends when the other end of the socket is closed, in whatever way its owner ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any, NamedTuple

from sortedrl.channel import Channel, ChannelClosed, Numbers
from sortedrl.engine.base import Engine, EngineEvent, Failed, Finished, InFlight, as_sleeping
from sortedrl.engine.pool.actor_loop import Report
from sortedrl.engine.pool.shared_weights import Place, SharedWeights
from sortedrl.engine.pool.wire import pack_report, unpack_requests
from sortedrl.errors import EngineError
from sortedrl.weights import load_arrays

POLL_S = 0.05  # timeout of `poll` for engines that decode in other processes: commands wait that long


class _OpenTake(NamedTuple):
    number: int
    deadline: float


class EngineServer:
    """Serves one engine over a channel."""

    def __init__(self, channel: Channel, weights: SharedWeights) -> None:
        self._channel = channel
        self._weights = weights
        self._engine: Engine | None = None
        self._module: Any = None
        self._poll_s = 0.0
        self._outbox: list[EngineEvent] = []
        self._has_ended = False  # whether the outbox holds the end of an attempt
        self._take: _OpenTake | None = None
        self._is_paused = False
        self._num_reports = 0
        self._failure: str | None = None

    def serve(self) -> None:
        """Serve until the channel is closed."""
        while True:
            is_working = self._engine is not None and not self._is_paused and self._engine.stats().running > 0
            command = self._channel.receive(0.0 if is_working else self._seconds_left())
            while command is not None:
                number, name, *arguments = command.header
                self._run(number, name, arguments, Numbers(command.data))
                command = self._channel.receive(0.0)
            if self._engine is not None and not self._is_paused and self._failure is None:
                self._decode(self._engine)
            self._answer_take()

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _run(self, number: int, name: str, arguments: list[Any], numbers: Numbers) -> None:
        if self._failure is not None:
            self._channel.send([number, None, self._failure])
            return
        if name == "take":
            self._is_paused = False
            self._take = _OpenTake(number, time.monotonic() + arguments[0])
            return
        answer = Numbers()
        try:
            match name:
                case "open":
                    result = self._open(*arguments)
                case "submit":
                    result = self._opened.submit(unpack_requests(arguments[0], numbers))
                case "interrupt":
                    result = pack_report(self._interrupt(*arguments), answer)
                case "publish":
                    result = self._publish(*arguments)
                case "sleep":
                    result = as_sleeping(self._opened).sleep()
                case "wake":
                    result = as_sleeping(self._opened).wake()
                case "stats":
                    result = self._stats()
                case _:
                    raise AssertionError(f"unknown command {name}")
        except Exception as error:  # the caller decides: an engine that refuses a request still works
            self._channel.send([number, None, _one_line(error)])
        else:
            self._channel.send([number, result, None], answer.data)

    def _open(self, factory: str, settings: dict[str, Any], threads: int) -> int:
        module, _, name = factory.partition(":")
        make_engine: Callable[..., tuple[Engine, Any]] = getattr(import_module(module), name)
        import torch

        torch.set_num_threads(threads)
        self._engine, self._module = make_engine(**settings)
        capabilities = self._engine.capabilities
        self._poll_s = 0.0 if capabilities.waits else POLL_S
        return capabilities.slots

    def _interrupt(self, samples: list[int] | None) -> Report:
        stopped = self._opened.interrupt(samples)
        self._is_paused = True
        if self._take is not None:  # its answer comes before that of the interrupt, as the events do
            self._answer_take(is_due=True)
        self._outbox.extend(stopped)
        return self._report()

    def _publish(self, version: int, places: list[list[Any]], in_flight: str) -> None:
        arrays = self._weights.read([Place(*place) for place in places])
        self._opened.publish(version, load_arrays(arrays, self._module), InFlight(in_flight)).wait()

    def _stats(self) -> dict[str, Any]:
        stats = self._opened.stats()
        stats.extra["pid"] = os.getpid()
        return asdict(stats)

    @property
    def _opened(self) -> Engine:
        if self._engine is None:
            raise EngineError("this engine has not been made yet")
        return self._engine

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def _decode(self, engine: Engine) -> None:
        try:
            events = engine.poll(self._poll_s)
        except Exception as error:
            self._failure = _one_line(error)
            return
        if events:
            self._outbox.extend(events)
            self._has_ended = self._has_ended or any(isinstance(event, Failed | Finished) for event in events)

    def _seconds_left(self) -> float | None:
        return None if self._take is None else max(self._take.deadline - time.monotonic(), 0.0)

    def _answer_take(self, *, is_due: bool = False) -> None:
        take = self._take
        if take is None:
            return
        if self._failure is not None:
            self._channel.send([take.number, None, self._failure])
        elif is_due or self._has_ended or time.monotonic() >= take.deadline:
            numbers = Numbers()
            self._channel.send([take.number, pack_report(self._report(), numbers), None], numbers.data)
        else:
            return
        self._take = None

    def _report(self) -> Report:
        taken, self._outbox, self._has_ended = self._outbox, [], False
        self._num_reports += 1
        return Report(number=self._num_reports, events=taken)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _end_with_owner(fd: int) -> None:
    """End this process when the other end of the socket is closed, also while the engine computes."""
    watch = select.poll()
    watch.register(fd, 0)  # a hang-up is reported without being asked for
    watch.poll()
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which then closes the socket
    end = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_owner, args=(end.fileno(),), name="owner-watch", daemon=True).start()
    try:
        EngineServer(Channel(end), SharedWeights(int(sys.argv[2]))).serve()
    except ChannelClosed:
        os._exit(0)


if __name__ == "__main__":
    main()
