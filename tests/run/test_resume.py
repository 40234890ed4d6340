"""A run that is stopped and resumed equals the same run without a stop."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sortedrl.config import SortedConfig
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
