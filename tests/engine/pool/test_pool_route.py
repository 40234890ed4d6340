"""A pool whose engines get weights by a route past the driver: all at once, and again if that broke off."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sortedrl.engine.base import Engine
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.pool.pool import Pool
from sortedrl.errors import WeightsNotReceived
from sortedrl.testing import Caller
from sortedrl.weights import arrays_of
from tests.support.thread_members import ThreadMember, ThreadMembers
from tests.support.tiny_models import add_noise, make_requests, serve, source, tiny_model

SLOTS = 4
MODEL, OTHER = tiny_model(), tiny_model(seed=7)  # made once: engines start in threads, and torch's seed is everybody's


class Route:
    """Gives each engine the weights, unless `fault` has another answer for it."""

    def __init__(self) -> None:
        self.rounds: list[list[ThreadMember]] = []  # the engines of each transfer
        self.fault: Callable[[ThreadMember], Any] = lambda engine: None
        self.num_finished = 0
        self.is_closed = False

    def begin(self, source: Any, engines: Sequence[Any]) -> list[Any]:
        self.rounds.append(list(engines))
        faults = [self.fault(engine) for engine in engines]
        return [arrays_of(source.module) if fault is None else fault for fault in faults]

    def finish(self) -> str | None:
        self.num_finished += 1
        return None

    def close(self) -> None:
        self.is_closed = True


class CutOff(dict[str, Any]):
    """Weights that do not arrive."""

    def __getitem__(self, name: str) -> Any:
        raise WeightsNotReceived("the connection was reset")


def make_engine(index: int) -> tuple[Engine, Any]:
    model = copy.deepcopy(OTHER)  # other weights than those that are published
    return LocalEngine(model, slots=SLOTS, max_length=128, stream_every=1), model


@pytest.fixture
def members() -> ThreadMembers:
    return ThreadMembers(make_engine)


def make_pool(members: ThreadMembers, route: Route, *, is_stable: bool = True) -> Pool:
    return Pool(
        members, size=2, slots=SLOTS, exact_replay=True, keep_kv=True, waits=True, route=route, is_stable=is_stable
    )


@pytest.fixture
def opened(members: ThreadMembers) -> Iterator[tuple[Pool, Route]]:
    route = Route()
    pool = make_pool(members, route)
    pool.publish(0, source(MODEL)).wait()
    yield pool, route
    pool.close()
    assert route.is_closed


def test_engines_end_also_if_the_route_cannot_be_closed(
    members: ThreadMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = Route()
    pool = make_pool(members, route)
    closed: list[bool] = []
    monkeypatch.setattr(members, "close", lambda: closed.append(True))

    def fail() -> None:
        raise RuntimeError("the communicator cannot be freed")

    monkeypatch.setattr(route, "close", fail)
    with pytest.raises(RuntimeError, match="cannot be freed"):
        pool.close()
    assert closed == [True]
    monkeypatch.undo()
    members.close()


def check_answers(pool: Pool, model: Any) -> None:
    requests = make_requests(8)
    expected = serve(model, requests)
    answers = Caller(pool).serve(requests)
    assert {s: a.tokens for s, a in answers.items()} == {s: a.tokens for s, a in expected.items()}


def moved(seed: int) -> Any:
    model = copy.deepcopy(MODEL)
    add_noise(model, 0.1, seed=seed)
    return model


def test_all_engines_get_the_weights_in_one_transfer(opened: tuple[Pool, Route], members: ThreadMembers) -> None:
    pool, route = opened
    assert route.rounds == [members.started]
    check_answers(pool, MODEL)
    pool.publish(1, source(moved(1))).wait()
    assert route.rounds[1:] == [members.started]
    check_answers(pool, moved(1))


def test_an_engine_that_is_cut_off_is_sent_the_weights_again(
    opened: tuple[Pool, Route], members: ThreadMembers
) -> None:
    """One engine dies in the transfer: it is replaced. The other, cut off by that, is not."""
    pool, route = opened
    first, second = members.started

    def fault(engine: ThreadMember) -> Any:
        if len(route.rounds) > 2:
            return None
        if engine is first:
            first.is_dead = True
        return CutOff()

    route.fault = fault
    pool.publish(1, source(moved(1))).wait()
    assert route.rounds[1:] == [[first, second], [second]]
    check_answers(pool, moved(1))
    assert not second.is_dead
    while len(route.rounds) < 4 or route.rounds[-1] == [second]:  # the new engine is sent the weights in force
        pool.poll(0.05)
    assert route.rounds[3:] == [[members.started[2]]]
    check_answers(pool, moved(1))
    assert route.num_finished == len(route.rounds)


def test_an_engine_that_never_gets_them_is_replaced(opened: tuple[Pool, Route], members: ThreadMembers) -> None:
    pool, route = opened
    _, second = members.started
    route.fault = lambda engine: CutOff() if engine is second else None
    pool.publish(1, source(moved(1))).wait()
    assert second.is_dead
    check_answers(pool, moved(1))


def test_weights_that_may_change_are_not_sent_between_publications(members: ThreadMembers) -> None:
    """With overlap the learner is at work: a new engine waits for the next publication, and is then used."""
    route = Route()
    pool = make_pool(members, route, is_stable=False)
    pool.publish(0, source(MODEL)).wait()
    members.started[0].is_dead = True
    check_answers(pool, MODEL)  # on the other one
    while len(members.started) < 3 or not pool._members[0].has_started:
        pool.poll(0.01)
        time.sleep(0.001)  # lets the engine's threads run
    pool.poll(0.05)
    assert len(route.rounds) == 1
    pool.publish(1, source(moved(1))).wait()
    assert route.rounds[1] == [members.started[1], members.started[2]]
    check_answers(pool, moved(1))
    assert members.started[2].submitted
    pool.close()
