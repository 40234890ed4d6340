"""Builds the engine of a run: local, also in a process of its own, vLLM, a pool of either in Ray actors, or the user's.

`parts.py` calls `build_engine`. An engine outside of this process creates the model from its configuration and receives
the weights with the first publication, so the machines of a cluster need this package but no copy of the model.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.config.plug_points import ENGINE
from sortedrl.engine.base import Engine, Sampling
from sortedrl.engine.local.decoder_choice import EXACT_DTYPES, choose_dtype
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.local.module_decoder import Geometry, check_supported
from sortedrl.engine.local.speculation import DraftMode
from sortedrl.engine.pool.actor_place import ActorPlace
from sortedrl.engine.pool.child_launcher import ChildLauncher
from sortedrl.engine.pool.member import EngineLauncher
from sortedrl.engine.pool.pool import Pool
from sortedrl.engine.pool.ray_cluster import connect, disconnect, is_connected
from sortedrl.engine.sampling.noise import SCHEME
from sortedrl.engine.vllm.core import check_installed
from sortedrl.engine.watchdog import Watchdog
from sortedrl.errors import ConfigError, EngineError
from sortedrl.external.plugins import name_of
from sortedrl.run.builders.machines import check_gpus
from sortedrl.schedule import Fate, Knobs
from sortedrl.weights import ModuleWeights, is_adapted

if TYPE_CHECKING:
    from sortedrl.engine.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

# What an actor imports before it makes a model, in steps of a second or two each.
IMPORTS = ("torch", "torch._dynamo", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", __name__)
STREAM_EVERY = 16  # decode steps between two deliveries: at most so many tokens per sample die with an engine


def build_engine(
    config: SortedConfig,
    model: Any,
    knobs: Knobs,
    decode: Callable[[list[int]], str] | None = None,
    places: Sequence[ActorPlace] = (),
) -> Engine:
    """The configured engine behind a watchdog. `decode` turns tokens into text, to search it for stop strings.

    `places`: the GPUs of each engine that shares them with ranks of the learner.
    """
    needs_replay = Fate.REPLAY in (knobs.interrupted, knobs.on_bound)
    length = config.task.max_prompt_tokens + config.engine.max_new_tokens
    has_members = is_pool(config)
    if config.engine.kind in ENGINE.names and config.engine.options:
        raise ConfigError(f"engine.options has no effect on engine.kind {config.engine.kind}: remove it")
    if config.engine.stop and has_members:
        raise ConfigError("engine.stop does not work with a pool: remove it, or set engine.replicas = 1")
    if has_members and (config.engine.address or config.engine.port):
        raise ConfigError("a pool starts its own engines: remove engine.address and engine.port")
    if has_members and not is_child(config):
        check_processors(config)
    if config.engine.kind == "local" and not config.engine.cluster:
        check_cache_fits(config, model, length)
    match config.engine.kind:
        case "vllm" if has_members:
            dtype = next(model.parameters()).dtype
            dtype = dtype if config.engine.dtype == "auto" else getattr(torch, config.engine.dtype)
            check_replay(knobs, is_exact=dtype == torch.float32)
            settings = vllm_settings(config)
            make = partial(vllm_engine, **settings)
            engine = build_pool(config, model, make, dtype=dtype, max_length=length, places=places)
        case "local" if has_members:
            is_here = not config.engine.cluster and not torch.cuda.is_available()
            dtype = choose_dtype(model, config.engine.dtype, needs_exact_replay=needs_replay, is_this_machine=is_here)
            make = partial(local_engine, drafts=config.engine.drafts)
            engine = build_pool(config, model, make, dtype=dtype, max_length=length)
        case "local":
            own = _private_copy(model) if knobs.overlap else model
            dtype = choose_dtype(own, config.engine.dtype, needs_exact_replay=needs_replay)
            engine = LocalEngine(
                own,
                slots=config.engine.slots,
                max_length=length,
                dtype=dtype,
                decode=decode,
                drafts=config.engine.drafts,
            )
        case "vllm":
            if config.engine.address and config.engine.port:
                raise ConfigError("engine.address names a vLLM server and engine.port starts one: set one of them")
            if config.engine.dtype == "bfloat16":
                check_replay(knobs, is_exact=False)  # before vLLM is started in vain
            engine = build_vllm(config, model, length, decode)
        case _:
            engine = build_own_engine(config, model, length, decode)
    try:
        if config.engine.in_flight == "keep" and not engine.capabilities.keep_kv:
            raise ConfigError(
                f"the engine {name_of(config.engine.kind)} cannot keep its KV cache when weights change: "
                "set engine.in_flight = reprefill"
            )
        check_replay(knobs, is_exact=engine.capabilities.exact_replay)
    except ConfigError:
        engine.close()
        raise
    return Watchdog(engine, config.engine.watchdog_s)


def engine_model(config: SortedConfig, model: Any, source: ModuleWeights) -> Any:
    """The model that the engine gets: plain weights, or the model with its adapters if the engine takes them."""
    if not is_adapted(model):
        return source.module
    why = _merge_reason(config, model)
    if why is None:
        return model
    if config.engine.kind == "vllm":
        log.info("adapters are merged into full weights at every publication: %s", why)
    return source.module


def _merge_reason(config: SortedConfig, model: Any) -> str | None:
    """Why adapters must be merged into the weights for the engine; None if the engine takes them."""
    from sortedrl.engine.vllm.adapter import find_adapter_fault

    settings = config.engine
    if settings.kind != "vllm":
        return "the engine computes with plain weights"
    if config.lora.merge:
        return "lora.merge is set"
    if settings.address or settings.port:
        return "a vLLM server takes full weights only"
    if is_pool(config):
        return "a pool takes full weights only"
    return find_adapter_fault(model)


def is_pool(config: SortedConfig) -> bool:
    return config.has_engine_pool


def is_child(config: SortedConfig) -> bool:
    """Whether the engine is a child process of this one. All other engines outside of this process are Ray actors."""
    settings = config.engine
    is_alone = config.num_engines == 1 and not settings.cluster and not config.engine_gpus
    return is_alone and settings.kind == "local" and settings.own_process


def check_replay(knobs: Knobs, *, is_exact: bool) -> None:
    if Fate.REPLAY in (knobs.interrupted, knobs.on_bound) and not is_exact:
        raise ConfigError(
            "replay needs an engine whose replay is exact (float32 weights; of vLLM servers, one with sortedrl's "
            "worker extension): load the model in float32 and set engine.dtype = float32, or set schedule.interrupted "
            "and schedule.on_bound to resume, restart or wait"
        )


def check_processors(config: SortedConfig) -> None:
    """Refuse a pool of more engines than this machine has processors for: Ray would wait for them forever."""
    settings = config.engine
    needed, there = config.num_engines * settings.replica_cpus, os.cpu_count() or 1
    if not settings.cluster and not is_connected() and needed > there:
        raise ConfigError(
            f"engine.replicas {config.num_engines} with engine.replica_cpus {settings.replica_cpus:g} need {needed:g} "
            f"processors, and this machine has {there}: lower one of them, or name a cluster"
        )


def check_cache_fits(config: SortedConfig, model: Any, max_length: int) -> None:
    """Refuse a key-value cache that is larger than this machine's memory even at two bytes per value."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):  # Windows
        return
    shape = Geometry.of(check_supported(model))
    needed = 2 * 2 * shape.num_layers * shape.kv_heads * shape.head_dim * max_length * config.slots
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        room = max(room, int(torch.cuda.mem_get_info()[1]))
    if needed > room:
        raise ConfigError(
            f"engine.slots {config.slots} of {max_length} tokens need a key-value cache of {needed / 2**30:,.0f} GiB "
            f"or more, and this machine has {room / 2**30:,.0f} GiB: lower engine.slots or engine.max_new_tokens"
        )


