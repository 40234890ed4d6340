"""benchmarks/against_trl.py runs completely, and both sides do the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "against_trl.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_sides_do_the_same_work() -> None:
    pytest.importorskip("trl")
    command = [sys.executable, str(SCRIPT), "--quick", "--full-length", "--rounds", "1", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    rows = {row["name"]: row for row in result["results"]}
    assert list(rows) == ["sortedrl", "trl", "trl-tuned"]
    assert {row["tokens"] for row in rows.values()} == {2 * 4 * 16}
    assert {row["rounds"][0]["steps"] for row in rows.values()} == {1}
    for row in rows.values():
        parts = sum(row[f"{part}_s"] for part in ("generation", "logprobs", "update", "other"))
        assert parts == pytest.approx(row["wall_s"])
        assert min(row["generation_s"], row["update_s"]) > 0
    # Both sides have the same number of tokens, so the ratios per token and per step are equal.
    wall_ratio = rows["trl"]["wall_s"] / rows["sortedrl"]["wall_s"]
    assert result["ratio"]["trl"] == result["ratio_per_token"]["trl"] == pytest.approx(wall_ratio)
