"""Colocated engines on fake Ray nodes with fake GPUs: every engine sees the GPUs of its ranks, on their machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: a Ray with several nodes cannot share one with the other tests'.
PROGRAM = """
import os
from ray.cluster_utils import Cluster as RayNodes

node = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 100 * 2**20}
nodes = RayNodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
nodes.add_node(**node)
import ray

ray.init(address=nodes.address, log_to_driver=False)
from sortedrl.config import SortedConfig
from sortedrl.engine.pool.ray_launcher import RayEngineLauncher
from sortedrl.learner.sharded.ray_ranks import RayRanks
from sortedrl.run.builders.machines import check_gpus, engine_places, ray_gpus

assert ray_gpus().gpus == (2, 2), ray_gpus()
placement = {"mode": "colocated", "engines": 2, "tensor_parallel": 2, "ranks": 4, "nodes": 2, "gpus_per_node": 2}
config = SortedConfig(
    engine={"kind": "vllm", "cluster": "auto"}, schedule={"strategy": "sorted-partial"}, placement=placement
)
assert str(check_gpus(config)) == "2 engines x 2 GPUs on the same GPUs as 4 ranks"
ranks = RayRanks(4, num_cpus=0.5, num_gpus=config.rank_gpus, threads=1, timeout_s=60)
places = engine_places(config, ranks.gpus)
assert len({place.node for place in places}) == 2, places


def where():
    raise RuntimeError(f"{ray.get_runtime_context().get_node_id()} sees {os.environ['CUDA_VISIBLE_DEVICES']}")


launcher = RayEngineLauncher(where, num_cpus=0.5, num_gpus=config.engine_gpus, threads=1, places=places)
for index, place in enumerate(places):
    error = launcher.launch(index).slots().exception(timeout=120)
    assert f"{place.node} sees 0,1" in str(error), error
ranks.close()
ray.shutdown()
nodes.shutdown()
print("placed")
"""


@pytest.mark.slow
def test_engines_share_the_GPUs_of_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.stdout.endswith("placed\n"), done.stderr[-2000:]
