"""Whole runs whose learner has a rank: checkpoints in the background, lost ranks, resuming elsewhere, and exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.learner.model import load_model
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.sharded.restarts import RestartingRanks
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.run.export import export_run
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import CheckpointBegun, CheckpointSaved, Event, LearnerRestarted, UpdateDone
from sortedrl.trainer import SortedTrainer
from tests.support.one_rank import OneRank, gloo_group

NUM_UPDATES = 4


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with gloo_group():
        yield


class Launches:
    """Starts one rank after the other; `losses` as of `OneRank`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.losses: list[str] = []
        self.ranks: list[OneRank] = []
        monkeypatch.setattr("sortedrl.run.builders.parts.build_learner", self.build_learner)

    def __call__(self) -> OneRank:
        self.ranks.append(OneRank(self.losses))
        return self.ranks[-1]

    def build_learner(self, config: SortedConfig, model: Any, initial: Any = None) -> ShardedLearner:
        ranks = RestartingRanks(self, max_restarts=config.learner.max_restarts)
        return ShardedLearner(model, config.learner, temperature=1.0, ranks=ranks, initial=initial)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


class Listener:
    """A sink that stops the run after some updates, and may change ranks meanwhile."""

    def __init__(self, on_update: Any) -> None:
        self._on_update = on_update

    def emit(self, event: Event) -> None:
        if isinstance(event, UpdateDone):
            self._on_update(event.update)

    def close(self) -> None: ...


def make_config(folder: Path, name: str, **learner: Any) -> SortedConfig:
    return SortedConfig(
        run={"name": name, "dir": str(folder), "samples": 8 * NUM_UPDATES, "report": False},
        engine={"slots": 8, "max_new_tokens": 12},
        schedule={"strategy": "sorted-replay", "update_batch": 8},
        learner={"algorithm": "reinforce++", "group_size": 1, "ranks": 2, **learner},
        eval={"prompts": 0},
        checkpoint={"every_updates": 2, "keep": 1},
    )


def train(config: SortedConfig, *, resume: bool = False, on_update: Any = lambda update: None) -> SortedTrainer:
    trainer = SortedTrainer(args=config, quiet=True, sinks=[])
    trainer.sinks = [Listener(lambda update: on_update(trainer, update))]
    trainer.train(resume=resume)
    return trainer


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in load_model(folder)[0].named_parameters()}


def check_same(folder: Path, other: Path) -> None:
    ours, theirs = weights_in(folder), weights_in(other)
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def check_ledger(run_dir: Path) -> None:
    with Ledger(run_dir / "ledger.sqlite") as ledger:
        assert verify(ledger).violations == []


def test_lost_ranks_change_no_weight_and_no_sample(tmp_path: Path, launches: Launches) -> None:
    """Ranks are lost before the first checkpoint, in a save, and in the last save of the run."""
    calm = make_config(tmp_path, "calm")
    train(calm)
    assert [path.name for path in (calm.run_dir / "checkpoints").iterdir()] == [str(NUM_UPDATES)]
    check_same(calm.run_dir / "model", calm.run_dir / "checkpoints" / str(NUM_UPDATES))

    launches.losses += ["update after", "wait_saved", "trained_weights", "save_shards"]
    launches.ranks.clear()
    config = make_config(tmp_path, "unlucky", max_restarts=4)
    train(config)
    check_ledger(config.run_dir)
    check_same(config.run_dir / "model", calm.run_dir / "model")
    events = list(read_events(config.run_dir / "events.jsonl"))
    restarts = [event for event in events if isinstance(event, LearnerRestarted)]
    assert (len(launches.ranks), launches.losses) == (len(restarts) + 1, [])
    assert restarts[0].point == "the start of the run"
    assert [event.version for event in events if isinstance(event, CheckpointSaved)][-1] == NUM_UPDATES
    assert len([event for event in events if isinstance(event, CheckpointBegun)]) >= 2
    assert list((config.run_dir / "checkpoints").glob(".*")) == []


def test_a_stopped_run_waits_for_its_save_and_goes_on_anywhere(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, "run")

    def stop(trainer: SortedTrainer, update: int) -> None:
        if update == 0:
            trainer.stop()
            launches.ranks[-1].may_finish.clear()
            Timer(1.0, launches.ranks[-1].may_finish.set).start()

    train(config, on_update=stop)
    folder = config.run_dir / "checkpoints" / "1"
    assert folder.is_dir()
    assert not (config.run_dir / "model").exists()
    exported = export_run(config.run_dir, tmp_path / "exported")
    assert (exported.version, "model.safetensors" in exported.files) == (1, True)
    check_same(tmp_path / "exported", folder)

    def stop_again(trainer: SortedTrainer, update: int) -> None:
        trainer.stop()

    train(config, resume=True, on_update=stop_again)  # in new ranks
    assert (config.run_dir / "checkpoints" / "2").is_dir()
    monkeypatch.undo()
    train(make_config(tmp_path, "run", ranks=1), resume=True)  # in one process
    check_ledger(config.run_dir)
    assert (config.run_dir / "checkpoints" / str(NUM_UPDATES) / "model.safetensors").is_file()
