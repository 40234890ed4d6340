"""Cases of the conformance suite whose engines are processes of their own: vLLM, its server, Ray actors, children.

The tests of this folder and `benchmarks/engine/engines_table.py` make them; each ends its processes when it is left.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch

from sortedrl.engine.base import Engine
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.pool.pool import Pool
from sortedrl.engine.replay_probe import probe_replay
from sortedrl.engine.sampling.noise import SCHEME
from sortedrl.testing import EngineCase
from tests.conformance.cases import MAX_LENGTH, SLOTS, letters, local_ray, model_case
from tests.support.tiny_models import VOCAB, source, tiny_model

HEADS = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}  # what vLLM's kernels like
POOL_LENGTH = 384
POOL_ANSWER_TOKENS = 240  # answers are read and interrupted from afar: short ones would be over before


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def are_gone(pids: list[int]) -> bool:
    alive = [process for process in psutil.process_iter(["pid", "status"]) if process.info["pid"] in pids]
    return all(process.info["status"] == psutil.STATUS_ZOMBIE for process in alive)


@contextmanager
def vllm_case(*, is_server: bool = False, tensor_parallel: int = 1) -> Iterator[EngineCase]:
    """vLLM in this process, or as a server behind HTTP. With tensor parallelism each worker gets a processor."""
    from sortedrl.engine.vllm.engine import VllmEngine

    if 0 < torch.cuda.device_count() < tensor_parallel:
        pytest.skip(f"{tensor_parallel} workers need as many GPUs, and there is {torch.cuda.device_count()}")
    model = tiny_model(**HEADS)
    port = free_port() if is_server else 0
    with pytest.MonkeyPatch.context() as patch:
        if tensor_parallel > 1:  # also when vLLM is started again
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(core) for core in range(tensor_parallel)))
        engine = VllmEngine(
            model,
            slots=SLOTS,
            max_length=MAX_LENGTH,
            decode=letters,
            port=port,
            tensor_parallel=tensor_parallel,
            sleeps=True,
        )
        if engine.needs_probe:  # on a GPU
            engine.take_evidence(probe_replay(engine, vocab=VOCAB, max_length=MAX_LENGTH))
        try:
            # A start of two workers takes two minutes on a busy machine.
            yield model_case(engine, model, kill=lambda: os.kill(engine.pids[0], signal.SIGKILL), limit_s=600.0)
            pids = engine.pids
        finally:
            engine.close()
    assert are_gone(pids)


def local_member() -> tuple[Engine, Any]:
    """In an actor: a local engine. Compiled code would be through with answers before they can be interrupted."""
    model = tiny_model()
    return LocalEngine(model, slots=SLOTS, max_length=POOL_LENGTH, stream_every=1, path="lean", decode=letters), model


def vllm_member() -> tuple[Engine, Any]:
    """In an actor: vLLM, which gets its weights with the first publication."""
    from sortedrl.engine.vllm.engine import VllmEngine

    model = tiny_model(**HEADS).to("meta")
    settings: dict[str, Any] = {"slots": SLOTS, "max_length": POOL_LENGTH, "stream_s": 0.5, "transfer": "gloo"}
    share = 0.4 if torch.cuda.is_available() else None  # two engines may be on one GPU
    return VllmEngine(model, decode=letters, sleeps=True, memory_share=share, **settings), model


@contextmanager
def local_pool_case() -> Iterator[EngineCase]:
    with _pool_case(local_member, tiny_model(), is_local=True) as case:
        yield case


@contextmanager
def child_case() -> Iterator[EngineCase]:
    """One local engine in a child process, without Ray."""
    from sortedrl.engine.pool.child_launcher import ChildLauncher

    model = tiny_model()
    launcher = ChildLauncher(f"{__name__}:{local_member.__name__}", {}, threads=1)
    with _served(
        Pool(launcher, size=1, slots=SLOTS, exact_replay=True, keep_kv=True, waits=True, noise=SCHEME), model
    ) as case:
        yield case


@contextmanager
def vllm_pool_case() -> Iterator[EngineCase]:
    from sortedrl.engine.vllm.transfer.link import WeightLink

    route = WeightLink(backend="gloo", dtype=torch.float32, num_workers=1, limit_s=300, is_local=True)
    settings = {"health_s": 300, "start_s": 900, "route": route, "sleeps": True}
    num_gpus = min(1.0, torch.cuda.device_count() / 2)  # without any, Ray hides the GPUs
    with _pool_case(vllm_member, tiny_model(**HEADS), num_gpus=num_gpus, **settings) as case:
        yield case


@contextmanager
def _pool_case(
    make: Callable[[], tuple[Engine, Any]],
    model: Any,
    *,
    is_local: bool = False,
    num_gpus: float = 0.0,
    **settings: Any,
) -> Iterator[EngineCase]:
    """Two engines behind one, in a Ray of our own."""
    with local_ray():
        from sortedrl.engine.pool.ray_launcher import RayEngineLauncher

        members = RayEngineLauncher(
            make, num_cpus=0.5, num_gpus=num_gpus, threads=1, imports=(make.__module__,), has_spare=is_local
        )
        pool = Pool(
            members, size=2, slots=SLOTS, exact_replay=True, keep_kv=True, waits=is_local, noise=SCHEME, **settings
        )
        with _served(pool, model) as case:
            yield case


@contextmanager
def _served(pool: Pool, model: Any) -> Iterator[EngineCase]:
    def kill() -> None:
        for pid in member_pids(pool):
            os.kill(pid, signal.SIGKILL)

    try:
        pool.publish(0, source(model)).wait()
        yield model_case(pool, model, kill=kill, answer_tokens=POOL_ANSWER_TOKENS)
    finally:
        pool.close()


def member_pids(pool: Pool) -> list[int]:
    """Of the engines that are up."""
    return [member["pid"] for member in pool.stats().extra["members"] if member]
