"""Scenarios: the same seed gives the same one, it survives its command line, and it can be made smaller."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fuzz.child import OutOfTimeError
from fuzz.draw import STRATEGIES, draw
from fuzz.scenario import Fault, Kind, Scenario, Stage
from fuzz.shrink import shrink


def test_a_seed_gives_one_scenario_and_others_differ():
    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(50)}) == 50


def test_a_scenario_survives_its_command_line():
    for seed in range(50):
        assert Scenario.from_json(draw(seed).to_json()) == draw(seed)


def test_all_faults_and_strategies_are_drawn():
    drawn = [draw(seed) for seed in range(1000)]
    assert {stage.fault for scenario in drawn for stage in scenario.stages} == set(Fault)
    assert {scenario.kind for scenario in drawn} == {Kind.TRAIN, Kind.TOOLS, Kind.DATA, Kind.TRL}
    strategies = {scenario.overrides[0] for scenario in drawn if scenario.kind == Kind.TRAIN}
    assert strategies == {f"schedule.strategy={name}" for name in STRATEGIES}


def test_a_quarter_of_the_processes_ends_as_the_interpreter_does():
    ends = [stage.ends_normally for seed in range(300) for stage in draw(seed).stages]
    assert 0.2 < sum(ends) / len(ends) < 0.3
    older = Scenario(seed=0, overrides=(), stages=(Stage(),)).to_json().replace(',"ends_normally":false', "")
    assert "ends" not in older
    assert Scenario.from_json(older).stages == (Stage(),)


def test_a_failure_shrinks_to_what_causes_it():
    guilty = Stage(fault=Fault.KILL, at=0.5)
    scenario = Scenario(
        seed=1,
        overrides=("run.samples=64", "engine.slots=3", "run.seed=4"),
        stages=(Stage(fault=Fault.TERM), guilty, Stage(fault=Fault.FREEZE, damage=("lock", "cut")), Stage()),
    )
    smallest = shrink(scenario, lambda s: guilty in s.stages and "engine.slots=3" in s.overrides)
    assert smallest.overrides == ("engine.slots=3",)
    assert smallest.stages == (guilty, Stage())


def test_shrinking_ends_with_what_it_has_when_the_time_is_over():
    scenario = Scenario(seed=1, overrides=("run.samples=64", "engine.slots=3", "run.seed=4"))
    tried = []

    def still_fails(smaller: Scenario) -> bool:
        if len(tried) == 2:
            raise OutOfTimeError
        tried.append(smaller)
        return True

    assert shrink(scenario, still_fails) == tried[1]
    assert len(tried[1].overrides) < len(scenario.overrides)


def test_only_runs_that_go_on_alike_are_compared_with_a_twin():
    kill, term = Stage(fault=Fault.KILL), Stage(fault=Fault.TERM)
    plain = Scenario(seed=0, overrides=("schedule.strategy=sorted-replay",), stages=(kill, Stage()))
    overlapping = Scenario(seed=0, overrides=("schedule.strategy=async",), stages=(kill, Stage()))
    stopped = Scenario(seed=0, overrides=("schedule.strategy=sync",), stages=(term, Stage()))
    assert (plain.has_twin, overlapping.has_twin, stopped.has_twin) == (True, False, False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer needs LD_PRELOAD")
@pytest.mark.parametrize("defect", ["", "no-cut"])
def test_a_kill_is_survived_and_a_planted_defect_found(defect):
    scenario = Scenario(
        seed=0,
        overrides=(
            "schedule.strategy=sorted-replay",
            "run.samples=40",
            "checkpoint.every_updates=2",
            "learner.group_size=1",
        ),
        stages=(Stage(fault=Fault.KILL_AT_WRITE, at=0.816), Stage()),
    )
    command = [sys.executable, "-m", "fuzz", "--scenario", scenario.to_json(), *(["--plant", defect] if defect else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if defect else 0), done.stdout + done.stderr
    assert "fault" in done.stdout
