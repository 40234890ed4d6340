"""A vLLM that dies, and one that does not start again: what becomes of its samples. Doubles stand for vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sortedrl.engine.base import Delta, Partial
from sortedrl.engine.vllm import engine as vllm_engine
from sortedrl.engine.vllm.engine import MAX_LOSSES, VllmEngine
from sortedrl.engine.vllm.request import VllmRequest
from sortedrl.engine.vllm.request_loop import RequestLoop
from sortedrl.errors import EngineError
from tests.support.double_vllm import CPU, ON_CPU, DoubleProcess
from tests.support.tiny_models import make_requests, source, tiny_model

NO_START = "vLLM did not start (killed)"


class Machine:
    """Starts doubles of vLLM, or fails to: `plan` says for each start what happens."""

    def __init__(self, plan: list[Callable[..., DoubleProcess]]) -> None:
        self.plan = plan
        self.num_starts = 0
        self.sent: list[int] = []  # samples that some vLLM has received

    def start(self, *arguments: Any, **named: Any) -> DoubleProcess:
        step = self.plan[self.num_starts]
        self.num_starts += 1
        return step(*arguments, **named)


class MortalProcess(DoubleProcess):
    report = ON_CPU

    def die(self) -> None:
        """Every call that waits for an answer of vLLM ends with an error."""
        self.loop.call_soon_threadsafe(self.frontend.death.set)


def starts(*arguments: Any, **named: Any) -> DoubleProcess:
    process = MortalProcess(*arguments, **named)
    process.frontend.death = asyncio.Event()  # type: ignore[attr-defined]
    return process


def does_not_start(*arguments: Any, **named: Any) -> DoubleProcess:
    raise EngineError(NO_START)


def dies_at_once(*arguments: Any, **named: Any) -> DoubleProcess:
    """It starts, and is dead before its first call."""
    process = starts(*arguments, **named)

    async def never_answer(*_: Any) -> None:
        await asyncio.Event().wait()

    process.frontend.update_weight_version = never_answer  # type: ignore[method-assign]
    process.is_dead = True
    return process


class DeathCollector:
    """The stream of a request's outputs: nothing, until vLLM dies."""

    def __init__(self, death: asyncio.Event) -> None:
        self._death = death
        self.request_id = "request"

    async def get(self) -> Any:
        await self._death.wait()
        raise RuntimeError("the core is dead")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[VllmEngine, Machine]]]:
    """Makes an engine whose starts of vLLM go as given."""
    made: list[VllmEngine] = []

    def engine(*plan: Callable[..., DoubleProcess], **settings: Any) -> tuple[VllmEngine, Machine]:
        machine = Machine(list(plan))

        class DoubleLoop(RequestLoop):
            async def _send(self, request: VllmRequest) -> None:
                machine.sent.append(request.attempt.request.sample)
                request.collector = DeathCollector(self.frontend.death)
                request.is_started, request.is_open = False, True

        monkeypatch.setattr(vllm_engine, "check_installed", lambda: "0.32.0")
        monkeypatch.setattr(vllm_engine, "read_platform", lambda: CPU)
        monkeypatch.setattr(vllm_engine, "RequestLoop", DoubleLoop)
        monkeypatch.setattr(vllm_engine, "HttpRequestLoop", DoubleLoop)
        monkeypatch.setattr(vllm_engine, "CoreProcess", machine.start)
        monkeypatch.setattr(vllm_engine, "ServerProcess", machine.start)
        made.append(VllmEngine(tiny_model(), slots=4, max_length=64, transfer="file", **settings))
        return made[-1], machine

    yield engine
    for one in made:
        one.close()


def lose(engine: VllmEngine) -> list[Any]:
    """Kill the running vLLM; returns the events of the next poll."""
    process = engine._process
    assert isinstance(process, MortalProcess)
    process.die()
    return engine.poll()


