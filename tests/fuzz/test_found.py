"""Scenarios in which the fuzzer once found a defect: each passes, and still reaches the code that the defect was in."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from fuzz.scenario import Fault, Scenario, Stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer needs LD_PRELOAD"),
]
# A kill while config.toml is written, and a resume that must remove the temporary file.
KILLED_IN_CONFIG = Scenario(
    seed=300000000007,
    overrides=("schedule.strategy=sorted-partial", "run.samples=16", "checkpoint.every_updates=0"),
    stages=(
        Stage(fault=Fault.KILL_AT_WRITE, at=0.373),
        Stage(fault=Fault.KILL_AT_WRITE, at=0.2305),
        Stage(fault=Fault.KILL_AT_WRITE, at=0.587),
        Stage(),
    ),
)
# A disk that gets full while the checkpoint's copy replaces a damaged ledger.
FULL_IN_COPY = Scenario(
    seed=3000000009,
    overrides=("run.samples=24", "learner.group_size=1", "checkpoint.every_updates=1"),
    stages=(
        Stage(fault=Fault.KILL_AT_WRITE, at=0.8126),
        Stage(fault=Fault.DISK_FULL, at=0.3, damage=("ledger.sqlite", "empty")),
        Stage(),
    ),
)


def play(scenario: Scenario, *, plant: str = "") -> tuple[int, str]:
    """Exit code and output of the fuzzer."""
    command = [sys.executable, "-m", "fuzz", "--scenario", scenario.to_json(), "--plant", plant]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_resume_removes_the_file_that_a_killed_process_was_writing() -> None:
    code, told = play(KILLED_IN_CONFIG)
    assert code == 0, told
    code, told = play(KILLED_IN_CONFIG, plant="unfinished-file-left")
    assert (code, "found leftover" in told) == (1, True), (
        f"no file is left unfinished any more, choose other writes:\n{told}"
    )


def test_a_full_disk_is_told_while_a_ledger_is_replaced() -> None:
    code, told = play(FULL_IN_COPY)
    assert code == 0, told
    copied = r"fault disk-full, exit code 2, error: cannot write \S+/ledger\.sqlite: No space left on device"
    assert re.search(copied, told), f"the disk is not full during the copy any more, choose another write:\n{told}"
