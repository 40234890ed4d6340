"""Weights for which Ray has little room: a store of 80 MiB, and no disk to write to. `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sortedrl.engine.base import Delta
from sortedrl.engine.pool import ray_cluster
from sortedrl.engine.pool.pool import Pool
from sortedrl.errors import EngineError
from sortedrl.run.builders.engine import local_engine
from tests.support.tiny_models import make_requests, source, tiny_model

pytestmark = [pytest.mark.slow]

STORE_BYTES = 80 * 2**20  # Ray takes no less than 75 MiB
VOCAB = 200_000  # by 32, in float32, twice: 49 MiB, which fit into the store once
TOO_LARGE = r"do not fit into Ray's object store: start Ray with a larger --object-store-memory"


@pytest.fixture(scope="module")
def small_ray() -> Iterator[Any]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ray_cluster.CLUSTERS, "0")  # loopback only
        patch.setenv("RAY_local_fs_capacity_threshold", "0")  # as if every disk were full
        import ray

        ray.init(include_dashboard=False, num_cpus=1, object_store_memory=STORE_BYTES, log_to_driver=False)
        yield ray
        ray_cluster.disconnect()


@pytest.fixture(scope="module")
def pool(small_ray: Any) -> Iterator[Pool]:
    from sortedrl.engine.pool.ray_launcher import RayEngineLauncher

    make_engine = partial(
        local_engine,
        tiny_model("llama-gqa", vocab_size=VOCAB).config.to_dict(),
        weights_dtype=torch.float32,
        dtype=torch.float32,
        slots=2,
        max_length=64,
    )
    members = RayEngineLauncher(make_engine, num_cpus=1, num_gpus=0, threads=1)
    pool = Pool(members, size=1, slots=2, exact_replay=True, keep_kv=True)
    yield pool
    pool.close()


def versions_of_an_answer(pool: Pool) -> set[int]:
    pool.submit(make_requests(1))
    heard = []
    while pool.num_running:
        heard += pool.poll()
    return {event.version for event in heard if isinstance(event, Delta)}


def test_room_for_one_version_is_enough(pool: Pool, small_ray: Any) -> None:
    weights = source(tiny_model("llama-gqa", vocab_size=VOCAB))
    theirs = small_ray.put(np.zeros(STORE_BYTES // 2, dtype=np.uint8))  # somebody else's
    with pytest.raises(EngineError, match=TOO_LARGE):
        pool.publish(0, weights)
    del theirs
    for version in range(4):
        pool.publish(version, weights).wait()
        assert versions_of_an_answer(pool) == {version}
    assert pool.stats().extra["restarts"] == 0


def test_weights_larger_than_the_store(pool: Pool) -> None:
    with pytest.raises(EngineError, match=TOO_LARGE):
        pool.publish(4, source(torch.nn.Linear(1024, 2 * STORE_BYTES // 4096, bias=False)))
    pool.publish(4, source(tiny_model("llama-gqa", vocab_size=VOCAB))).wait()
    assert versions_of_an_answer(pool) == {4}
