"""A short crash storm: the benchmark itself, with few kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).parents[1] / "benchmarks" / "crash_storm.py"


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_nothing_is_lost_in_a_short_storm() -> None:
    command = [sys.executable, str(STORM), "--kills", "15", "--updates", "6", "--calm", "1", "--no-save", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["kills"], sum(record["by_phase"].values())) == (15, 15)
    ledger = record["ledger"]
    assert ledger["loaded"] == ledger["trained"] == 16 * 6 * record["runs"]
    assert (ledger["lost"], ledger["duplicated"], ledger["unclean"]) == (0, 0, 0)
    # The same seed, killed and not killed, learns the same.
    (seed,) = record["accuracy_undisturbed"]
    assert record["accuracy"][seed] == pytest.approx(record["accuracy_undisturbed"][seed], abs=0.1)
