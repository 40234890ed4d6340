"""Faults in a pool of engines: every sample is still trained exactly once, within its staleness bound."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Delta, Engine, EngineEvent, InFlight, Partial
from sortedrl.engine.pool.pool import Pool
from sortedrl.errors import ConfigError, EngineError
from sortedrl.run.builders.engine import build_engine
from sortedrl.schedule import Strategy, resolve_knobs
from sortedrl.testing import Caller, EngineCase
from sortedrl.testing.loop_checks import run_loop
from tests.engine.pool.test_pool import MODEL, SLOTS, check_same, make_engine, make_pool, serve_through
from tests.support.thread_members import PausingEngine, ThreadMember, ThreadMembers
from tests.support.tiny_models import add_noise, make_requests, serve, source, teacher_forced, tiny_model

FAST_STEPS = 10  # of the fast engine for each step of the slow one
IDLE_POLLS = 20  # polls in which the fast engine does nothing, after which the slow engine makes a step anyway
WAIT_S = 120.0  # for another thread, on a busy machine


@dataclass(slots=True)
class CountingEngine:
    """An engine that counts its steps."""

    engine: Engine
    num_steps: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        self.num_steps += self.engine.stats().running > 0
        return self.engine.poll(timeout)


@dataclass(slots=True)
class SlowEngine:
    """An engine that makes one step for every FAST_STEPS steps of another engine, however busy the machine is."""

    engine: Engine
    other: CountingEngine
    num_seen: int = 0
    num_idle: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        self.num_idle += 1
        if self.other.num_steps < self.num_seen + FAST_STEPS and self.num_idle < IDLE_POLLS:
            time.sleep(0.001)
            return []
        self.num_seen, self.num_idle = self.other.num_steps, 0
        return self.engine.poll(timeout)


def loop_case(pool: Pool) -> EngineCase:
    """A case for whole runs of the controller on the pool; every publication changes the weights a little."""

    def weights(step: int) -> Any:
        model = copy.deepcopy(MODEL)
        for number in range(1, step + 1):
            add_noise(model, 0.01, seed=number)
        return source(model)

    return EngineCase(
        engine=pool,
        prompts=[[3, 1, 4], [2, 7, 1, 8, 2, 8], [5] * 11],
        source=weights,
        logprobs=lambda step, request, tokens: [],
        spoil=lambda request: request,
        answer_tokens=80,
    )


PARTIAL = {"strategy": Strategy.SORTED_PARTIAL, "update_batch": 4, "cohort_batches": 3}


@pytest.fixture
def closing() -> Iterator[Callable[[Pool], Pool]]:
    pools: list[Pool] = []

    def keep(pool: Pool) -> Pool:
        pools.append(pool)
        return pool

    yield keep
    for pool in pools:
        pool.close()


def test_one_engine_ten_times_slower_than_the_other(closing: Callable[[Pool], Pool]) -> None:
    engines = [make_engine(index) for index in range(2)]
    fast = CountingEngine(engines[1][0])
    slow = SlowEngine(engines[0][0], fast)

    members = ThreadMembers(lambda index: ((slow, fast)[index], engines[index][1]))
    pool = closing(make_pool(members))
    run_loop(loop_case(pool), resolve_knobs(**PARTIAL))
    by_slow, by_fast = ({request.sample for request in member.submitted} for member in members.started)
    assert pool.stats().extra["restarts"] == 0, "the pool took a slow engine for a dead one"
    assert len(by_fast) > len(by_slow)


def test_all_engines_die_at_once(closing: Callable[[Pool], Pool]) -> None:
    members = ThreadMembers(make_engine)
    pool = closing(make_pool(members))
    killed: list[int] = []

    def kill_all(caller: Caller) -> None:
        if not killed and any(answer.tokens for answer in caller.answers.values()):
            killed.append(1)
            for member in members.started:
                member.is_dead = True

    requests = make_requests(16)
    answers = serve_through(pool, requests, meanwhile=kill_all)
    check_same(answers, serve(MODEL, requests))
    assert pool.stats().extra["restarts"] == 2


def test_an_engine_that_dies_at_every_update(closing: Callable[[Pool], Pool]) -> None:
    members = ThreadMembers(make_engine)
    pool = closing(make_pool(members))
    case = loop_case(pool)
    weights = case.source

    def kill_one(step: int) -> Any:
        members.started[-1].is_dead = True  # just before the weights are published
        return weights(step)

    case.source = kill_one
    learner = run_loop(case, resolve_knobs(**PARTIAL, max_staleness=2, on_bound="restart"))
    assert all(sample.staleness(batch.version) <= 2 for batch in learner.batches for sample in batch.samples)
    assert pool.stats().extra["restarts"] >= 1


class LateMember(ThreadMember):
    """Accepts published weights only after `gate` is set."""

    gate = threading.Event()

    def publish(self, version: int, weights: Any, in_flight: InFlight) -> Future[None]:
        def publish() -> None:
            assert self.gate.wait(WAIT_S)
            self.host.publish(version, weights, in_flight)

        return self._call(publish)


def test_engines_of_different_versions_stamp_their_own(closing: Callable[[Pool], Pool]) -> None:
    """While only one engine has the new weights, each token has the version and log-prob of its engine."""

    class Members(ThreadMembers):
        def launch(self, index: int) -> ThreadMember:
            kind = LateMember if index == 1 else ThreadMember
            member = kind(lambda: self._make_engine(index))
            self.started.append(member)
            return member

    def make(index: int) -> tuple[Engine, Any]:
        engine, model = make_engine(index)
        return (PausingEngine(engine) if index == 0 else engine), model  # it cannot finish before the new weights come

    members = Members(make)
    pool = closing(make_pool(members))
    newer = tiny_model()
    add_noise(newer, 0.1, seed=5)
    requests = make_requests(2 * SLOTS, budget=100)
    caller = Caller(pool)
    LateMember.gate.clear()
    pool.submit(requests)
    handle = pool.publish(7, source(newer), InFlight.KEEP)
    early: list[EngineEvent] = []
    while not {event.version for event in early if isinstance(event, Delta)} >= {0, 7}:
        early += pool.poll(0.05)
    LateMember.gate.set()
    handle.wait()
    caller.take(early)
    while pool.num_running:
        caller.take(pool.poll())
    for request in requests:
        answer = caller.answers[request.sample]
        cut = answer.versions.count(0)
        assert answer.versions == [0] * cut + [7] * (100 - cut)
        assert answer.logprobs[:cut] == pytest.approx(teacher_forced(MODEL, request, answer.tokens)[:cut], abs=1e-4)


def test_weights_published_while_an_engine_starts_are_the_ones_it_gets(closing: Callable[[Pool], Pool]) -> None:
    is_slow = threading.Event()
    may_go_on = threading.Event()

    def make(index: int) -> tuple[Engine, Any]:
        if is_slow.is_set():
            assert may_go_on.wait(WAIT_S)
        return make_engine(index)

    members = ThreadMembers(make)
    pool = closing(make_pool(members))
    is_slow.set()
    members.started[0].is_dead = True
    pool.submit(make_requests(1))
    while len(members.started) < 3:
        pool.poll(0.05)
    newer = tiny_model()
    add_noise(newer, 0.1, seed=5)
    pool.interrupt()
    pool.publish(9, source(newer)).wait()
    may_go_on.set()
    while not members.started[2].submitted:
        pool.submit(make_requests(SLOTS + 1, seed=4))
        pool.interrupt()
    requests = make_requests(8, seed=6)
    answers = serve_through(pool, requests)
    check_same(answers, serve(newer, requests))
    assert {version for answer in answers.values() for version in answer.versions} == {9}


def test_weights_that_cannot_be_stored(closing: Callable[[Pool], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    members = ThreadMembers(make_engine)
    pool = closing(make_pool(members))
    newer = tiny_model()
    add_noise(newer, 0.1, seed=5)

    def full(source: Any) -> Any:
        raise EngineError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(members, "put", full)
        with pytest.raises(EngineError, match="no room"):
            pool.publish(8, source(newer))
    members.started[0].is_dead = True
    while len(members.started) < 3:
        pool.submit(make_requests(1))
        pool.poll(0.05)
        pool.interrupt()
    members.started[2].slots().result()
    pool.submit(make_requests(2 * SLOTS))  # four more than the living engine has slots for
    pool.interrupt()
    assert not members.started[2].submitted, "an engine without weights got requests"
    pool.publish(9, source(newer)).wait()
    requests = make_requests(8, seed=6)
    check_same(serve_through(pool, requests), serve(newer, requests))


def test_an_engine_that_does_not_come_up_again_is_tried_again(closing: Callable[[Pool], Pool]) -> None:
    started: list[int] = []
    release = threading.Event()
    skipped_s = 0.0

    def make(index: int) -> tuple[Engine, Any]:
        started.append(index)
        if len(started) == 3:
            assert release.wait(WAIT_S)
        return make_engine(index)

    members = ThreadMembers(make)
    pool = closing(
        Pool(
            members,
            size=2,
            slots=SLOTS,
            exact_replay=True,
            keep_kv=True,
            health_s=1e6,
            start_s=WAIT_S,
            clock=lambda: time.monotonic() + skipped_s,
        )
    )
    members.started[0].is_dead = True
    pool.submit(make_requests(1, budget=100))
    while len(started) < 4:
        if len(started) == 3 and not skipped_s:
            skipped_s = 2 * WAIT_S  # the clock moves past the time that a start may take
        for event in pool.poll(0.05):
            if isinstance(event, Partial):
                pool.submit(make_requests(1, budget=100))
    release.set()
    pool.interrupt()


def test_more_engines_than_processors_are_refused_before_ray_starts() -> None:
    config = SortedConfig(engine={"replicas": 9999})
    with pytest.raises(ConfigError, match=r"replicas 9999.*need 9999 processors"):
        build_engine(config, tiny_model(), config.knobs)
