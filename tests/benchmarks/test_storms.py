"""What the storms of benchmarks/ledger count as a kill, and when they are sound: judged without a training."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ledger import rank_storm, tool_storm


def checkpoint(folder: Path, name: str) -> None:
    (folder / "storm" / "checkpoints" / name).mkdir(parents=True)


def test_the_newest_checkpoint_has_the_largest_number(tmp_path: Path) -> None:
    assert tool_storm.newest(tmp_path) == (-1, False)
    for name, newest in (("9", (9, True)), (".10.partial-7", (10, False)), ("10", (10, True)), ("latest", (10, True))):
        checkpoint(tmp_path, name)
        assert tool_storm.newest(tmp_path) == newest


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_process_that_hangs_is_no_kill(
    is_last: bool, child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATIENCE_S", "LAST_S"):
        monkeypatch.setattr(tool_storm, name, 0.01)
    with pytest.raises(SystemExit, match="hangs"):
        tool_storm.kill_or_wait(child.pid, tmp_path, random.Random(0), is_last=is_last)


def test_a_process_is_killed_after_a_checkpoint(
    child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([(0, True), (1, False)])
    monkeypatch.setattr(tool_storm, "newest", lambda folder: next(found, (1, False)))
    monkeypatch.setattr(tool_storm, "LONGEST_S", 0.01)
    assert not tool_storm.kill_or_wait(child.pid, tmp_path, random.Random(0), is_last=False)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_process_that_ends_by_itself_is_no_kill(is_last: bool, tmp_path: Path) -> None:
    ended, failed = (subprocess.Popen([name]) for name in ("true", "false"))
    assert tool_storm.kill_or_wait(ended.pid, tmp_path, random.Random(0), is_last=is_last)
    with pytest.raises(SystemExit, match="failed with exit code 1"):
        tool_storm.kill_or_wait(failed.pid, tmp_path, random.Random(0), is_last=is_last)
    for process in (ended, failed):
        process.poll()


def test_a_storm_with_fewer_kills_than_asked_for_is_not_sound() -> None:
    result: dict[str, Any] = {"kind": "snapshot", "trained": 8, "loaded": 8, "violations": 0, "wrong_states": 0}
    result |= {"called_again": 0, "counted_again_in_ledger": 0}
    assert tool_storm.is_sound({**result, "ended_early": False})
    assert not tool_storm.is_sound({**result, "ended_early": True})


def storm_of_ranks(**changes: int | bool) -> dict[str, Any]:
    counts = {"trained": 8, "loaded": 8, "lost": 0, "duplicated": 0, "violations": 0}
    saves = {**counts, "resumes_of_checkpoints": 3, "resumes_compared": 3, "resumes_different": 0}
    ranks = {**counts, "kills": 2, "restarts": 2, "engines_restarted": 0}
    saves["weights_as_undisturbed"] = True
    return {
        part: {**values, **{k: v for k, v in changes.items() if k in values}}
        for part, values in (("saves", saves), ("ranks", ranks))
    }


def test_a_storm_of_ranks_needs_every_comparison_and_every_restart() -> None:
    assert rank_storm.is_within_goal(storm_of_ranks())
    for changes in (
        {"resumes_compared": 2},
        {"resumes_compared": 0, "resumes_of_checkpoints": 0},
        {"restarts": 1},
        {"weights_as_undisturbed": False},
        {"violations": 1},
        {"trained": 7},
    ):
        assert not rank_storm.is_within_goal(storm_of_ranks(**changes)), changes
    assert rank_storm.is_within_goal({"ranks": storm_of_ranks()["ranks"]}), "one part alone"
