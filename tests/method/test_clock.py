"""Clocks: time inside `stopped` is not the run's, and virtual time only goes forward."""

from __future__ import annotations

import time

import pytest

from sortedrl.clock import VirtualClock, WallClock


def test_a_stopped_wall_clock_leaves_the_time_out() -> None:
    clock = WallClock()
    before = time.perf_counter()
    first = clock.now()
    with clock.stopped():
        held = clock.now()
        time.sleep(0.05)
        assert clock.now() == held
    assert clock.now() - first <= time.perf_counter() - before - 0.05


def test_a_stopped_virtual_clock_goes_back_to_where_it_was() -> None:
    clock = VirtualClock()
    clock.advance(3.0)
    with clock.stopped():
        clock.advance(10.0)
    assert clock.now() == 3.0


def test_timers_that_are_over_are_forgotten() -> None:
    clock = VirtualClock()
    clock.set_timer(2.0)
    clock.set_timer(1.0)
    assert clock.next_timer() == 1.0
    clock.advance(1.5)
    assert clock.next_timer() == 2.0
    clock.advance(2.0)
    assert clock.next_timer() is None
    with pytest.raises(AssertionError, match="cannot go back"):
        clock.advance(1.0)
