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
from sortedrl.engine.pool.pool import TAKE_S, Pool
from sortedrl.engine.pool.ray_cluster import connect, disconnect, is_connected
from sortedrl.engine.replay_probe import probe_replay
from sortedrl.engine.sampling.noise import SCHEME
from sortedrl.engine.vllm.core import check_installed
from sortedrl.engine.vllm.runner_choice import RunnerWishes, asks_v1
from sortedrl.engine.watchdog import Watchdog
from sortedrl.errors import ConfigError, EngineError
from sortedrl.external.plugins import name_of
from sortedrl.run.builders.machines import check_gpus
from sortedrl.schedule import Fate, Knobs
from sortedrl.weights import ModuleWeights, arrays_of, base_copy, is_adapted, load_arrays

if TYPE_CHECKING:
    from sortedrl.engine.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

# What an actor imports before it makes a model, in steps of a second or two each.
IMPORTS = ("torch", "torch._dynamo", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", __name__)
KEPT_SHARE = 1 / 8  # of the machine's memory for the cache of trajectories in tools
STREAM_EVERY = 16  # decode steps between two deliveries: at most so many tokens per sample die with an engine


def build_engine(
    config: SortedConfig,
    model: Any,
    knobs: Knobs,
    decode: Callable[[list[int]], str] | None = None,
    *,
    source: ModuleWeights | None = None,
    places: Sequence[ActorPlace] = (),
    has_tools: bool = False,
) -> Engine:
    """The configured engine behind a watchdog. `decode` turns tokens into text, to search it for stop strings.

    `source`: the learner's weights, for engines that fetch them from where they are; without it those of `model`.
    `places`: the GPUs of each engine that shares them with ranks of the learner.
    `has_tools`: the run's trajectories leave their slots and come back.
    """
    needs_replay = Fate.REPLAY in (knobs.interrupted, knobs.on_bound)
    length = config.task.max_prompt_tokens + config.engine.max_new_tokens
    has_members = is_pool(config)
    if config.engine.kind in ENGINE.names and config.engine.options:
        raise ConfigError(f"engine.options has no effect on engine.kind {config.engine.kind}: remove it")
    if config.engine.sleep_during_updates and knobs.overlap:
        raise ConfigError("engine.sleep_during_updates and schedule.overlap exclude each other: set one to false")
    if config.engine.sleep_during_updates and config.engine.kind == "local":  # before a pool is started in vain
        raise _sleepless(config)
    if config.engine.stop and has_members:
        raise ConfigError("engine.stop does not work with a pool: remove it, or set engine.replicas = 1")
    if has_members and (config.engine.address or config.engine.port):
        raise ConfigError("a pool starts its own engines: remove engine.address and engine.port")
    if has_members and not is_child(config):
        check_processors(config)
    if has_members and config.engine.kind == "vllm" and config.has_gpu_engines and not asks_v1():
        check_filters(config)
    if config.engine.kind == "local" and not config.engine.cluster:
        check_cache_fits(config, model, length)
    match config.engine.kind:
        case "vllm" if has_members:
            dtype = next(model.parameters()).dtype
            dtype = dtype if config.engine.dtype == "auto" else getattr(torch, config.engine.dtype)
            check_replay(config, is_exact=may_replay_exactly(config, dtype, has_gpu=config.has_gpu_engines))
            source = source or ModuleWeights(model)
            engine = build_vllm_pool(config, model, source, dtype=dtype, max_length=length, places=places)
            if needs_replay and config.has_gpu_engines:
                probe(engine, config, model, length)
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
                kept_prefixes=num_kept_prefixes(config, own, length, has_tools=has_tools),
            )
        case "vllm":
            if config.engine.address and config.engine.port:
                raise ConfigError("engine.address names a vLLM server and engine.port starts one: set one of them")
            dtype = getattr(torch, config.engine.dtype, torch.float32)  # of "auto" only vLLM's start will tell
            # Before vLLM is started in vain.
            check_replay(config, is_exact=may_replay_exactly(config, dtype, has_gpu=torch.cuda.is_available()))
            engine = build_vllm(config, model, length, decode)
            try:
                if engine.is_stock:
                    check_filters(config)
            except ConfigError:
                engine.close()
                raise
            if needs_replay and engine.needs_probe:
                probe(engine, config, model, length)
        case _:
            engine = build_own_engine(config, model, length, decode)
    try:
        if config.engine.in_flight == "keep" and not engine.capabilities.keep_kv:
            raise ConfigError(
                f"the engine {name_of(config.engine.kind)} cannot keep its KV cache when weights change: "
                "set engine.in_flight = reprefill"
            )
        if config.engine.sleep_during_updates and not engine.capabilities.sleeps:
            raise _sleepless(config)
        check_replay(config, is_exact=engine.capabilities.exact_replay, probe=engine.capabilities.replay_probe)
    except ConfigError:
        engine.close()
        raise
    return watch(config, engine)


