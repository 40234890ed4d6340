"""A pool whose engines sleep during updates: the checks of sleep, the memory of each device, and engines that die."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sortedrl.engine.base import CompletedHandle, Engine, EngineEvent, InFlight
from sortedrl.engine.pool.child_launcher import ChildLauncher
from sortedrl.engine.pool.pool import Pool
from sortedrl.engine.sampling.noise import SCHEME
from sortedrl.errors import EngineError
from sortedrl.testing import CHECKS, Caller, Check, EngineCase
from sortedrl.testing.checks import SLEEPS
from tests.conformance.cases import SLOTS, model_case
from tests.conformance.process_cases import POOL_ANSWER_TOKENS, POOL_LENGTH
from tests.support.sleepy_engine import SleepyEngine
from tests.support.thread_members import PausingEngine, ThreadMembers
from tests.support.tiny_models import add_noise, make_requests, serve, source, tiny_model

SLEEP_CHECKS = [check for check in CHECKS if SLEEPS in check.requires]
MODEL = tiny_model()  # made once: engines start in threads, and torch's seed is everybody's
OTHER = tiny_model(seed=7)


class HaltingEngine(SleepyEngine):
    """If `num_steps` is set, it stops decoding after so many steps, until weights are published.

    So answers are unfinished when a test interrupts them, however busy the machine is.
    """

    num_steps: int | None = None

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        if self.num_steps is not None and self.num_running:
            if self.num_steps == 0:
                time.sleep(0.001)
                return []
            self.num_steps -= 1
        return super().poll(timeout)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        self.num_steps = None
        return super().publish(version, source, in_flight)


class SleepyMembers(ThreadMembers):
    """Engines with other weights than those that are published; each has a device of its own."""

    def __init__(self) -> None:
        super().__init__(self.make)
        self.engines: list[HaltingEngine] = []

    def make(self, index: int) -> tuple[Engine, Any]:
        model = copy.deepcopy(OTHER)
        engine = HaltingEngine(model, slots=SLOTS, max_length=POOL_LENGTH, stream_every=1, path="lean")
        self.engines.append(engine)
        return engine, model


@pytest.fixture
def members() -> SleepyMembers:
    return SleepyMembers()


@pytest.fixture
def pool(members: SleepyMembers) -> Iterator[Pool]:
    pool = make_pool(members, size=2)
    yield pool
    pool.close()


def make_pool(launcher: Any, size: int) -> Pool:
    settings = {"exact_replay": True, "keep_kv": True, "waits": True, "sleeps": True, "noise": SCHEME}
    pool = Pool(launcher, size=size, slots=SLOTS, **settings)  # type: ignore[arg-type]
    pool.publish(0, source(MODEL)).wait()
    return pool


def moved(seed: int) -> Any:
    model = copy.deepcopy(MODEL)
    add_noise(model, 0.1, seed=seed)
    return model


def check_answers(pool: Pool, model: Any) -> None:
    requests = make_requests(8)
    answers = Caller(pool).serve(requests)
    assert {s: a.tokens for s, a in answers.items()} == {s: a.tokens for s, a in serve(model, requests).items()}


@pytest.mark.parametrize("check", SLEEP_CHECKS, ids=str)
def test_sleep(check: Check, pool: Pool, members: SleepyMembers) -> None:
    def use_devices() -> None:
        for engine in members.engines:
            engine.device.take("update")  # out of memory unless the engine has freed its own
            engine.device.free("update")

    case: EngineCase = model_case(pool, MODEL, answer_tokens=POOL_ANSWER_TOKENS, during_update=use_devices)
    assert not check.why_not(case)
    if check.name == "answers-continue-after-a-sleep":
        for engine in members.engines:
            engine.num_steps = 20
    check.run(case)
    assert [engine.device.held for engine in members.engines] == [{"weights", "kv_cache"}] * 2


def test_an_engine_that_dies_asleep_is_replaced_after_the_others_woke(pool: Pool, members: SleepyMembers) -> None:
    pool.sleep()
    members.started[0].is_dead = True
    pool.publish(1, source(moved(1))).wait()
    assert pool.poll(0) == []
    assert len(members.started) == 2, "a new engine would take memory during the update"
    pool.wake()
    check_answers(pool, moved(1))
    while len(members.engines) < 3:
        pool.poll(0.01)
    check_answers(pool, moved(1))
    assert pool.stats().extra["restarts"] == 1


def test_an_engine_that_dies_between_its_weights_and_its_wake_is_replaced(pool: Pool, members: SleepyMembers) -> None:
    pool.sleep()
    pool.publish(1, source(moved(1))).wait()
    members.started[1].is_dead = True
    pool.wake()
    check_answers(pool, moved(1))
    assert pool.stats().extra["restarts"] == 1


def test_all_engines_may_die_asleep(pool: Pool, members: SleepyMembers) -> None:
    pool.sleep()
    for member in members.started:
        member.is_dead = True
    pool.publish(1, source(moved(1))).wait()
    pool.wake()
    check_answers(pool, moved(1))
    assert pool.stats().extra["restarts"] == 2


def test_an_engine_that_is_starting_sleeps_too(pool: Pool, members: SleepyMembers) -> None:
    """It has no weights yet, and gets them with the next publication."""
    members.started[0].is_dead = True
    check_answers(pool, MODEL)  # on the other one
    while len(members.started) < 3:
        pool.poll(0.01)
    pool.sleep()
    assert len(members.engines) == 3
    # Engines are made in threads, in any order. The dead one still holds its memory.
    assert sorted(len(engine.device.held) for engine in members.engines) == [0, 0, 2]
    pool.publish(1, source(moved(1))).wait()
    pool.wake()
    check_answers(pool, moved(1))
    assert [bool(member.submitted) for member in members.started[1:]] == [True, True]


def test_a_start_that_fails_does_not_stop_the_others_from_sleeping(pool: Pool, members: SleepyMembers) -> None:
    members.started[0].is_dead = True
    check_answers(pool, MODEL)
    while len(members.started) < 3:
        pool.poll(0.01)
    members.started[2].is_dead = True
    pool.sleep()
    pool.publish(1, source(moved(1))).wait()
    pool.wake()
    check_answers(pool, moved(1))


def test_samples_must_be_interrupted_first(members: SleepyMembers) -> None:
    def make(index: int) -> tuple[Engine, Any]:
        engine, model = members.make(index)
        return PausingEngine(engine), model  # type: ignore[return-value]

    pool = make_pool(ThreadMembers(make), size=1)
    pool.publish(1, source(MODEL)).wait()
    pool.submit(make_requests(2))
    with pytest.raises(EngineError, match="2 samples run: interrupt them first"):
        pool.sleep()
    pool.close()


def sleepy_child() -> tuple[Engine, Any]:
    model = copy.deepcopy(OTHER)
    return SleepyEngine(model, slots=SLOTS, max_length=POOL_LENGTH, stream_every=1, path="lean"), model


def test_an_engine_in_a_child_process_sleeps() -> None:
    pool = make_pool(ChildLauncher(f"{__name__}:{sleepy_child.__name__}", {}, threads=1), size=1)
    try:
        pool.sleep()
        pool.publish(1, source(moved(1))).wait()
        pool.wake()
        check_answers(pool, moved(1))
    finally:
        pool.close()
