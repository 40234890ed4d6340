"""A run that is stopped and resumed equals the same run without a stop."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sortedrl.config import SortedConfig
from sortedrl.engine.sampling.noise import SCHEME
from sortedrl.errors import DataError, EngineError, LearnerError, RunDirError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.store import Store
from sortedrl.ledger.verify import verify
from sortedrl.run.checkpoint_folder import STATE_FILE
from sortedrl.run.manifest import write_manifest
from sortedrl.run.save_and_resume import _reopen_ledger
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, Event, UpdateDone
from sortedrl.telemetry.summary import Summary
from sortedrl.trainer import SortedTrainer

UPDATES, STOP_AT = 10, 5


def make_config(folder: Path, name: str, strategy: str, **sections: dict) -> SortedConfig:
    settings = {
        "run": {"name": name, "dir": str(folder), "samples": 16 * UPDATES, "report": False},
        "engine": {"slots": 16, "max_new_tokens": 56},
        "schedule": {"strategy": strategy, "update_batch": 16},
        "learner": {"algorithm": "reinforce++", "group_size": 1, "lr": 1e-3, "warmup_samples": 40},
        "eval": {"prompts": 8, "every_samples": 48},
        "checkpoint": {"every_updates": 0},
        "reward": {"grace_s": 60.0},  # batches do not depend on the speed of the reward workers
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    return SortedConfig(**settings)


class StopAfter:
    """Stops a run after a number of updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.trainer: SortedTrainer | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, UpdateDone) and event.update + 1 == self.updates and self.trainer is not None:
            self.trainer.stop()

    def close(self) -> None:
        pass


def train(config: SortedConfig, *, resume: bool = False, stop_after: int = 0) -> Summary:
    stop = StopAfter(stop_after)
    trainer = SortedTrainer(args=config, sinks=[stop], quiet=True)
    stop.trainer = trainer
    return trainer.train(resume=resume)


def batches(run_dir: Path) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    taken = [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, BatchTaken)]
    return [(event.samples, event.lengths, event.rewards, event.staleness) for event in taken]


def answers(run_dir: Path) -> dict[int, list[tuple[int, int, bytes]]]:
    """The token rows of every sample, in order: start, version, tokens."""
    rows = sqlite3.connect(run_dir / "ledger.sqlite").execute(
        "SELECT sample, start, version, tokens FROM segments ORDER BY seq"
    )
    held: dict[int, list[tuple[int, int, bytes]]] = {}
    for sample, start, version, tokens in rows:
        held.setdefault(sample, []).append((start, version, tokens))
    return held


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    return load_file(newest / "model.safetensors")


@pytest.mark.parametrize("strategy", ["sync", "sorted-partial", "sorted-replay"])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(strategy: str, tmp_path: Path) -> None:
    whole, halves = (make_config(tmp_path, name, strategy) for name in ("whole", "halves"))
    assert train(whole).updates == UPDATES
    stopped = train(halves, stop_after=STOP_AT)
    assert (stopped.status, stopped.updates) == ("stopped", STOP_AT)
    resumed = train(halves, resume=True)
    assert (resumed.status, resumed.updates) == ("complete", UPDATES)
    assert batches(halves.run_dir) == batches(whole.run_dir)
    final = {sample: rows[-1] for sample, rows in answers(whole.run_dir).items()}
    assert {sample: rows[-1] for sample, rows in answers(halves.run_dir).items()} == final
    expected = weights(whole.run_dir)
    for name, value in weights(halves.run_dir).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)
    assert resumed.ledger is not None
    assert (resumed.ledger.loaded, resumed.ledger.lost, resumed.ledger.duplicated) == (16 * UPDATES, 0, 0)


# ---- weights that broke ----------------------------------------------------------------------------------------------

PUZZLES = [
    {"prompt": f"{one} says {two}-knave . {two} says {one}-knight . ?", "level": number}
    for number, (one, two) in enumerate([("Ann", "Bob"), ("Bob", "Ann")] * 8)
]


def train_on(rows: list[dict], config: SortedConfig, *, resume: bool = False, stop_after: int = 0) -> Summary:
    stop = StopAfter(stop_after)
    rewards = lambda completions: [float(len(text) % 3) for text in completions]  # noqa: E731  (called in a thread)
    trainer = SortedTrainer("knights-tiny", rewards, config, rows, sinks=[stop], quiet=True)
    stop.trainer = trainer
    return trainer.train(resume=resume)


def small_config(folder: Path, **sections: dict) -> SortedConfig:
    small = {"engine": {"slots": 16, "max_new_tokens": 24}, "eval": {"prompts": 0}}
    return make_config(folder, "small", "sync", **{"run": {"samples": 64}, **small, **sections})


