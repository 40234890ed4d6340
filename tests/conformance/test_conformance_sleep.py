"""The checks of sleep, on a local engine that sleeps and a device whose memory is counted; vLLM's are in its file."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from sortedrl.engine.sleep_state import Memory, SleepState
from sortedrl.errors import EngineError
from sortedrl.testing import CHECKS, Check, EngineCase
from sortedrl.testing.checks import SLEEPS
from tests.conformance.cases import MAX_LENGTH, SLOTS, letters, model_case
from tests.support.sleepy_engine import CountedDevice, SleepyEngine
from tests.support.tiny_models import tiny_model

SLEEP_CHECKS = [check for check in CHECKS if SLEEPS in check.requires]


@pytest.fixture
def case() -> EngineCase:
    model = tiny_model()
    engine = SleepyEngine(copy.deepcopy(model), slots=SLOTS, max_length=MAX_LENGTH, decode=letters)

    def use_device() -> None:
        engine.device.take("update")  # out of memory unless the engine has freed its own
        engine.device.free("update")

    return model_case(engine, model, advance=lambda: engine.poll(0), during_update=use_device)


@pytest.mark.parametrize("check", SLEEP_CHECKS, ids=str)
def test_sleep(check: Check, case: EngineCase) -> None:
    assert not check.why_not(case)
    check.run(case)
    assert case.engine.device.held == {"weights", "kv_cache"}  # type: ignore[attr-defined]


def test_there_are_four_checks() -> None:
    assert len(SLEEP_CHECKS) == 4


def test_the_controller_interrupts_sleeps_updates_publishes_and_wakes(case: EngineCase) -> None:
    (check,) = (check for check in SLEEP_CHECKS if check.guarantee == "loop")
    check.run(case)
    calls = case.engine.calls  # type: ignore[attr-defined]
    assert calls.count("sleep") == calls.count("wake") == 12  # 24 samples in fours, twice
    for index, name in enumerate(calls):
        if name == "sleep":
            assert calls[index + 1 : index + 3] == ["publish", "wake"]
    assert "interrupt" in calls


def test_the_device_has_no_room_for_an_engine_that_stays_awake(case: EngineCase) -> None:
    device = CountedDevice()
    device.take("weights", "kv_cache")
    with pytest.raises(AssertionError, match="out of memory"):
        device.take("update")


def refuse_running(state: SleepState) -> None:
    state.begin_sleep(2)


def sleep_twice(state: SleepState) -> None:
    state.begin_sleep(0)
    state.begin_sleep(0)


def wake_without_weights(state: SleepState) -> None:
    state.begin_sleep(0)
    state.begin_wake()


def serve_without_memory(state: SleepState) -> None:
    state.begin_sleep(0)
    assert state.begin_publication()
    assert state.memory is Memory.LOADED
    state.check_awake()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (refuse_running, "2 samples run"),
        (sleep_twice, "asleep, so it cannot sleep"),
        (wake_without_weights, "publish weights"),
        (SleepState.begin_wake, "awake, so it cannot wake"),
        (serve_without_memory, "loaded and serves no requests"),
    ],
)
def test_calls_in_a_wrong_order_say_what_to_do(act: Callable[[SleepState], None], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        act(SleepState())
