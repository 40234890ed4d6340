"""Ranks that are lost and started again: the same weights as without a loss, from a checkpoint or from the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.errors import LearnerError, RankLostError
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.sharded.restarts import RanksRestarted, RestartingRanks
from sortedrl.learner.sharded.shards import weights_of
from tests.support.learners import make_model
from tests.support.one_rank import OneRank, gloo_group
from tests.support.rank_cases import CASES, batch_of, run_updates

PPO = CASES["ppo"].settings
NUM_UPDATES = 4


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with gloo_group():
        yield


class Launches:
    """Starts one rank after the other."""

    def __init__(self, *losses: str) -> None:
        self.losses = list(losses)
        self.ranks: list[OneRank] = []

    def __call__(self) -> OneRank:
        self.ranks.append(OneRank(self.losses))
        return self.ranks[-1]

    def learner(self, max_restarts: int = 3, **options: Any) -> ShardedLearner:
        ranks = RestartingRanks(self, max_restarts=max_restarts)
        return ShardedLearner(make_model(), PPO, temperature=1.0, ranks=ranks, **options)


def state_of(learner: ShardedLearner) -> dict[str, torch.Tensor]:
    weights = {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}
    return {**weights, **learner.state_dict()["optimizer"]}


def save(learner: ShardedLearner, folder: Path) -> None:
    (folder / "2").mkdir()
    saving = learner.begin_save(folder / "2" / "shards")
    saving.wait()
    learner.mark_saved(saving, folder=folder / "2" / "shards")


def check_same(learner: ShardedLearner, metrics: list[dict[str, float]]) -> None:
    """Compare with a learner that lost nothing."""
    calm = Launches().learner()
    assert run_updates(calm, 0, NUM_UPDATES) == metrics
    ours, theirs = state_of(learner), state_of(calm)
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


@pytest.mark.parametrize("kind", ["shards", "whole", "none"])
def test_a_lost_rank_repeats_the_updates_since_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """The fourth update is lost when its weights have moved already, and the rank that repeats it is lost too."""
    launches = Launches()
    learner = launches.learner(initial=(lambda: weights_of(make_model())) if kind == "none" else None)
    metrics = run_updates(learner, 0, 2)
    if kind == "shards":
        save(learner, tmp_path)
    elif kind == "whole":
        learner.state_dict()
        learner.mark_saved()
    metrics += run_updates(learner, 2, 3)
    launches.losses += ["update after", "build after"]
    metrics += run_updates(learner, 3, NUM_UPDATES)
    repeated = {"shards": ["load_shards", "update"], "whole": ["load", "update"], "none": ["update"] * 3}[kind]
    assert launches.ranks[-1].methods == ["build", *repeated, "update"]
    assert len(launches.ranks) == 3
    (restart,) = learner.take_restarts()
    assert (restart.number, restart.num_repeated) == (2, len(repeated) - (kind != "none"))
    check_same(learner, metrics)


def test_a_rank_that_is_lost_while_nothing_is_trained(tmp_path: Path) -> None:
    """Reading the weights meets the loss; so does a publication, whose receivers must connect again."""
    launches = Launches()
    learner = launches.learner()
    metrics = run_updates(learner, 0, 3)
    place = learner.source.place
    launches.losses += ["trained_weights", "apply"]
    assert learner.source.module is learner.model
    with pytest.raises(RanksRestarted):
        learner.source.apply(lambda holder: holder.rank)
    assert learner.source.place != place
    assert learner.source.apply(lambda holder: holder.rank) == [0]
    check_same(learner, metrics + run_updates(learner, 3, NUM_UPDATES))


def test_updates_before_a_checkpoint_are_forgotten(tmp_path: Path) -> None:
    """Also if the checkpoint gets its name after a later update."""
    launches = Launches()
    learner = launches.learner()
    metrics = run_updates(learner, 0, 2)
    (tmp_path / "2").mkdir()
    saving = learner.begin_save(tmp_path / "2" / "shards")
    metrics += run_updates(learner, 2, 3)
    saving.wait()
    learner.mark_saved(saving, folder=tmp_path / "2" / "shards")
    launches.losses.append("update")
    metrics += run_updates(learner, 3, NUM_UPDATES)
    assert [restart.point for restart in learner.take_restarts()] == ["checkpoint 2"]
    assert launches.ranks[-1].methods == ["build", "load_shards", "update", "update"]
    check_same(learner, metrics)


def test_too_many_losses_end_the_run() -> None:
    launches = Launches()
    learner = launches.learner(max_restarts=1)
    run_updates(learner, 0, 1)
    launches.losses += ["update", "build"]
    with pytest.raises(RankLostError, match="fix that and resume"):
        run_updates(learner, 1, 2)
    assert len(launches.ranks) == 2
    unlucky = Launches("update")
    with pytest.raises(RankLostError):
        run_updates(unlucky.learner(max_restarts=0), 0, 1)
    assert len(unlucky.ranks) == 1


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_error_of_an_update_starts_nothing_again() -> None:
    """It would come again."""
    launches = Launches()
    learner = launches.learner()
    batch = batch_of(0)
    batch.samples[0].reward = float("inf")
    learner.start(batch).result()  # two steps
    with pytest.raises(LearnerError, match="3 steps in a row were not finite"):
        learner.start(replace(batch, update=1))
    assert len(launches.ranks) == 1
