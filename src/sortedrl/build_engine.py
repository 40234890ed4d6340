"""From a configuration to the engine of a run: in this process, vLLM, or a pool of Ray actors.

`build.py` calls `build_engine`. The actors of a pool make their engine from the model's configuration alone and get its
weights by the first publication: a machine of the cluster needs this package, and no copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.config_sections import EngineSection
from sortedrl.engine.base import Engine, Sampling
from sortedrl.engine.local import LocalEngine
from sortedrl.engine.paths import choose_dtype
from sortedrl.engine.pool import Pool
from sortedrl.engine.ray_cluster import connect, disconnect
from sortedrl.engine.watchdog import Watchdog
from sortedrl.errors import ConfigError
from sortedrl.knobs import Fate, Knobs
from sortedrl.weights import ModuleWeights

STREAM_EVERY = 16  # decode steps from one delivery to the next: what a dead engine takes along


def build_engine(
    config: SortedConfig, model: Any, knobs: Knobs, decode: Callable[[list[int]], str] | None = None
) -> Engine:
    """`decode` turns tokens into the text in which stop strings are looked for."""
    needs_replay = Fate.REPLAY in (knobs.interrupted, knobs.on_bound)
    length = config.task.max_prompt_tokens + config.engine.max_new_tokens
    is_pool = config.engine.replicas > 1 or bool(config.engine.cluster)
    if config.engine.stop and is_pool:
        raise ConfigError("engine.stop is not for pools: leave it out, or engine.replicas at 1")
    match config.engine.kind:
        case "vllm" if is_pool:
            raise ConfigError("a pool has local engines only: set engine.replicas = 1, or engine.kind = local")
        case "local" if is_pool:
            dtype = choose_dtype(model, config.engine.dtype, is_exact=needs_replay)
            engine = build_pool(config.engine, model, dtype, max_length=length, threads=config.run.threads)
        case "local":
            own = _private_copy(model) if knobs.overlap else model
            dtype = choose_dtype(own, config.engine.dtype, is_exact=needs_replay)
            engine = LocalEngine(own, slots=config.engine.slots, max_length=length, dtype=dtype, decode=decode)
        case "vllm":
            if config.engine.address and config.engine.port:
                raise ConfigError("engine.address names a vLLM server and engine.port starts one: set one of them")
            if config.engine.dtype == "bfloat16":
                check_replay(knobs, is_exact=False)  # before it is started for nothing
            engine = build_vllm(config, model, length, decode)
    if config.engine.in_flight == "keep" and not engine.capabilities.keep_kv:
        raise ConfigError(f"engine {config.engine.kind} cannot keep its cache: set engine.in_flight = reprefill")
    try:
        check_replay(knobs, is_exact=engine.capabilities.exact_replay)
    except ConfigError:
        engine.close()
        raise
    return Watchdog(engine, config.engine.watchdog_s)


def check_replay(knobs: Knobs, *, is_exact: bool) -> None:
    if Fate.REPLAY in (knobs.interrupted, knobs.on_bound) and not is_exact:
        raise ConfigError(
            "replay needs an engine whose replay is exact (float32 weights; of vLLM servers, one with sortedrl's "
            "worker extension): load the model in float32 and set engine.dtype = float32, or set schedule.interrupted "
            "and schedule.on_bound to resume, restart or wait"
        )


def build_vllm(config: SortedConfig, model: Any, max_length: int, decode: Callable[[list[int]], str] | None) -> Engine:
    """vLLM with a copy of the model; it may be silent for half as long as the watchdog allows, then it starts anew."""
    from sortedrl.engine.vllm import VllmEngine  # it needs much that others do not have

    settings = config.engine
    return VllmEngine(
        model,
        slots=settings.slots,
        max_length=max_length,
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        kv_bytes=None if settings.kv_gb is None else int(settings.kv_gb * 2**30),
        limit_s=settings.watchdog_s / 2,
        decode=decode,
        address=settings.address,
        port=settings.port,
    )


def build_sampling(config: SortedConfig, stop_tokens: tuple[int, ...]) -> Sampling:
    settings = config.engine
    return Sampling(
        temperature=settings.temperature,
        stop_tokens=stop_tokens,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        stop_strings=settings.stop,
    )


def _private_copy(model: Any) -> Any:
    """Weights that the learner does not change under a running engine."""
    return copy.deepcopy(model).requires_grad_(False)


def build_pool(settings: EngineSection, model: Any, dtype: torch.dtype, *, max_length: int, threads: int) -> Engine:
    """Engines like the one that the settings describe, `replicas` times, with the weights of `model` as version 0."""
    is_ours = connect(settings.cluster or None)
    from sortedrl.engine.ray_members import RayMembers  # not before Ray knows where to listen

    make_engine = partial(
        local_engine,
        model.config.to_dict(),
        weights_dtype=next(model.parameters()).dtype,
        dtype=dtype,
        slots=settings.slots,
        max_length=max_length,
    )
    members = RayMembers(
        make_engine,
        num_cpus=settings.replica_cpus,
        num_gpus=settings.replica_gpus,
        threads=threads,
        on_close=disconnect if is_ours else None,
    )
    pool = Pool(
        members,
        size=settings.replicas,
        slots=settings.slots,
        exact_replay=dtype == torch.float32,
        keep_kv=True,
        health_s=settings.health_s,
    )
    pool.publish(0, ModuleWeights(model)).wait()
    return pool


def local_engine(
    config: dict[str, Any], *, weights_dtype: torch.dtype, dtype: torch.dtype, slots: int, max_length: int
) -> tuple[Engine, Any]:
    """Called in an actor: an engine around a model of this shape, whose weights are yet to come."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=weights_dtype, trust_remote_code=False)
    model.requires_grad_(False).eval()
    if torch.cuda.is_available():
        model.to("cuda")
    engine = LocalEngine(model, slots=slots, max_length=max_length, dtype=dtype, stream_every=STREAM_EVERY)
    return engine, model
