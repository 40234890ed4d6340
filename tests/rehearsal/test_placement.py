"""Every shipped configuration for GPUs finds its places on Ray nodes with fake GPUs.

Ray believes what a node says about its GPUs. So its scheduler places engines and ranks here as it would on real
machines: the same placement groups and actors, with actors that only say where they are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_names, shipped_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NODE_GPUS = 8
NODE_CPUS = 64


@dataclass(slots=True, kw_only=True, frozen=True)
class Seats:
    """The engines and ranks of a configuration that Ray places."""

    engines: int
    engine_gpus: float
    engine_cpus: float
    ranks: int
    rank_gpus: float
    rank_cpus: float

    @classmethod
    def of(cls, config: SortedConfig) -> Seats:
        config = config.in_older_keys()
        engine, learner = config.engine, config.learner
        has_members = engine.replicas > 1 or engine.own_process or bool(engine.cluster)
        return cls(
            engines=engine.replicas if has_members else 0,
            engine_gpus=engine.replica_gpus,
            engine_cpus=engine.replica_cpus,
            ranks=learner.ranks if learner.ranks > 1 else 0,
            rank_gpus=learner.rank_gpus,
            rank_cpus=learner.rank_cpus,
        )

    @property
    def num_gpus(self) -> int:
        return int(self.engines * self.engine_gpus + self.ranks * self.rank_gpus)


class Seat:
    """In an actor: says where it is."""

    def look(self) -> tuple[str, list[int], str]:
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), [int(gpu) for gpu in ray.get_gpu_ids()], os.environ["CUDA_VISIBLE_DEVICES"]


@contextmanager
def fake_nodes(count: int) -> Iterator[Any]:
    """A Ray cluster on this machine whose nodes each claim eight GPUs."""
    import ray
    from ray.cluster_utils import Cluster

    room = {"num_cpus": NODE_CPUS, "num_gpus": NODE_GPUS, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(**room)
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()


def place(ray: Any, seats: Seats) -> tuple[list[Any], list[Any]]:
    """Start a seat for every engine and rank: ranks in one packed placement group, engines as actors."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    seat, ranks = ray.remote(Seat), []
    if seats.ranks:
        group = placement_group([{"CPU": seats.rank_cpus, "GPU": seats.rank_gpus}] * seats.ranks, strategy="PACK")
        assert group.wait(120), "Ray has no place for the ranks"
        ranks = [
            seat.options(
                num_cpus=seats.rank_cpus,
                num_gpus=seats.rank_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(seats.ranks)
        ]
    engines = [
        seat.options(num_cpus=seats.engine_cpus, num_gpus=seats.engine_gpus).remote() for _ in range(seats.engines)
    ]
    return engines, ranks


def gpu_configs() -> list[str]:
    names = [name for name in shipped_names() if Seats.of(SortedConfig.load(shipped_path(name), [])).num_gpus]
    assert names, "no shipped configuration asks Ray for GPUs"
    return names


@pytest.mark.parametrize("name", gpu_configs())
def test_every_engine_and_rank_finds_its_gpus(name: str) -> None:
    seats = Seats.of(SortedConfig.load(shipped_path(name), []))
    num_nodes = -(-seats.num_gpus // NODE_GPUS)
    with fake_nodes(num_nodes) as ray:
        engines, ranks = place(ray, seats)
        engine_seats = ray.get([actor.look.remote() for actor in engines], timeout=300)
        rank_seats = ray.get([actor.look.remote() for actor in ranks], timeout=300)
    taken = Counter((node, gpu) for node, gpus, _ in [*engine_seats, *rank_seats] for gpu in gpus)
    assert max(taken.values()) == 1, "two of them share a GPU"
    assert len(taken) == seats.num_gpus
    assert all(len(gpus) == seats.engine_gpus for _, gpus, _ in engine_seats)
    assert all(seen == ",".join(map(str, gpus)) for _, gpus, seen in [*engine_seats, *rank_seats])
    if seats.ranks <= NODE_GPUS:
        assert len({node for node, _, _ in rank_seats}) == 1, "ranks that fit on one node are on one node"


def test_a_configuration_that_is_too_large_is_not_placed() -> None:
    from ray.util.placement_group import placement_group

    with fake_nodes(1):
        assert not placement_group([{"GPU": 1}] * (NODE_GPUS + 1), strategy="PACK").wait(2)
