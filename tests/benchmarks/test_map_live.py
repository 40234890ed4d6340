"""Live points of the map and the cost of an order: their figures against values by hand, and that settings load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.record import QUICKSTART
from benchmarks.schedule import map_live, order_cost
from sortedrl.errors import ConfigError

CONDITION = {"tail": 1.1, "batch_per_slot": 1.0, "fixed_share": 0.6, "learner_share": 0.1, "diverged": 0.07}


def record(live: dict[str, float], on_map: dict[str, float]) -> dict[str, Any]:
    return {"condition": CONDITION, "live": live, "map": on_map, "simulated": live}


def test_every_point_has_settings_that_load(tmp_path: Path) -> None:
    for point in map_live.POINTS.values():
        start = None if point.config == QUICKSTART else tmp_path
        for choice in point.choices:
            config = map_live.config_of(point, choice, tmp_path, start)
            assert config.strategy_name == map_live.CHOICES[choice][0]
            assert config.knobs.lookahead == map_live.CHOICES[choice][1].get("lookahead", 0)
            assert (config.slots, config.knobs.update_batch) == (point.slots, point.update_batch)
    assert len(map_live.POINTS) == 12


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Folders of finished runs of the point `smollm2`, by choice."""
    point = map_live.POINTS["smollm2"]
    folders = {choice: tmp_path / f"a=b {choice}" for choice in point.choices}
    configs = {folder: map_live.config_of(point, choice, tmp_path, tmp_path) for choice, folder in folders.items()}
    monkeypatch.setattr(map_live, "live_config", configs.__getitem__)
    return folders


def test_what_is_simulated_is_the_schedule_that_ran(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def simulate(trace: object, *, exact: Any, slots: int, **others: Any) -> SimpleNamespace:
        seen.append((others["strategy"], slots, exact.update_batch, exact.lookahead, exact.max_unverified))
        return SimpleNamespace(tokens_per_s=float(len(seen)))

    monkeypatch.setattr(map_live, "simulate", simulate)
    monkeypatch.setattr(map_live, "load_trace", lambda run_dir: None)
    fitted: Any = SimpleNamespace(cost=SimpleNamespace(prompt_tokens=16))
    assert list(map_live.simulated(runs, fitted, 0.0).values()) == [1.0, 2.0, 3.0]
    # The recipe verifies every answer once, when it is complete: no bound on the updates before.
    assert seen == [("sync", 8, 8, 0, None), ("sync-large", 8, 8, 0, None), ("sorted-replay", 8, 8, 2, None)]


def test_a_finished_run_with_another_schedule_is_refused(runs: dict[str, Path]) -> None:
    for choice, folder in runs.items():
        map_live.check_finished(map_live.POINTS["smollm2"], choice, folder)
    with pytest.raises(ConfigError, match="slots is 8, the point has 16"):
        map_live.check_finished(map_live.POINTS["smollm2-wide"], "sync", runs["sync"])
    with pytest.raises(ConfigError, match="strategy is sync-large, the point has sync"):
        map_live.check_finished(map_live.POINTS["smollm2"], "sync", runs["sync-large"])
    with pytest.raises(ConfigError, match="lookahead is 2, the point has 0"):
        map_live.check_finished(map_live.POINTS["smollm2"], "sorted-replay", runs["sorted-replay, lookahead 2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--read"], "there are no results"),
        (["--point", "smollm2", "--finished", "sync"], "--finished needs CHOICE=DIR"),
        (["--point", "smollm2", "--finished", "sync=a=b"], "a=b is not the folder of a run"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(map_live, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["map_live", *arguments])
    with pytest.raises(SystemExit):
        map_live.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_errors_and_lost_speed_of_the_map() -> None:
    live = {"sync": 1.0, "sync-large": 2.0, "sorted-replay": 1.5}
    good = record(live, {"sync": 1.0, "sync-large": 2.2, "sorted-replay": 1.2})
    bad = record(live, {"sync": 1.0, "sync-large": 1.6, "sorted-replay": 0.9})
    found = map_live.digest({"good": good, "bad": bad})
    assert found["map"]["median"] == pytest.approx(0.2)  # of .1, .2, .2 and .4
    assert found["map"]["bias"] == pytest.approx((0.1 - 0.2 - 0.2 - 0.4) / 4)
    # At staleness 0 the bad map advises sync, and a third of the speed of sorted-replay is lost.
    assert found["map"]["staleness 0"] == pytest.approx({"within_5_percent": 1, "mean_lost": 1 / 6, "most_lost": 1 / 3})
    assert found["map"]["any staleness"]["within_5_percent"] == 2
    assert found["simulated"]["p90"] == 0.0


def test_how_sorted_batches_are() -> None:
    assert order_cost.sortedness([[1, 9], [9, 1]]) == pytest.approx(0.0)
    assert order_cost.sortedness([[1, 1], [9, 9]]) == pytest.approx(1.0)
    # Logarithms 0, 1, 2, 3: batch means .5 and 2.5, so 1 of the variance 1.25 lies between.
    e = 2.718281828459045
    assert order_cost.sortedness([[1, e], [e**2, e**3]]) == pytest.approx(0.8)
