"""Metrics of an evaluation with k answers to each problem: mean@k, pass@k, maj@k, lengths and standard errors.

`evaluate.py` uses it for the held-out prompts of a run, `suite_eval.py` for the suites of `sortedrl eval`. All
functions are pure. Guarantees: every problem has the same weight, whatever its number of answers; standard errors are
those of the mean over problems, because answers to one problem are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, frozen=True)
class Graded:
    """One answer. `vote`: its final answer in a normal form, equal for equal answers; None if it gives none."""

    reward: float
    length: int
    is_truncated: bool = False
    vote: str | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class Figures:
    """Metrics of a set of problems; `k` is the smallest number of answers to a problem."""

    num_problems: int
    num_samples: int  # in all
    k: int
    mean_at_k: float
    mean_at_k_se: float | None
    pass_at_k: float
    pass_at_k_se: float | None
    maj_at_k: float
    maj_at_k_se: float | None
    pass_at: dict[str, float]  # pass@n for n = 1, 2, 4, ... and k
    mean_length: float
    mean_length_se: float | None
    truncation_rate: float


def figures(problems: Sequence[Sequence[Graded]], *, is_right: Callable[[float], bool] = lambda r: r > 0.5) -> Figures:
    """The metrics of all problems. mean@k averages rewards; pass@k and maj@k count answers that `is_right` accepts."""
    assert problems, "an evaluation needs problems"
    assert all(problems), "every problem needs answers"
    k = min(len(answers) for answers in problems)
    mean, mean_se = mean_and_error(average(answer.reward for answer in answers) for answers in problems)
    passed, passed_se = mean_and_error(_pass(answers, k, is_right) for answers in problems)
    voted, voted_se = mean_and_error(majority(answers, is_right) for answers in problems)
    length, length_se = mean_and_error(average(answer.length for answer in answers) for answers in problems)
    tries = sorted({*(2**power for power in range(k.bit_length())), k})
    return Figures(
        num_problems=len(problems),
        num_samples=sum(len(answers) for answers in problems),
        k=k,
        mean_at_k=mean,
        mean_at_k_se=mean_se,
        pass_at_k=passed,
        pass_at_k_se=passed_se,
        maj_at_k=voted,
        maj_at_k_se=voted_se,
        pass_at={str(num): average(_pass(answers, num, is_right) for answers in problems) for num in tries},
        mean_length=length,
        mean_length_se=length_se,
        truncation_rate=average(average(answer.is_truncated for answer in answers) for answers in problems),
    )


def pass_at(num_answers: int, num_right: int, tries: int) -> float:
    """The probability that at least one of `tries` answers, drawn without replacement from all answers, is right.

    This is the unbiased estimator of pass@k; counting only the first `tries` answers would have a larger variance.
    """
    assert 0 <= num_right <= num_answers, f"{num_right} right of {num_answers}"
    assert 1 <= tries <= num_answers, f"{tries} tries of {num_answers} answers"
    return 1.0 - math.comb(num_answers - num_right, tries) / math.comb(num_answers, tries)


def majority(answers: Sequence[Graded], is_right: Callable[[float], bool]) -> float:
    """1 if the most frequent vote is right, else 0; with a tie, the mean over the tied votes.

    Answers without a vote are ignored. If equal votes have different rewards, their mean counts.
    """
    votes = Counter(answer.vote for answer in answers if answer.vote is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [vote for vote, count in votes.items() if count == most]
    return average(average(is_right(a.reward) for a in answers if a.vote == winner) for winner in winners)


def mean_and_error(values: Iterable[float]) -> tuple[float, float | None]:
    """The mean and its standard error (the standard deviation over the root of the count), None for one value."""
    numbers = list(values)
    mean = average(numbers)
    if len(numbers) < 2:
        return mean, None
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return mean, math.sqrt(variance / len(numbers))


def average(values: Iterable[float]) -> float:
    """The mean; 0 for no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _pass(answers: Sequence[Graded], tries: int, is_right: Callable[[float], bool]) -> float:
    return pass_at(len(answers), sum(is_right(answer.reward) for answer in answers), tries)
