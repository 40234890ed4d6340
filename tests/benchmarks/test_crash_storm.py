"""benchmarks/ledger/crash_storm.py with few kills: every sample is trained exactly once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.ledger import crash_storm
from tests.support.forked_process import ForkedProcess


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.timeout(1800)
def test_nothing_is_lost_in_a_short_storm(tmp_path: Path) -> None:
    """Fifteen kills hit nearly all eight phases, since each kill aims at the phase that was hit least so far."""
    arguments = ["--kills", "15", "--updates", "6", "--calm", "1", "--no-save", "--json"]
    with ForkedProcess(tmp_path, run_storm, arguments) as storm:
        code = storm.wait(1700)
        assert storm.out, storm.err
    record = json.loads(storm.out)
    assert code == (not record["within_goal"]), "few kills may miss a phase by chance; the code says so"
    assert (record["kills"], sum(record["by_phase"].values())) == (15, 15)
    ledger = record["ledger"]
    assert ledger["loaded"] == ledger["trained"] == 16 * 6 * record["runs"]
    assert (ledger["lost"], ledger["duplicated"], ledger["unclean"]) == (0, 0, 0)
    # A run that was killed reaches the same accuracy as an undisturbed run of the same seed.
    (seed,) = record["accuracy_undisturbed"]
    assert record["accuracy"][seed] == pytest.approx(record["accuracy_undisturbed"][seed], abs=0.1)


def run_storm(arguments: list[str]) -> None:
    sys.argv = ["crash_storm", *arguments]
    crash_storm.main()
