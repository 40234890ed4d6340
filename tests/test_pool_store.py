"""Weights that do not fit into Ray's object store, nor onto its disk: a Ray with little of both. `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sortedrl.engine import ray_cluster
from sortedrl.errors import EngineError
from tiny_models import source

pytestmark = [pytest.mark.slow]

STORE_BYTES = 80 * 2**20  # Ray takes no less than 75 MiB


@pytest.fixture
def small_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0")  # as if no disk had any room: nothing is written there
    ray.init(include_dashboard=False, num_cpus=1, object_store_memory=STORE_BYTES, log_to_driver=False)
    yield
    ray_cluster.disconnect()


def test_weights_larger_than_the_object_store(small_ray: None) -> None:
    from sortedrl.engine.ray_members import RayMembers

    members = RayMembers(lambda: pytest.fail("no engine is started"), num_cpus=1, num_gpus=0, threads=1)
    model = torch.nn.Linear(1024, 2 * STORE_BYTES // 4096, bias=False)
    with pytest.raises(
        EngineError, match=r"do not fit into Ray's object store: start Ray with a larger --object-store"
    ):
        members.put(source(model))
    small = torch.nn.Linear(4, 4)
    assert members.put(source(small)) is not None, "what fits is taken as before"
