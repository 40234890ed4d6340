"""The benchmark crash_storm.py with few kills."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.forked_process import ForkedProcess

STORM = Path(__file__).parents[2] / "benchmarks" / "crash_storm.py"


@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_nothing_is_lost_in_a_short_storm(tmp_path: Path) -> None:
    """Each phase of a run is killed at least once: the benchmark kills in the phase with the fewest kills so far."""
    arguments = ["--kills", "15", "--updates", "6", "--calm", "1", "--no-save", "--json"]
    with ForkedProcess(tmp_path, run_storm, arguments) as storm:
        assert storm.wait(1700) == 0, storm.err
    record = json.loads(storm.out)
    assert (record["kills"], sum(record["by_phase"].values())) == (15, 15)
    ledger = record["ledger"]
    assert ledger["loaded"] == ledger["trained"] == 16 * 6 * record["runs"]
    assert (ledger["lost"], ledger["duplicated"], ledger["unclean"]) == (0, 0, 0)
    # A run that was killed learns as much as an undisturbed run with the same seed.
    (seed,) = record["accuracy_undisturbed"]
    assert record["accuracy"][seed] == pytest.approx(record["accuracy_undisturbed"][seed], abs=0.1)


def run_storm(arguments: list[str]) -> None:
    sys.argv = [str(STORM), *arguments]
    sys.path.insert(0, str(STORM.parent))
    runpy.run_path(str(STORM), run_name="__main__")
