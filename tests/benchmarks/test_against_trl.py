"""benchmarks/learner/against_trl.py runs from end to end, and both sides do the same work."""

from __future__ import annotations

import json

import pytest

from benchmarks.record import run_module


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_sides_do_the_same_work() -> None:
    pytest.importorskip("trl")
    options = ("--quick", "--full-length", "--rounds", "1", "--threads", "1", "--json")
    result = json.loads(run_module("benchmarks.learner.against_trl", *options))
    rows = {row["name"]: row for row in result["results"]}
    assert list(rows) == ["sortedrl", "trl", "trl-tuned"]
    assert {row["tokens"] for row in rows.values()} == {2 * 4 * 16}
    assert {row["rounds"][0]["steps"] for row in rows.values()} == {1}
    for row in rows.values():
        parts = sum(row[f"{part}_s"] for part in ("generation", "logprobs", "update", "other"))
        assert parts == pytest.approx(row["wall_s"])
        assert min(row["generation_s"], row["update_s"]) > 0
    # Both sides write the same number of tokens, so the ratio per token equals the ratio per step.
    wall_ratio = rows["trl"]["wall_s"] / rows["sortedrl"]["wall_s"]
    assert result["ratio"]["trl"] == result["ratio_per_token"]["trl"] == pytest.approx(wall_ratio)
