"""Clocks: time inside `stopped` does not count, and virtual time only moves forward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sortedrl.clock import VirtualClock, WallClock


def test_a_stopped_wall_clock_leaves_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 100.0
    monkeypatch.setattr("sortedrl.clock.time", SimpleNamespace(perf_counter=lambda: seconds))
    clock = WallClock(at=7.0)
    seconds = 102.0
    assert clock.now() == 9.0
    with clock.stopped():
        seconds = 150.0
        assert clock.now() == 9.0
    seconds = 151.0
    assert clock.now() == 10.0


def test_a_stopped_virtual_clock_goes_back() -> None:
    clock = VirtualClock()
    clock.advance(3.0)
    with clock.stopped():
        clock.advance(10.0)
    assert clock.now() == 3.0


def test_expired_timers_are_removed() -> None:
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