def load_vllm_engine() -> type[VllmEngine]:
    """The class of the vLLM engine, imported at need: its packages are optional."""
    try:
        from sortedrl.engine.vllm.engine import VllmEngine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sortedrl"):
            raise
        raise EngineError(
            f"engine.kind = vllm needs {error.name}, which is not installed: pip install {error.name}, or set "
            "engine.kind = local"
        ) from error
    return VllmEngine


def build_vllm(config: SortedConfig, model: Any, max_length: int, decode: Callable[[list[int]], str] | None) -> Engine:
    """vLLM with a copy of the model. It restarts its core after half the time that the watchdog allows."""
    settings = config.engine
    if not settings.address:
        check_installed()  # first, because its message names everything that a local vLLM needs
    return load_vllm_engine()(
        model,
        slots=settings.slots,
        max_length=max_length,
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        decode=decode,
        address=settings.address,
        port=settings.port,
        **vllm_settings(config),
    )


def build_own_engine(
    config: SortedConfig, model: Any, max_length: int, decode: Callable[[list[int]], str] | None
) -> Engine:
    """The engine that the user wrote: made with the model, or given ready, with the model's weights as version 0."""
    settings = config.engine
    what = f"engine.kind {name_of(settings.kind)!r}"
    if is_pool(config):
        raise ConfigError(f"{what} cannot run in a pool: remove engine.replicas, engine.own_process and engine.cluster")
    for key in ("dtype", "kv_gb", "address", "port"):
        if getattr(settings, key) != type(settings).model_fields[key].default:
            raise ConfigError(f"engine.{key} has no effect on {what}: remove it, or pass it in engine.options")
    own = _private_copy(model) if config.knobs.overlap else model
    signature = "(model, slots=..., max_length=..., decode=..., **engine.options)"
    options = {"slots": settings.slots, "max_length": max_length, "decode": decode, **settings.options}
    engine = ENGINE.make(settings.kind, signature, own, **options)
    if engine.capabilities.slots != settings.slots:
        engine.close()
        raise ConfigError(
            f"{what} has {engine.capabilities.slots} slots and engine.slots is {settings.slots}: make them equal"
        )
    if engine is ENGINE.find(settings.kind):  # it was not made here, so its weights may be others than the run's
        engine.publish(0, ModuleWeights(own)).wait()
    return engine


