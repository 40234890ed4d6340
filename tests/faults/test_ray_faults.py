"""Ray's processes and the driver are killed for real: what the user reads, what is left, and resuming. Minutes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sortedrl.config.shipped import shipped_path
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 300.0
LEFTOVERS_S = 30.0  # without the reaper two agents of Ray stay for a minute
QUICKSTART = shipped_path("quickstart")
POOL = ["engine.replicas=2", "engine.replica_cpus=.5"]
RANKS = ["learner.ranks=2", "learner.rank_cpus=.5"]
COMMON = ["run.samples=1024", "run.name=run", "eval.prompts=0", "checkpoint.every_updates=2", "run.report=false"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "192.0.2.1:6379"}  # which nobody asked for


def train(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from sortedrl.cli import main; main()", "train", *words, "--json"]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )


def wait_for(is_there: Callable[[], bool], why: str, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


@contextmanager
def training(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A run with its first checkpoint written, and all its processes."""
    driver = train(str(QUICKSTART), *COMMON, f"run.dir={folder}", *words)
    others: list[psutil.Process] = []
    try:
        checkpoints = folder / "run" / "checkpoints"
        wait_for(lambda: driver.poll() is not None or (checkpoints / "2").exists(), "no checkpoint came")
        assert driver.poll() is None, driver.communicate()[1]
        others = psutil.Process(driver.pid).children(recursive=True)
        yield driver, others
    finally:
        driver.kill()
        driver.wait()
        for process in others:
            if process.is_running():  # compares start times too
                process.kill()


def living(processes: list[psutil.Process]) -> list[str]:
    found: list[str] = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.NoSuchProcess:
            pass
    return found


def check_file(path: Path) -> None:
    """Verify from the ledger file alone that no sample was lost or trained twice."""
    with Ledger(path) as ledger:
        assert verify(ledger).violations == []


@pytest.mark.parametrize(
    ("words", "victim", "name"), [(POOL, "raylet", "raylet"), (POOL, "gcs_server", "GCS"), (RANKS, "raylet", "raylet")]
)
def test_a_run_whose_ray_ends_says_so_and_goes_on(words: list[str], victim: str, name: str, tmp_path: Path) -> None:
    with training(tmp_path, *words) as (driver, others):
        next(process for process in others if process.name() == victim).kill()
        _, messages = driver.communicate(timeout=WAIT_S)
        assert driver.returncode == 2, messages
        (line,) = [line for line in messages.splitlines() if line.startswith("error:")]
        assert line.startswith(f"error: Ray has ended (its {name} was killed")
        assert line.endswith(f"resume the run with: sortedrl train --resume {tmp_path / 'run'}")
        wait_for(lambda: not living(others), "processes of Ray are left", LEFTOVERS_S)
    check_file(tmp_path / "run" / "ledger.sqlite")
    resumed = train("--resume", str(tmp_path / "run"))
    _, messages = resumed.communicate(timeout=WAIT_S)
    assert resumed.returncode == 0, messages
    check_file(tmp_path / "run" / "ledger.sqlite")


def test_nothing_of_ray_outlives_a_killed_driver_for_long(tmp_path: Path) -> None:
    with training(tmp_path, *POOL) as (driver, others):
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + LEFTOVERS_S
        while left := living(others):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
