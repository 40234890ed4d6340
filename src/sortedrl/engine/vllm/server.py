"""vLLM behind HTTP: a server that the engine starts, or one that the user names.

`engine.py` makes a `ServerProcess` in place of a `CoreProcess` when the configuration sets `engine.port` or
`engine.address`. A server started here has our worker extension and ends with this process, also if that
is killed while the server starts (`owned_launch.py`). A named server must run in
vLLM's development mode, which has the calls for pausing and for weights, and its worker must see our weight files. With
our extension it gives the same answers as AsyncLLM; without it there is no replay, since it draws with its own noise.
Guarantees: the engine ends only processes that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from sortedrl.engine.vllm import owned_launch
from sortedrl.engine.vllm.core import is_alive, kill_vllm
from sortedrl.engine.vllm.http import HttpFrontend
from sortedrl.engine.vllm.owner import own_mark
from sortedrl.engine.vllm.process import CLOSE_S, StepCounts, VllmLost, VllmProcess, VllmSettings
from sortedrl.engine.vllm.runner_choice import EXTENSION
from sortedrl.engine.vllm.segments import mapped_segments, note_segments, remove_segments
from sortedrl.engine.vllm.worker_report import WorkerReport
from sortedrl.errors import EngineError

HOST = "127.0.0.1"
_CONNECT_S = 30.0  # how long a named server may take to answer
_HEALTH_CHECK_S = 0.2
_TOTALS = {"steps": "vllm:iteration_tokens_total_count", "preemptions": "vllm:num_preemptions_total"}
# The module behind `vllm serve`; that command itself does not start in vLLM's CPU build.
_ENTRY = ("python", "-m", "vllm.entrypoints.launchers.api_server.entry")


def serve_command(settings: VllmSettings, port: int) -> list[str]:
    """The command that starts a server which this engine can use."""
    options = {
        "model": settings.folder,
        "host": HOST,
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_length,
        "max-num-seqs": settings.slots,
        "tensor-parallel-size": settings.tensor_parallel,
        "block-size": settings.block_size,
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": f"{EXTENSION}.SortedWorker",
        "uvicorn-log-level": "error",
    }
    if settings.kv_bytes is not None:
        options["kv-cache-memory-bytes"] = settings.kv_bytes
    if settings.memory_share is not None:
        options["gpu-memory-utilization"] = settings.memory_share
    if settings.transfer:
        options["weight-transfer-config"] = json.dumps({"backend": settings.transfer})
    if settings.starts_empty:
        options["load-format"] = "dummy"
    adapter = settings.adapter
    if adapter is not None:
        options |= {"max-loras": 1, "max-lora-rank": adapter.rank}
    flags = ["enable-scale-out", "skip-tokenizer-init", "enable-prefix-caching"]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    lora = [] if adapter is None else ["--enable-lora", "--lora-target-modules", *adapter.modules]
    return [*_ENTRY, *words, *(f"--{flag}" for flag in flags), *settings.plan.flags, *lora]


class ServerProcess(VllmProcess):
    """Uses the server at `address`, or else starts one on `port`. Raises `EngineError` if no server answers."""

    frontend: HttpFrontend

    def __init__(
        self, settings: VllmSettings, counts: StepCounts, *, limit_s: float, address: str = "", port: int = 0
    ) -> None:
        super().__init__(limit_s)
        self._counts, self._pids = counts, list[int]()
        self._segments: set[str] = set()  # shared memory of the server's processes
        self._seen: dict[str, int] = {}  # the server's totals when last read
        self._popen: subprocess.Popen[bytes] | None = None
        place = address.rstrip("/") or f"{HOST}:{port}"
        self._address = place if "://" in place else f"http://{place}"
        self.frontend = HttpFrontend(self._address, slots=settings.slots)
        try:
            if not address:
                self._popen = _launch(settings, port)
            asyncio.run_coroutine_threadsafe(self._wait_for_health(settings.start_s), self.loop).result()
            self._pids = [] if self._popen is None else _descendants(self._popen.pid)
            self._segments = mapped_segments(self._pids)
            note_segments(settings.folder, self._segments)
            # By `call`, which notices a death: a server whose core dies here never answers.
            self.call(self._connect(settings), settings.start_s)
        except BaseException as error:
            self.close(is_lost=True)
            if isinstance(error, VllmLost):
                raise EngineError(
                    f"the vLLM server at {self._address} failed while connecting ({error}): see its messages and start "
                    "it again"
                ) from error
            raise

    @property
    def is_dead(self) -> bool:
        """Whether the server or its core has ended: a server without its core stays up, but answers no call."""
        if self._popen is None:
            return False
        return self._popen.poll() is not None or (bool(self._pids) and not is_alive(self._pids[0]))

    @property
    def pids(self) -> list[int]:
        return list(self._pids)

    @property
    def has_noise(self) -> bool:
        return self.frontend.has_noise

    def close(self, *, is_lost: bool = False) -> None:
        if not self.loop.is_closed():
            future = asyncio.run_coroutine_threadsafe(self._disconnect(is_lost=is_lost), self.loop)
            with contextlib.suppress(Exception):
                future.result(CLOSE_S)
        if self._popen is not None:
            pids = self._pids or _descendants(self._popen.pid)
            self._segments |= mapped_segments(pids)
            if not is_lost:
                self._popen.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(CLOSE_S)
            self._popen.kill()
            self._popen.wait()
            kill_vllm(pids)
            remove_segments(self._segments)
            if self._popen.stdin is not None:
                self._popen.stdin.close()
        self._stop_loop()

    def _is_loss(self, error: Exception) -> bool:
        return isinstance(error, httpx.TransportError) or (isinstance(error, EngineError) and self.is_dead)

    async def _disconnect(self, *, is_lost: bool) -> None:
        """Close all connections. A named server keeps running, so its requests from us are aborted first."""
        if self._popen is None and not is_lost:
            with contextlib.suppress(EngineError, httpx.TransportError):
                await self.frontend.abort_all()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # tasks that still read a stream
        await asyncio.sleep(0)
        await self.frontend.client.aclose()

    async def _connect(self, settings: VllmSettings) -> None:
        response = await self.frontend.client.get("/server_info", params={"config_format": "json"})
        if response.status_code != httpx.codes.OK:
            raise EngineError(
                f"the vLLM server at {self._address} is not in development mode, so it cannot be paused or given new "
                f"weights: start it with VLLM_SERVER_DEV_MODE=1 {' '.join(serve_command(settings, 8000))}"
            )
        await self.frontend.resume()  # an earlier user may have left it paused
        if not await self.frontend.accepts_tokens():
            raise EngineError(
                f"the vLLM server at {self._address} does not accept requests in tokens: start it with "
                "--enable-scale-out, on a loopback address"
            )
        config = response.json()["vllm_config"]
        self.frontend.has_noise = config["parallel_config"].get("worker_extension_cls") == f"{EXTENSION}.SortedWorker"
        fault = find_server_fault(config, settings, has_noise=self.frontend.has_noise)
        if fault is not None:
            raise EngineError(f"the vLLM server at {self._address} cannot be used: {fault}")
        if self.frontend.has_noise:
            reports = await self.frontend.rpc("sorted_prepare", "" if self._popen is None else own_mark())
            self.workers = [WorkerReport.from_dict(report) for report in reports]
            fault = next((worker.noise_fault for worker in self.workers if worker.noise_fault), None)
            if fault is not None:
                raise EngineError(f"the vLLM server at {self._address} cannot be used: {fault}")
            self.frontend.is_stock = any(worker.is_v2 for worker in self.workers)
            fault = find_logprobs_fault(config) if self.frontend.is_stock else None
            if fault is not None:
                raise EngineError(f"the vLLM server at {self._address} cannot be used: {fault}")
        if self._popen is None:  # it may serve other weights: load ours
            await self.frontend.abort_all()
            await self.frontend.take_weights(str(settings.folder / "model.safetensors"))
        await self.refresh_counts()

    async def _wait_for_health(self, start_s: float) -> None:
        """Return when the server answers; raises `EngineError` if it ends, or is silent too long."""
        deadline = time.monotonic() + (start_s if self._popen is not None else _CONNECT_S)
        while not await self.frontend.is_healthy():
            if self.is_dead:
                raise EngineError(
                    "the vLLM server did not start: see its messages above; if it lacks memory, lower "
                    "engine.memory_share, engine.slots, engine.max_new_tokens or engine.kv_gb, or take a smaller model"
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no vLLM server answers at {self._address}: start it (docs/guides/vllm.md has the command), or "
                    "correct engine.address; an interrupted run can then be resumed"
                )
            await asyncio.sleep(_HEALTH_CHECK_S)

    async def refresh_counts(self) -> None:
        response = await self.frontend.client.get("/metrics")
        totals = read_metrics(response.text)
        now = {name: int(totals.get(metric, 0)) for name, metric in _TOTALS.items()}
        for name, total in now.items():
            setattr(self._counts, name, getattr(self._counts, name) + total - self._seen.get(name, total))
        self._seen = now
        self._counts.record_kv_usage(totals.get("vllm:kv_cache_usage_perc", 0.0))


def read_metrics(text: str) -> dict[str, float]:
    """The last value of each name in Prometheus' text format."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" " if "{" not in line else "} ")
        if line and not line.startswith("#"):
            found[name.partition("{")[0]] = float(value)
    return found