def watch(config: SortedConfig, engine: Engine) -> Watchdog:
    """The engine behind its watchdog. Only a pool that is sent weights loads them in a poll too."""
    settings, has_members = config.engine, is_pool(config)
    is_remote = has_members or settings.kind == "vllm"
    extra = {"start_s": settings.start_s, "publish_s": settings.publish_s} if is_remote else {}
    if has_members and settings.kind == "vllm":
        extra["poll_s"] = 2 * settings.publish_s
    return Watchdog(engine, settings.watchdog_s, **extra)


def _sleepless(config: SortedConfig) -> ConfigError:
    return ConfigError(
        f"the engine {name_of(config.engine.kind)} cannot free its memory during updates: remove "
        "engine.sleep_during_updates, or set engine.kind = vllm without engine.address and engine.port"
    )


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
    if settings.address:
        return "a vLLM server that was started elsewhere takes full weights only"
    return find_adapter_fault(model)


def is_pool(config: SortedConfig) -> bool:
    return config.has_engine_pool


def is_child(config: SortedConfig) -> bool:
    """Whether the engine is a child process of this one. All other engines outside of this process are Ray actors."""
    settings = config.engine
    is_alone = config.num_engines == 1 and not settings.cluster and not config.engine_gpus
    return is_alone and settings.kind == "local" and settings.own_process


def is_replaying(config: SortedConfig) -> bool:
    return Fate.REPLAY in (config.knobs.interrupted, config.knobs.on_bound)


def check_replay(config: SortedConfig, *, is_exact: bool, probe: str = "") -> None:
    """Refuse replay on an engine that is not exact, unless the user sets a tolerance. `probe`: what a test found."""
    if is_replaying(config) and not is_exact and not config.engine.replay_tolerance:
        found = f": in a test at the start {probe}" if probe else ""
        raise ConfigError(
            "replay needs an engine whose replay is exact (float32 weights, or vLLM with batch invariance on a GPU; of "
            f"vLLM servers, one with sortedrl's worker extension){found}. Set engine.dtype = float32, or keep the "
            "engine and set schedule.strategy = sorted-partial with schedule.max_staleness = 1, or accept close "
            "tokens with engine.replay_tolerance = 0.1"
        )


def check_filters(config: SortedConfig) -> None:
    """Refuse two filters that vLLM's own sampler applies in another order."""
    if config.engine.top_p < 1 and config.engine.min_p > 0:
        raise ConfigError(
            "vLLM on GPUs applies min-p before top-p, and other engines apply it after: set engine.top_p or "
            "engine.min_p, not both"
        )


def may_replay_exactly(config: SortedConfig, dtype: torch.dtype, *, has_gpu: bool) -> bool:
    """Whether vLLM's replay can be exact: in float32, or with batch invariance, which needs a GPU."""
    return dtype == torch.float32 or (has_gpu and config.engine.batch_invariant != "off")


def probe(engine: VllmEngine | Pool, config: SortedConfig, model: Any, max_length: int) -> None:
    """Test the engine's replay, so that it promises what it keeps."""
    sampling = build_sampling(config, ())
    try:
        evidence = probe_replay(engine, vocab=Geometry.of(model).vocab, max_length=max_length, sampling=sampling)
    except BaseException:
        engine.close()
        raise
    log.info("replay: in a test at the start %s", evidence)
    engine.take_evidence(evidence)


def check_processors(config: SortedConfig) -> None:
    """Refuse a pool of more engines than this machine has processors for: Ray would wait for them forever."""
    settings = config.engine
    needed, there = config.num_engines * settings.replica_cpus, os.cpu_count() or 1
    if not settings.cluster and not is_connected() and needed > there:
        raise ConfigError(
            f"engine.replicas {config.num_engines} with engine.replica_cpus {settings.replica_cpus:g} need {needed:g} "
            f"processors, and this machine has {there}: lower one of them, or name a cluster"
        )


