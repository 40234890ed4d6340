"""One life of vLLM, however it is reached: an event loop in a thread, and calls into it that always come back.

`core.py` (AsyncLLM) and `server.py` (HTTP) are such lives; `engine.py` holds one at a time. What it
keeps true: a call returns, or raises `CoreLost` when vLLM has died or does not answer in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sortedrl.engine.vllm.abort_flag import HaltFlag

CLOSE_S = 10.0
DEAD = "vLLM's core has died"
_LOOK_S = 0.25  # between two looks at whether vLLM lives, while it is waited for
_Result = TypeVar("_Result")

# Read by vLLM when it is imported, and by its processes: nothing is reported to anybody, and the sampler that this
# package replaces is the one in use.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to who uses this package
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says
    "TQDM_DISABLE": "1",
}


class CoreLost(Exception):
    """vLLM has died, or does not answer."""


@dataclass(slots=True, kw_only=True, frozen=True)
class AdapterTerms:
    """What vLLM has to know of adapters before it is started."""

    rank: int  # that it makes room for
    modules: tuple[str, ...]  # that have adapters, by the last part of their names


@dataclass(slots=True, kw_only=True, frozen=True)
class CoreSettings:
    folder: Path
    slots: int
    max_length: int
    dtype: str
    kv_bytes: int
    block_size: int
    adapter: AdapterTerms | None = None  # that requests name, where adapters are published as they are

    @property
    def flag(self) -> Path:
        """The file of the flag at which a step is broken off."""
        return self.folder / "halt"


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """What vLLM tells of its steps, over all of its lives."""

    steps: int = 0
    preemptions: int = 0
    kv_usage: float = 0.0
    kv_usage_peak: float = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if iteration_stats is not None:
            self.steps += 1
            self.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.see_usage(scheduler_stats.kv_cache_usage)

    def see_usage(self, share: float) -> None:
        self.kv_usage = share
        self.kv_usage_peak = max(self.kv_usage_peak, share)


class Life(ABC):
    front: Any = None  # what a tower talks to
    flag: HaltFlag | None = None  # breaks off the step under way, where that can be done

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sortedrl-vllm", daemon=True)
        self._thread.start()

    @property
    @abstractmethod
    def is_dead(self) -> bool: ...

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """vLLM's processes that are ours, its core first."""

    @property
    def has_noise(self) -> bool:
        """Whether our worker extension is there: shared noise, exact replay."""
        return True

    async def count(self) -> None:
        """Bring the counts of steps up to date, where vLLM does not tell of each."""
        return

    @abstractmethod
    def close(self, *, is_lost: bool = False) -> None:
        """End everything; a vLLM that is lost is not asked, since it may not answer."""

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        deadline = time.monotonic() + self._limit_s
        while True:
            with contextlib.suppress(FutureTimeout):
                try:
                    return future.result(_LOOK_S)
                except Exception as error:
                    if self._is_loss(error):
                        raise CoreLost(DEAD) from error
                    raise
            if future.done():  # with a time limit of its own
                return future.result()
            # What vLLM was asked just before it died is never answered, nor refused.
            if self.is_dead or time.monotonic() > deadline:
                future.cancel()
                raise CoreLost(DEAD if self.is_dead else f"vLLM did not answer for {self._limit_s:g} s")

    def let_run(self) -> None:
        """Return when the loop has done all that was ready."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(done.set)
        done.wait(self._limit_s)

    @abstractmethod
    def _is_loss(self, error: Exception) -> bool:
        """Whether an error says that vLLM has died."""

    def _end_loop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()
