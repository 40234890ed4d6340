"""The planner: front and recommendation worked out by hand, the search on small traces, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sortedrl.cli import app
from sortedrl.config import SortedConfig
from sortedrl.engine.sim.cost import UnitCost
from sortedrl.errors import ConfigError
from sortedrl.schedule import Strategy, resolve_knobs
from sortedrl.simulate.plan import (
    BATCH_LIMIT,
    Candidate,
    Plan,
    Point,
    Workload,
    best_first,
    choose_candidates,
    pareto_front,
    recommend,
    rounds,
    search,
)
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.summary import Summary


def point(name: str, speed: float, staleness: float) -> Point:
    summary = Summary(strategy=name, tokens_per_s=speed, staleness_token_mean=staleness)
    return Point(candidate=Candidate(strategy=name), summary=summary)


def names(points: list[Point]) -> list[str]:
    return [one.candidate.strategy for one in points]


POINTS = [
    point("slow", 10, 0.0),
    point("fresh", 20, 0.0),  # as fresh as slow, and faster
    point("between", 30, 1.0),
    point("worse", 29, 2.0),  # slower and staler than between
    point("fast", 31, 3.0),
    point("twin", 31, 3.0),
]


def test_the_front_holds_what_nothing_beats() -> None:
    assert names(pareto_front(POINTS)) == ["fresh", "between", "fast"]


def test_the_better_half_is_taken_front_by_front() -> None:
    assert names(best_first(POINTS)) == ["fast", "twin", "between", "fresh", "worse", "slow"]


def test_the_freshest_of_the_nearly_fastest_is_recommended() -> None:
    front = pareto_front(POINTS)
    assert recommend(front).candidate.strategy == "between"  # 30 > .95 x 31
    assert recommend([*front, point("faster", 40, 9.0)]).candidate.strategy == "faster"


def workload(samples: int = 256, **changes: object) -> Workload:
    trace = load_trace("lognormal(40, 1.1, 400)", samples=samples)
    return replace(Workload(trace=trace, slots=8, update_batch=8, cost=UnitCost(), divergence=1e-3), **changes)


def test_rounds_double_up_to_the_trace_or_the_limit() -> None:
    assert rounds(workload(256)) == [64, 128, 256]
    assert rounds(workload(100)) == [64, 100]
    assert rounds(workload(40)) == [40]
    assert rounds(workload(10_000)) == [64, 128, 256]  # 32 updates of 8


def test_candidates_keep_the_bound_and_depend_on_the_seed_alone() -> None:
    for bound in (0, 1, 3):
        for candidate in choose_candidates(8, bound, 500, seed=0):
            held = resolve_knobs(candidate.strategy, 8, **candidate.knobs).max_staleness
            assert held is not None
            assert held <= bound
    first = choose_candidates(8, None, 30, seed=1)
    assert first == choose_candidates(8, None, 30, seed=1)
    assert first != choose_candidates(8, None, 30, seed=2)
    assert len({candidate.strategy for candidate in first}) == 7  # every one without overlap
    beside = {candidate.strategy for candidate in choose_candidates(8, None, 9, seed=1, overlap=True)}
    assert beside == {strategy.value for strategy in Strategy}
    at_once = {candidate.strategy for candidate in choose_candidates(8, 0, 40, seed=1, overlap=True)}
    assert ("async-on-policy" in at_once, "async" in at_once) == (True, False)


@pytest.fixture(scope="module")
def found() -> Plan:
    return search(workload(), num_candidates=24)


def test_a_plan_beats_sync_and_keeps_the_batch(found: Plan) -> None:
    assert found.sync.candidate.strategy == "sync"
    assert found.sync.summary.samples == 256
    assert found.recommended.speed > 2 * found.sync.speed
    assert all(one.mean_batch <= BATCH_LIMIT * 8 for one in found.front)
    speeds, staleness = [one.speed for one in found.front], [one.staleness for one in found.front]
    assert speeds == sorted(speeds)
    assert staleness == sorted(staleness)


def test_the_same_seed_gives_the_same_plan(found: Plan) -> None:
    assert search(workload(), num_candidates=24).as_dict() == found.as_dict()


def test_a_bound_holds_for_all_of_the_front() -> None:
    bounded = search(workload(), max_staleness=0, num_candidates=10)
    assert {one.summary.staleness_max for one in bounded.front} == {0}
    assert len(bounded.front) == 1  # nothing to trade


def test_a_plan_becomes_a_configuration(found: Plan, tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    path.write_text(found.config().to_toml(), encoding="utf-8")
    config = SortedConfig.load(path)
    chosen = found.recommended.candidate
    assert config.knobs == resolve_knobs(chosen.strategy, 8, **chosen.knobs)
    assert (config.engine.slots, config.engine.max_new_tokens) == (8, 400)
    assert config.learner.algorithm == "reinforce++"


def test_a_plan_leaves_the_rest_of_a_configuration_alone(found: Plan) -> None:
    base = SortedConfig(learner={"lr": 1e-3, "group_size": 2}, run={"seed": 3, "dir": "elsewhere"})
    config = found.config(base)
    assert (config.learner.lr, config.run.seed, config.run.dir) == (1e-3, 3, "elsewhere")
    assert config.schedule.strategy == found.recommended.candidate.strategy


def test_siblings_are_planned_in_whole_groups() -> None:
    trace = load_trace("lognormal(40, 1.1, 400)", samples=96, group_size=4)
    plan = search(workload(trace=trace, group_size=4), num_candidates=7)
    assert plan.config().learner.group_size == 4
    assert plan.config().is_grouped


def test_no_candidates_are_refused() -> None:
    with pytest.raises(ConfigError, match="--candidates"):
        search(workload(), num_candidates=0)


def test_the_command_prints_one_object_and_writes_a_configuration(tmp_path: Path) -> None:
    out = tmp_path / "planned.toml"
    arguments = ["plan", "--trace", "lognormal(40, 1.1, 400)", "--samples", "128", "--slots", "8", "--candidates", "8"]
    result = CliRunner().invoke(app, [*arguments, "--max-staleness", "2", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {"front", "recommended"} <= set(told)
    assert told["recommended"]["speedup"] > 1
    assert told["recommended"]["staleness_max"] <= 2
    assert SortedConfig.load(out).schedule.strategy == told["recommended"]["strategy"]
    assert told["recommended"]["config"] == out.read_text(encoding="utf-8")


def test_the_command_says_what_is_missing() -> None:
    result = CliRunner().invoke(app, ["plan"])
    assert isinstance(result.exception, ConfigError)
    assert "--trace" in str(result.exception)