def with_learner(config: SortedConfig, **values: object) -> SortedConfig:
    tree = config.model_dump()
    tree["learner"].update(values)
    return SortedConfig(**tree)


def test_broken_weights_end_the_run_and_a_lower_rate_lets_it_go_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, checkpoint={"every_updates": 1, "keep": 1})
    assert train_on(PUZZLES, config, stop_after=2).status == "stopped"
    with pytest.raises(LearnerError, match=r"weights after update 2 .*lower learner\.lr") as caught:
        train_on(PUZZLES, with_learner(config, lr=1e42), resume=True)
    assert caught.value.__notes__ == [
        f"continue from checkpoint 2 with: sortedrl train --resume {config.run_dir}",
    ]
    assert [folder.name for folder in (config.run_dir / "checkpoints").iterdir()] == ["2"]
    assert all(bool(value.isfinite().all()) for value in weights(config.run_dir).values())
    resumed = train_on(PUZZLES, with_learner(config, lr=1e-5, betas=(0.8, 0.9)), resume=True)
    assert (resumed.status, resumed.updates) == ("complete", 4)
    with Ledger(config.run_dir) as ledger:
        changes = [[str(change) for change in lineage.changes] for lineage in ledger.lineages]
        assert verify(ledger).violations == []
    assert changes == [
        [],
        ["learner.lr 0.001 -> 1e+42"],
        ["learner.betas [0.9, 0.95] -> [0.8, 0.9]", "learner.lr 0.001 -> 1e-05"],
    ]


def test_answers_that_all_fail_replace_no_checkpoint(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, run={"samples": 96}, learner={"lr": 1e10}, checkpoint={"every_updates": 1, "keep": 1}
    )
    with pytest.raises(EngineError, match="every answer of 3 updates in a row failed"):
        train_on(PUZZLES, config)
    assert [folder.name for folder in (config.run_dir / "checkpoints").iterdir()] == ["1"]


# ---- the sampling noise ---------------------------------------------------------------------------------------------


def rewrite_state(run_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state in a run's only checkpoint."""
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    state = json.loads((checkpoint / STATE_FILE).read_text())
    change(state["extra"])
    (checkpoint / STATE_FILE).write_text(json.dumps(state))
    write_manifest(checkpoint)


@pytest.mark.parametrize(("saved", "named"), [(None, "gumbel-splitmix64-v1"), ("own", "own")])
def test_a_run_drawn_with_other_noise_is_refused(saved: str | None, named: str, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    train_on(PUZZLES, config, stop_after=1)
    with Ledger(config.run_dir) as ledger:
        assert ledger.noise == SCHEME
    rewrite_state(config.run_dir, lambda state: state.pop("noise") and saved and state.update(noise=saved))
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(RunDirError, match=f"sampling noise {named}, and this engine draws with {SCHEME}: resume it"):
        train_on(PUZZLES, config, resume=True)
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != "lock")
    rewrite_state(config.run_dir, lambda state: state.update(noise=SCHEME))
    assert train_on(PUZZLES, config, resume=True).status == "complete"


# ---- the dataset ----------------------------------------------------------------------------------------------------


def test_a_dataset_that_changed_is_refused_on_resume(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    train_on(PUZZLES, config, stop_after=1)
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match=r"dataset had 16 rows when the run was saved and has 5 rows now"):
        train_on(PUZZLES[:5], config, resume=True)
    changed = [{**row, "level": 99} if number in (3, 7) else row for number, row in enumerate(PUZZLES)]
    with pytest.raises(DataError, match=r"row dataset/3 .*2 rows"):
        train_on(changed, config, resume=True)
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != "lock")
    assert train_on(PUZZLES, config, resume=True).status == "complete"


def test_a_checkpoint_of_before_without_a_fingerprint_resumes(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    train_on(PUZZLES, config, stop_after=1)
    rewrite_state(config.run_dir, lambda state: state.pop("rows"))
    assert train_on([*PUZZLES, *PUZZLES], config, resume=True).status == "complete"


def test_a_disk_that_is_full_while_a_damaged_ledger_is_replaced_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    Store.create(copy, grouped=True, knobs={}, noise=SCHEME).close(commit=True)
    path.write_bytes(b"damaged")

    def full(source: Path, target: Path) -> None:
        target.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(
            RunDirError, match=r"cannot write .*ledger.sqlite: No space left on device; check free space"
        ):
            _reopen_ledger(path, copy, 0, {})
    store, buffer = _reopen_ledger(path, copy, 0, {})  # half a copy is damaged too, and replaced
    store.close(commit=False)
    assert buffer.grouped
