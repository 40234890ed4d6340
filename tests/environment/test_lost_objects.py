"""Objects that cannot begin, come too late or are gone: what becomes of their trajectories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import Sampling
from sortedrl.environment.answers import AnswerTurns
from sortedrl.environment.base import Kind, ToolCall, Turn
from sortedrl.environment.dialect import turns_of
from sortedrl.environment.loop import TurnLoop
from sortedrl.environment.objects import EnvironmentObjects
from sortedrl.environment.past import past_turns
from sortedrl.environment.scorer import EnvironmentScorer
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.store import DurableBuffer, Store
from sortedrl.ledger.verify import verify
from sortedrl.records import FinishReason, Mode, Prompt, Sample, Segment, State
from sortedrl.reward.pool import OnError
from sortedrl.reward.worker import CallFailed, FailureKind
from sortedrl.schedule import resolve_knobs
from sortedrl.telemetry.events import Emit, ignore
from sortedrl.telemetry.metrics import RunMetrics
from tests.support.scripted_turns import Adder, DirectChannel, DirectRunner, ScriptedDialect, zeros

CALL, END, HANG = [1, 2], [4, 5], [8, 8]  # turns that call the tool with 1, not at all, and without end
PROMPT = Prompt(id="p", tokens=(1,), content="")
KNOBS = resolve_knobs("sorted-on-policy", 1)


class NoLevel(Adder):
    def reset(self, **row: Any) -> None:
        raise FileNotFoundError("level 17")


class Rewarded(Adder):
    """The reward is the sum; a call with 8 takes the time limit."""

    def add(self, number: int) -> int:
        if number == 8:
            raise Hang
        return super().add(number)

    def get_reward(self) -> float:
        return float(self.total)


class Hang(BaseException):
    """In place of a call that does not return."""


class Killing(DirectChannel):
    """A worker process that is killed, with all of its objects, when a call hangs."""

    def exchange(self, request: Any, timeout_s: float) -> dict[str, Any]:
        reply = super().exchange(request, timeout_s)
        if reply.get("text", "").startswith("Hang"):
            self.objects._held.clear()
            raise CallFailed(FailureKind.TIMEOUT)
        return reply


class BusyAtFirst(Adder):
    num_resets = 0

    def reset(self, **row: Any) -> None:
        BusyAtFirst.num_resets += 1
        if BusyAtFirst.num_resets == 1:
            raise TimeoutError("the server is busy")
        super().reset()


class CallsAll(ScriptedDialect):
    """Every turn but END calls the tool with its first token."""

    def calls(self, sample: Sample) -> list[ToolCall]:
        return self._calls(turns_of(sample)[-1])

    def history(self, sample: Sample) -> list[list[ToolCall]]:
        return [self._calls(turn) for turn in turns_of(sample)[:-1]]

    @staticmethod
    def _calls(turn: list[int]) -> list[ToolCall]:
        return [] if turn == END else [ToolCall(name="add", arguments={"number": turn[0]})]


def start(
    runner: DirectRunner, *, buffer: Buffer | None = None, budget: int = 30, emit: Emit = ignore
) -> tuple[TurnLoop, Buffer, Sample]:
    buffer = buffer or Buffer()
    sample = Sample(id=0, prompt=PROMPT, index=0, epoch=0, cohort=0, seed=7, budget=budget)
    buffer.load([sample])
    return make_loop(runner, buffer, emit), buffer, sample


def make_loop(runner: DirectRunner, buffer: Buffer, emit: Emit = ignore) -> TurnLoop:
    return TurnLoop(
        buffer=buffer,
        runner=runner,
        dialect=CallsAll(),
        knobs=KNOBS,
        max_turns=8,
        clock=VirtualClock(),
        emit=emit,
        past=past_turns(buffer.store.live_calls()) if isinstance(buffer, DurableBuffer) else None,
    )


def write(buffer: Buffer, sample: Sample, loop: TurnLoop, tokens: list[int]) -> None:
    """Write a turn to its end, and let the environment work if it calls tools; a lost object is asked again."""
    buffer.start(sample)
    buffer.append(sample, Segment(buffer.version, tokens, [-1.0] * len(tokens), 1.0), start=sample.num_tokens)
    buffer.finish(sample, FinishReason.STOP)
    if loop.take(sample):
        loop.collect(0.0)
        loop.collect(0.0)  # calls that are made again need a second submission


@pytest.mark.parametrize("kind", list(Kind))
def test_a_trajectory_whose_reset_fails_ends(kind: Kind) -> None:
    """The policy is deterministic: a trajectory that started over would fail in the same way for ever."""
    loop, buffer, sample = start(DirectRunner(NoLevel, kind))
    for _ in range(4):
        if sample.state is State.PENDING:
            write(buffer, sample, loop, CALL if sample.num_turns < 2 else END)
    assert sample.state is State.FINISHED
    assert (sample.num_restarts, loop.counts["lost"]) == (0, 0)
    goes_on = kind in (Kind.STATELESS, Kind.REPEATABLE)  # a fresh object may begin at the next turn
    assert sample.num_turns == (2 if goes_on else 0)


def test_a_failed_restore_keeps_the_snapshot() -> None:
    class CannotRestore(Adder):
        def _restore(self, state: int) -> None:
            raise OSError("disk")

    runner = DirectRunner(CannotRestore, Kind.SNAPSHOT)
    loop, buffer, sample = start(runner)
    write(buffer, sample, loop, CALL)
    for _ in range(2):
        runner.forget(0)
        write(buffer, sample, loop, CALL)
    assert (sample.num_turns, sample.num_restarts) == (3, 0)
    assert [turn.state for turn in loop._past[0].values()] == [1, 1, 1]


def test_calls_that_were_never_made_are_not_made_later() -> None:
    BusyAtFirst.num_resets = 0
    Adder.made.clear()
    loop, buffer, sample = start(DirectRunner(BusyAtFirst, Kind.REPEATABLE))
    write(buffer, sample, loop, [1, 2])  # the model is told that this call failed
    write(buffer, sample, loop, [2, 2])
    assert [number for _, number in Adder.made] == [2]


def opening(serial: int, turn: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = {"op": "open", "sample": 0, "serial": serial, "turn": turn}
    return {**made, "row": {}, "state": None, "history": [], "may_repeat": True}


@pytest.mark.parametrize("moment", ["reset", "before"])
def test_an_object_of_an_older_turn_does_not_replace_that_of_a_newer_one(moment: str) -> None:
    """The newer turn opens while the older one is in `reset`, or before the older one does."""

    class Slow(Adder):
        def reset(self, **row: Any) -> None:
            super().reset()
            if moment == "reset" and not newer:
                newer.append({})
                newer[0] = objects.handle(opening(2))

    newer: list[dict[str, Any]] = []
    objects = EnvironmentObjects(Slow, kind="none", max_chars=100)
    if moment == "before":
        newer.append(objects.handle(opening(2)))
    assert objects.handle(opening(1)) == {"lost": True}
    assert newer == [{"state": None}]
    call = {"op": "call", "sample": 0, "name": "add", "arguments": {"number": 1}}
    assert objects.handle({**call, "serial": 1}) == {"lost": True}
    assert objects.handle({**call, "serial": 2})["text"] == "1"


def test_an_abandoned_reset_leaves_no_object() -> None:
    class Abandoned(Adder):
        def reset(self, **row: Any) -> None:
            objects.handle({"op": "forget", "sample": 0, "serial": 1})  # as a thread's time limit does

    objects = EnvironmentObjects(Abandoned, kind="none", max_chars=100)
    assert objects.handle(opening(1)) == {"lost": True}
    assert objects._held == {}


# ---- rewards --------------------------------------------------------------------------------------------------------


def make_scorer(runner: DirectRunner, loop: TurnLoop, on_error: OnError = "zero", **told: Any) -> EnvironmentScorer:
    return EnvironmentScorer(
        inner=zeros(on_error, **told),
        runner=runner,
        make_turn=loop.reward_turn,
        repeat_turn=loop.repeat_reward_turn,
    )


def make_controller(buffer: Buffer, loop: TurnLoop, scorer: EnvironmentScorer) -> Controller:
    parts: Any = {
        "engine": SimpleNamespace(capabilities=SimpleNamespace(slots=4, keep_kv=True, waits=True)),
        "learner": None,
    }
    settings = LoopSettings(knobs=KNOBS, total_samples=1, sampling=Sampling())
    parts = LoopParts(**parts, scorer=scorer, load_samples=lambda cohort, size: [], turns=loop)
    return Controller(buffer, parts, settings, clock=VirtualClock())


def score(buffer: Buffer, loop: TurnLoop, scorer: EnvironmentScorer) -> None:
    """Have the only sample's answer scored, as the controller does."""
    controller = make_controller(buffer, loop, scorer)
    controller.ask_score(buffer.samples[0])
    controller.collect()
    controller.collect()  # if calls were made again


