"""What all tests share: one thread, no network, reproducible property tests; the command line, called here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Before torch and transformers are imported by any test: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"  # torch takes it for its own number of threads
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from hypothesis import HealthCheck, settings

# A shared machine makes single examples slow: time is no reason to fail.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
# Derandomized unless asked otherwise, so that two runs of `make test` do the same; `local` looks for more.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Call the entry point in an empty folder; returns exit code, stdout and stderr."""
    from sortedrl import cli

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sortedrl", *arguments])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 1
        out, err = capsys.readouterr()
        return code, out, err

    return run
