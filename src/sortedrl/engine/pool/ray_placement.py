"""Where the engines of a pool go in a Ray cluster, if each needs several GPUs: one placement group per engine.

`run/builders/engine.py` chooses the bundles after it has connected to Ray, and `ray_launcher.py` makes a group for
every engine that it starts. An engine gets all its GPUs on one machine if any machine has so many. Otherwise it
gets a bundle per GPU, packed on as few machines as possible, in which vLLM's Ray executor starts its workers.

Guarantees: GPUs are reserved for one engine together, so two engines never wait for each other's half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.errors import EngineError


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineBundles:
    """The bundles of one engine's placement group. The engine's actor runs in the first."""

    bundles: tuple[dict[str, float], ...]
    is_spread: bool  # whether the engine's workers are on several machines


def choose_bundles(num_gpus: int, num_cpus: float, gpus_by_node: Sequence[float]) -> EngineBundles:
    """Bundles for an engine of so many GPUs on machines with these numbers of GPUs."""
    if sum(gpus_by_node) < num_gpus:
        raise EngineError(
            f"engine.tensor_parallel = {num_gpus} needs as many GPUs, and the Ray cluster has "
            f"{sum(gpus_by_node):g}: lower it, or add machines"
        )
    if max(gpus_by_node) >= num_gpus:
        return EngineBundles(bundles=({"CPU": num_cpus, "GPU": float(num_gpus)},), is_spread=False)
    first = {"CPU": num_cpus + 1.0, "GPU": 1.0}  # the actor, and a worker as in each of the others
    return EngineBundles(bundles=(first, *[{"CPU": 1.0, "GPU": 1.0}] * (num_gpus - 1)), is_spread=True)


def gpus_by_node() -> list[float]:
    """The number of GPUs of each living machine of the cluster that this process is connected to."""
    import ray  # here, because `ray_cluster.connect` must come before the first import

    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
