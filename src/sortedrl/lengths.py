"""Estimates how long an answer will be, from its siblings, from earlier epochs and from the mean of all answers.

The buffer owns one `LengthEstimator`; the admission order `longest-expected-first` uses it. An estimate is never below
the length that the sample has already reached. The time in tools is estimated in the same way, and counts as the tokens
that a slot decodes in that time. The estimator also measures itself: the estimate made when a sample first started is
compared with the length at which the sample was trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

RESERVOIR = 256  # earlier estimates that a new one may be compared with
PRIOR_WEIGHT = 1.0  # the mean over all prompts counts like this many answers of the prompt itself


@dataclass(slots=True, kw_only=True)
class Calibration:
    """How well estimates and true lengths agree, in constant memory.

    Each estimate is compared with one from a reservoir, a uniform sample of all earlier ones. The latest would not do:
    batches are sorted by length, so neighbours are too much alike. Only estimates that use answers to the same prompt
    count; all others are equal.
    """

    num_guesses: int = 0
    num_pairs: int = 0  # comparisons in which both estimates and lengths differ
    num_in_order: int = 0  # comparisons in which the larger estimate was the longer answer
    log_error_sum: float = 0.0
    earlier: list[tuple[float, int]] = field(default_factory=list)

    def add(self, guess: float, length: int) -> None:
        self.num_guesses += 1
        self.log_error_sum += abs(math.log(max(guess, 1.0) / max(length, 1)))
        drawn = self.num_guesses * 0x9E3779B97F4A7C15 % 2**64 >> 32  # a hash, so that it is deterministic
        if self.earlier:
            other_guess, other_length = self.earlier[drawn % len(self.earlier)]
            order = (guess - other_guess) * (length - other_length)
            self.num_pairs += order != 0
            self.num_in_order += order > 0
        if len(self.earlier) < RESERVOIR:
            self.earlier.append((guess, length))
        elif (place := drawn % self.num_guesses) < RESERVOIR:
            self.earlier[place] = (guess, length)

    @property
    def in_order(self) -> float | None:
        """Share of pairs in the right order: 1 is perfect, 0.5 is chance."""
        return self.num_in_order / self.num_pairs if self.num_pairs else None

    @property
    def log_error(self) -> float | None:
        """Mean of |log(estimate / length)|: 0.7 means off by a factor of two."""
        return self.log_error_sum / self.num_guesses if self.num_guesses else None


@dataclass(slots=True, kw_only=True)
class LengthEstimator:
    """Mean length by prompt, pulled towards the mean over all prompts. An unseen prompt gets that mean."""

    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)  # id -> (tokens, answers)
    num_tokens: int = 0
    num_answers: int = 0
    tool_s: dict[str, float] = field(default_factory=dict)  # id -> seconds in tools, for prompts that have any
    tool_s_sum: float = 0.0
    decoded_tokens: int = 0  # by the engine since this process began, and the time that its slots took
    decoding_s: float = 0.0
    calibration: Calibration = field(default_factory=Calibration)
    _guesses: dict[int, float] = field(default_factory=dict)  # by sample, made when it first started

    def expected(self, prompt: str, *, reached: int = 0, finished: Iterable[int] = ()) -> float:
        """Estimate for an answer that has `reached` tokens and whose siblings `finished` with these lengths."""
        tokens, answers = self._own(prompt, finished)
        return max(float(reached), self._pulled(tokens, answers, self.num_tokens))

    def expected_tool_tokens(self, prompt: str, *, reached_s: float = 0.0, finished_s: Sequence[float] = ()) -> float:
        """Estimate of the time in tools, as the number of tokens that a slot decodes in it.

        The sample has been in tools for `reached_s` seconds, and its finished siblings for `finished_s`.
        """
        if self.decoding_s <= 0.0:
            return 0.0
        _, answers = self.prompts.get(prompt, (0, 0))
        own_s = self.tool_s.get(prompt, 0.0) + sum(finished_s)
        seconds = self._pulled(own_s, answers + len(finished_s), self.tool_s_sum)
        return max(reached_s, seconds) * self.decoded_tokens / self.decoding_s

    def start(self, sample: int, prompt: str, finished: Iterable[int] = ()) -> None:
        """Record the estimate for a sample that starts for the first time, if answers to its prompt are known."""
        lengths = list(finished)
        if lengths or prompt in self.prompts:
            self._guesses[sample] = self.expected(prompt, finished=lengths)

    def learn(self, trained: Iterable[tuple[int, str, int]]) -> None:
        """Learn from trained samples, given as (sample id, prompt id, length)."""
        prompts, guesses = self.prompts, self._guesses
        for sample, prompt, length in trained:
            if sample in guesses:
                self.calibration.add(guesses.pop(sample), length)
            tokens, answers = prompts.get(prompt, (0, 0))
            prompts[prompt] = (tokens + length, answers + 1)
            self.num_tokens += length
            self.num_answers += 1

    def learn_tool_time(self, trained: Iterable[tuple[str, float]]) -> None:
        """Learn from trained samples that called tools, given as (prompt id, seconds in tools)."""
        for prompt, seconds in trained:
            self.tool_s[prompt] = self.tool_s.get(prompt, 0.0) + seconds
            self.tool_s_sum += seconds

    def learn_speed(self, decoded_tokens: int, slot_s: float) -> None:
        """The engine decoded so many tokens, which took its slots `slot_s` seconds together."""
        self.decoded_tokens += decoded_tokens
        self.decoding_s += slot_s

    def _pulled(self, own: float, answers: int, total: float) -> float:
        """Mean of a prompt's `answers`, pulled towards the mean over all prompts, whose sum is `total`."""
        if not self.num_answers:
            return own / answers if answers else 0.0
        return (PRIOR_WEIGHT * total / self.num_answers + own) / (PRIOR_WEIGHT + answers)

    def _own(self, prompt: str, finished: Iterable[int]) -> tuple[int, int]:
        tokens, answers = self.prompts.get(prompt, (0, 0))
        for length in finished:
            tokens, answers = tokens + length, answers + 1
        return tokens, answers

    # ---- saving and restoring ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was learned of prompts: tokens, answers and, if there are any, seconds in tools.

        Neither the calibration nor the speed is saved.
        """
        tool_s = self.tool_s
        return {
            prompt: [*value, tool_s[prompt]] if prompt in tool_s else list(value)
            for prompt, value in self.prompts.items()
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> LengthEstimator:
        prompts = {prompt: (int(tokens), int(answers)) for prompt, (tokens, answers, *_) in state.items()}
        tool_s = {prompt: float(more[0]) for prompt, (_, _, *more) in state.items() if more and more[0]}
        return cls(
            prompts=prompts,
            num_tokens=sum(tokens for tokens, _ in prompts.values()),
            num_answers=sum(answers for _, answers in prompts.values()),
            tool_s=tool_s,
            tool_s_sum=sum(tool_s.values()),
        )
