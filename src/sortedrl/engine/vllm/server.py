"""A vLLM server as a life of vLLM: one that is started here, or one that somebody names.

`engine.py` makes one in place of a `Core` when the configuration asks for it. A server that is started here has
our worker extension, and ends with this process. One that is named has to run in vLLM's development mode, which has the
calls for pausing and for weights, with a worker that sees our files; with our extension it gives what AsyncLLM gives,
without it no replay, since its draws are its own. What it keeps true: nobody else's process is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from sortedrl.engine.vllm.core import is_alive, kill_vllm
from sortedrl.engine.vllm.http import HttpFront
from sortedrl.engine.vllm.process import CLOSE_S, ENVIRONMENT, CoreSettings, Life, StepCounts
from sortedrl.errors import EngineError

HOST = "127.0.0.1"
_START_S = 900.0
_CONNECT_S = 30.0  # that a named server may take to come back
_LOOK_S = 0.2
_TOTALS = {"steps": "vllm:iteration_tokens_total_count", "preemptions": "vllm:num_preemptions_total"}
# What `vllm serve` runs; that command itself does not start in vLLM's CPU build.
_ENTRY = ("python", "-m", "vllm.entrypoints.launchers.api_server.entry")
_EXTENSION = "sortedrl.engine.vllm.worker"


def serve_command(settings: CoreSettings, port: int) -> list[str]:
    """What starts a server that this engine can drive."""
    options = {
        "model": settings.folder,
        "host": HOST,
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_length,
        "max-num-seqs": settings.slots,
        "kv-cache-memory-bytes": settings.kv_bytes,
        "block-size": settings.block_size,
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": f"{_EXTENSION}.SortedWorker",
        "logits-processors": f"{_EXTENSION}:NoiseRows",
        "uvicorn-log-level": "error",
    }
    flags = ["enable-scale-out", "skip-tokenizer-init", "enforce-eager", "no-async-scheduling", "enable-prefix-caching"]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*_ENTRY, *words, *(f"--{flag}" for flag in flags)]


class Server(Life):
    """`address` names a server; without one, a server is started on `port`. Raises `EngineError` if none answers."""

    front: HttpFront

    def __init__(
        self, settings: CoreSettings, counts: StepCounts, *, limit_s: float, address: str = "", port: int = 0
    ) -> None:
        super().__init__(limit_s)
        self._counts, self._pids = counts, list[int]()
        self._seen: dict[str, int] = {}  # totals of the server, as last read
        self._process: subprocess.Popen[bytes] | None = None
        place = address.rstrip("/") or f"{HOST}:{port}"
        self._address = place if "://" in place else f"http://{place}"
        self.front = HttpFront(self._address, slots=settings.slots)
        try:
            if not address:
                self._process = _launch(settings, port)
            asyncio.run_coroutine_threadsafe(self._connect(settings), self.loop).result()
        except BaseException as error:
            self.close(is_lost=True)
            if isinstance(error, httpx.TransportError):
                raise EngineError(f"the vLLM server at {self._address} has gone while it was greeted") from error
            raise
        self._pids = [] if self._process is None else _descendants(self._process.pid)

    @property
    def is_dead(self) -> bool:
        """A server whose core is gone stays until the calls that it cannot answer any more are given up."""
        if self._process is None:
            return False
        return self._process.poll() is not None or (bool(self._pids) and not is_alive(self._pids[0]))

    @property
    def pids(self) -> list[int]:
        return list(self._pids)

    @property
    def has_noise(self) -> bool:
        return self.front.has_noise

    def close(self, *, is_lost: bool = False) -> None:
        if not self.loop.is_closed():
            future = asyncio.run_coroutine_threadsafe(self._leave(is_lost=is_lost), self.loop)
            with contextlib.suppress(Exception):
                future.result(CLOSE_S)
        if self._process is not None:
            pids = self._pids or _descendants(self._process.pid)
            if not is_lost:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(CLOSE_S)
            self._process.kill()
            self._process.wait()
            kill_vllm(pids)
        self._end_loop()

    def _is_loss(self, error: Exception) -> bool:
        return isinstance(error, httpx.TransportError) or (isinstance(error, EngineError) and self.is_dead)

    async def _leave(self, *, is_lost: bool) -> None:
        """A named server goes on without us: what is ours in it must not."""
        if self._process is None and not is_lost:
            with contextlib.suppress(EngineError, httpx.TransportError):
                await self.front.abort_all()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # who still reads a stream reads in vain
        await asyncio.sleep(0)
        await self.front.client.aclose()

    async def _connect(self, settings: CoreSettings) -> None:
        await self._wait_for_health()
        response = await self.front.client.get("/server_info", params={"config_format": "json"})
        if response.status_code != httpx.codes.OK:
            raise EngineError(
                f"the vLLM server at {self._address} is not in development mode, without which it cannot be paused nor "
                f"given weights: start it with VLLM_SERVER_DEV_MODE=1 {' '.join(serve_command(settings, 8000))}"
            )
        await self.front.resume()  # whoever used it before may have left it paused
        if await self.front.is_without_tokens():
            raise EngineError(
                f"the vLLM server at {self._address} takes no tokens: start it with --enable-scale-out, on a loopback "
                "address"
            )
        config = response.json()["vllm_config"]
        self.front.has_noise = config["parallel_config"].get("worker_extension_cls") == f"{_EXTENSION}.SortedWorker"
        fault = find_server_fault(config, settings, has_noise=self.front.has_noise)
        if fault is not None:
            raise EngineError(f"the vLLM server at {self._address} cannot be used: {fault}")
        if self.front.has_noise:
            await self.front.rpc("sorted_prepare", 0 if self._process is None else os.getpid())
        if self._process is None:  # whatever it serves, these are the weights in force
            await self.front.abort_all()
            await self.front.take_weights(str(settings.folder / "model.safetensors"))
        await self.count()

    async def _wait_for_health(self) -> None:
        deadline = time.monotonic() + (_START_S if self._process is not None else _CONNECT_S)
        while not await self.front.is_healthy():
            if self.is_dead:
                raise EngineError(
                    "the vLLM server did not start: see its messages above; if it lacks memory, lower engine.slots, "
                    "engine.max_new_tokens or engine.kv_gb, or take a smaller model"
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no vLLM server answers at {self._address}: start it (docs/engines.md has the command), or "
                    "correct engine.address; a run that was under way can then be resumed"
                )
            await asyncio.sleep(_LOOK_S)

    async def count(self) -> None:
        response = await self.front.client.get("/metrics")
        totals = read_metrics(response.text)
        now = {name: int(totals.get(metric, 0)) for name, metric in _TOTALS.items()}
        for name, total in now.items():
            setattr(self._counts, name, getattr(self._counts, name) + total - self._seen.get(name, total))
        self._seen = now
        self._counts.see_usage(totals.get("vllm:kv_cache_usage_perc", 0.0))


def read_metrics(text: str) -> dict[str, float]:
    """Of Prometheus' text, the last value of each name."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" " if "{" not in line else "} ")
        if line and not line.startswith("#"):
            found[name.partition("{")[0]] = float(value)
    return found