@pytest.mark.parametrize("failure", [does_not_start, dies_at_once])
def test_a_start_that_fails_is_another_loss(make: Any, failure: Callable[..., DoubleProcess]) -> None:
    engine, machine = make(starts, failure, starts)
    requests = make_requests(3)
    engine.submit(requests)
    assert {event.sample for event in lose(engine)} == {0, 1, 2}
    machine.sent.clear()

    engine.submit(requests)  # the second start fails
    assert engine.num_running == 3
    events = engine.poll()
    assert [(type(event), event.sample, event.attempt) for event in events] == [(Partial, s, 0) for s in range(3)]
    assert (engine.num_running, engine.stats().extra["losses"], machine.sent) == (0, 2, [])

    engine.submit(requests)  # the third start succeeds
    assert (engine.num_running, machine.num_starts, machine.sent) == (3, 3, [0, 1, 2])


def test_samples_of_a_failed_start_can_be_interrupted(make: Any) -> None:
    engine, _ = make(starts, does_not_start)
    engine.submit(make_requests(2))
    lose(engine)
    engine.submit(make_requests(2))
    assert [(type(event), event.sample) for event in engine.interrupt()] == [(Partial, 0), (Partial, 1)]
    assert engine.num_running == 0


def test_starts_that_fail_again_and_again_end_the_run(make: Any) -> None:
    engine, machine = make(starts, *[does_not_start] * MAX_LOSSES)
    engine.submit(make_requests(1))
    lose(engine)
    for _ in range(MAX_LOSSES - 2):
        engine.submit(make_requests(1))
        assert len(engine.poll()) == 1
    engine.submit(make_requests(1))
    with pytest.raises(EngineError, match=f"lost {MAX_LOSSES} times in a row.*resume the run.*did not start"):
        engine.poll()
    assert machine.num_starts == MAX_LOSSES


def test_the_weights_file_is_removed_also_if_a_transfer_cannot_be_ended(make: Any) -> None:
    engine, _ = make(starts)
    folder = engine._weights.path
    assert folder.exists()

    def fail() -> None:
        raise RuntimeError("the communicator cannot be freed")

    engine._link = SimpleNamespace(close=fail)
    with pytest.raises(RuntimeError, match="cannot be freed"):
        engine.close()
    assert not folder.exists()


def test_a_first_start_that_fails_is_told_at_once(make: Any) -> None:
    """Settings are the likely reason, and they would be the same the next time."""
    with pytest.raises(EngineError, match="did not start"):
        make(does_not_start)


def test_a_named_server_that_is_gone_is_told_at_once(make: Any) -> None:
    engine, _ = make(starts, does_not_start, address="127.0.0.1:1")
    engine.submit(make_requests(1))
    lose(engine)
    with pytest.raises(EngineError, match="did not start"):
        engine.submit(make_requests(1))


@pytest.mark.parametrize("what", ["sleep", "wake weights", "wake kv_cache"])
def test_a_vllm_that_cannot_sleep_or_wake_is_replaced(make: Any, what: str) -> None:
    """The memory that it wants back may be taken: the next one starts when the learner has released more."""
    engine, machine = make(starts, starts, sleeps=True)
    frontend = engine._process.frontend

    def failing(name: str, call: Any) -> Any:
        async def run(**arguments: Any) -> Any:
            if f"{name} {' '.join(arguments.get('tags', ()))}".strip() == what:
                raise RuntimeError("CUDA out of memory")
            return await call(**arguments)

        return run

    frontend.sleep, frontend.wake_up = failing("sleep", frontend.sleep), failing("wake", frontend.wake_up)
    engine.sleep()
    assert (engine._process is None) == (what == "sleep")
    engine.publish(1, source(tiny_model(seed=1))).wait()
    engine.wake()
    assert engine.stats().extra["losses"] == 1
    engine.submit(make_requests(2))
    assert (machine.num_starts, machine.sent) == (2, [0, 1])
    assert engine._process.frontend.calls == ["version 1"]


def test_a_vllm_without_the_weights_in_force_gets_no_request(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer with arbitrary weights until the loss is noticed."""
    engine, machine = make(starts, starts)
    engine.submit(make_requests(2))
    lose(engine)
    machine.sent.clear()

    def send(*_: Any) -> None:
        engine._request_loop.loss = "vLLM did not get the weights of version 0"

    monkeypatch.setattr(engine, "_source", object())
    monkeypatch.setattr(engine, "_send", send)
    engine.submit(make_requests(2))
    assert machine.sent == []
    events = engine.poll()
    assert [event.sample for event in events if isinstance(event, Partial)] == [0, 1]
    assert not any(isinstance(event, Delta) for event in events)
