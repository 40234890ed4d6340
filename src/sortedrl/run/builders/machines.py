"""The GPUs that are really there, and the placement of a run on them.

`parts.py` checks the placement before anything starts, and `learner.py` again once Ray's cluster is known. Engines
that share GPUs with ranks are told theirs by `engine_places`, after Ray has chosen those of the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.config.placement import Cluster, Demand, Placement, cluster_of, plan_placement
from sortedrl.engine.pool.actor_place import ActorPlace
from sortedrl.engine.pool.ray_cluster import is_connected
from sortedrl.errors import ConfigError


def find_gpus(config: SortedConfig) -> Cluster | None:
    """The GPUs of this machine, or of the cluster that Ray is connected to; None if that is not connected yet."""
    if config.engine.cluster:
        return ray_gpus() if is_connected() else None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Cluster(gpus=(count,) if count else ())


def ray_gpus() -> Cluster:
    """The GPUs of each machine of the connected Ray."""
    ray: Any = sys.modules["ray"]
    counts = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return Cluster(gpus=tuple(count for count in counts if count))


def check_gpus(config: SortedConfig) -> Placement | None:
    """The placement of the run on the GPUs that are there; raises ConfigError if it is impossible or would collide.

    None if the GPUs are not known before Ray is connected.
    """
    mode = config.placement.mode
    if mode is not None and config.placement.nodes > 1 and not config.engine.cluster:
        raise ConfigError(
            f"placement.nodes = {config.placement.nodes} need Ray on every machine: start it there with `ray start`, "
            "and name the cluster with --cluster auto"
        )
    found = find_gpus(config)
    if found is None:
        return None
    if mode is not None and not found.num_gpus:
        where = "the Ray cluster" if config.engine.cluster else "this machine"
        raise ConfigError(
            f"placement.mode = {mode} needs {cluster_of(config)}, and {where} has none: run it elsewhere, or override "
            "placement.mode, engine and model for a run on CPUs"
        )
    return plan_placement(Demand.of(config), found)


def engine_places(config: SortedConfig, rank_gpus: Sequence[tuple[str, int]]) -> list[ActorPlace]:
    """The GPUs of each engine that shares those of ranks; empty for engines that Ray places itself.

    `rank_gpus` are the machine and the GPU of each rank. The GPUs of an engine are on one machine.
    """
    if config.placement.mode != "colocated" or not config.has_rank_actors:
        return []
    by_node: dict[str, list[int]] = {}
    for node, gpu in rank_gpus:
        by_node.setdefault(node, []).append(gpu)
    width = config.tensor_parallel
    places = [
        ActorPlace(node=node, gpus=tuple(sorted(gpus)[start : start + width]))
        for node, gpus in by_node.items()
        for start in range(0, len(gpus) - width + 1, width)
    ]
    if len(places) < config.num_engines:
        spread = ", ".join(str(len(gpus)) for gpus in by_node.values())
        raise ConfigError(
            f"Ray spread the ranks over machines with {spread} GPUs, which hold only {len(places)} engines of {width} "
            "GPUs: free the other GPUs of these machines, or lower engine.tensor_parallel"
        )
    return places[: config.num_engines]
