"""The fuzzer's command line: what its closing line says, which figures it keeps, and when it stops."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import record
from fuzz import figures
from fuzz.__main__ import smallest, stop_on_term, summarize
from fuzz.finding import FindingKind
from fuzz.judge import Player, Result
from fuzz.scenario import Scenario


@pytest.mark.parametrize("num_findings", [0, 1])
def test_an_invocation_that_found_something_keeps_no_figures(
    num_findings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    summarize(Counter({"runs": 3, "faults": 5, "findings": num_findings, "unfinished": 2}), keep_figures=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"3 runs, 5 faults, {num_findings} findings, 2 unfinished"
    if num_findings:
        assert "figures are not kept" in lines[1]
        assert figures.read()["total"] == {}
    else:
        assert len(lines) == 1
        kept = figures.read()["total"]
        assert (kept["runs"], kept["unfinished"]) == (3, 2)


def test_unfinished_runs_are_told_also_if_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    summarize(Counter({"runs": 1}), keep_figures=False)
    assert capsys.readouterr().out == "1 runs, 0 faults, 0 findings, 0 unfinished\n"


class TermedPlayer(Player):
    """Gets SIGTERM while it plays."""

    num_played = 0

    def play(self, scenario: Scenario) -> Result:
        self.num_played += 1
        signal.raise_signal(signal.SIGTERM)
        self.deadline.check()
        raise AssertionError("it plays on")


def test_a_request_to_stop_also_counts_while_a_failure_is_made_smaller(tmp_path: Path) -> None:
    player = TermedPlayer(None, tmp_path)  # type: ignore[arg-type]
    failed = Result(scenario=Scenario(seed=0, overrides=("a=1", "b=2")))
    failed.find(FindingKind.LOST, "one is gone")
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop_on_term(player)
        assert smallest(player, failed) == failed.scenario
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (player.num_played, player.deadline.has_passed) == (1, True)
