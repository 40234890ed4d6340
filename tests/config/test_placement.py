"""Placement: which GPU each engine and rank owns, by hand; traps and contradictions are refused with the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.config.placement import Cluster, Demand, Placement, cluster_of, plan_placement
from sortedrl.config.shipped import shipped_names
from sortedrl.errors import ConfigError

NODE = Cluster(gpus=(8,))


def config(placement: dict[str, Any] | None = None, **sections: Any) -> SortedConfig:
    engine = {"kind": "vllm", **sections.pop("engine", {})}
    strategy = {"strategy": "sorted-partial", **sections.pop("schedule", {})}
    return SortedConfig(engine=engine, schedule=strategy, placement=placement or {}, **sections)


def plan(cluster: Cluster, placement: dict[str, Any] | None = None, **sections: Any) -> Placement:
    return plan_placement(Demand.of(config(placement, **sections)), cluster)


def shown(placement: Placement) -> tuple[list[str], list[str]]:
    """Engines and ranks by their devices, such as "0:0 0:1"."""
    engines = [" ".join(map(str, devices)) for devices in placement.engines]
    return engines, [str(device) for device in placement.ranks]


# ---- plans by hand ---------------------------------------------------------------------------------------------------


def test_separate_engines_come_first_and_ranks_last() -> None:
    placement = plan(NODE, {"mode": "separate", "engines": 2, "tensor_parallel": 2, "ranks": 4})
    assert shown(placement) == (["0:0 0:1", "0:2 0:3"], ["0:4", "0:5", "0:6", "0:7"])
    assert str(placement) == "2 engines x 2 GPUs and 4 ranks"
    assert len(placement.devices) == 8
    device = placement.ranks[0]
    assert (placement.rank_on(device), placement.engine_on(device)) == (0, None)


def test_an_engine_never_spans_machines() -> None:
    nodes = {"nodes": 2, "gpus_per_node": 3}
    placement = plan(
        Cluster(gpus=(3, 3)), {"mode": "separate", "engines": 2, "tensor_parallel": 2, "ranks": 2, **nodes}
    )
    # Two ranks at the end would leave the second machine one GPU: they take what the engines leave over.
    assert shown(placement) == (["0:0 0:1", "1:0 1:1"], ["0:2", "1:2"])


def test_colocated_engines_use_the_GPUs_of_the_ranks() -> None:
    placement = plan(NODE, {"mode": "colocated", "engines": 2, "tensor_parallel": 4, "ranks": 8})
    assert shown(placement) == (["0:0 0:1 0:2 0:3", "0:4 0:5 0:6 0:7"], [f"0:{gpu}" for gpu in range(8)])
    assert str(placement) == "2 engines x 4 GPUs on the same GPUs as 8 ranks"


def test_one_GPU_is_shared_in_one_process() -> None:
    one = config({"mode": "colocated", "gpus_per_node": 1})
    assert shown(plan_placement(Demand.of(one), cluster_of(one))) == (["0:0"], ["0:0"])
    assert (one.has_engine_pool, one.has_rank_actors) == (False, False)


def test_a_placement_says_what_ray_reserves() -> None:
    separate = config({"mode": "separate", "engines": 1, "tensor_parallel": 4, "ranks": 1})
    assert (separate.engine_gpus, separate.rank_gpus) == (4, 1)
    assert (separate.has_engine_pool, separate.has_rank_actors) == (True, True)  # also one of each
    colocated = config({"mode": "colocated", "engines": 4, "tensor_parallel": 2, "ranks": 8})
    assert (colocated.engine_gpus, colocated.rank_gpus) == (0, 1)  # the engines use what the ranks reserve
    assert (colocated.num_engines, colocated.tensor_parallel, colocated.num_ranks, colocated.slots) == (4, 2, 8, 128)


def test_a_placement_is_told_in_the_older_keys_too() -> None:
    separate = config({"mode": "separate", "engines": 1, "tensor_parallel": 4, "ranks": 2}).in_older_keys()
    engine, learner = separate.engine, separate.learner
    assert (engine.replicas, engine.tensor_parallel, engine.replica_gpus, engine.own_process) == (1, 4, 4, True)
    assert (learner.ranks, learner.rank_gpus) == (2, 1)
    assert separate.in_older_keys() == separate
    old = config(engine={"replicas": 2})
    assert old.in_older_keys() is old


def test_machines_are_filled_up_to_a_number_of_devices() -> None:
    assert Cluster.of(20, 8).gpus == (8, 8, 4)
    assert Cluster.of(8, 8).gpus == (8,)
    assert str(Cluster(gpus=(4, 4))) == "8 GPUs on 2 machines"


# ---- contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "sections", "message"),
    [
        ({"mode": "separate", "engines": 6, "ranks": 4}, {}, r"6 x 1 \+ 4 = 10 GPUs.*8 GPUs on 1 machine.*lower"),
        ({"mode": "separate", "tensor_parallel": 16}, {}, "16 is more than the 8 GPUs of a machine"),
        ({"mode": "colocated", "engines": 3, "ranks": 8}, {}, "set placement.engines = 8 and placement.ranks = 8"),
        ({"mode": "colocated", "ranks": 9, "engines": 9}, {}, "9 need a GPU each.*8 GPUs"),
        (
            {"mode": "colocated", "engines": 2, "tensor_parallel": 2, "ranks": 4, "nodes": 2, "gpus_per_node": 3},
            {},
            "choose an engine.tensor_parallel that divides placement.gpus_per_node",
        ),
        ({"mode": "colocated"}, {"schedule": {"strategy": "async"}}, "set placement.mode = separate"),
        ({"mode": "separate"}, {"engine": {"kind": "local"}}, "only engine.kind = vllm uses"),
        ({"mode": "separate"}, {"engine": {"address": "http://127.0.0.1:1"}}, "a server with GPUs of its own"),
        ({"mode": "separate"}, {"engine": {"replica_gpus": 2}}, "remove engine.replica_gpus"),
        ({"mode": "separate"}, {"learner": {"rank_gpus": 2}}, "a rank has one GPU"),
        ({}, {"learner": {"offload": True, "ranks": 2}}, "learner.offload is for a learner in one process"),
        ({"engines": 3}, {"engine": {"replicas": 2}}, "placement.engines 3 and engine.replicas 2 are two names"),
        ({"ranks": 3}, {"learner": {"ranks": 2}}, "placement.ranks 3 and learner.ranks 2 are two names"),
        ({"tensor_parallel": 2}, {"engine": {"kind": "local"}}, "engine.tensor_parallel 2 needs engine.kind = vllm"),
    ],
)
def test_what_contradicts_itself_is_refused(placement: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(placement, **sections)


# ---- the older keys --------------------------------------------------------------------------------------------------


def test_older_keys_mean_what_they_did() -> None:
    old = config(engine={"replicas": 4, "replica_gpus": 1}, learner={"ranks": 4, "rank_gpus": 1})
    assert (old.num_engines, old.engine_gpus, old.num_ranks, old.rank_gpus) == (4, 1, 4, 1)
    assert shown(plan_placement(Demand.of(old), NODE)) == (
        [f"0:{gpu}" for gpu in range(4)],
        [f"0:{gpu}" for gpu in range(4, 8)],
    )
    assert plan_placement(Demand.of(old), Cluster()) == Placement(mode=None)  # without GPUs nothing is placed
    same = config({"engines": 4, "ranks": 4}, engine={"replicas": 4}, learner={"ranks": 4})
    assert same.num_engines == 4


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learner": {"ranks": 2, "rank_gpus": 1}}, "takes GPU 0, which Ray gives to a rank too: set placement.mode"),
        ({"engine": {"replicas": 2}}, "engine.replica_gpus = 0 hides all GPUs.*or engine.replica_gpus = 1"),
        (
            {"engine": {"replicas": 2, "replica_gpus": 1, "tensor_parallel": 2}, "learner": {"ranks": 2}},
            "set engine.replica_gpus = 2",
        ),
        ({"engine": {"replicas": 2, "replica_gpus": 1}}, "on GPU 0, which Ray gives to an engine too"),
        (
            {"engine": {"replicas": 6, "replica_gpus": 1}, "learner": {"ranks": 4, "rank_gpus": 1}},
            "ask for 10 GPUs, and there are 8 GPUs on 1 machine",
        ),
    ],
)
def test_traps_of_the_older_keys_are_refused_where_there_are_GPUs(sections: dict[str, Any], message: str) -> None:
    demand = Demand.of(config(**sections))
    with pytest.raises(ConfigError, match=message):
        plan_placement(demand, NODE)
    plan_placement(demand, Cluster())  # on CPUs there is no trap


def test_engines_that_need_no_GPU_are_in_no_trap() -> None:
    demand = Demand.of(config(engine={"replicas": 2}))
    plan_placement(replace(demand, is_vllm=False), NODE)
    plan_placement(replace(demand, is_served_elsewhere=True), NODE)
    with_gpus = replace(demand, engine_gpus=1.0, learner_uses_gpu=False)  # the learner stays on the CPU
    assert shown(plan_placement(with_gpus, NODE)) == (["0:0", "0:1"], [])
    shared = replace(demand, engine_gpus=0.5, learner_uses_gpu=False)  # left to Ray
    assert plan_placement(shared, NODE).devices == []


def test_a_saved_placement_loads_again_and_may_change(tmp_path: Any) -> None:
    before = config({"mode": "separate", "engines": 2, "ranks": 2})
    saved = before.resolved()
    assert (saved["engine"]["replicas"], saved["learner"]["ranks"], saved["placement"]["engines"]) == (2, 2, None)
    path = tmp_path / "run.toml"
    path.write_text(before.to_toml())
    again = SortedConfig.load(path)
    assert (again.num_engines, again.num_ranks, again.placement.mode) == (2, 2, "separate")
    again.check_resumable(saved)
    more = SortedConfig.load(path, ["placement.ranks=4"])  # the last name that is set counts
    assert more.num_ranks == 4
    assert SortedConfig.load(path, ["placement.ranks=4", "learner.ranks=1"]).num_ranks == 1
    more.check_resumable(saved)
    with pytest.raises(ConfigError, match=r"engine\.replicas"):
        SortedConfig.load(path, ["placement.engines=3"]).check_resumable(saved)


@pytest.mark.parametrize("name", [name for name in shipped_names() if SortedConfig.load(name).engine.kind == "vllm"])
def test_recipes_for_GPUs_have_a_placement(name: str) -> None:
    recipe = SortedConfig.load(name)
    assert recipe.placement.mode is not None
    placement = plan_placement(Demand.of(recipe), cluster_of(recipe))
    assert len(placement.devices) == cluster_of(recipe).num_gpus  # no GPU is idle
    assert recipe.learner.importance == "token"  # truncated importance weights: engine and learner differ in bfloat16