def num_kept_prefixes(config: SortedConfig, model: Any, max_length: int, *, has_tools: bool) -> int:
    """How many trajectories in tools keep their cache: as set, or all that may be open, if memory allows.

    With fewer rows than waiting trajectories the oldest gives way, which is often the next one to come back.
    """
    if config.engine.kept_prefixes is not None or not has_tools:
        return config.engine.kept_prefixes or 0
    slots, bound, room = config.engine.slots, config.knobs.open_trajectories, _machine_bytes()
    wanted = 2 * slots if bound is None else bound
    row_bytes = 2 * _cache_bytes(model, max_length)  # the native decoder has four bytes per value
    return max(0, wanted if room is None else min(wanted, int(room * KEPT_SHARE / row_bytes)))


def _machine_bytes() -> int | None:
    """This machine's memory, where the system tells."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cache_bytes(model: Any, max_length: int) -> int:
    """The cache of one slot at two bytes per value."""
    shape = Geometry.of(check_supported(model))
    return 2 * 2 * shape.num_layers * shape.kv_heads * shape.head_dim * max_length


def check_cache_fits(config: SortedConfig, model: Any, max_length: int) -> None:
    """Refuse a key-value cache that is larger than this machine's memory even at two bytes per value."""
    room = _machine_bytes()
    if room is None:
        return
    needed = _cache_bytes(model, max_length) * (config.slots + (config.engine.kept_prefixes or 0))
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


def build_vllm(
    config: SortedConfig, model: Any, max_length: int, decode: Callable[[list[int]], str] | None
) -> VllmEngine:
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
        keeps_copy=config.knobs.overlap,
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
    unused = ("dtype", "kv_gb", "memory_share", "transfer", "tensor_parallel", "address", "port")
    for key in (*unused, "eager", "async_scheduling", "batch_invariant"):
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
    wishes = RunnerWishes(
        eager=settings.eager,
        async_scheduling=settings.async_scheduling,
        batch_invariant=settings.batch_invariant,
        needs_exact_replay=is_replaying(config) and not settings.replay_tolerance,
    )
    return {
        "kv_bytes": kv_bytes,
        "memory_share": settings.memory_share,
        "tensor_parallel": config.tensor_parallel,
        "transfer": settings.transfer,
        "limit_s": settings.watchdog_s / 2,
        "start_s": settings.start_s,
        "publish_s": settings.publish_s,
        "rank_timeout_s": config.learner.rank_timeout_s,
        "wishes": wishes,
        "sleeps": settings.sleep_during_updates,
    }


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
        launcher = ray_members(config, make_engine, places=places)
    pool = Pool(
        launcher,
        size=config.num_engines,
        slots=settings.slots,
        exact_replay=dtype in EXACT_DTYPES or is_invariant_pool(config),
        noise=SCHEME,
        keep_kv=True,
        waits=settings.kind == "local",
        health_s=settings.health_s,
        start_s=settings.start_s,
        publish_s=settings.publish_s,
    )
    pool.publish(0, ModuleWeights(model)).wait()
    return pool


def is_invariant_pool(config: SortedConfig) -> bool:
    """Whether engines of a pool compute independently of their batches, as far as the configuration tells."""
    settings = config.engine
    return settings.kind == "vllm" and config.has_gpu_engines and settings.batch_invariant != "off"


def build_vllm_pool(
    config: SortedConfig,
    model: Any,
    source: ModuleWeights,
    *,
    dtype: torch.dtype,
    max_length: int,
    places: Sequence[ActorPlace] = (),
) -> Pool:
    """A pool of vLLM engines, which receive weights from where the learner holds them, unless by file."""
    settings = config.engine
    transfer = "file" if is_adapted(model) else pool_transfer(config, model)
    is_ours = connect(settings.cluster or None, run_dir=config.run_dir)
    from sortedrl.engine.pool.ray_placement import choose_bundles, gpus_by_node

    place, num_gpus = None, max(config.engine_gpus, float(config.tensor_parallel))
    if config.engine_gpus and config.tensor_parallel > 1 and not places:
        place = choose_bundles(int(num_gpus), settings.replica_cpus, gpus_by_node())
    common = {"slots": settings.slots, "max_length": max_length, "dtype": dtype, "stream_s": TAKE_S}
    options = {**vllm_settings(config), "transfer": transfer, "is_spread": place is not None and place.is_spread}
    common |= {"weights_dtype": next(model.parameters()).dtype, **options}
    if is_adapted(model):
        import ray

        base, (peft_config,) = ray.put(arrays_of(base_copy(model))), model.peft_config.values()
        make = partial(vllm_adapter_engine, model.config.to_dict(), base=base, peft_config=peft_config, **common)
    else:
        make = partial(vllm_engine, model.config.to_dict(), **common)
    route = None
    if transfer != "file":
        from sortedrl.engine.vllm.transfer.link import WeightLink

        route = WeightLink(
            backend=transfer,
            dtype=dtype,
            num_workers=config.tensor_parallel,
            limit_s=settings.publish_s,
            rank_timeout_s=config.learner.rank_timeout_s,
            is_local=not settings.cluster,
        )
    pool = Pool(
        ray_members(config, make, place=place, places=places, has_adapters=is_adapted(model), is_ours=is_ours),
        size=config.num_engines,
        slots=settings.slots,
        exact_replay=dtype in EXACT_DTYPES or is_invariant_pool(config),
        noise=SCHEME,
        keep_kv=True,
        sleeps=settings.sleep_during_updates,
        health_s=settings.health_s,
        start_s=settings.start_s,
        publish_s=settings.publish_s,
        route=route,
        is_stable=not config.knobs.overlap,
    )
    pool.publish(0, source).wait()
    return pool


