"""Counting in steps: the answer is the list of numbers itself, so its length is drawn with the prompt and has a tail.

"Count from 12 to 40 in steps of 7." asks for `12 19 26 33 40`. The number of numbers is drawn from a lognormal
distribution: most lists are short, a few are ten times as long. A language model ends its answer by itself after the
last number. `run/builders/task.py` makes the task, reward workers import `counting_reward`.

Guarantees: `row(i)` depends on the options, the seed and `i` only; numbers have at most three digits, so an answer
needs at most four tokens a number if digits are single tokens; a hash of its text decides whether a prompt is held out,
so no held-out prompt is in training; an answer gets the full reward only if it is the whole list and nothing else.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.tasks.answers import completion_text
from sortedrl.tasks.base import RewardFunc, Row, Rows
from sortedrl.tasks.knights import HELDOUT_SEED, MAX_REDRAWS, is_heldout
from sortedrl.tasks.wording import Wording

INSTRUCTION = "Write only the numbers, separated by spaces."
MAX_NUMBERS = 110  # in the longest list by default: 110 numbers in steps of 9 still have at most three digits
MAX_STEP = 9
_MAX_START = 99
_MAX_VALUE = 999
_MAX_SPAN = MAX_STEP * MAX_NUMBERS  # most numbers x largest step
_PARTIAL_REWARD = 0.5  # for a wrong list whose numbers are all right; fewer right ones get their share
_MAX_CHARS = 4000  # as long as the longest list; a longer text is wrong without being read
_BETWEEN = re.compile(r"[ \t\n]*,[ \t\n]*|[ \t\n]+")
_NUMBER = re.compile(r"-?[0-9]{1,4}")


@dataclass(slots=True, kw_only=True, frozen=True)
class Count:
    """One question. `stop` need not be in the list: counting ends with the last number that is not beyond it."""

    start: int
    stop: int
    step: int
    is_brief: bool = False

    @property
    def prompt(self) -> str:
        if self.is_brief:
            return f"{self.start} to {self.stop}" + (f" by {self.step}:" if self.step > 1 else ":")
        steps = f" in steps of {self.step}" if self.step > 1 else ""
        return f"Count from {self.start} to {self.stop}{steps}."

    @property
    def numbers(self) -> list[int]:
        if self.start <= self.stop:
            return list(range(self.start, self.stop + 1, self.step))
        return list(range(self.start, self.stop - 1, -self.step))


@dataclass(slots=True, kw_only=True, frozen=True)
class Questions:
    """What is asked. The number of numbers is lognormal, with this median and spread (sigma), from 2 to `most`."""

    median: float = 12.0
    spread: float = 0.9
    most: int = MAX_NUMBERS
    max_step: int = MAX_STEP  # steps are drawn from 1 to this
    brief: bool = False  # "12 to 40 by 7:" instead of a sentence, for a model that was fine-tuned on it

    def __post_init__(self) -> None:
        if type(self.brief) is not bool:
            raise ConfigError(f"task.options.brief is {self.brief!r}: set true or false")
        largest = self.max_step if type(self.max_step) is int and self.max_step > 0 else MAX_STEP
        for name, most in (("max_step", MAX_STEP), ("most", _MAX_SPAN // largest)):
            least, value = 2 if name == "most" else 1, getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"task.options.{name} is {value!r}: set a whole number from {least} to {most}")
        for name, least, most in (("median", 2, self.most), ("spread", 0, 3)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ConfigError(f"task.options.{name} is {value!r}: set a number from {least} to {most}")

    def draw_length(self, rng: random.Random) -> int:
        """Draw again instead of cutting, so that the longest lists are not more frequent than they should be."""
        while True:
            number = round(rng.lognormvariate(math.log(self.median), self.spread))
            if 2 <= number <= self.most:
                return number


def draw(rng: random.Random, questions: Questions) -> Count:
    """Draw a question upwards or downwards. All its numbers are from 1 to 999."""
    num, step = questions.draw_length(rng), rng.randint(1, questions.max_step)
    span = step * (num - 1)
    low = rng.randint(1, min(_MAX_START, _MAX_VALUE - span))
    beyond = rng.randrange(step)  # by how much `stop` lies behind the last number
    if rng.random() < 0.5:
        return Count(start=low, stop=low + span + beyond, step=step, is_brief=questions.brief)
    return Count(start=low + span, stop=max(low - beyond, 0), step=step, is_brief=questions.brief)


# ---- the verifier ----------------------------------------------------------------------------------------------------


def counting_reward(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Reward function: 1.0 for the right list, 0.0 for what is no list of numbers.

    A wrong list gets half of the share of numbers that are right before the first wrong one.
    """
    return [_score(completion_text(given), wanted) for given, wanted in zip(completions, answer, strict=True)]


def _score(completion: str, answer: str) -> float:
    wanted, given = answer.split(" "), read_numbers(completion)
    if given is None:
        return 0.0
    if given == wanted:
        return 1.0
    pairs = zip(given, wanted, strict=False)
    num_right = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(given), len(wanted)))
    return _PARTIAL_REWARD * num_right / max(len(given), len(wanted))


def read_numbers(text: str) -> list[str] | None:
    """The numbers of a list that is separated by spaces, commas or lines; None if the text holds anything else."""
    if len(text) > _MAX_CHARS:
        return None
    words = _BETWEEN.split(text.strip(" \t\n"))
    return words if all(_NUMBER.fullmatch(word) for word in words) else None


# ---- the task --------------------------------------------------------------------------------------------------------


def _row(count: Count) -> Row:
    numbers = count.numbers
    size = "short" if len(numbers) <= 8 else "medium" if len(numbers) <= 24 else "long"
    return {"prompt": count.prompt, "answer": " ".join(map(str, numbers)), "size": size}


@dataclass(slots=True, kw_only=True, frozen=True)
class CountingRows:
    """Training questions, generated without end."""

    seed: int | str
    questions: Questions
    wording: Wording

    @property
    def size(self) -> None:
        return None

    def row(self, index: int) -> Row:
        rng = random.Random(f"counting/{self.seed}/{index}")
        while is_heldout((count := draw(rng, self.questions)).prompt):
            pass
        return self.wording.apply(_row(count))


@dataclass(slots=True, kw_only=True, frozen=True)
class CountingTask:
    """Generated questions. Held-out ones do not depend on the seed. Accuracy is also given by the size of the list."""

    seed: int = 0
    questions: Questions = field(default_factory=Questions)
    wording: Wording = field(default_factory=lambda: Wording(instruction=INSTRUCTION))
    name: str = "counting"
    group_column: str = "size"
    reward_funcs: Sequence[RewardFunc] = (counting_reward,)

    @property
    def train(self) -> Rows:
        return CountingRows(seed=self.seed, questions=self.questions, wording=self.wording)

    def heldout(self, num: int) -> list[Row]:
        """Return distinct questions, fewer than `num` if no new ones can be found."""
        rng = random.Random(f"counting/{HELDOUT_SEED}")
        seen: set[str] = set()
        rows: list[Row] = []
        for _ in range(num * MAX_REDRAWS):
            if len(rows) == num:
                break
            count = draw(rng, self.questions)
            if is_heldout(count.prompt) and count.prompt not in seen:
                seen.add(count.prompt)
                rows.append(self.wording.apply(_row(count)))
        return rows
