"""The base of a running vLLM, in this process or as a server: an event loop in a thread, and calls into it.

`core.py` (AsyncLLM) and `server.py` (HTTP) implement it; `engine.py` holds one at a time. Guarantees: a call returns,
or raises `VllmLost` when vLLM has died or does not answer in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sortedrl.engine.vllm.abort_flag import AbortFlag
from sortedrl.engine.vllm.runner_choice import CPU_PLAN, RunnerPlan
from sortedrl.engine.vllm.worker_report import WorkerReport

CLOSE_S = 10.0
DEAD = "vLLM's core has died"
_CHECK_S = 0.25  # while a call waits, how often it checks that vLLM is alive
_Result = TypeVar("_Result")

# vLLM reads these on import, and so do its processes: no usage reports. `runner_choice.py` adds the model runner's.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is reserved for our own output
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says
    "TQDM_DISABLE": "1",
}


class VllmLost(Exception):
    """vLLM died, or does not answer."""


@dataclass(slots=True, kw_only=True, frozen=True)
class AdapterSettings:
    """What vLLM must know about adapters when it starts."""

    rank: int  # the largest rank that vLLM reserves memory for
    modules: tuple[str, ...]  # last part of the names of the modules that have adapters


@dataclass(slots=True, kw_only=True, frozen=True)
class VllmSettings:
    folder: Path
    slots: int
    max_length: int
    dtype: str
    kv_bytes: int | None  # per device; None: `memory_share` says
    block_size: int
    memory_share: float | None = None  # of each device's memory, for weights, activations and KV cache together
    tensor_parallel: int = 1  # devices, or on a CPU processes, over which vLLM splits the model
    is_spread: bool = False  # whether they are on several machines
    transfer: str = ""  # backend by which weights arrive; empty: vLLM loads them from `folder`
    starts_empty: bool = False  # start with arbitrary weights: the first transfer brings the right ones
    start_s: float = 900.0
    adapter: AdapterSettings | None = None  # set if adapters are published unmerged
    plan: RunnerPlan = CPU_PLAN
    sleeps: bool = False  # allocate so that weights and KV cache can be freed; on CPUs there are the states only

    @property
    def flag(self) -> Path:
        """The file of the flag that aborts a step."""
        return self.folder / "abort"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for vLLM, unless they are set already. Several workers on CPUs divide the cores.

        Threads of workers that share a core wait for each other in loops, which makes both several times slower.
        """
        # A process that has used CUDA, if only to look for GPUs, cannot be forked: vLLM must start its processes anew.
        if self.plan.device != "cpu":
            return ENVIRONMENT | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if self.tensor_parallel == 1:
            return ENVIRONMENT
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, cores // self.tensor_parallel))}


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """Counts of vLLM's steps, over all processes that one engine has started."""

    steps: int = 0
    preemptions: int = 0
    kv_usage: float = 0.0
    kv_usage_peak: float = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if iteration_stats is not None:
            self.steps += 1
            self.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.record_kv_usage(scheduler_stats.kv_cache_usage)

    def record_kv_usage(self, share: float) -> None:
        self.kv_usage = share
        self.kv_usage_peak = max(self.kv_usage_peak, share)


class VllmProcess(ABC):
    frontend: Any = None  # AsyncLLM or HttpFrontend, which the request loop calls
    flag: AbortFlag | None = None  # aborts the current step, where that is possible
    workers: list[WorkerReport]  # what vLLM's workers run, one per worker; empty if vLLM has none of our code

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.workers = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sortedrl-vllm", daemon=True)
        self._thread.start()

    @property
    @abstractmethod
    def is_dead(self) -> bool: ...

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The vLLM processes that this engine started, the core first."""

    @property
    def has_noise(self) -> bool:
        """Whether vLLM runs our worker extension, which brings shared noise and exact replay."""
        return True

    async def refresh_counts(self) -> None:
        """Update the counts of steps, where vLLM does not report each step."""
        return

    @abstractmethod
    def close(self, *, is_lost: bool = False) -> None:
        """End all processes. A lost vLLM is killed without asking it, because it may not answer."""

    def call(self, coroutine: Coroutine[Any, Any, _Result], limit_s: float | None = None) -> _Result:
        """Run a coroutine in the event loop and wait for its result, at most `limit_s` in place of the usual limit."""
        limit_s = limit_s or self._limit_s
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(FutureTimeout):
                try:
                    return future.result(_CHECK_S)
                except Exception as error:
                    if self._is_loss(error):
                        raise VllmLost(DEAD) from error
                    raise
            if future.done():  # the coroutine itself raised a TimeoutError
                return future.result()
            # A vLLM that dies never answers the calls that it received just before.
            if self.is_dead or time.monotonic() > deadline:
                future.cancel()
                raise VllmLost(DEAD if self.is_dead else f"vLLM did not answer for {limit_s:g} s")

    def drain_loop(self) -> None:
        """Return when the event loop has run everything that was ready."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(done.set)
        done.wait(self._limit_s)

    @abstractmethod
    def _is_loss(self, error: Exception) -> bool:
        """Whether the error means that vLLM has died."""

    def _stop_loop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()
