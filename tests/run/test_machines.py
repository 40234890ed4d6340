"""The placement of a run is checked against the GPUs that are there, and engines find those of the ranks they share."""

from __future__ import annotations

from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.config.placement import Cluster, Placement
from sortedrl.engine.pool.actor_place import ActorPlace
from sortedrl.errors import ConfigError
from sortedrl.run.builders import machines
from sortedrl.run.builders.machines import check_gpus, engine_places, find_gpus
from sortedrl.run.builders.parts import build_parts


def config(mode: str | None, **sections: Any) -> SortedConfig:
    placement = {"mode": mode, **sections.pop("placement", {})}
    engine = {"kind": "vllm", **sections.pop("engine", {})}
    return SortedConfig(engine=engine, placement=placement, schedule={"strategy": "sorted-partial"}, **sections)


def has_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


def test_a_placement_needs_GPUs(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 0)
    wanted = config("separate", placement={"engines": 2, "ranks": 2})
    with pytest.raises(ConfigError, match="separate needs 8 GPUs on 1 machine, and this machine has none"):
        build_parts(wanted)  # before anything is loaded or started
    assert check_gpus(config(None)) == Placement(mode=None)
    has_gpus(monkeypatch, 3)
    with pytest.raises(ConfigError, match=r"2 x 1 \+ 2 = 4 GPUs, and there are 3 GPUs on 1 machine"):
        check_gpus(wanted)
    has_gpus(monkeypatch, 4)  # fewer than the 8 that it names, and enough
    placement = check_gpus(wanted)
    assert placement is not None
    assert [str(device) for device in placement.ranks] == ["0:2", "0:3"]


def test_traps_are_found_on_a_machine_with_GPUs(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="takes GPU 0, which Ray gives to a rank too"):
        check_gpus(config(None, learner={"ranks": 2, "rank_gpus": 1}))
    with pytest.raises(ConfigError, match="hides all GPUs"):
        check_gpus(config(None, engine={"replicas": 2}))


def test_a_cluster_is_known_when_ray_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cluster = config("separate", engine={"cluster": "auto"}, placement={"engines": 2, "ranks": 2, "nodes": 2})
    monkeypatch.setattr(machines, "is_connected", lambda: False)
    assert find_gpus(on_cluster) is None
    assert check_gpus(on_cluster) is None
    monkeypatch.setattr(machines, "is_connected", lambda: True)
    monkeypatch.setattr(machines, "ray_gpus", lambda: Cluster(gpus=(1, 1)))
    with pytest.raises(ConfigError, match="there are 2 GPUs on 2 machines"):
        check_gpus(on_cluster)
    with pytest.raises(ConfigError, match=r"placement\.nodes = 2 need Ray on every machine"):
        check_gpus(config("separate", placement={"engines": 2, "ranks": 2, "nodes": 2}))


def test_colocated_engines_get_the_GPUs_of_ranks_of_one_machine() -> None:
    shared = config("colocated", placement={"engines": 2, "tensor_parallel": 2, "ranks": 4})
    # Ray numbers ranks as it likes.
    places = engine_places(shared, [("a", 3), ("b", 0), ("a", 1), ("b", 2)])
    assert places == [ActorPlace(node="a", gpus=(1, 3)), ActorPlace(node="b", gpus=(0, 2))]
    assert places[0].visible_devices == "1,3"
    with pytest.raises(ConfigError, match=r"machines with 3, 1 GPUs, which hold only 1 engines of 2 GPUs"):
        engine_places(shared, [("a", 0), ("a", 1), ("a", 2), ("b", 0)])
    assert engine_places(config("separate", placement={"ranks": 2}), [("a", 0), ("a", 1)]) == []
