"""The turns of answers outside of training: an evaluation calls tools too, but interrupts and replays nothing.

`run/evaluate.py` asks after each finished turn whether the answer goes on. It uses a runner of its own, so that the
objects of evaluation and training never meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sortedrl.environment.base import ToolCall, Turn, TurnResult
from sortedrl.environment.dialect import Dialect
from sortedrl.environment.past import PastTurn, following_turn, past_turn
from sortedrl.environment.runner import EnvironmentRunner
from sortedrl.records import Prompt, Sample, Segment


@dataclass(slots=True, kw_only=True)
class AnswerTurns:
    """Numbers answers anew for each evaluation, so that no object is used twice."""

    runner: EnvironmentRunner
    dialect: Dialect
    max_turns: int
    _first: int = 0  # sample id of answer 0
    _num_answers: int = 0
    _serial: int = 0
    _past: dict[int, dict[int, PastTurn]] = field(default_factory=dict)  # of the answers that have objects
    _open: dict[int, Turn] = field(default_factory=dict)

    def begin(self, num_answers: int) -> None:
        """Start an evaluation of this many answers."""
        for number in self._past:
            self.runner.forget(number)
        self._first, self._num_answers = self._first + self._num_answers, num_answers
        self._past.clear()

    def take(self, number: int, prompt: Prompt, tokens: Sequence[int], masked: Sequence[range]) -> bool:
        """Give a finished turn to the answer's environment; False if the answer is complete."""
        sample = self._sample(number, prompt, tokens, masked)
        calls = self.dialect.calls(sample)
        if not calls or len(masked) >= self.max_turns:
            return False
        turn = self._turn(sample, calls=calls)
        self._open[sample.id] = turn
        self.runner.submit(turn)
        return True

    def poll(self, timeout: float) -> list[tuple[int, list[int]]]:
        """Answers whose environments are done, with the tokens to feed; none if the answer ends there."""
        done: list[tuple[int, list[int]]] = []
        for result in self.runner.poll(timeout):
            turn = self._open.pop(result.sample)
            done.append((result.sample - self._first, self._fed(turn, result)))
        return done

    def reward_turn(self, number: int, prompt: Prompt, tokens: Sequence[int], masked: Sequence[range]) -> Turn:
        sample = self._sample(number, prompt, tokens, masked)
        last = self._past.get(sample.id, {}).get(len(masked))  # a turn whose result was not fed
        if last is None:
            return self._turn(sample, asks_reward=True)
        return self._turn(sample, self.dialect.calls(sample), asks_reward=True, is_over=last.is_over)

    def _fed(self, turn: Turn, result: TurnResult) -> list[int]:
        if result.is_lost:
            return []
        self._past[turn.sample][turn.number] = past_turn(result)
        return [] if result.is_over else self.dialect.fed(turn.calls, [r.text for r in result.results])

    def _turn(self, sample: Sample, last: Sequence[ToolCall] | None = None, **asked: Any) -> Turn:
        """The next turn of an answer; `last`: the calls of a turn before it whose result was not fed."""
        self._serial += 1
        past, number = self._past.setdefault(sample.id, {}), sample.num_turns + (last is not None)
        made: list[Sequence[ToolCall]] = [*self.dialect.history(sample), *([] if last is None else [last])]
        asked["may_repeat"] = True  # an evaluation has no ledger
        return following_turn(sample, self._serial, number, made, past, **asked)

    def _sample(self, number: int, prompt: Prompt, tokens: Sequence[int], masked: Sequence[range]) -> Sample:
        """The answer as a sample: a dialect reads the turns of samples."""
        whole = Segment(0, list(tokens), [0.0] * len(tokens))
        return Sample(
            id=self._first + number,
            prompt=prompt,
            index=0,
            epoch=0,
            cohort=0,
            seed=0,
            budget=len(tokens),
            segments=whole.parted(list(masked)),
        )