def find_server_fault(config: Mapping[str, Any], settings: VllmSettings, *, has_noise: bool) -> str | None:
    """Why a server with this configuration, as vLLM reports it, cannot be used with these settings; None if it can."""
    model, scheduler = config["model_config"], config["scheduler_config"]
    dtype = str(model["dtype"]).removeprefix("torch.")
    if model["max_model_len"] < settings.max_length:
        length = settings.max_length
        return (
            f"its max-model-len is {model['max_model_len']}, but this run needs {length}: start it with "
            f"--max-model-len {length}"
        )
    if scheduler["max_num_seqs"] < settings.slots:
        return (
            f"its max-num-seqs is {scheduler['max_num_seqs']}, but engine.slots is {settings.slots}: start it with "
            f"--max-num-seqs {settings.slots}, or lower engine.slots"
        )
    if dtype != settings.dtype:
        return f"it computes in {dtype}, and the configuration asks for {settings.dtype}: set engine.dtype = {dtype}"
    if not has_noise and (fault := find_logprobs_fault(config)) is not None:
        return fault
    if not has_noise and _is_tied(settings.folder):
        return (
            "the model's head is tied to its embedding and would keep old weights: start it with "
            f"--worker-extension-cls {EXTENSION}.SortedWorker"
        )
    return None


