"""A pool of engines: routing, interruption in one round trip, publication, and members that die."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sortedrl.engine.base import Engine, Failed, InFlight, Partial, Request
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.pool.member import MAX_DEATHS
from sortedrl.engine.pool.pool import Pool
from sortedrl.errors import EngineError
from sortedrl.records import Mode
from sortedrl.testing import Answer, Caller
from tests.support.thread_members import PausingEngine, ThreadMembers
from tests.support.tiny_models import add_noise, make_requests, serve, source, tiny_model

SLOTS = 4
Paces = tuple[Pool, ThreadMembers, threading.Event]


MODEL = tiny_model()  # made once: engines start in threads, and torch's seed is everybody's


def make_engine(index: int) -> tuple[Engine, Any]:
    model = copy.deepcopy(MODEL)
    return LocalEngine(model, slots=SLOTS, max_length=128, stream_every=1), model


@pytest.fixture
def members() -> ThreadMembers:
    return ThreadMembers(make_engine)


@pytest.fixture
def pool(members: ThreadMembers) -> Iterator[Pool]:
    pool = make_pool(members)
    yield pool
    pool.close()


@pytest.fixture
def paced() -> Iterator[Paces]:
    """A pool whose members stand still after some steps, until they are let go on."""
    may_go_on = threading.Event()

    def make(index: int) -> tuple[Engine, Any]:
        engine, model = make_engine(index)
        return PausingEngine(engine, may_go_on), model

    members = ThreadMembers(make)
    pool = make_pool(members)
    yield pool, members, may_go_on
    pool.close()


def make_pool(members: ThreadMembers, size: int = 2) -> Pool:
    return Pool(members, size=size, slots=SLOTS, exact_replay=True, keep_kv=True, waits=True, health_s=120, start_s=120)


def serve_through(pool: Pool, requests: list[Request], *, meanwhile: Any = lambda caller: None) -> dict[int, Answer]:
    """Serve requests as a controller would: what comes back interrupted is submitted again, to be resumed."""
    caller = Caller(pool)
    current = {request.sample: request for request in requests}
    waiting = list(requests)
    while waiting or pool.num_running:
        num_free = pool.capabilities.slots - pool.num_running
        pool.submit(waiting[:num_free])
        del waiting[:num_free]
        events = pool.poll(5.0)
        caller.take(events)
        for event in events:
            if isinstance(event, Partial):
                current[event.sample] = caller.again(current[event.sample], Mode.RESUME)
                waiting.append(current[event.sample])
        meanwhile(caller)
    return caller.answers


def check_same(ours: dict[int, Answer], theirs: dict[int, Answer]) -> None:
    assert ours.keys() == theirs.keys()
    for sample, answer in ours.items():
        assert answer.tokens == theirs[sample].tokens
        assert answer.reason == theirs[sample].reason
        assert answer.logprobs == pytest.approx(theirs[sample].logprobs, abs=1e-4)


def test_a_pool_gives_the_answers_of_one_engine(pool: Pool, members: ThreadMembers) -> None:
    requests = make_requests(20)
    check_same(serve_through(pool, requests), serve(tiny_model(), requests))
    assert all(member.submitted for member in members.started)
    stats = pool.stats()
    assert stats.running == 0
    assert stats.decoded_tokens == sum(len(a.tokens) for a in serve(tiny_model(), requests).values())


def test_siblings_go_to_one_member_and_the_rest_where_there_is_room(pool: Pool, members: ThreadMembers) -> None:
    first, other = make_requests(2, budget=40)
    trio = [replace(first, sample=sample, seed=sample) for sample in (10, 11, 12)]
    pool.submit([trio[0], other])
    pool.submit(trio[1:])  # two at each would be even
    homes = [{request.sample for request in member.submitted} for member in members.started]
    assert sorted(homes, key=len) == [{1}, {10, 11, 12}]
    pool.interrupt()


def test_more_than_there_are_slots_is_refused(pool: Pool) -> None:
    with pytest.raises(EngineError, match="9 requests for 8 free slots"):
        pool.submit(make_requests(9))


def test_an_interrupt_stops_all_members_and_loses_no_token(paced: Paces) -> None:
    pool, _, may_go_on = paced
    requests = [replace(r, budget=5 if r.sample < 2 else 110) for r in make_requests(8)]
    caller = Caller(pool)
    pool.submit(requests)
    caller.take(pool.poll())  # a short one has ended
    caller.interrupt()
    assert pool.num_running == 0
    stopped = [request for request in requests if caller.answers[request.sample].num_partials == 1]
    assert {request.sample for request in stopped} >= {2, 3, 4, 5, 6, 7}
    assert pool.poll(0.2) == []
    may_go_on.set()
    again = [caller.again(request, Mode.RESUME) for request in stopped]
    pool.submit(again)
    while pool.num_running:
        caller.take(pool.poll())
    expected = serve(tiny_model(), requests)
    for request in requests:
        assert caller.answers[request.sample].tokens == expected[request.sample].tokens


def test_an_interrupt_of_some_leaves_the_others(pool: Pool) -> None:
    requests = make_requests(6, budget=60)
    caller = Caller(pool)
    pool.submit(requests)
    caller.interrupt([0, 3])
    assert {s for s, answer in caller.answers.items() if answer.num_partials} <= {0, 3}
    while pool.num_running:
        caller.take(pool.poll())
    expected = serve(tiny_model(), requests)
    for sample in (1, 2, 4, 5):
        assert caller.answers[sample].tokens == expected[sample].tokens


def test_what_is_not_interrupted_stands_still_until_somebody_polls(paced: Paces) -> None:
    pool, _, may_go_on = paced
    requests = [replace(r, budget=5 if r.sample < 2 else 110) for r in make_requests(8)]
    caller = Caller(pool)
    pool.submit(requests)
    caller.take(pool.poll())
    assert pool.interrupt([]) == []
    decoded = pool.stats().decoded_tokens
    may_go_on.set()
    for _ in range(50):  # an engine that did not pause would decode between two of these commands
        assert pool.stats().decoded_tokens == decoded
    while pool.num_running:
        caller.take(pool.poll())
    check_same(caller.answers, serve(MODEL, requests))
    assert not any(answer.num_partials for answer in caller.answers.values())


def test_an_uneven_load_is_evened_out_at_an_interrupt(paced: Paces) -> None:
    pool, members, may_go_on = paced
    siblings = [replace(make_requests(1)[0], sample=sample, budget=110) for sample in range(4)]
    caller = Caller(pool)
    pool.submit(siblings)
    assert sorted(len(member.submitted) for member in members.started) == [0, 4]
    caller.interrupt([])
    # Two are a fair share of four; the two that were sent last are to go on elsewhere.
    assert {sample for sample, answer in caller.answers.items() if answer.num_partials} == {2, 3}
    may_go_on.set()
    pool.submit([caller.again(siblings[sample], Mode.RESUME) for sample in (2, 3)])
    while pool.num_running:
        caller.take(pool.poll())
    check_same(caller.answers, serve(MODEL, siblings))


def test_published_weights_reach_every_member(pool: Pool) -> None:
    model = tiny_model()
    add_noise(model, 0.1, seed=5)
    pool.publish(3, source(model)).wait()
    requests = make_requests(12)
    answers = serve_through(pool, requests)
    check_same(answers, serve(model, requests))
    assert {version for answer in answers.values() for version in answer.versions} == {3}


def test_publication_while_requests_run(pool: Pool) -> None:
    model = tiny_model()
    caller = Caller(pool)
    pool.submit(make_requests(8, budget=60))
    caller.take(pool.poll(0.2))
    pool.publish(1, source(model), InFlight.REPREFILL).wait()
    while pool.num_running:
        caller.take(pool.poll())
    for answer in caller.answers.values():
        assert answer.versions == sorted(answer.versions)
        assert answer.reason is not None


def test_the_samples_of_a_dead_member_go_on_elsewhere(pool: Pool, members: ThreadMembers) -> None:
    """With the weights in force: those were published before the death, and the member that replaces it gets them."""
    model = tiny_model()
    add_noise(model, 0.1, seed=5)
    pool.publish(3, source(model)).wait()
    killed: list[int] = []

    def kill_one(caller: Caller) -> None:
        if not killed and any(answer.tokens for answer in caller.answers.values()):
            members.started[0].is_dead = True
            killed.append(1)

    requests = make_requests(24)
    answers = serve_through(pool, requests, meanwhile=kill_one)
    check_same(answers, serve(model, requests))
    assert killed
    assert any(answer.num_partials for answer in answers.values())
    # The other may finish all before it has started.
    while len(members.started) == 2 or not members.started[2].submitted:
        check_same(serve_through(pool, make_requests(8, seed=1)), serve(model, make_requests(8, seed=1)))
    assert pool.stats().extra["restarts"] == 1
    assert len(members.started) == 3


def test_a_member_that_dies_in_an_interrupt_or_a_publication(pool: Pool, members: ThreadMembers) -> None:
    caller = Caller(pool)
    requests = make_requests(8, budget=60)
    pool.submit(requests)
    caller.take(pool.poll(0.2))
    members.started[1].is_dead = True
    caller.interrupt()
    assert pool.num_running == 0
    assert all((answer.reason is None) == (answer.num_partials == 1) for answer in caller.answers.values())
    members.started[0].is_dead = True
    pool.publish(1, source(tiny_model())).wait()
    check_same(serve_through(pool, make_requests(4, seed=1)), serve(tiny_model(), make_requests(4, seed=1)))


def test_a_member_that_refuses_requests_fails_them_and_lives_on(paced: Paces) -> None:
    pool, members, _ = paced
    too_long = make_requests(1, budget=1000)[0]  # the engine says so by itself
    pool.submit([too_long])
    events = pool.poll(5.0)
    assert [type(event) for event in events] == [Failed]
    wrong = make_requests(1)[0]
    members.started[0].host.submit([replace(r, sample=50 + i) for i, r in enumerate(make_requests(4, budget=60))])
    members.started[1].host.submit([replace(r, sample=60 + i) for i, r in enumerate(make_requests(4, budget=60))])
    pool.submit([wrong])  # behind the pool's back its members are full
    refused = pool.poll(5.0)
    assert [type(event) for event in refused] == [Failed]
    assert "free slots" in refused[0].error
    assert pool.num_running == 0
    for member in members.started:
        member.host.interrupt(None)


def test_a_pool_whose_members_all_keep_dying_gives_up(members: ThreadMembers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.engine.pool.pool.BACK_OFF_S", (0.0,))
    pool = make_pool(members)

    def go_on_dying() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            for member in members.started:
                member.is_dead = True
            pool.poll(0.01)
            if not pool.num_running:
                pool.submit(make_requests(1, budget=60))

    with pytest.raises(EngineError, match=f"all 2 engines of the pool died {MAX_DEATHS} times"):
        go_on_dying()
    pool.close()


def test_an_engine_that_cannot_start_is_told_before_anything_runs() -> None:
    def broken(index: int) -> tuple[Engine, Any]:
        raise MemoryError("no room for the model")

    members = ThreadMembers(broken)
    with pytest.raises(EngineError, match=r"an engine of the pool failed.*no room for the model"):
        make_pool(members)
