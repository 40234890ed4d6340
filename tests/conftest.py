"""Settings for all tests (one thread, no network, reproducible property tests) and the fixture `call`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Set before any test imports torch or transformers, which read these once.
os.environ["OMP_NUM_THREADS"] = "1"  # torch uses it as its number of threads
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from hypothesis import HealthCheck, settings

# Examples may be slow on a shared machine, so no property test fails because of time.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
# Derandomized by default, so that two runs of `make test` do the same. HYPOTHESIS_PROFILE=local tries new examples.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """A function that runs the command line in an empty folder and returns exit code, stdout and stderr."""
    from sortedrl import cli

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sortedrl", *arguments])
        capsys.readouterr()
        code = 0
        try:
            cli.run_command()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        out, err = capsys.readouterr()
        return code, out, err

    return run
