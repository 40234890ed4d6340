"""The fuzzer's command line: what its closing line says, which figures it keeps, and when it stops."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import record
from fuzz import figures
from fuzz.__main__ import Done, Jobs, check, fuzz, look_for, parse, smallest, stop_on_term, summarize
from fuzz.finding import FindingKind
from fuzz.judge import Player, Result
from fuzz.scenario import Kind, Scenario


@pytest.mark.parametrize("num_findings", [0, 1])
def test_an_invocation_that_found_something_keeps_no_figures(
    num_findings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    done = Done(counts=Counter({"runs": 3, "faults": 5, "findings": num_findings, "unfinished": 2}))
    summarize(done, keep_figures=True)
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
    summarize(Done(counts=Counter({"runs": 1})), keep_figures=False)
    assert capsys.readouterr().out == "1 runs, 0 faults, 0 findings, 0 unfinished\n"


RECORD = {"counts": {"runs": 1, "findings": 1, "found traceback": 1}, "findings": ["x"], "again": "", "line": ""}


def job(source: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"record = {json.dumps(json.dumps(RECORD))}\n{source}"]


def run_jobs(*sources: str, until: tuple[FindingKind, ...] = ()) -> Done:
    return Jobs([job(source) for source in sources], [os.environ] * len(sources), quiet=True, until=until).run()


def test_a_job_that_prints_what_is_no_record_is_listened_to_and_fails() -> None:
    done = run_jobs("print('warning: x' * 100_000)\nprint('[]')\nprint(record)")
    assert done.counts["runs"] == 1
    assert len(done.failures) == 2
    assert "warning: x" in done.failures[0]


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 15)"])
def test_a_job_that_fails_leaves_the_results_of_the_others(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    done = run_jobs(end, "print(record)")
    assert (done.counts["runs"], len(done.failures)) == (1, 1)
    summarize(Done(counts=Counter({"runs": 1}), failures=done.failures), keep_figures=True)
    told = capsys.readouterr()
    assert told.out.startswith("1 runs, ")
    assert "job 0 ended with" in told.err
    assert figures.read()["total"] == {}


def test_jobs_are_stopped_only_by_a_finding_that_is_looked_for() -> None:
    waits = "print(record, flush=True)\nimport time; time.sleep(60)"
    assert run_jobs(waits, until=(FindingKind.LOST, FindingKind.TRACEBACK)).failures == []
    assert not run_jobs("print(record)", until=(FindingKind.LOST,)).has_found((FindingKind.LOST,))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--planted", "no-cut,typo"], "no planted defect typo"),
        (["--kinds", "vllm"], "vllm needs vllm, which is not installed"),
        (["--kinds", "train,ranks"], "needs ray"),
        (["--scenario", Scenario(seed=0, kind=Kind.TRL, overrides=()).to_json()], "trl needs trl"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(
    given: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", *given])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as refused:
        check(parse())
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_a_planted_defect_is_found_only_by_what_it_explains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz"])
    done = Done(counts=Counter({"found traceback": 1, "findings": 1}), failures=["job 0 ended with 1"])
    monkeypatch.setattr("fuzz.__main__.fuzz", lambda *_, **__: done)
    assert not look_for("lost-requeue", parse())
    assert "NOT found" in (told := capsys.readouterr().out)
    assert "job 0 ended with 1" in told
    done.counts["found lost"] = 1
    assert look_for("lost-requeue", parse())


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


def test_each_job_has_a_page_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a common page, a fault of one job would count as one of the other."""
    pages: list[str] = []

    class Recorded:
        def __init__(self, commands: object, envs: Sequence[Mapping[str, str]], **_: object) -> None:
            pages.extend(env["FUZZ_CONTROL"] for env in envs)

        def run(self) -> Done:
            return Done()

    monkeypatch.setattr("fuzz.__main__.Jobs", Recorded)
    monkeypatch.setattr("sys.argv", ["fuzz", "--jobs", "3"])
    fuzz(parse())
    assert len(set(pages)) == 3
