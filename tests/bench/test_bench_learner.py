"""`sortedrl bench learner`: what it prints, that both contenders learn the same, and from which lengths."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sortedrl.cli import app
from sortedrl.errors import LearnerError
from sortedrl.testing.bench.learner import LearnerBench, run_process, spread_lengths

SMALL = ["--model", "knights-tiny", "--samples", "8", "--scale", "0.25", "--passes", "2", "--threads", "2"]


@pytest.mark.slow
def test_packed_gradients_are_those_of_the_padded_batch() -> None:
    run = CliRunner().invoke(app, ["bench", "learner", *SMALL, "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    rows = {row["name"]: row for row in result["results"]}
    assert list(rows) == ["packed", "padded", "packed, recomputed"]
    assert rows["packed"]["gradient_error"] == result["gradient_error"] < 1e-5
    assert rows["packed, recomputed"]["gradient_error"] < 1e-5
    assert result["ratio"]["padded"] == rows["packed"]["tokens_per_s"] / rows["padded"]["tokens_per_s"]
    assert result["memory"]["padded"] == rows["packed"]["peak_gb"] / rows["padded"]["peak_gb"]
    assert all(row["rounds"][0]["peak_bytes"] > row["rounds"][0]["start_bytes"] > 0 for row in rows.values())
    assert (result["samples"], result["passes"], result["threads"]) == (8, 2, 2)
    assert result["tokens"] == sum(spread_lengths(LearnerBench(samples=8, scale=0.25)))


@pytest.mark.slow
def test_a_table_for_people() -> None:
    run = CliRunner().invoke(app, ["bench", "learner", *SMALL, "--no-recomputed"])
    assert run.exit_code == 0, run.output
    assert "ratio of the first two" in run.stdout
    assert "recomputed" not in run.stdout


def test_lengths_are_spread_over_the_trace(tmp_path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([400, 10, 20, 40, 80, 160, 100, 200]), encoding="utf-8")
    # Sorted 10 20 40 80 100 160 200 400; the middles of four quarters are at places 1, 3, 5 and 7.
    assert spread_lengths(LearnerBench(trace=str(path), samples=4, scale=0.5)) == [10, 40, 80, 200]


@pytest.mark.slow
def test_a_contender_that_fails_says_why() -> None:
    with pytest.raises(LearnerError, match=r"padded process failed .*lower --samples"):
        run_process({"folder": "/no/such/folder", "contender": "padded", "threads": 1})
