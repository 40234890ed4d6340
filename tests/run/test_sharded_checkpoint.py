"""Checkpoints that ranks write in the background: when they get their name, what is removed, and lost ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sortedrl.errors import RunDirError
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.sharded.restarts import RestartingRanks
from sortedrl.learner.sharded.shard_files import SHARDS_FOLDER
from sortedrl.learner.unscored import SkippingLearner
from sortedrl.run.checkpoint_folder import STATE_FILE, Checkpoints, load_state
from sortedrl.run.manifest import find_damage
from sortedrl.run.sharded_checkpoint import SaveInFlight
from tests.learner.test_sharded_learner import NoTokenizer
from tests.support.learners import make_model
from tests.support.one_rank import OneRank, gloo_group
from tests.support.rank_cases import CASES, run_updates

PPO = CASES["ppo"].settings
EXTRA = {"version": 2}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with gloo_group():
        yield


def make_learner(losses: list[str] | None = None) -> tuple[ShardedLearner, OneRank]:
    rank = OneRank([] if losses is None else losses)
    return ShardedLearner(make_model(), PPO, temperature=1.0, ranks=RestartingRanks(lambda: rank, max_restarts=1)), rank


def begin(checkpoints: Checkpoints, version: int, learner: ShardedLearner) -> SaveInFlight:
    def add(folder: Path) -> None:
        (folder / "ledger.sqlite").write_text("rows")

    return SaveInFlight(checkpoints, version, learner, make_model(), NoTokenizer(), extra=EXTRA, add=add)


def test_a_checkpoint_gets_its_name_when_all_is_written(tmp_path: Path) -> None:
    """The older one goes after that. What is saved is the state of the moment, and one process can continue it."""
    learner, rank = make_learner()
    checkpoints = Checkpoints(tmp_path, keep=1)
    run_updates(learner, 0, 1)
    assert begin(checkpoints, 1, learner).wait()
    run_updates(learner, 1, 2)
    expected = learner.state_dict()
    rank.may_finish.clear()
    save = begin(checkpoints, 2, learner)
    run_updates(learner, 2, 3)
    assert (checkpoints.versions(), save.is_done) == ([1], False)
    assert len(list(tmp_path.glob(".2.partial-*"))) == 1
    rank.may_finish.set()
    assert save.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    assert find_damage(tmp_path / "2", required=(STATE_FILE, "ledger.sqlite")) is None
    one = SkippingLearner(make_model(), PPO, temperature=1.0)
    assert load_state(tmp_path / "2", one) == EXTRA
    found = one.state_dict()
    assert found["counters"] == expected["counters"]
    assert all(torch.equal(value, expected["optimizer"][name]) for name, value in found["optimizer"].items())
    again, _ = make_learner()
    load_state(tmp_path / "2", again)
    assert all(
        torch.equal(value, expected["optimizer"][name]) for name, value in again.state_dict()["optimizer"].items()
    )


def test_a_save_that_lost_a_rank_is_given_up(tmp_path: Path) -> None:
    losses: list[str] = []
    learner, rank = make_learner(losses)
    checkpoints = Checkpoints(tmp_path)
    run_updates(learner, 0, 1)
    assert begin(checkpoints, 1, learner).wait()
    losses.append("wait_saved")
    assert not begin(checkpoints, 2, learner).wait()
    # A rank that is really lost writes nothing more. This one's thread goes on: it ends, or finds its folder gone.
    rank._actor._writer._saving.exception()
    checkpoints.prepare(3, make_model(), has_learner=True)  # the next save removes what is left
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_shards_that_cannot_be_written_name_the_remedy(tmp_path: Path) -> None:
    learner, _ = make_learner()

    def add(folder: Path) -> None:
        (folder / SHARDS_FOLDER).write_text("a file in the way")

    save = SaveInFlight(Checkpoints(tmp_path), 1, learner, make_model(), NoTokenizer(), extra=EXTRA, add=add)
    with pytest.raises(RunDirError, match=r"checkpoint .* cannot be written \(.*\): free some space"):
        save.wait()
    assert list(tmp_path.iterdir()) == []


def test_layouts_of_other_versions(tmp_path: Path) -> None:
    """The first version had no layout: it is read as whole. A later one is refused in a line."""
    document = {"schema_version": 1, "learner": None, "extra": EXTRA}
    (tmp_path / STATE_FILE).write_text(json.dumps(document))
    assert load_state(tmp_path) == EXTRA
    (tmp_path / STATE_FILE).write_text(json.dumps({**document, "schema_version": 3}))
    with pytest.raises(RunDirError, match=r"state of version 3, this sortedrl reads 1 to 2: use the version that"):
        load_state(tmp_path)
    (tmp_path / STATE_FILE).write_text(json.dumps({**document, "schema_version": 2, "layout": "striped"}))
    with pytest.raises(RunDirError, match=r"striped"):
        load_state(tmp_path)
