"""The map of strategies: its advice keeps what is asked, and the shipped map is what the simulator gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sortedrl.simulate.strategy_map import (
    AXES,
    CHOICES,
    Condition,
    MapPoint,
    ShapedCost,
    from_json,
    grid,
    measure,
    nearest,
    shipped_map,
    tail_of,
    to_json,
)

MIDDLE = Condition(tail=1.1, batch_per_slot=1.0, fixed_share=0.6, learner_share=0.1, diverged=0.07)


def test_the_shipped_map_is_whole_and_reproducible() -> None:
    points = shipped_map()
    assert [point.condition for point in points] == list(grid())
    point = nearest(points, MIDDLE)
    assert point.condition == MIDDLE
    names = ("sync", "sync-large", "sorted-replay, lookahead 2")
    assert measure(MIDDLE, choices=names).speedups == pytest.approx(
        {name: point.speedups[name] for name in names}, abs=1e-3
    )


def test_advice_keeps_the_bounds_and_prefers_staleness_0() -> None:
    speeds = dict.fromkeys(CHOICES, 1.0) | {"sorted-partial, lookahead 2": 2.0, "sorted-replay, lookahead 2": 1.7}
    point = MapPoint(condition=MIDDLE, speedups=speeds)
    assert point.advice() == "sorted-partial, lookahead 2"
    assert point.advice(max_staleness=0) == "sorted-replay, lookahead 2"
    assert (
        replace(point, speedups={**speeds, "sorted-replay, lookahead 2": 1.95}).advice() == "sorted-replay, lookahead 2"
    )
    faster = replace(point, speedups={**speeds, "async-on-policy": 3.0})
    assert faster.advice(overlap=True) == "async-on-policy"
    assert faster.advice() == "sorted-partial, lookahead 2", "without overlap it is not allowed"


def test_conditions_with_even_lengths_and_cheap_slots_get_sync() -> None:
    even = replace(MIDDLE, tail=AXES["tail"][0], fixed_share=0.0)
    assert nearest(shipped_map(), even).advice(max_staleness=0) == "sync"
    assert nearest(shipped_map(), replace(MIDDLE, fixed_share=0.9)).advice(max_staleness=0).startswith("sorted-replay")


def test_a_map_survives_its_file() -> None:
    point = MapPoint(condition=MIDDLE, speedups=dict.fromkeys(CHOICES, 1.5))
    assert from_json(to_json([point])) == (point,)


def test_costs_are_fixed_and_arithmetic() -> None:
    cost = ShapedCost(slots=10, fixed_share=0.6, update_token_s=0.5)
    assert cost.decode_s(10, 0, 1) == pytest.approx(1.0)  # a full step takes a second
    assert cost.decode_s(1, 0, 2) == pytest.approx(2 * (0.6 + 0.04))
    assert cost.prefill_s([100]) == pytest.approx(0.6 + 4.0)
    assert cost.prefill_s([]) == 0.0
    assert cost.update_s(4) == 2.0


def test_the_tail_is_the_spread_of_log_lengths() -> None:
    assert tail_of([5, 5, 5]) == 0.0
    assert tail_of([1, 7]) == pytest.approx(0.97296, abs=1e-5)  # half of log 7


def test_without_overlap_no_strategy_shortens_the_updates() -> None:
    for point in shipped_map():
        most = max(speed for name, speed in point.speedups.items() if not name.startswith("async"))
        assert most <= 1 / point.condition.learner_share + 1e-3, point.condition
    mostly_learner = nearest(shipped_map(), replace(MIDDLE, learner_share=0.5, diverged=0.01))
    assert mostly_learner.advice(overlap=True, max_staleness=0) == "async-on-policy"