def find_logprobs_fault(config: Mapping[str, Any]) -> str | None:
    """Why a server that draws by vLLM's own sampler reports other log-probs than ours; None if it does not."""
    if config["model_config"]["logprobs_mode"] == "processed_logprobs":
        return None
    return "its log-probs are not those of the sampled distribution: start it with --logprobs-mode processed_logprobs"


def _is_tied(folder: Path) -> bool:
    """Whether the model in a folder uses one matrix for embedding and head."""
    from transformers import AutoConfig

    return bool(AutoConfig.from_pretrained(folder, trust_remote_code=False).tie_word_embeddings)


def _launch(settings: VllmSettings, port: int) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EngineError(
                f"port {port} is in use: set engine.port to a free one, or engine.address to use the server there"
            ) from error
    command = [sys.executable, *serve_command(settings, port)[1:]]
    environment = settings.environment | os.environ | settings.plan.environment
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return owned_launch.start_owned(command, environment)


def _descendants(pid: int) -> list[int]:
    """The pids of a server's processes, the core first."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found: list[tuple[bool, int]] = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if owned_launch.__file__ not in child.cmdline():  # the watcher is no part of vLLM
                found.append(("EngineCore" not in child.name(), child.pid))
    return [*(child for _, child in sorted(found, key=lambda entry: entry[0])), pid]