@pytest.mark.parametrize(("num_turns", "is_gone", "is_resumed"), [(2, False, False), (2, True, False), (1, True, True)])
@pytest.mark.parametrize("kind", [Kind.SNAPSHOT, Kind.REPEATABLE, Kind.NONE])
def test_the_reward_is_of_the_turns_that_the_object_has_been_through(
    kind: Kind, num_turns: int, is_gone: bool, is_resumed: bool, tmp_path: Path
) -> None:
    """The result of the last turn does not fit, so it is no turn that the trajectory keeps; but its calls were made."""
    runner, store = DirectRunner(Rewarded, kind), new_store(tmp_path) if is_resumed else None
    loop, buffer, sample = start(runner, buffer=store and store.restore(), budget=3 * num_turns)
    for _ in range(num_turns):
        write(buffer, sample, loop, CALL)
    assert (sample.state, sample.finish_reason) == (State.FINISHED, FinishReason.LENGTH)
    assert sample.num_turns == num_turns - 1
    if is_gone:
        runner.forget(0)
    if store is not None:
        buffer = store.restore()
        loop = make_loop(runner, buffer)
    score(buffer, loop, make_scorer(runner, loop))
    if kind is Kind.NONE and is_gone:
        assert (buffer.samples[0].state, buffer.samples[0].num_restarts) == (State.PENDING, 1)
        assert runner.runner.errors == {"get_reward: lost": 1}
    else:
        assert (buffer.samples[0].state, buffer.samples[0].reward) == (State.SCORED, num_turns)
        assert not runner.runner.errors
    if store is not None:
        store.close()
        with Ledger(store.path) as ledger:
            assert verify(ledger).violations == []


