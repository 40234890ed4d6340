"""Two ways to call a reward function under a time limit: in a worker process, or in a thread.

Each scoring thread of `reward/pool.py` owns one caller.

Guarantees: after a call that timed out or died, the next call works, because the process is killed and replaced
(`reward/process.py`), or the thread abandoned and replaced.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from sortedrl.reward.process import MEMORY_BYTES, WorkerProcess
from sortedrl.reward.worker import CallFailed, FailureKind, Row, call_reward

_KINDS = frozenset(kind.value for kind in FailureKind)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardFunction:
    """A reward function. `module` and `qualname` are empty if another process cannot import it."""

    index: int
    name: str
    function: Callable[..., Any]
    module: str = ""
    qualname: str = ""

    @property
    def is_importable(self) -> bool:
        return bool(self.module)


class RewardCaller(Protocol):
    def start(self) -> None:
        """Prepare for calls; raises RewardError if that is impossible."""
        ...

    def call(self, function: RewardFunction, rows: Sequence[Row], lines: Sequence[str]) -> list[float | str | None]:
        """Return the rewards of `rows` (`lines` is their JSON) as `call_reward` does; raises CallFailed."""
        ...

    def stop(self) -> None:
        """Make the current call and every later one fail. Any thread may call this."""
        ...

    def close(self) -> None: ...


def find_function(function: Callable[..., Any], index: int) -> RewardFunction:
    """Find the name under which another process would import this function, if there is one."""
    module = getattr(function, "__module__", None) or ""
    qualname = getattr(function, "__qualname__", None) or type(function).__qualname__
    name = f"{module}.{qualname}" if module else qualname
    if _resolves(module, qualname, function) and _is_on_path(module):
        return RewardFunction(index=index, name=name, function=function, module=module, qualname=qualname)
    return RewardFunction(index=index, name=name, function=function)


def _resolves(module: str, qualname: str, function: Callable[..., Any]) -> bool:
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return module != "__main__" and found is function


def _is_on_path(module: str) -> bool:
    """Whether an import in another process would load the same file; a module may have been created at run time."""
    package = sys.modules.get(module.rpartition(".")[0])
    path = getattr(package, "__path__", None)
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(module, path) if find_spec else None
        if spec is not None:
            return spec.origin == getattr(sys.modules[module], "__file__", None)
    return False


class ProcessCaller(WorkerProcess):
    """Calls functions in a worker process, which starts at the first call and is killed when a call takes too long."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        timeout_s: float,
        memory_bytes: int | None = MEMORY_BYTES,
        keep_env: Sequence[str] = (),
    ) -> None:
        self._indices = {function.index: position for position, function in enumerate(functions)}
        names = [(function.module, function.qualname) for function in functions]
        super().__init__(
            {"functions": names, "timeout_s": timeout_s, "memory_bytes": memory_bytes},
            names=", ".join(f"{module}.{qualname}" for module, qualname in names),
            section="reward",
            keep_env=keep_env,
        )
        self._timeout_s = timeout_s

    def call(self, function: RewardFunction, rows: Sequence[Row], lines: Sequence[str]) -> list[float | str | None]:
        self.start()
        request = f'{{"function":{self._indices[function.index]},"rows":[{",".join(lines)}]}}'
        reply = self._exchange(request, self._timeout_s)
        match reply:
            case {"kind": str(kind), "detail": str(detail)} if kind in _KINDS:
                if kind == FailureKind.MEMORY:
                    self._end()  # earlier calls may have filled its memory
                raise CallFailed(FailureKind(kind), detail)
            case {"rewards": list(rewards)} if len(rewards) == len(rows) and all(map(_is_reward, rewards)):
                return rewards
            case _:
                self._end()
                raise CallFailed(
                    FailureKind.MALFORMED,
                    "sent a result that is not a list of numbers, because it wrote to the worker's channel",
                )


class ThreadCaller:
    """Calls functions in a thread. Threads cannot be killed, so one whose call takes too long is abandoned."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._inbox: SimpleQueue[Callable[[], None] | None] | None = None
        self._outbox: SimpleQueue[list[float | str | None] | CallFailed] = SimpleQueue()
        self._is_stopped = False

    def start(self) -> None:
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=self._work, args=(self._inbox,), name="reward-call", daemon=True).start()

    @staticmethod
    def _work(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := inbox.get()) is not None:
            task()

    def call(self, function: RewardFunction, rows: Sequence[Row], lines: Sequence[str]) -> list[float | str | None]:
        self.start()
        assert self._inbox is not None, "no thread to call in"
        # One outbox per call, so that what an abandoned thread returns later is never taken for another call's reward.
        outbox: SimpleQueue[list[float | str | None] | CallFailed] = SimpleQueue()
        self._outbox = outbox

        def task() -> None:
            try:
                outbox.put(call_reward(function.function, rows))
            except CallFailed as failed:
                outbox.put(failed)

        self._inbox.put(task)
        if self._is_stopped:
            raise CallFailed(FailureKind.DIED, "closed")
        try:
            outcome = outbox.get(timeout=self._timeout_s)
        except Empty:
            self._abandon(function)
            raise CallFailed(FailureKind.TIMEOUT) from None
        if isinstance(outcome, CallFailed):
            raise outcome
        return outcome

    def _abandon(self, function: RewardFunction) -> None:
        logger.warning(
            "reward function %s took longer than %g s in a thread, which cannot be killed and keeps running: "
            "define the function at the top level of a module, so that it runs in a process, which can be killed",
            function.name,
            self._timeout_s,
        )
        self.close()

    def stop(self) -> None:
        self._is_stopped = True
        self._outbox.put(CallFailed(FailureKind.DIED, "closed"))

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.put(None)
            self._inbox = None


def _is_reward(value: object) -> bool:
    """Whether a worker may send this: a finite number, None, or the text that shows an invalid reward."""
    return value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))
