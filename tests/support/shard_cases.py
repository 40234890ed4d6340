"""Ranks that save and load shards, for test_shard_files.py: the functions that each rank's process runs."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sortedrl.learner.sharded.rank import RankLearner
from sortedrl.learner.sharded.rank_states import load_shard_tensors, shard_tensors
from sortedrl.learner.sharded.shard_files import ShardWriter
from tests.support.learners import Settings, make_model
from tests.support.rank_cases import CASES, run_updates, save_state, use_sgd

PPO = CASES["ppo"].settings  # with a critic and a reference model, whose weights are saved too
SGD = CASES["sgd"].settings
NUM_UPDATES = 2


def make_learner(settings: Settings, *, is_sgd: bool = False) -> RankLearner:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    learner = RankLearner(make_model(), settings, temperature=1.0, mesh=mesh)
    if is_sgd:
        use_sgd(learner)
    return learner


def join(rank: int, folder: Path, size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))


def save_on_four(rank: int, folder: Path) -> None:
    """Save after an update, and update again while files are written; then train with two copies of the model."""
    join(rank, folder, 4)
    learner = make_learner(PPO)
    run_updates(learner, 0, 1)
    save_state(folder / "expected", learner, [])
    writer = ShardWriter(dist.new_group(backend="gloo"))
    tensors, state = shard_tensors(learner)
    writer.begin(folder / "shards", tensors)
    run_updates(learner, 1, 2)
    save_state(folder / "later", learner, [])
    files = writer.wait()
    (folder / f"files-{rank}.json").write_text(json.dumps({"files": files, "state": state}))
    copies = make_learner(replace(SGD, rank_replicas=2), is_sgd=True)
    metrics = run_updates(copies, 0, NUM_UPDATES)
    save_state(folder / "copies", copies, metrics)
    writer.begin(folder / "copied-shards", shard_tensors(copies)[0])
    writer.wait()
    dist.destroy_process_group()


def load_on_two(rank: int, folder: Path) -> None:
    """Load shards of four ranks; then train with all states in host memory."""
    join(rank, folder, 2)
    learner = make_learner(PPO)
    state = json.loads((folder / "files-0.json").read_text())["state"]
    load_shard_tensors(learner, folder / "shards", state, dist.new_group(backend="gloo"))
    save_state(folder / "on-two", learner, [])
    on_host = make_learner(replace(SGD, host_states=True), is_sgd=True)
    save_state(folder / "on-host", on_host, run_updates(on_host, 0, NUM_UPDATES))
    dist.destroy_process_group()