def new_store(folder: Path) -> Store:
    return Store.create(folder / "ledger.sqlite", grouped=False, knobs={"update_batch": 1, "max_staleness": None})


def test_an_answer_that_a_replay_changed_has_not_been_through_its_old_last_turn(tmp_path: Path) -> None:
    runner, store = DirectRunner(Rewarded, Kind.SNAPSHOT), new_store(tmp_path)
    loop, buffer, sample = start(runner, buffer=store.restore(), budget=6)
    write(buffer, sample, loop, CALL)
    write(buffer, sample, loop, CALL)
    buffer.publish(1)
    buffer.requeue(sample, Mode.REPLAY)
    buffer.start(sample)
    tokens = [*sample.tokens[:3], *END, 7]
    buffer.append(sample, Segment(1, tokens, [-1.0] * 6, 1.0), start=0, verified=3)
    buffer.finish(sample, FinishReason.LENGTH)
    for held in (loop, make_loop(runner, store.restore())):
        turn = held.reward_turn(sample)
        assert (turn.number, turn.state) == (1, 1)


def test_a_complete_trajectory_whose_object_is_lost_starts_over_once() -> None:
    """Another call killed the worker. If the same answer loses its object again, it is not tried a third time."""
    runner, metrics = DirectRunner(Rewarded, Kind.NONE), RunMetrics()
    loop, buffer, sample = start(runner, emit=metrics.emit)
    scorer = make_scorer(runner, loop)
    for _ in range(2):
        write(buffer, sample, loop, CALL)
        write(buffer, sample, loop, END)
        runner.forget(0)
        score(buffer, loop, scorer)
    assert (sample.state, sample.reward, sample.num_restarts) == (State.SCORED, 0.0, 1)
    assert (loop.counts["lost"], metrics.tools.lost) == (1, 1)
    assert runner.runner.errors == {"get_reward: lost": 1, "get_reward: failed": 1}
    assert scorer.inner.pool.errors == {"get_reward: no reward": 1}


def test_a_lost_object_of_an_answer_that_is_verified_is_no_news() -> None:
    runner = DirectRunner(Rewarded, Kind.NONE)
    loop, buffer, sample = start(runner)
    write(buffer, sample, loop, CALL)
    write(buffer, sample, loop, END)
    runner.forget(0)
    controller = make_controller(buffer, loop, make_scorer(runner, loop))
    controller.ask_score(sample)
    buffer.requeue(sample, Mode.REPLAY)
    controller.collect()
    assert (sample.state, sample.num_restarts, controller.early, controller.asked) == (State.PENDING, 0, {}, {})


