"""Live points of the map and the cost of an order: their figures against values by hand, and that settings load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import QUICKSTART
from benchmarks.schedule import map_live, order_cost

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
