"""Builds the learner of a run: in this process, in a child process, or over ranks that each hold a share of weights.

`parts.py` calls `build_learner` before it builds the engine, because both may share one connection to Ray.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.pool.ray_cluster import connect, disconnect, is_connected
from sortedrl.errors import ConfigError
from sortedrl.learner.forked import ForkedLearner
from sortedrl.learner.sharded.context import check_heads
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.sharded.restarts import RestartingRanks
from sortedrl.learner.sharded.shards import check_torch
from sortedrl.learner.unscored import SkippingLearner
from sortedrl.run.builders.machines import check_gpus

RunLearner = SkippingLearner | ForkedLearner | ShardedLearner

log = logging.getLogger(__name__)


def build_learner(
    config: SortedConfig, model: Any, initial: Callable[[], Mapping[str, Any]] | None = None
) -> RunLearner:
    """The configured learner. It saves batches whose steps are not finite in the run directory.

    `initial` reads the model's weights again, for ranks that are lost before the first checkpoint.
    """
    settings, overlap = config.learner, config.knobs.overlap
    temperature = config.engine.temperature or 1.0
    if not config.has_rank_actors:
        is_apart = has_own_process(config, model)
        in_thread = overlap and not is_apart
        learner = SkippingLearner(
            model,
            settings,
            temperature=temperature,
            overlap=in_thread,
            inspect_dir=config.run_dir,
            shares_device=config.engine.sleep_during_updates,
        )
        return ForkedLearner(learner) if is_apart else learner
    check_torch()
    check_heads(model.config, config.context_parallel)
    check_rank_device(config)
    check_room(config)
    is_ours = connect(config.engine.cluster or None, run_dir=config.run_dir)
    check_gpus(config)
    from sortedrl.learner.sharded.ray_ranks import RayRanks  # imports Ray's actors, so only after `connect`

    def launch() -> RayRanks:
        return RayRanks(
            config.num_ranks,
            num_cpus=settings.rank_cpus,
            num_gpus=config.rank_gpus,
            threads=config.run.threads,
            timeout_s=settings.rank_timeout_s,
            send_s=config.engine.publish_s,
            is_local=not config.engine.cluster,
            shares_device=config.engine.sleep_during_updates,
        )

    on_close = disconnect if is_ours else None
    # Without checkpoints, all updates of the run would be kept in memory.
    has_points = config.checkpoint.save and config.checkpoint.every_updates > 0
    try:
        ranks = RestartingRanks(launch, max_restarts=settings.max_restarts if has_points else 0, on_close=on_close)
    except BaseException:
        if on_close is not None:
            on_close()
        raise
    try:
        return ShardedLearner(
            model,
            settings,
            temperature=temperature,
            ranks=ranks,
            overlap=overlap,
            inspect_dir=config.run_dir,
            initial=initial,
        )
    except BaseException:
        ranks.close()
        raise


def check_rank_device(config: SortedConfig) -> None:
    """Refuse a `learner.device` that learner processes do not get: Ray shows them the GPUs of `rank_gpus` only."""
    settings = config.learner
    if settings.device.startswith("cuda") and settings.rank_gpus == 0:
        raise ConfigError(
            f"learner.device = {settings.device}, but learner.rank_gpus = 0 gives the {settings.ranks} learner "
            "processes no GPU: set learner.rank_gpus = 1"
        )
    if settings.device == "cpu" and settings.rank_gpus > 0:
        raise ConfigError(
            f"learner.rank_gpus = {settings.rank_gpus:g} gives GPUs to learner processes that learner.device = cpu "
            "does not use: remove one of them"
        )


def has_own_process(config: SortedConfig, model: Any) -> bool:
    """Whether updates run in a child process. In a thread they would take turns with the engine's Python code."""
    wanted = config.learner.own_process
    if not config.knobs.overlap:
        if wanted:
            raise ConfigError("learner.own_process = true needs schedule.overlap: choose async-on-policy or async")
        return False
    why = _fork_fault(config, model)
    if wanted and why:
        raise ConfigError(f"learner.own_process = true does not work here: {why}; leave it out")
    if wanted is None and num_processors() == 1:
        log.info("engine and learner take turns on one processor: schedule = sorted-replay is as fast here")
        return False
    return wanted is not False and why is None and (bool(wanted) or not config.engine.own_process)


def _fork_fault(config: SortedConfig, model: Any) -> str | None:
    """Why this process cannot be copied for the learner; None if it can."""
    if sys.platform != "linux":
        return "only Linux copies a process safely"
    if torch.cuda.is_available() or any(not parameter.is_cpu for parameter in model.parameters()):
        return "a process that uses a GPU cannot be copied"
    if is_connected():
        return "a process that is connected to Ray cannot be copied"
    if config.run.threads > 1:
        return f"a process with {config.run.threads} threads cannot be copied: set run.threads = 1"
    return None


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_room(config: SortedConfig) -> None:
    """Refuse more processors than this machine has: Ray would wait for them forever."""
    if config.engine.cluster:
        return  # a cluster may grow
    settings, engine = config.learner, config.engine
    of_engines = config.num_engines * engine.replica_cpus if config.num_engines > 1 else 0.0
    needed, there = config.num_ranks * settings.rank_cpus + of_engines, os.cpu_count() or 1
    if needed > there:
        raise ConfigError(
            f"learner.ranks and engine.replicas ask for {needed:g} processors and this machine has {there}: lower "
            "learner.rank_cpus or engine.replica_cpus, or set engine.cluster"
        )
