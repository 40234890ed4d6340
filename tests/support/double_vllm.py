"""Doubles in vLLM's place: a process whose device memory is counted, and which dies when a test says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from sortedrl.engine.vllm.process import VllmProcess
from sortedrl.engine.vllm.runner_choice import PlatformFacts
from sortedrl.engine.vllm.worker_report import WorkerReport

H100 = PlatformFacts(device="cuda", has_triton=True, capability=(9, 0))
CPU = PlatformFacts(device="cpu", has_triton=False)
ON_GPU = WorkerReport(
    is_v2=True,
    device="cuda:0",
    dtype="bfloat16",
    attention_backends=("FLASH_ATTN",),
    graph_mode="FULL_AND_PIECEWISE",
    is_async=True,
    is_batch_invariant=True,
    tensor_parallel=1,
    is_speculative=False,
    uses_float64_noise=False,
    allocated_bytes=1 << 30,
)
ON_CPU = replace(ON_GPU, device="cpu", is_v2=False, is_async=False, is_batch_invariant=False, allocated_bytes=0)


class DoubleFrontend:
    """AsyncLLM's calls, on a device whose memory is counted: weights and KV cache are there, or gone."""

    def __init__(self) -> None:
        self.held = {"weights", "kv_cache"}
        self.calls: list[str] = []
        self.errored = False

    async def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (2, "abort")
        self.calls.append("sleep")
        self.held.clear()

    async def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake {tags[0]}")
        self.held |= set(tags)
        return self.held == {"weights", "kv_cache"}

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert "weights" in self.held, "weights are loaded into memory that is not there"
        self.calls.append(method)
        return []

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    async def reset_prefix_cache(self) -> None:
        pass


class DoubleProcess(VllmProcess):
    report = ON_GPU

    def __init__(self, settings: Any, counts: Any, *, limit_s: float, address: str = "", port: int = 0) -> None:
        super().__init__(limit_s)
        self.settings, self.frontend, self.workers = settings, DoubleFrontend(), [self.report]

    is_dead = False
    pids = ()  # type: ignore[assignment]

    def close(self, *, is_lost: bool = False) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result()
        self._stop_loop()

    def _is_loss(self, error: Exception) -> bool:
        return False
