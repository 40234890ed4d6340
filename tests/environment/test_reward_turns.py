"""Rewards of environments whose object is gone: which requests may call tools again."""

from __future__ import annotations

from typing import Any

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.environment.base import ToolResult, Turn, TurnResult
from sortedrl.environment.loop import TurnLoop
from sortedrl.environment.scorer import EnvironmentScorer
from sortedrl.records import FinishReason, Mode, Prompt, Sample, Segment
from sortedrl.schedule import resolve_knobs
from sortedrl.telemetry.events import ignore
from tests.support.scripted_turns import ScriptedDialect, zeros


class ForgetfulRunner:
    """Its objects are gone before each reward: calls of kept turns must be made again."""

    def __init__(self) -> None:
        self.submitted: list[Turn] = []

    def submit(self, turn: Turn) -> None:
        self.submitted.append(turn)

    def poll(self, timeout: float) -> list[TurnResult]:
        (turn,) = self.submitted
        self.submitted.clear()
        results = [ToolResult(text="1", seconds=0.5) for _ in turn.calls]
        return [TurnResult(sample=turn.sample, serial=turn.serial, number=turn.number, results=results)]

    def poll_rewards(self, timeout: float) -> list[TurnResult]:
        turns, self.submitted = self.submitted, []
        return [_reward_of(turn) for turn in turns]

    def forget(self, sample: int) -> None: ...


def _reward_of(turn: Turn) -> TurnResult:
    made: dict[str, Any] = {"sample": turn.sample, "serial": turn.serial, "number": turn.number}
    return TurnResult(**made, reward=1.0) if turn.may_repeat else TurnResult(**made, must_repeat=True)


def answer(buffer: Buffer, sample: Sample, tokens: list[int]) -> None:
    """Write a turn to its end."""
    buffer.start(sample)
    segment = Segment(buffer.version, tokens, [-1.0] * len(tokens), 1.0)
    buffer.append(sample, segment, start=sample.num_tokens)
    buffer.finish(sample, FinishReason.STOP)


def with_a_turn_in_tools() -> tuple[Buffer, Sample, TurnLoop, ForgetfulRunner]:
    """A complete answer after one turn with one call: turns that begin with 1 call, those that begin with 4 do not."""
    buffer, runner = Buffer(), ForgetfulRunner()
    loop = TurnLoop(
        buffer=buffer,
        runner=runner,
        dialect=ScriptedDialect(),
        knobs=resolve_knobs("sorted-partial", 1),
        max_turns=2,
        clock=VirtualClock(),
        emit=ignore,
    )
    prompt = Prompt(id="p", tokens=(1,), content="")
    sample = Sample(id=0, prompt=prompt, index=0, epoch=0, cohort=0, seed=7, budget=20)
    buffer.load([sample])
    call_and_end(buffer, sample, loop)
    return buffer, sample, loop, runner


def call_and_end(buffer: Buffer, sample: Sample, loop: TurnLoop) -> None:
    answer(buffer, sample, [1, 2])
    assert loop.take(sample)
    loop.collect(0.0)
    answer(buffer, sample, [4, 5])
    assert not loop.take(sample)


def test_only_the_newest_request_for_a_reward_may_call_tools_again() -> None:
    buffer, sample, loop, runner = with_a_turn_in_tools()
    scorer = EnvironmentScorer(
        inner=zeros(),
        runner=runner,
        make_turn=loop.reward_turn,
        repeat_turn=loop.repeat_reward_turn,
    )
    scorer.submit(sample)
    outdated = runner.submitted.pop()
    buffer.requeue(sample, Mode.FRESH)
    call_and_end(buffer, sample, loop)  # as many turns as before
    scorer.submit(sample)
    newest = runner.submitted[0]
    runner.submitted.insert(0, outdated)

    scores = scorer.poll(0.0)
    assert [(turn.serial, turn.may_repeat) for turn in runner.submitted] == [(newest.serial, True)]
    assert loop.counts["repeated"] == 1
    scores += scorer.poll(0.0)
    assert {score.key: score.reward for score in scores} == {(0, 2): 0.0, (0, 4): 1.0}  # by sample and attempt
