"""What the fuzzer accepts of a process that ended, and what it finds; and the figures that it keeps."""

from __future__ import annotations

import os
import random
import sys
import zlib
from pathlib import Path

import pytest

from benchmarks import record
from fuzz import figures, hits, oracle, rewards, rows
from fuzz.child import Ended, OutOfTimeError
from fuzz.finding import FindingKind
from fuzz.judge import Damage, Excuses, Player, Result, judge_end, ledger_findings, newest_weights
from fuzz.programs import Call, Program
from fuzz.scenario import Fault, Kind, Scenario, Stage
from fuzz.trl_script import newest_checkpoint
from sortedrl.config import SortedConfig
from tests.support.ledgers import write_good, writing

LINE = "error: it cannot go on: do something\n"
TRACE = "Traceback (most recent call last):\n  boom\n"


def ended(code: int | None, err: str = "", *, was_hit: bool = True, processes: tuple[str, ...] = ()) -> Ended:
    return Ended(code=code, out="", err=err, was_hit=was_hit, processes=processes)


PART_ENDED = "error: the learner's process has ended (signal 9): resume the run\n"
MEMORY = "error: memory ran out: lower engine.slots\n"
ABORTING = "memory allocation of 786432 bytes failed\n"

RIGHT = [
    (ended(0), Fault.NONE, Excuses()),
    (ended(2, LINE), Fault.DISK_FULL, Excuses()),
    (ended(2, LINE), Fault.HELPER_KILLED, Excuses(needs_helpers=True)),
    (ended(2, PART_ENDED), Fault.HELPER_KILLED, Excuses()),
    (ended(2, MEMORY, was_hit=False), Fault.OUT_OF_MEMORY, Excuses()),
    (ended(2, LINE), Fault.NONE, Excuses(may_refuse=True)),
    (ended(2, LINE), Fault.FREEZE, Excuses(must_refuse=True)),
    (ended(-9), Fault.KILL_AT_WRITE, Excuses(must_refuse=True)),
    (ended(143), Fault.TERM, Excuses(has_handlers=True)),
    (ended(-15), Fault.TERM, Excuses()),
    (ended(-6), Fault.OUT_OF_MEMORY, Excuses()),
    (ended(None, ABORTING), Fault.OUT_OF_MEMORY, Excuses()),
]
WRONG = [
    (ended(None), Fault.FREEZE, Excuses(), FindingKind.END),
    (ended(None), Fault.OUT_OF_MEMORY, Excuses(), FindingKind.END),
    (ended(None, ABORTING), Fault.FREEZE, Excuses(), FindingKind.END),
    (ended(1, TRACE), Fault.DISK_FULL, Excuses(), FindingKind.TRACEBACK),
    (ended(0, TRACE), Fault.NONE, Excuses(), FindingKind.TRACEBACK),
    (ended(2, ""), Fault.DISK_FULL, Excuses(), FindingKind.END),
    (ended(2, 2 * LINE), Fault.DISK_FULL, Excuses(), FindingKind.END),
    (ended(-9, was_hit=False), Fault.KILL, Excuses(), FindingKind.END),
    (ended(0), Fault.KILL_AT_CALL, Excuses(), FindingKind.END),
    (ended(-6), Fault.NONE, Excuses(), FindingKind.END),
    (ended(143), Fault.INTERRUPT, Excuses(), FindingKind.END),
    (ended(-15), Fault.TERM, Excuses(has_handlers=True), FindingKind.END),
    (ended(0, processes=("sleep 60",)), Fault.NONE, Excuses(), FindingKind.LEFTOVER),
    # A refusal that nothing explains: the fault is survived, or did not happen, or is not what is told.
    (ended(2, LINE), Fault.NONE, Excuses(), FindingKind.END),
    (ended(2, LINE), Fault.NONE, Excuses(is_resume=True), FindingKind.WRONG_RESUME),
    *((ended(2, LINE), fault, Excuses(), FindingKind.END) for fault in (Fault.FREEZE, Fault.CLOCK_JUMP, Fault.TERM)),
    (ended(2, LINE), Fault.SAMPLE_FAILS, Excuses(), FindingKind.END),
    (ended(2, LINE), Fault.KILL_AT_CALL, Excuses(), FindingKind.END),
    (ended(2, LINE), Fault.HELPER_KILLED, Excuses(), FindingKind.END),
    (ended(2, PART_ENDED), Fault.FREEZE, Excuses(), FindingKind.END),
    (ended(2, LINE, was_hit=False), Fault.DISK_FULL, Excuses(), FindingKind.END),
    (ended(2, LINE), Fault.OUT_OF_MEMORY, Excuses(), FindingKind.END),
    (ended(0), Fault.NONE, Excuses(must_refuse=True), FindingKind.END),
]


