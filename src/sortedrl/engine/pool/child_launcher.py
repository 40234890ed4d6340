"""Engines in child processes of this one, without Ray: the remote engines of a pool on one machine.

`run/builders/engine.py` makes a `ChildLauncher` for `engine.own_process` and gives it to the pool. A child is a new
Python interpreter that runs `child_program.py`; it gets commands over a pair of sockets (`channel.py`) and weights in
shared memory (`shared_weights.py`). There is no thread on this side: whoever waits for an answer reads the socket, so
no other thread takes the interpreter lock from the learner.

Guarantees: a child ends with this process, however that ends; what a child prints goes to stderr, so stdout is the
caller's; calls to a child that has died fail with its exit code.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sortedrl.channel import Channel, ChannelClosed, Numbers
from sortedrl.engine.base import EngineStats, InFlight, Request
from sortedrl.engine.pool.actor_loop import Report
from sortedrl.engine.pool.shared_weights import SharedWeights
from sortedrl.engine.pool.wire import pack_requests, unpack_report
from sortedrl.errors import EngineError
from sortedrl.weights import arrays_of

_PROGRAM = "sortedrl.engine.pool.child_program"
_EXIT_S = 1.0  # how long a child may take to end after its socket was closed


class _Answer(Future[Any]):
    """The answer to a call. Asking for it reads the socket. `unpack` makes the result of what the child sent."""

    def __init__(self, child: ChildEngine, unpack: Callable[[Any, Numbers], Any]) -> None:
        super().__init__()
        self._child = child
        self.unpack = unpack

    def done(self) -> bool:
        if not super().done():
            self._child.read(0.0)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not super().done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._child.read(left)


class ChildEngine:
    """This side of one child process."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self._process = process
        self._channel = Channel(end)
        self._fd = end.fileno()
        self._open: dict[int, _Answer] = {}  # calls without an answer
        self._num_calls = 0
        self._death: EngineError | None = None
        self._slots: Future[int] | None = None

    def start(self, factory: str, settings: Mapping[str, Any], threads: int) -> None:
        self._slots = self._call("open", factory, settings, threads)

    def slots(self) -> Future[int]:
        assert self._slots is not None, "a child was not started"
        return self._slots

    def submit(self, requests: list[Request]) -> Future[None]:
        numbers = Numbers()
        return self._call("submit", pack_requests(requests, numbers), numbers=numbers)

    def take(self, wait_s: float, pause_id: int) -> Future[Report]:
        return self._call("take", wait_s, unpack=unpack_report)  # commands arrive in order, so a pause needs no id

    def interrupt(self, samples: list[int] | None, pause_id: int) -> Future[Report]:
        return self._call("interrupt", samples, unpack=unpack_report)

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]:
        return self._call("publish", version, weights, in_flight.value)

    def sleep(self) -> Future[None]:
        return self._call("sleep")

    def wake(self) -> Future[None]:
        return self._call("wake")

    def stats(self) -> Future[EngineStats]:
        return self._call("stats", unpack=lambda stats, _: EngineStats(**stats))

    def kill(self) -> None:
        """Close the socket, upon which the child ends; one that does not is killed."""
        if self._death is None:
            self._die("it was ended")
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._process.kill()
        self._process.wait()

    @property
    def fd(self) -> int | None:
        """The descriptor to wait at for answers; None once the child is dead."""
        return None if self._death is not None else self._fd

    def read(self, timeout: float | None) -> None:
        """Take the answers that have come; wait for one at most `timeout` seconds."""
        if self._death is not None:
            return
        try:
            message = self._channel.receive(timeout)
            while message is not None:
                number, result, error = message.header
                answer = self._open.pop(number)
                if error is None:
                    answer.set_result(answer.unpack(result, Numbers(message.data)))
                else:
                    answer.set_exception(EngineError(error))
                message = self._channel.receive(0.0)
        except ChannelClosed:
            self._die(self._exit_reason())

    def _call(
        self,
        name: str,
        *arguments: Any,
        numbers: Numbers | None = None,
        unpack: Callable[[Any, Numbers], Any] = lambda result, _: result,
    ) -> _Answer:
        answer = _Answer(self, unpack)
        if self._death is not None:
            answer.set_exception(self._death)
            return answer
        self._num_calls += 1
        self._open[self._num_calls] = answer
        try:
            self._channel.send([self._num_calls, name, *arguments], b"" if numbers is None else numbers.data)
        except ChannelClosed:
            self._die(self._exit_reason())
        return answer

    def _exit_reason(self) -> str:
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _die(self, why: str) -> None:
        self._death = EngineError(f"the engine's process has ended ({why})")
        unanswered, self._open = self._open, {}
        for answer in unanswered.values():
            answer.set_exception(self._death)


class ChildLauncher:
    """`factory`, as "module:function", makes an engine and the module that holds its weights, in each child.

    It is called with `settings`, which must be plain JSON. `threads`: how many CPU threads a child may use.
    """

    def __init__(self, factory: str, settings: Mapping[str, Any], *, threads: int) -> None:
        self._factory = factory
        self._settings = settings
        self._threads = threads
        self._weights = SharedWeights()
        self._children: list[ChildEngine] = []

    def launch(self, index: int) -> ChildEngine:
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._weights.fd)
        command = [sys.executable, "-P", "-m", _PROGRAM, *map(str, descriptors)]
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=_environment(self._threads),
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C in a terminal is for this process alone
                )
            except OSError as error:
                ours.close()
                raise EngineError(
                    f"a process for the engine could not be started ({error.strerror}): set engine.own_process = false"
                ) from error
        child = ChildEngine(process, ours)
        child.start(self._factory, self._settings, self._threads)
        self._children = [known for known in self._children if known.fd is not None] + [child]
        return child

    def prepare_spare(self) -> None:
        """Keep no spare: a child is ready within seconds."""

    def put(self, source: Any) -> Any:
        return self._weights.write(arrays_of(source.module))

    def wait_any(self, futures: Sequence[Future[Any]], seconds: float) -> None:
        if any(future.done() for future in futures):  # reads what has come
            return
        watch = select.poll()
        for child in self._children:
            if child.fd is not None:
                watch.register(child.fd, select.POLLIN)
        watch.poll(max(seconds, 0.0) * 1000)

    def close(self) -> None:
        """The pool has killed the children."""
        self._weights.close()


def _environment(threads: int) -> dict[str, str]:
    """That of this process. The child finds modules where this process finds them, its own ones included."""
    paths = [path or os.getcwd() for path in sys.path]
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
