"""Signals while a run starts: exceptions with the exit codes of the shell, and the handlers of before afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from sortedrl.run.stop_signals import leave_on_signal


@pytest.fixture
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal with its default handler; tests themselves may run under `nohup`, which ignores SIGHUP."""
    if not hasattr(signal, request.param):
        pytest.skip(f"the system has no {request.param}")
    number = getattr(signal, request.param)
    before = signal.signal(number, signal.SIG_DFL)
    yield number
    signal.signal(number, before)


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGHUP", 129)], indirect=["number"])
def test_a_signal_while_a_run_starts_is_an_exit(number: int, code: int) -> None:
    with pytest.raises(SystemExit) as raised, leave_on_signal():
        signal.raise_signal(number)
    assert raised.value.code == code
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("number", ["SIGHUP"], indirect=True)
def test_an_ignored_hang_up_stays_ignored(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with leave_on_signal():
        signal.raise_signal(number)


def test_an_interrupt_while_a_run_starts_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt), leave_on_signal():
        signal.raise_signal(signal.SIGINT)


def test_a_library_that_wraps_or_catches_the_exit_does_not_change_it() -> None:
    def wrap() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit as wrapped:
            raise ValueError from wrapped

    with pytest.raises(SystemExit) as raised, leave_on_signal():
        wrap()
    assert raised.value.code == 143
    with pytest.raises(SystemExit), leave_on_signal(), suppress(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(ValueError, match="no signal"), leave_on_signal():
        raise ValueError("no signal")
