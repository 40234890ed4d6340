"""Engines over several GPUs in a Ray whose GPUs are made up: each gets its own, all at once, and gives them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sortedrl.engine.pool import ray_cluster
from sortedrl.engine.pool.ray_placement import choose_bundles, gpus_by_node

WAIT_S = 60.0


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ray_cluster.CLUSTERS, "0")  # loopback only; Ray reads it when it is imported
        import ray

        room = {"num_cpus": 4, "num_gpus": 5}
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", **room)
        yield ray
        ray.shutdown()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free_gpus(ray: Any) -> float:
    return ray.available_resources().get("GPU", 0.0)


def test_each_engine_gets_its_gpus_together(ray: Any) -> None:
    from sortedrl.engine.pool.ray_launcher import RayEngineLauncher

    assert gpus_by_node() == [5.0]
    place = choose_bundles(2, 0.5, gpus_by_node())

    def make_engine() -> tuple[Any, Any]:
        raise RuntimeError("this test needs places only")

    launcher = RayEngineLauncher(make_engine, num_cpus=0.5, num_gpus=2, threads=1, place=place)
    first, second, third = (launcher.launch(index) for index in range(3))
    wait_until(lambda: free_gpus(ray) == 1.0)  # two engines have two each; the third waits for a second one
    seen = ray.get([engine._actor.devices.remote() for engine in (first, second)], timeout=WAIT_S)
    assert [len(devices) for devices in seen] == [2, 2]
    assert not set(seen[0]) & set(seen[1])
    first.kill()
    assert len(ray.get(third._actor.devices.remote(), timeout=WAIT_S)) == 2  # it has taken the place
    second.kill()
    third.kill()
    launcher.close()
    wait_until(lambda: free_gpus(ray) == 5.0)
