"""The objects of environments, by sample: makes them, resets them, calls their tools and asks for rewards.

It runs in a worker process (`reward/worker.py` loads it by name) or in the trainer's process, for threads. It uses the
standard library and `reward/worker.py` only, so that a worker starts quickly.

Guarantees: what a tool raises is a reply, never an error of the worker; texts are of limited length and hold no control
characters; an object is used for one turn at a time; `open` gives an object whose state is that after the kept turns,
or says that it is lost, or that calls of kept turns must be made again first, which needs permission.
"""

from __future__ import annotations

import importlib
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock
from typing import Any

from sortedrl.reward.worker import describe, printable

MAX_STATE_CHARS = 1 << 18  # of a snapshot as JSON
KEPT_CONTROLS = "\n\t"
MAX_REWARD = 3.4028234663852886e38  # the largest float32, as for reward functions


@dataclass(slots=True, kw_only=True)
class _Held:
    """An object and the number of turns with tools that it has been through; `made` is None while it is being made."""

    made: Any = None
    serial: int
    turn: int = 0
    is_busy: bool = True
    was_asked: bool = False  # for its reward


class EnvironmentObjects:
    """Answers the requests of `environment/runner.py`; see `handle`."""

    def __init__(self, factory: Callable[[], Any], *, kind: str, max_chars: int) -> None:
        self._factory = factory
        self._kind = kind
        self._max_chars = max_chars
        self._held: dict[int, _Held] = {}
        self._lock = Lock()  # threads of the trainer share one

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what `op` says: open, call, close, reward or forget."""
        op, sample, serial = request["op"], request["sample"], request["serial"]
        if op == "open":
            return self._open(sample, serial, request)
        with self._lock:
            held = self._held.get(sample)
            if op == "forget":
                if held is not None and (held.serial == serial or serial < 0):
                    del self._held[sample]
                return {}
        if held is None or held.serial != serial:
            return {"lost": True}
        if op == "call":
            return self._call(held.made, request["name"], request["arguments"])
        if op == "reward":
            return self._reward(held)
        return self._close(held)

    def _open(self, sample: int, serial: int, request: dict[str, Any]) -> dict[str, Any]:
        turn = request["turn"]
        with self._lock:
            held = self._held.get(sample)
            if held is not None and held.serial > serial:  # a newer turn of the sample has begun
                return {"lost": True}
            if held is not None and not held.is_busy and self._fits(held, turn):
                held.serial, held.turn, held.is_busy = serial, turn, True
                return {}
            if turn and (self._kind == "none" or (self._kind == "snapshot" and request["state"] is None)):
                return {"lost": True}
            if turn and self._kind == "repeatable" and any(request["history"]) and not request["may_repeat"]:
                return {"must_repeat": True}
            # It is noted before it is made: a thread abandoned in `reset` then finds another one, and drops its own.
            held = self._held[sample] = _Held(serial=serial, turn=turn)
        try:
            made = self._made(turn, request)
        except BaseException as error:
            return {"error": f"the environment could not begin: {describe(error)}"}
        with self._lock:
            if self._held.get(sample) is not held:
                return {"lost": True}
            held.made = made
        return self._snapshot(made) if turn == 0 else {}

    def _fits(self, held: _Held, turn: int) -> bool:
        """Whether an object is in the state of a sample at this turn; one that has told its reward may be finished."""
        is_at_start_again = turn == 0 and held.was_asked
        return self._kind == "stateless" or (held.turn == turn and not is_at_start_again)

    def _made(self, turn: int, request: dict[str, Any]) -> Any:
        """A new object in the state after `turn` turns, by the kind of the class."""
        made = self._factory()
        self._reset(made, request["row"])
        if turn and self._kind == "snapshot":
            made._restore(request["state"])
        elif turn and self._kind == "repeatable":
            for calls in request["history"]:
                for call in calls:
                    self._call(made, call["name"], call["arguments"])
        return made

    @staticmethod
    def _reset(made: Any, row: dict[str, Any]) -> None:
        """Call `reset` with the row; one without `**row` gets only the columns that it names."""
        parameters = inspect.signature(made.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        _finished(made.reset(**row))

    def _call(self, made: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            text, error = str(_finished(getattr(made, name)(**arguments))), ""
        except MemoryError as failed:
            text, error = describe(failed), "out of memory"
        except BaseException as failed:  # sys.exit in a tool must not end the worker either
            text, error = describe(failed), "exception"
        return {"text": clean(text, self._max_chars), "error": error, "seconds": time.perf_counter() - began}

    def _reward(self, held: _Held) -> dict[str, Any]:
        held.was_asked = True
        try:
            reward = float(_finished(held.made.get_reward()))
        except BaseException as failed:
            return {"reward": None, "error": f"get_reward raised {describe(failed)}"}
        finally:
            held.is_busy = False
        if not abs(reward) <= MAX_REWARD:
            return {"reward": None, "error": f"get_reward returned {reward:g}: rewards are finite, at most 3.4e38"}
        return {"reward": reward, "error": ""}

    def _close(self, held: _Held) -> dict[str, Any]:
        """The turn is over; returns the snapshot after it, or why there is none."""
        held.turn += 1
        reply = self._snapshot(held.made)
        held.is_busy = False
        return reply

    def _snapshot(self, made: Any) -> dict[str, Any]:
        """The state of an object of a class with snapshots; None, and why, if it is no JSON or too large."""
        if self._kind != "snapshot":
            return {"state": None}
        try:
            text = json.dumps(_finished(made._snapshot()), allow_nan=False)
            if len(text) > MAX_STATE_CHARS:
                raise ValueError(f"a snapshot of {len(text)} characters, more than {MAX_STATE_CHARS}")
            return {"state": json.loads(text)}
        except BaseException as failed:
            return {"state": None, "state_error": describe(failed)}


def clean(text: str, max_chars: int) -> str:
    """The text without control characters, except line ends and tabs, cut to `max_chars`."""
    num_cut = len(text) - max_chars
    if num_cut > 0:
        text = f"{text[:max_chars]} [{num_cut} more characters]"
    return printable(text, keep=KEPT_CONTROLS)


def _finished(result: Any) -> Any:
    """What a function returned, or what its coroutine returns."""
    if inspect.iscoroutine(result):
        import asyncio  # imported only if needed: it would double the start-up time of workers

        return asyncio.run(result)
    return result


def from_setup(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The handler of a worker process, which `reward/worker.py` loads by name."""
    module, name = setup["factory"]
    factory = attrgetter(name)(importlib.import_module(module))
    return EnvironmentObjects(factory, kind=setup["kind"], max_chars=setup["max_chars"]).handle
