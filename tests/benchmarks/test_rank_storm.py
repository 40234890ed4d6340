"""benchmarks/ledger/rank_storm.py with few kills: sharded saves, and ranks that start again. Minutes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.record import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_nothing_is_lost_in_a_short_storm() -> None:
    """Three kills during saves, and three kills of ranks in one run."""
    arguments = ["--kills", "3", "--rank-kills", "3", "--updates", "24", "--no-save", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ledger.rank_storm", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    saves, ranks = record["saves"], record["ranks"]
    assert (saves["kills"], saves["resumes_different"], saves["violations"]) == (3, 0, 0)
    assert saves["resumes_compared"] >= 1
    assert (ranks["restarts"], ranks["engines_restarted"], ranks["violations"]) == (3, 0, 0)
    for part in (saves, ranks):
        assert part["loaded"] == part["trained"] > 0
        assert (part["lost"], part["duplicated"]) == (0, 0)
    assert saves["weights_as_undisturbed"]
