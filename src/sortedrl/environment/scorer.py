"""Adds what environments say of their own trajectories (`get_reward`) to the reward of the reward functions.

It takes the place of `reward/scorer.py` where the class of a run has `get_reward`; the controller and evaluation use it
alike. An answer whose `get_reward` fails is handled as one on which a reward function fails (`reward.on_error`). If its
object is gone through no fault of its own, a sample starts over; in an evaluation this too is a failure. The runner
counts both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sortedrl.environment.base import Turn, TurnResult
from sortedrl.records import Prompt, Sample
from sortedrl.reward.pool import MAX_REWARD, RewardScore
from sortedrl.reward.scorer import SampleScorer
from sortedrl.reward.worker import FailureKind

_SLICE_S = 0.005  # how long to wait for one source while the other may have news

Key = tuple[int, int]


class RewardRunner(Protocol):
    def submit(self, turn: Turn) -> None: ...

    def poll_rewards(self, timeout: float) -> Sequence[TurnResult]: ...


def no_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward function of a run whose rewards come from its environments alone."""
    return [0.0] * len(prompts)


@dataclass(slots=True, kw_only=True)
class EnvironmentScorer:
    """`make_turn(sample)` returns the turn that asks for the reward of a complete trajectory.

    `repeat_turn(turn)` returns the same with leave to make calls of kept turns again, or None if it is not needed.
    `starts_over`: whether a sample starts over whose environment is lost.
    """

    inner: SampleScorer
    runner: RewardRunner
    make_turn: Callable[[Sample], Turn]
    repeat_turn: Callable[[Turn], Turn | None]
    starts_over: bool = True
    _keys: dict[int, Key] = field(default_factory=dict)  # of submitted turns, by serial
    _turns: dict[int, Turn] = field(default_factory=dict)  # the same turns
    _scores: dict[Key, RewardScore] = field(default_factory=dict)  # of reward functions, waiting for the environment
    _results: dict[Key, TurnResult] = field(default_factory=dict)  # of environments, waiting for the functions

    def submit(self, sample: Sample) -> None:
        self._ask((sample.id, sample.attempt), self.make_turn(sample))
        self.inner.submit(sample)

    def submit_answer(
        self, key: Key, prompt: Prompt, tokens: Sequence[int], masked: Sequence[range] = (), turn: Turn | None = None
    ) -> None:
        assert turn is not None, "an answer without its environment's turn"
        self._ask(key, turn)
        self.inner.submit_answer(key, prompt, tokens, masked)

    def poll(self, timeout: float) -> list[RewardScore]:
        deadline = time.monotonic() + timeout
        while True:
            wait = min(_SLICE_S, max(deadline - time.monotonic(), 0.0))
            for score in self.inner.pool.poll(wait):
                self._scores[score.key] = score
            for result in self.runner.poll_rewards(wait if self._keys else 0.0):
                self._take(result)
            done = [key for key in self._scores if key in self._results]
            if done or time.monotonic() >= deadline or not (self._keys or self.inner.pool.num_waiting):
                return self._told([self._joined(key) for key in done])

    def _told(self, scores: Sequence[RewardScore | None]) -> list[RewardScore]:
        """The scores, without those that stop the run; the callbacks of the inner scorer see those that are final."""
        given = [score for score in scores if score is not None]
        return [*self.inner.told([s for s in given if not s.is_lost]), *(s for s in given if s.is_lost)]

    def _ask(self, key: Key, turn: Turn) -> None:
        self._keys[turn.serial], self._turns[turn.serial] = key, turn
        self.runner.submit(turn)

    def _take(self, result: TurnResult) -> None:
        key, turn = self._keys.pop(result.serial), self._turns.pop(result.serial)
        again = self.repeat_turn(turn) if result.must_repeat else None
        if again is None:
            self._results[key] = result
        else:
            self._ask(key, again)

    def _joined(self, key: Key) -> RewardScore | None:
        """The score of an answer with the reward of its environment; None if it stops the run."""
        score, result = self._scores.pop(key), self._results.pop(key)
        if score.error is not None or result.must_repeat:  # without leave to repeat, nobody waits for it any more
            return score
        if result.is_lost and self.starts_over:
            return replace(score, is_lost=True)
        if result.reward is None:
            is_asked = result.error.startswith("get_reward")
            remedy = "make get_reward return one for each trajectory" if is_asked else "see what ended it before"
            message = f"the environment gives no reward ({result.error}): {remedy}"
            return self.inner.pool.refuse(key, FailureKind.NO_REWARD, "get_reward", message)
        total = score.reward + result.reward
        if not abs(total) <= MAX_REWARD:
            message = f"the rewards of environment and functions add up to {total:g}, more than float32 can hold"
            return self.inner.pool.refuse(key, FailureKind.OUT_OF_RANGE, "get_reward", message)
        return replace(score, reward=total)

    @property
    def failure(self) -> Exception | None:
        return self.inner.failure
