"""Builds the learner of a run: in this process, or over several ranks that each hold a share of the weights.

`parts.py` calls `build_learner` before it builds the engine, because both may share one connection to Ray.
"""

from __future__ import annotations

import os
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.engine.pool.ray_cluster import connect, disconnect
from sortedrl.errors import ConfigError
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.sharded.shards import check_torch
from sortedrl.learner.unscored import SkippingLearner

RunLearner = SkippingLearner | ShardedLearner


def build_learner(config: SortedConfig, model: Any) -> RunLearner:
    """The configured learner. It saves batches whose steps are not finite in the run directory."""
    settings, overlap = config.learner, config.knobs.overlap
    temperature = config.engine.temperature or 1.0
    if settings.ranks == 1:
        return SkippingLearner(model, settings, temperature=temperature, overlap=overlap, inspect_dir=config.run_dir)
    check_torch()
    check_room(config)
    is_ours = connect(config.engine.cluster or None, run_dir=config.run_dir)
    from sortedrl.learner.sharded.ray_ranks import RayRanks  # imports Ray's actors, so only after `connect`

    ranks = RayRanks(
        settings.ranks,
        num_cpus=settings.rank_cpus,
        num_gpus=settings.rank_gpus,
        threads=config.run.threads,
        timeout_s=settings.rank_timeout_s,
        on_close=disconnect if is_ours else None,
    )
    try:
        return ShardedLearner(
            model, settings, temperature=temperature, ranks=ranks, overlap=overlap, inspect_dir=config.run_dir
        )
    except BaseException:
        ranks.close()
        raise


def check_room(config: SortedConfig) -> None:
    """Refuse more processors than this machine has: Ray would wait for them forever."""
    if config.engine.cluster:
        return  # a cluster may grow
    settings, engine = config.learner, config.engine
    of_engines = engine.replicas * engine.replica_cpus if engine.replicas > 1 else 0.0
    needed, there = settings.ranks * settings.rank_cpus + of_engines, os.cpu_count() or 1
    if needed > there:
        raise ConfigError(
            f"learner.ranks and engine.replicas ask for {needed:g} processors and this machine has {there}: lower "
            "learner.rank_cpus or engine.replica_cpus, or set engine.cluster"
        )
