"""What the fuzzer accepts of a process that ended, and what it finds; and the figures that it keeps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import record
from fuzz import figures, rows
from fuzz.child import Ended
from fuzz.finding import FindingKind
from fuzz.judge import Result, judge_end, newest_weights
from fuzz.programs import Program
from fuzz.scenario import Fault, Kind, Scenario, Stage
from fuzz.trl_script import newest_checkpoint

LINE = "error: it cannot go on: do something\n"
TRACE = "Traceback (most recent call last):\n  boom\n"


def ended(code: int | None, err: str = "", *, was_hit: bool = True, processes: tuple[str, ...] = ()) -> Ended:
    return Ended(code=code, out="", err=err, was_hit=was_hit, processes=processes)


RIGHT = [
    (ended(0), Fault.NONE),
    (ended(2, LINE), Fault.DISK_FULL),
    (ended(-9), Fault.KILL_AT_WRITE),
    (ended(143), Fault.TERM),
    (ended(-15), Fault.TERM),
    (ended(-6), Fault.OUT_OF_MEMORY),
    (ended(None, "memory allocation of 786432 bytes failed\n"), Fault.OUT_OF_MEMORY),
]
WRONG = [
    (ended(None), Fault.FREEZE, FindingKind.END),
    (ended(None), Fault.OUT_OF_MEMORY, FindingKind.END),
    (ended(None, "memory allocation of 786432 bytes failed\n"), Fault.FREEZE, FindingKind.END),
    (ended(1, TRACE), Fault.DISK_FULL, FindingKind.TRACEBACK),
    (ended(0, TRACE), Fault.NONE, FindingKind.TRACEBACK),
    (ended(2, ""), Fault.NONE, FindingKind.END),
    (ended(2, 2 * LINE), Fault.NONE, FindingKind.END),
    (ended(-9, was_hit=False), Fault.KILL, FindingKind.END),
    (ended(-6), Fault.NONE, FindingKind.END),
    (ended(143), Fault.INTERRUPT, FindingKind.END),
    (ended(0, processes=("sleep 60",)), Fault.NONE, FindingKind.LEFTOVER),
]


@pytest.mark.parametrize(("how", "fault"), RIGHT)
def test_an_end_that_its_fault_explains(how: Ended, fault: Fault) -> None:
    assert judge_end(how, Stage(fault=fault)) == []


@pytest.mark.parametrize(("how", "fault", "kind"), WRONG)
def test_an_end_that_nothing_explains(how: Ended, fault: Fault, kind: FindingKind) -> None:
    assert kind in {finding.kind for finding in judge_end(how, Stage(fault=fault))}


def test_a_script_may_raise() -> None:
    assert judge_end(ended(1, TRACE), Stage(fault=Fault.DISK_FULL), may_raise=True) == []
    assert judge_end(ended(-9, TRACE), Stage(fault=Fault.KILL_AT_CALL), may_raise=True) == []
    assert judge_end(ended(0, TRACE), Stage(), may_raise=True)
    assert judge_end(ended(70), Stage(), may_raise=True)


def test_a_run_inside_trl_continues_from_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    overrides = ("strategy=sync", "max_steps=5")
    program = Program(scenario=Scenario(seed=0, kind=Kind.TRL, overrides=overrides), home=tmp_path)
    assert (program.num_samples, program.can_resume) == (20, False)
    for step in (2, 10, 11):
        (tmp_path / "runs/r" / f"checkpoint-{step}").mkdir(parents=True)
    for step in (2, 10):
        (tmp_path / "runs/r" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert program.can_resume
    assert newest_checkpoint(tmp_path / "runs/r") == str(tmp_path / "runs/r/checkpoint-10")


def test_a_scenario_with_rows_gets_their_file(tmp_path: Path) -> None:
    scenario = Scenario(seed=0, kind=Kind.DATA, overrides=("task.path=rows.jsonl",))
    Program(scenario=scenario, home=tmp_path / "home").prepare()
    assert (tmp_path / "home/rows.jsonl").read_text().count("\n") == 24


def test_weights_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    assert newest_weights(tmp_path) == "no checkpoint"
    for version, content in ((9, b"old"), (10, b"new")):
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / "model.safetensors").write_bytes(content)
    before = newest_weights(tmp_path)
    assert before.startswith("10:")
    (tmp_path / "10/model.safetensors").write_bytes(rows.damaged(b"new", "flip", random.Random(0)))
    assert newest_weights(tmp_path) != before


def test_figures_add_up_over_invocations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for commit, number in (("aaa", 3), ("aaa", 4), ("bbb", 5)):
        monkeypatch.setattr(record, "stamp", lambda commit=commit: {"commit": commit})
        result = Result(scenario=Scenario(seed=0, overrides=()), faults=["kill"] * number, outcome="complete")
        result.find(FindingKind.LOST, "one is gone")
        figures.add(result.counts)
    found = figures.read()
    assert {name: found["total"][name] for name in ("runs", "faults", "fault kill", "complete", "found lost")} == {
        "runs": 3,
        "faults": 12,
        "fault kill": 12,
        "complete": 3,
        "found lost": 3,
    }
    assert [found["by_commit"][commit]["faults"] for commit in ("aaa", "bbb")] == [7, 5]