@pytest.mark.parametrize(("how", "fault", "why"), RIGHT)
def test_an_end_that_is_explained(how: Ended, fault: Fault, why: Excuses) -> None:
    assert judge_end(how, Stage(fault=fault), why) == []


@pytest.mark.parametrize(("how", "fault", "why", "kind"), WRONG)
def test_an_end_that_nothing_explains(how: Ended, fault: Fault, why: Excuses, kind: FindingKind) -> None:
    assert kind in {finding.kind for finding in judge_end(how, Stage(fault=fault), why)}


def test_a_script_may_raise() -> None:
    script, damaged = Excuses(is_script=True), Excuses(is_script=True, may_raise=True)
    assert judge_end(ended(1, TRACE), Stage(fault=Fault.DISK_FULL), script) == []
    assert judge_end(ended(1, TRACE, was_hit=False), Stage(fault=Fault.DISK_FULL), script)
    assert judge_end(ended(-9, TRACE), Stage(fault=Fault.KILL_AT_CALL), damaged) == []
    assert judge_end(ended(0, TRACE), Stage(), damaged)
    assert judge_end(ended(70), Stage(), damaged)


# ---- what is left ---------------------------------------------------------------------------------------------------


def ledger_of(tmp_path: Path, *, is_complete: bool, num_samples: int = 4) -> list[FindingKind]:
    found = ledger_findings(tmp_path, tmp_path / "copy", is_complete=is_complete, num_samples=num_samples)
    return [finding.kind for finding in found]


def test_a_complete_run_must_have_a_ledger(tmp_path: Path) -> None:
    assert ledger_of(tmp_path, is_complete=False) == []
    assert ledger_of(tmp_path, is_complete=True) == [FindingKind.LOST]
    (tmp_path / "ledger.sqlite").write_bytes(b"")
    assert ledger_of(tmp_path, is_complete=False) == []
    assert ledger_of(tmp_path, is_complete=True) == [FindingKind.LOST]
    (tmp_path / "ledger.sqlite").write_bytes(b"nothing" * 1000)
    assert ledger_of(tmp_path, is_complete=False) == [FindingKind.LEDGER]


def test_a_complete_run_says_how_many_samples_it_trains(tmp_path: Path) -> None:
    write_good(tmp_path / "ledger.sqlite")
    assert ledger_of(tmp_path, is_complete=True, num_samples=0) == [FindingKind.LOST]


def test_the_package_verifies_a_ledger_too(tmp_path: Path) -> None:
    with writing(write_good(tmp_path / "ledger.sqlite")) as connection:
        assert ledger_of(tmp_path, is_complete=False) == []
        connection.execute("UPDATE segments SET crc = crc + 1 WHERE sample = 5")
        connection.commit()
        assert ledger_of(tmp_path, is_complete=False) == [FindingKind.LEDGER]


class IdlePlayer(Player):
    """Its processes do nothing, and end well."""

    def _run(self, program: Program, call: Call, stage: Stage) -> Ended:
        return ended(0, was_hit=False)


class LatePlayer(Player):
    """Its time is over while a process has shared memory."""

    def _run(self, program: Program, call: Call, stage: Stage) -> Ended:
        name = f"fuzz-test-{os.getpid()}"
        Path("/dev/shm", name).write_bytes(b"1")
        Path(os.environ["FUZZ_SHARED_MEMORY"]).write_text(f"{name}\n")
        raise OutOfTimeError


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_SHARED_MEMORY", str(tmp_path / "shared"))


@pytest.mark.usefixtures("shared")
def test_a_program_that_does_nothing_does_not_pass(tmp_path: Path) -> None:
    result = IdlePlayer(None, tmp_path).play(Scenario(seed=0, overrides=("schedule.strategy=sync",)))  # type: ignore[arg-type]
    assert [finding.kind for finding in result.findings] == [FindingKind.LOST]
    result = IdlePlayer(None, tmp_path).play(Scenario(seed=0, overrides=("run.samples=0",)))  # type: ignore[arg-type]
    assert [finding.kind for finding in result.findings] == [FindingKind.END], "a mistake must be refused"


