"""kill -9 of a TRL run, resumed from TRL's newest complete checkpoint: nothing is lost, nothing trained twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

pytest.importorskip("trl", reason="TRL is an optional package: pip install 'sortedrl[trl]'")

from tests.adapters.test_trl import BATCH, assert_proven
from tests.adapters.trl_process import STEPS

pytestmark = pytest.mark.slow


def start(folder: Path, checkpoint: str | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.adapters.trl_process", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([*command, checkpoint] if checkpoint else command, env=environment)


def newest(folder: Path) -> str | None:
    """TRL's newest checkpoint that is complete."""
    found = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return found if found and (Path(found) / "trainer_state.json").is_file() else None


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_is_resumed(seed: int, tmp_path: Path) -> None:
    rng, folder = random.Random(seed), tmp_path / "out"
    for _ in range(2):
        before = newest(folder)
        process = start(folder, before)
        while process.poll() is None and newest(folder) == before:
            time.sleep(0.02)
        time.sleep(rng.random() * 0.3)  # somewhere in the updates after a checkpoint
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    process = start(folder, newest(folder))
    assert process.wait(120) == 0
    assert_proven(folder / "sortedrl", STEPS * BATCH)
