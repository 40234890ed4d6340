"""Pairs of runs that must not differ: they are compared with each other and with a committed trajectory.

    python -m tests.properties.test_equivalences   # writes trajectories/ again, from the first run of each pair

A trajectory has the samples of every update, their lengths and rewards, and the loss. Compared with the file, whole
numbers are equal and losses agree to 1e-4, because another machine rounds differently. The two runs of a pair agree to
1e-5, or bit by bit if everything is computed in the same order.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken, UpdateDone
from tests.run.test_resume import train

TRAJECTORIES = Path(__file__).parent / "trajectories"
UPDATES = 6

Trajectory = list[dict[str, Any]]


def make_config(folder: Path, name: str, schedule: dict[str, Any], **learner: Any) -> SortedConfig:
    return SortedConfig(
        run={"name": name, "dir": str(folder), "samples": 16 * UPDATES, "report": False},
        engine={"slots": 16, "max_new_tokens": 56},
        schedule={"update_batch": 16, **schedule},
        reward={"grace_s": 60.0},  # batches do not depend on the speed of the reward workers
        learner={"algorithm": "reinforce++", "group_size": 1, "lr": 1e-3, **learner},
        eval={"prompts": 0},
        checkpoint={"every_updates": 0},
    )


def trajectory(config: SortedConfig) -> Trajectory:
    happened = list(read_events(config.run_dir / "events.jsonl"))
    batches = [event for event in happened if isinstance(event, BatchTaken)]
    updates = [event for event in happened if isinstance(event, UpdateDone)]
    return [
        {
            "samples": batch.samples,
            "lengths": batch.lengths,
            "rewards": [int(reward) for reward in batch.rewards],
            "loss": done.metrics["loss"],
        }
        for batch, done in zip(batches, updates, strict=True)
    ]


def whole(config: SortedConfig) -> Trajectory:
    train(config)
    return trajectory(config)


def in_two_parts(config: SortedConfig) -> Trajectory:
    assert train(config, stop_after=3).status == "stopped"
    assert train(config, resume=True).status == "complete"
    return trajectory(config)


def by_micro_batches(folder: Path) -> tuple[Callable[[], Trajectory], Callable[[], Trajectory]]:
    """Updates in one micro-batch, or in micro-batches of a few answers."""
    schedule = {"strategy": "sorted-replay"}
    return (
        lambda: whole(make_config(folder, "at-once", schedule)),
        lambda: whole(make_config(folder, "in-pieces", schedule, micro_tokens=128)),
    )


def by_strategy(folder: Path) -> tuple[Callable[[], Trajectory], Callable[[], Trajectory]]:
    """`sync`, or a sorted strategy with one batch per cohort and harvest = drain."""
    drained = {"strategy": "sorted-replay", "cohort_batches": 1, "harvest": "drain", "order": "shuffled"}
    return (
        lambda: whole(make_config(folder, "sync", {"strategy": "sync"})),
        lambda: whole(make_config(folder, "drained", drained)),
    )


def by_resuming(folder: Path) -> tuple[Callable[[], Trajectory], Callable[[], Trajectory]]:
    """Without a stop, or stopped after three updates and resumed."""
    schedule = {"strategy": "sorted-partial", "lookahead": 1}
    return (
        lambda: whole(make_config(folder, "one-go", schedule)),
        lambda: in_two_parts(make_config(folder, "two-parts", schedule)),
    )


PAIRS = {"micro_batches": by_micro_batches, "sync": by_strategy, "resume": by_resuming}
TOLERANCE = {"micro_batches": 1e-5, "sync": 0.0, "resume": 1e-5}  # between the losses of the two runs


def assert_same(ours: Trajectory, theirs: Trajectory, tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert {**our, "loss": 0} == {**their, "loss": 0}, f"update {number}"
        assert our["loss"] == pytest.approx(their["loss"], rel=tolerance, abs=1e-2 * tolerance), f"update {number}"


@pytest.mark.parametrize("name", list(PAIRS))
def test_both_runs_take_the_trajectory(name: str, tmp_path: Path) -> None:
    kept = json.loads((TRAJECTORIES / f"{name}.json").read_text(encoding="utf-8"))
    assert len(kept) == UPDATES
    assert any(abs(update["loss"]) > 1e-3 for update in kept)
    first, second = (run() for run in PAIRS[name](tmp_path))
    assert_same(second, first, TOLERANCE[name])
    assert_same(first, kept, 1e-4)


def main() -> None:
    TRAJECTORIES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, pair in PAIRS.items():
            lines = ",\n".join(json.dumps(update) for update in pair(Path(folder))[0]())
            (TRAJECTORIES / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