def find_server_fault(config: Mapping[str, Any], settings: CoreSettings, *, has_noise: bool) -> str | None:
    """Why a server of this configuration (vLLM's own, as it tells it) cannot serve these settings."""
    model, scheduler = config["model_config"], config["scheduler_config"]
    dtype = str(model["dtype"]).removeprefix("torch.")
    if model["max_model_len"] < settings.max_length:
        return f"its max-model-len is {model['max_model_len']}, and answers may take {settings.max_length} tokens"
    if scheduler["max_num_seqs"] < settings.slots:
        return f"its max-num-seqs is {scheduler['max_num_seqs']}, and engine.slots {settings.slots}"
    if dtype != settings.dtype:
        return f"it computes in {dtype}, and the engine is to in {settings.dtype}: set engine.dtype = {dtype}"
    if has_noise and scheduler.get("async_scheduling"):
        return "our worker extension needs --no-async-scheduling"
    if not has_noise and model["logprobs_mode"] != "processed_logprobs":
        return "its log-probs are not of the distribution that it samples from: --logprobs-mode processed_logprobs"
    if not has_noise and is_tied(settings.folder):
        return f"a head tied to its embedding would keep old weights: --worker-extension-cls {_EXTENSION}.SortedWorker"
    return None


def is_tied(folder: Path) -> bool:
    """Whether the model of a folder has one matrix for embedding and head."""
    from transformers import AutoConfig

    return bool(AutoConfig.from_pretrained(folder, trust_remote_code=False).tie_word_embeddings)


def _launch(settings: CoreSettings, port: int) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EngineError(
                f"port {port} is in use: name a free one in engine.port, or in engine.address the server that is there"
            ) from error
    command = [sys.executable, *serve_command(settings, port)[1:]]
    environment = ENVIRONMENT | os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2)  # its messages are for people


def _descendants(pid: int) -> list[int]:
    """Processes of a server, its core first."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    named = sorted(children, key=lambda child: "EngineCore" not in child.name())
    return [*(child.pid for child in named), pid]
