"""Runs the turns of environments in the background, in worker processes or threads, while the engine decodes others.

`environment/loop.py` submits turns and polls for results; `run/builders` makes the runner. A class that another process
can import by name runs in worker processes; others run in threads of the trainer. Objects keep their state between
turns: those of a sample stay in one worker.

Guarantees: each submitted turn gives one result; no call lasts longer than `timeout_s`; a process that hangs, dies or
runs out of memory is replaced, and its other objects are made again as their kind allows; what tools raise or return is
text of limited length.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from sortedrl.environment.base import EnvironmentSpec, Kind, ToolCall, ToolResult, Turn, TurnResult
from sortedrl.environment.objects import EnvironmentObjects, clean
from sortedrl.errors import ConfigError
from sortedrl.reward.caller import find_function
from sortedrl.reward.process import MEMORY_BYTES, WorkerProcess, as_plain
from sortedrl.reward.worker import CallFailed, FailureKind

logger = logging.getLogger(__name__)

_HANDLER = ("sortedrl.environment.objects", "from_setup")


class Channel(Protocol):
    """A way to the objects: in a worker process, or in a thread. `exchange` raises CallFailed."""

    def exchange(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class ProcessChannel(WorkerProcess):
    """The objects of a worker process, which starts at the first request."""

    def exchange(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self.start()
        reply = self._exchange(json.dumps({**request, "timeout_s": timeout_s}, default=as_plain), timeout_s)
        if not isinstance(reply, dict):
            self._end()
            raise CallFailed(FailureKind.MALFORMED, "a tool wrote to the worker's channel")
        return reply


class ThreadChannel:
    """Objects in this process. A thread cannot be killed: one that takes too long is abandoned, with its object."""

    def __init__(self, objects: EnvironmentObjects) -> None:
        self._objects = objects
        self._inbox: SimpleQueue[Callable[[], None] | None] | None = None
        self._is_stopped = False

    def exchange(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._is_stopped:
            raise CallFailed(FailureKind.DIED, "closed")
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=_work, args=(self._inbox,), name="environment-call", daemon=True).start()
        # One outbox per request, so that a late reply of an abandoned thread is never taken for another one.
        outbox: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._inbox.put(lambda: outbox.put(self._objects.handle(dict(request))))
        try:
            return outbox.get(timeout=timeout_s)
        except Empty:
            self.close()
            self._objects.handle({"op": "forget", "sample": request["sample"], "serial": request["serial"]})
            raise CallFailed(FailureKind.TIMEOUT) from None

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.put(None)
            self._inbox = None


def _work(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := inbox.get()) is not None:
        task()


class EnvironmentRunner:
    """`run_in`: "process", "thread", or "auto" for processes where the class can be imported by name."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        timeout_s: float = 10.0,
        workers: int = 2,
        memory_bytes: int | None = MEMORY_BYTES,
        max_chars: int = 2000,
        keep_env: Sequence[str] = (),
        run_in: str = "auto",
    ) -> None:
        self.spec = spec
        self.errors: Counter[str] = Counter()  # failed calls by tool and kind
        self._timeout_s = timeout_s
        self._done: SimpleQueue[TurnResult | BaseException] = SimpleQueue()
        self._rewards: SimpleQueue[TurnResult | BaseException] = SimpleQueue()
        self._num_waiting = 0
        self._is_closed = False
        found = find_function(spec.factory, 0)
        if run_in == "process" and not found.is_importable:
            raise ConfigError(
                f"environment.run_in = process: another process cannot import {spec.name}; define it at the top level "
                "of a module, or set environment.run_in = thread"
            )
        self.is_remote = found.is_importable if run_in == "auto" else run_in == "process"
        self._channels: list[Channel]
        if self.is_remote:
            setup = {
                "handler": _HANDLER,
                "factory": (found.module, found.qualname),
                "kind": spec.kind.value,
                "max_chars": max_chars,
                "timeout_s": timeout_s,
                "memory_bytes": memory_bytes,
            }
            self._channels = [
                ProcessChannel(setup, names=found.name, section="environment", keep_env=keep_env)
                for _ in range(workers)
            ]
            self._inboxes: list[SimpleQueue[Turn | int | None]] = [SimpleQueue() for _ in range(workers)]
        else:
            self._objects = EnvironmentObjects(spec.factory, kind=spec.kind.value, max_chars=max_chars)
            self._channels = [ThreadChannel(self._objects) for _ in range(workers)]
            self._inboxes = [SimpleQueue()] * workers
        self._max_chars = max_chars
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, and the worker processes with them; a class that cannot be imported raises.

        If one of them cannot start, the runner is closed.
        """
        assert not self._is_closed, "a closed runner gets a turn, which no thread would work on"
        if self._threads:
            return
        for channel, inbox in zip(self._channels, self._inboxes, strict=True):
            thread = threading.Thread(target=self._serve, args=(channel, inbox), name="environment", daemon=True)
            try:
                if isinstance(channel, ProcessChannel):
                    channel.start()
                thread.start()
            except BaseException:
                channel.close()  # its thread would do that
                self.close()
                raise
            self._threads.append(thread)  # only if it has started: `close` waits for it

    def submit(self, turn: Turn) -> None:
        self.start()
        self._num_waiting += 1
        self._inboxes[turn.sample % len(self._inboxes)].put(turn)

    def poll(self, timeout: float) -> list[TurnResult]:
        """The turns that are over, waiting up to `timeout` seconds for the first if any is under way."""
        return self._take(self._done, timeout)

    def poll_rewards(self, timeout: float) -> list[TurnResult]:
        """The same for turns that asked for a reward."""
        return self._take(self._rewards, timeout)

    def _take(self, done: SimpleQueue[TurnResult | BaseException], timeout: float) -> list[TurnResult]:
        found: list[TurnResult | BaseException] = []
        if timeout > 0 and self._num_waiting:
            try:
                found.append(done.get(timeout=timeout))
            except Empty:
                return []
        while not done.empty():
            found.append(done.get())
        for result in found:
            if isinstance(result, BaseException):
                raise result
        self._num_waiting -= len(found)
        return [result for result in found if isinstance(result, TurnResult)]

    def forget(self, sample: int) -> None:
        """Drop the object of a sample that is trained, or of an answer of an evaluation that is over.

        A sample that starts over gets a new object at its first turn.
        """
        if self._threads:
            self._inboxes[sample % len(self._inboxes)].put(sample)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for channel in self._channels:
            channel.stop()
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(self._timeout_s + 1.0)

    # ---- inside a worker's thread -----------------------------------------------------------------------------------

    def _serve(self, channel: Channel, inbox: SimpleQueue[Turn | int | None]) -> None:
        try:
            while (job := inbox.get()) is not None and not self._is_closed:
                if isinstance(job, int):
                    self._forget(channel, job)
                else:
                    began = time.monotonic()
                    result = self._work(channel, job)
                    done = self._rewards if job.asks_reward else self._done
                    done.put(replace(result, seconds=time.monotonic() - began))
        except BaseException as error:  # `poll` raises it: otherwise the run would wait for ever
            if not self._is_closed:
                self._done.put(error)
                self._rewards.put(error)
        finally:
            channel.close()

    def _forget(self, channel: Channel, sample: int) -> None:
        with contextlib.suppress(CallFailed):  # the object is gone with its process
            channel.exchange({"op": "forget", "sample": sample, "serial": -1}, self._timeout_s)

    def _work(self, channel: Channel, turn: Turn) -> TurnResult:
        key = {"sample": turn.sample, "serial": turn.serial}
        num_again = sum(map(len, turn.history)) if self.spec.kind is Kind.REPEATABLE else 0
        opening = {
            **key,
            "op": "open",
            "turn": turn.number,
            "row": dict(turn.row),
            "state": turn.state,
            "history": [[call.as_dict() for call in calls] for calls in turn.history],
            "may_repeat": turn.may_repeat,
        }
        try:
            opened = channel.exchange(opening, self._timeout_s * (1 + num_again))
        except CallFailed as failed:
            opened = {"error": f"the environment could not begin: {failed.kind} {failed.detail}".rstrip()}
        made: dict[str, Any] = {**key, "number": turn.number}
        if opened.get("lost"):
            return self._lost(turn, made)
        if opened.get("must_repeat"):
            return TurnResult(**made, must_repeat=True)
        if turn.asks_reward:
            return self._ask_reward(channel, turn, key, made, opened)
        if error := opened.get("error"):
            self.errors["reset: exception"] += 1
            unmade = [ToolResult(text=self._error_text(error), error="not called") for _ in turn.calls]
            return TurnResult(**made, results=unmade, state=turn.state, is_over=self._is_over(turn.state))
        return self._make_calls(channel, turn, key, made, opened.get("state", turn.state))

    def _is_over(self, state: Any) -> bool:
        """Whether no object can go on after a turn that left none, only this snapshot."""
        return self.spec.kind is Kind.NONE or (self.spec.kind is Kind.SNAPSHOT and state is None)

    def _make_calls(
        self, channel: Channel, turn: Turn, key: dict[str, Any], made: dict[str, Any], state: Any
    ) -> TurnResult:
        results: list[ToolResult] = []
        is_dead = False
        for call in turn.calls:
            if is_dead:
                text = self._error_text("not called, because an earlier call of this turn did not return")
                results.append(ToolResult(text=text, error="not called"))
            elif call.error:
                self.errors["malformed call"] += 1
                results.append(ToolResult(text=self._error_text(call.error), error="malformed"))
            else:
                result, is_dead = self._make_call(channel, key, call)
                results.append(result)
        if not is_dead:
            try:
                closed = channel.exchange({**key, "op": "close"}, self._timeout_s)
            except CallFailed:
                closed, is_dead = {}, True
            if closed.get("state_error"):
                self.errors["_snapshot: exception"] += 1
                logger.warning("the snapshot of %s failed: %s", self.spec.name, closed["state_error"])
            state = closed.get("state", state)
        return TurnResult(**made, results=results, state=state, is_over=is_dead and self._is_over(state))

    def _make_call(self, channel: Channel, key: dict[str, Any], call: ToolCall) -> tuple[ToolResult, bool]:
        """The result of a call, and whether the object died of it."""
        began = time.monotonic()
        try:
            reply = channel.exchange(
                {**key, "op": "call", "name": call.name, "arguments": dict(call.arguments)}, self._timeout_s
            )
        except CallFailed as failed:
            kind = str(failed.kind)
            self.errors[f"{call.name}: {kind}"] += 1
            limit = f" within {self._timeout_s:g} s" if failed.kind is FailureKind.TIMEOUT else f" ({kind})"
            text = self._error_text(f"{call.name} did not return{limit}")
            return ToolResult(text=text, error=kind, seconds=time.monotonic() - began), True
        if "text" not in reply:
            return ToolResult(text=self._error_text("the environment is gone"), error="died"), True
        error = str(reply["error"])
        if error:
            self.errors[f"{call.name}: {error}"] += 1
        text = self._error_text(reply["text"]) if error else str(reply["text"])
        return ToolResult(text=text, error=error, seconds=float(reply["seconds"])), False

    def _ask_reward(
        self, channel: Channel, turn: Turn, key: dict[str, Any], made: dict[str, Any], opened: Mapping[str, Any]
    ) -> TurnResult:
        reply: Mapping[str, Any] = opened
        if not opened.get("error"):
            try:
                reply = channel.exchange({**key, "op": "reward"}, self._timeout_s)
            except CallFailed as failed:
                reply = {"error": f"get_reward: {failed.kind}"}
        if reply.get("lost"):
            return self._lost(turn, made)
        if reply.get("reward") is None:
            self.errors["get_reward: failed"] += 1
        return TurnResult(**made, reward=reply.get("reward"), error=str(reply.get("error", "")))

    def _lost(self, turn: Turn, made: dict[str, Any]) -> TurnResult:
        """The object is gone. If it died in the trajectory's own last call (`is_over`), its reward has failed."""
        if turn.asks_reward:
            self.errors["get_reward: failed" if turn.is_over else "get_reward: lost"] += 1
        return TurnResult(**made, is_lost=not turn.is_over, error="its environment is lost")

    def _error_text(self, error: str) -> str:
        return clean(json.dumps({"error": error}, ensure_ascii=False), self._max_chars)