def pool_transfer(config: SortedConfig, model: Any) -> str:
    """The backend by which a pool of vLLM engines gets weights: NCCL between GPUs that are not shared, else gloo.

    `model`: of a learner in this process.
    """
    settings = config.engine
    if settings.transfer == "ipc":
        raise ConfigError(
            "engine.transfer = ipc needs engine and learner on one GPU and in one process: set engine.replicas = 1, or "
            "engine.transfer = nccl"
        )
    is_on_gpu = config.rank_gpus > 0 if config.has_rank_actors else next(model.parameters()).device.type == "cuda"
    is_shared = config.placement.mode == "colocated"  # NCCL refuses two processes on one GPU
    has_nccl = config.engine_gpus >= 1 and is_on_gpu and not is_shared
    if settings.transfer == "nccl" and not has_nccl:
        raise ConfigError(
            "engine.transfer = nccl needs engines and a learner that have GPUs of their own: set placement.mode = "
            "separate, or remove engine.transfer"
        )
    if settings.transfer != "auto":
        return settings.transfer
    return "nccl" if has_nccl else "gloo"


def child_members(config: SortedConfig, engine: dict[str, Any]) -> EngineLauncher:
    """A child process for the engine that `child_engine` makes of the settings `engine`."""
    return ChildLauncher(f"{__name__}:child_engine", engine, threads=config.run.threads)


def ray_members(
    config: SortedConfig,
    make_engine: Callable[[], tuple[Engine, Any]],
    *,
    place: Any = None,
    places: Sequence[ActorPlace] = (),
    has_adapters: bool = False,
    is_ours: bool = False,
) -> EngineLauncher:
    """Launches engines in Ray actors. `is_ours`: the caller has just connected to Ray, and closes it with the pool."""
    settings = config.engine
    is_ours = connect(settings.cluster or None, run_dir=config.run_dir) or is_ours
    check_gpus(config)
    from sortedrl.engine.pool.ray_launcher import RayEngineLauncher  # imports Ray's actors, so only after `connect`

    return RayEngineLauncher(
        make_engine,
        num_cpus=settings.replica_cpus,
        num_gpus=config.engine_gpus,
        threads=config.run.threads,
        imports=IMPORTS,
        place=place,
        places=places,
        has_adapters=has_adapters,
        has_spare=settings.kind == "local" and not settings.cluster and not config.engine_gpus,
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
    """Runs in an actor: a vLLM engine, and a model in host memory if that receives the weights."""
    make = load_vllm_engine()
    with torch.device("cpu" if settings["transfer"] == "file" else "meta"):
        model = empty_model(config, weights_dtype)
    return make(model, slots=slots, max_length=max_length, dtype=dtype, **settings), model


def vllm_adapter_engine(
    config: dict[str, Any], *, weights_dtype: torch.dtype, base: Any, peft_config: Any, **settings: Any
) -> tuple[Engine, Any]:
    """Runs in an actor: a vLLM engine with adapters. `base`: Ray's reference to the base weights, which stay.

    Publications bring the adapters alone. The first one brings those of the learner.
    """
    import ray

    from sortedrl.learner.lora import adapt

    model = empty_model(config, weights_dtype)
    load_arrays(ray.get(base), model)
    return load_vllm_engine()(adapt(model, peft_config), **settings), model


def empty_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    return model.requires_grad_(False).eval()