def vllm_settings(config: SortedConfig) -> dict[str, Any]:
    """Settings of a single vLLM engine and of each engine of a pool."""
    settings = config.engine
    kv_bytes = None if settings.kv_gb is None else int(settings.kv_gb * 2**30)
    return {"kv_bytes": kv_bytes, "limit_s": settings.watchdog_s / 2}


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
    """A copy of the model, so that the learner does not change weights while the engine uses them."""
    return copy.deepcopy(model).requires_grad_(False)


def build_pool(
    config: SortedConfig,
    model: Any,
    make: Callable[..., tuple[Engine, Any]],
    *,
    dtype: torch.dtype,
    max_length: int,
    places: Sequence[ActorPlace] = (),
) -> Engine:
    """A pool of engines made by `make`, with the weights of `model` as version 0."""
    settings = config.engine
    common = {"slots": settings.slots, "max_length": max_length}
    if is_child(config):
        weights = str(next(model.parameters()).dtype).removeprefix("torch.")
        chosen = {"weights_dtype": weights, "dtype": str(dtype).removeprefix("torch."), "drafts": settings.drafts}
        launcher = child_members(config, {"config": model.config.to_dict(), **chosen, **common})
    else:
        weights_dtype = next(model.parameters()).dtype
        described = model.config.to_dict()
        make_engine = partial(make, described, weights_dtype=weights_dtype, dtype=dtype, **common)
        launcher = ray_members(config, make_engine, places)
    pool = Pool(
        launcher,
        size=config.num_engines,
        slots=settings.slots,
        exact_replay=dtype in EXACT_DTYPES,
        noise=SCHEME,
        keep_kv=True,
        waits=settings.kind == "local",
        health_s=settings.health_s,
    )
    pool.publish(0, ModuleWeights(model)).wait()
    return pool


def child_members(config: SortedConfig, engine: dict[str, Any]) -> EngineLauncher:
    """A child process for the engine that `child_engine` makes of the settings `engine`."""
    return ChildLauncher(f"{__name__}:child_engine", engine, threads=config.run.threads)


def ray_members(
    config: SortedConfig, make_engine: Callable[[], tuple[Engine, Any]], places: Sequence[ActorPlace]
) -> EngineLauncher:
    settings = config.engine
    is_ours = connect(settings.cluster or None, run_dir=config.run_dir)
    check_gpus(config)
    from sortedrl.engine.pool.ray_launcher import RayEngineLauncher  # imports Ray's actors, so only after `connect`

    return RayEngineLauncher(
        make_engine,
        num_cpus=settings.replica_cpus,
        num_gpus=config.engine_gpus,
        threads=config.run.threads,
        imports=IMPORTS,
        has_spare=settings.kind == "local" and not settings.cluster and not config.engine_gpus,
        places=places,
        on_close=disconnect if is_ours else None,
    )


def local_engine(
    config: dict[str, Any],
    *,
    weights_dtype: torch.dtype,
    dtype: torch.dtype,
    slots: int,
    max_length: int,
    drafts: DraftMode = "off",
) -> tuple[Engine, Any]:
    """Runs in an actor: a local engine and its model, whose weights come with the first publication."""
    model = empty_model(config, weights_dtype)
    if torch.cuda.is_available():
        model.to("cuda")
    engine = LocalEngine(
        model, slots=slots, max_length=max_length, dtype=dtype, stream_every=STREAM_EVERY, drafts=drafts
    )
    return engine, model


def child_engine(
    config: dict[str, Any], *, weights_dtype: str, dtype: str, slots: int, max_length: int, drafts: DraftMode
) -> tuple[Engine, Any]:
    """Runs in a child process: the same, from plain values."""
    weights, computed = getattr(torch, weights_dtype), getattr(torch, dtype)
    return local_engine(
        config, weights_dtype=weights, dtype=computed, slots=slots, max_length=max_length, drafts=drafts
    )


def vllm_engine(
    config: dict[str, Any],
    *,
    weights_dtype: torch.dtype,
    dtype: torch.dtype,
    slots: int,
    max_length: int,
    **settings: Any,
) -> tuple[Engine, Any]:
    """Runs in an actor: a vLLM engine and a model in host memory that receives the weights."""
    make = load_vllm_engine()
    model = empty_model(config, weights_dtype)
    return make(model, slots=slots, max_length=max_length, dtype=dtype, **settings), model


def empty_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    return model.requires_grad_(False).eval()