@pytest.mark.usefixtures("shared")
def test_two_runs_without_a_checkpoint_are_not_alike(tmp_path: Path) -> None:
    result = Result(scenario=Scenario(seed=0, overrides=()))
    program = Program(scenario=result.scenario, home=tmp_path / "home")
    IdlePlayer(None, tmp_path)._compare_with_twin(program, result)  # type: ignore[arg-type]
    assert [finding.kind for finding in result.findings] == [FindingKind.LOST]


@pytest.mark.usefixtures("shared")
@pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer needs Linux")
def test_no_shared_memory_is_left_when_the_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        LatePlayer(None, tmp_path).play(Scenario(seed=0, overrides=()))  # type: ignore[arg-type]
    assert not Path("/dev/shm", f"fuzz-test-{os.getpid()}").exists()


# ---- what must be refused, and what damage explains -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "must_refuse"),
    [
        ((), False),
        (("run.samples=0",), True),
        (("task.reward=fuzz.rewards:nothing",), True),  # it can be loaded
        (("schedule.strategy=sync", "schedule.cohort_batches=3"), True),
    ],
)
def test_which_configurations_must_be_refused(overrides: tuple[str, ...], must_refuse: bool, tmp_path: Path) -> None:
    program = Program(scenario=Scenario(seed=0, overrides=overrides), home=tmp_path)
    assert oracle.must_refuse_start(program) is must_refuse


def test_which_changes_must_be_refused(tmp_path: Path) -> None:
    config = SortedConfig.load("quickstart", ["run.seed=99"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    changes = ("run.seed=99", "engine.max_new_tokens=7", "learner.lr=1e-4")
    assert [oracle.must_refuse_changes(tmp_path, [change]) for change in changes] == [False, True, False]


def test_damage_counts_only_if_it_changed_a_file(tmp_path: Path) -> None:
    damage = Damage(run_dir=tmp_path)
    (tmp_path / "lock").write_bytes(b"")
    assert not any(damage.cause("lock", how, seed=0.5) for how in ("empty", "cut", "flip"))
    assert not damage.cause("summary.json", "delete", seed=0.5)
    assert not damage.has_happened
    assert damage.cause("lock", "delete", seed=0.5)
    assert damage.has_happened


def test_a_refusal_needs_damage_of_all_checkpoints(tmp_path: Path) -> None:
    damage = Damage(run_dir=tmp_path)
    for version in ("9", "10"):
        (tmp_path / "checkpoints" / version).mkdir(parents=True)
        (tmp_path / "checkpoints" / version / "state").write_bytes(b"1234")
    assert damage.cause("checkpoint", "empty", seed=0.5)
    assert not damage.explains_a_refusal()
    (tmp_path / "checkpoints/9/state").unlink()
    (tmp_path / "checkpoints/9").rmdir()
    assert damage.explains_a_refusal()
    (tmp_path / "checkpoints/10/state").write_bytes(b"1234")  # it was saved again
    assert not damage.explains_a_refusal()


def test_a_damaged_ledger_is_mended_by_a_process_that_ends_well(tmp_path: Path) -> None:
    damage = Damage(run_dir=tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"1234")
    assert damage.cause("ledger.sqlite", "empty", seed=0.5)
    damage.look(ended(2, LINE), is_script=False)
    damage.look(ended(0, "r is complete: 4 samples\n"), is_script=False)
    assert damage.ledger is not None
    damage.look(ended(0), is_script=False)
    assert damage.ledger is None


def test_a_file_that_was_not_changed_is_sound(tmp_path: Path) -> None:
    for name in ("cut-rows.jsonl", "nested.json"):
        rows.write(tmp_path, name, seed=0)
        assert not rows.is_sound(tmp_path, name)
    rows.write(tmp_path, "rows.jsonl", seed=0)
    (tmp_path / "cut-rows.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    assert rows.is_sound(tmp_path, "cut-rows.jsonl")


def test_functions_note_that_they_misbehaved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = next(text for text in map(str, range(1000)) if zlib.crc32(text.encode()) % 100 == 3)
    good = next(text for text in map(str, range(1000)) if zlib.crc32(text.encode()) % 100 == 50)
    rewards.chaos_wild([], [bad])  # outside of the fuzzer
    (tmp_path / hits.FOLDER).mkdir()
    monkeypatch.setenv(hits.VARIABLE, str(tmp_path / hits.FOLDER))
    rewards.chaos_wild([], [good])
    assert hits.noted(tmp_path) == []
    rewards.chaos_wild([], [bad, bad])
    assert hits.noted(tmp_path) == ["reward chaos"]


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