@pytest.mark.parametrize("on_error", ["zero", "skip", "stop"])
@pytest.mark.parametrize("num_turns", [0, 1])
def test_an_object_that_died_in_its_last_call_fails_as_a_reward_function_does(
    num_turns: int, on_error: OnError
) -> None:
    """It would die again if the trajectory started over."""
    runner = DirectRunner(Rewarded, Kind.NONE)
    runner.channel = Killing(runner.channel.objects)
    loop, buffer, sample = start(runner)
    skipped: list[tuple[int, int]] = []
    scorer = make_scorer(runner, loop, on_error, on_skipped=lambda *key: skipped.append(key))
    for turn in [CALL] * num_turns + [HANG]:
        write(buffer, sample, loop, turn)
    score(buffer, loop, scorer)
    assert runner.runner.errors == {"add: timeout": 1, "get_reward: failed": 1}
    assert skipped == ([(0, sample.attempt)] if on_error == "skip" else [])
    if on_error == "stop":
        assert sample.state is State.FINISHED
        assert "the environment gives no reward" in str(scorer.failure)
    else:
        assert (sample.state, sample.reward, scorer.failure) == (State.SCORED, 0.0, None)


@pytest.mark.parametrize("reward", [3.5e38, float("nan"), "raise"])
def test_a_reward_that_float32_cannot_hold_is_none(reward: float | str) -> None:
    class Extreme(Adder):
        def get_reward(self) -> float:
            return float(reward)

    runner = DirectRunner(Extreme, Kind.STATELESS)
    loop, buffer, sample = start(runner)
    write(buffer, sample, loop, END)
    scorer = make_scorer(runner, loop)
    score(buffer, loop, scorer)
    assert (sample.reward, scorer.inner.pool.errors) == (0.0, {"get_reward: no reward": 1})


def test_a_sum_that_float32_cannot_hold_is_none() -> None:
    class Extreme(Adder):
        def get_reward(self) -> float:
            return 3e38

    runner = DirectRunner(Extreme, Kind.STATELESS)
    loop, buffer, sample = start(runner)
    write(buffer, sample, loop, END)
    scorer, inner = make_scorer(runner, loop), zeros()
    inner.pool.poll = lambda timeout: [replace(s, reward=3e38) for s in type(inner.pool).poll(inner.pool)]  # type: ignore[method-assign]
    scorer.inner = inner
    score(buffer, loop, scorer)
    assert (sample.reward, inner.pool.errors) == (0.0, {"get_reward: out of range": 1})


# ---- evaluation -----------------------------------------------------------------------------------------------------


def evaluate(kind: Kind) -> tuple[AnswerTurns, DirectRunner]:
    runner = DirectRunner(Rewarded, kind)
    turns: Any = {"runner": runner, "dialect": CallsAll()}
    answers = AnswerTurns(**turns, max_turns=4)
    answers.begin(2)
    return answers, runner


def reward(runner: DirectRunner, turn: Turn) -> float | None:
    runner.submit(turn)
    (result,) = runner.poll_rewards(0.0)
    return result.reward


def test_an_evaluation_makes_no_call_again_that_did_not_return() -> None:
    answers, runner = evaluate(Kind.REPEATABLE)
    runner.channel = Killing(runner.channel.objects)
    Adder.made.clear()
    assert answers.take(0, PROMPT, HANG, [])
    ((_, fed),) = answers.poll(0.0)
    assert fed
    assert answers.take(0, PROMPT, [*HANG, *fed, *CALL], [range(2, 3)])
    answers.poll(0.0)
    assert [number for _, number in Adder.made] == [1]
    assert runner.runner.errors == {"add: timeout": 1}


@pytest.mark.parametrize("kind", [Kind.SNAPSHOT, Kind.REPEATABLE, Kind.NONE])
def test_an_evaluation_asks_for_the_turns_that_the_object_has_been_through(kind: Kind) -> None:
    answers, runner = evaluate(kind)
    assert answers.take(0, PROMPT, CALL, [])
    answers.poll(0.0)  # what is fed does not fit
    assert reward(runner, answers.reward_turn(0, PROMPT, CALL, [])) == 1.0
    assert reward(runner, answers.reward_turn(1, PROMPT, END, [])) == 0.0


def test_an_evaluation_leaves_no_objects() -> None:
    answers, runner = evaluate(Kind.NONE)
    objects: Any = runner.channel
    for number in range(2):
        assert reward(runner, answers.reward_turn(number, PROMPT, END, [])) == 0.0
    assert len(objects.objects._held) == 2
    answers.begin(2)
    assert len(objects.objects._held) == 0
