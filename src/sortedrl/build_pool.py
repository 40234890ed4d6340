"""From a configuration to a pool of engines in Ray actors; `build.py` calls it where `engine.replicas` asks for it.

Actors make their engine from the model's configuration alone and get its weights by the first publication: a machine of
the cluster needs this package, and no copy of the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sortedrl.config_sections import EngineSection
from sortedrl.engine.base import Engine
from sortedrl.engine.local import LocalEngine
from sortedrl.engine.pool import Pool
from sortedrl.engine.ray_cluster import connect, disconnect
from sortedrl.errors import ConfigError
from sortedrl.weights import ModuleWeights

STREAM_EVERY = 16  # decode steps from one delivery to the next: what a dead engine takes along


def build_pool(settings: EngineSection, model: Any, dtype: torch.dtype, *, max_length: int, threads: int) -> Engine:
    """Engines like the one that the settings describe, `replicas` times, with the weights of `model` as version 0."""
    if settings.stop:
        raise ConfigError("engine.stop needs the tokenizer beside the engine: leave it out, or set engine.replicas = 1")
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
