"""Figures of an evaluation: k answers to each of n problems, as mean@k, pass@k, maj@k, lengths and standard errors.

`evaluate.py` uses it for the held-out prompts of a run, `run/suite_eval.py` for the suites of `sortedrl eval`. Pure
functions of what was graded. What they keep true: problems weigh alike, however many answers each has; a standard error
is that of the mean over problems, since answers to one problem are no independent draws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True, kw_only=True, frozen=True)
class Graded:
    """One answer. `vote` is what it says in the end, in a form that equal answers share; None: it says nothing."""

    reward: float
    length: int
    is_truncated: bool = False
    vote: str | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class Estimate:
    """A mean over problems and its standard error, which a single problem does not have."""

    value: float
    error: float | None


@dataclass(slots=True, kw_only=True, frozen=True)
class Figures:
    """What k answers to each problem of a set came to; `k` is the fewest that any problem has."""

    num_problems: int
    num_samples: int  # in all
    k: int
    mean_at_k: float
    mean_at_k_se: float | None
    pass_at_k: float
    pass_at_k_se: float | None
    maj_at_k: float
    maj_at_k_se: float | None
    pass_at: dict[str, float]  # by the number of tries: 1, 2, 4, ... up to k
    mean_length: float
    mean_length_se: float | None
    truncation_rate: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(problems: Sequence[Sequence[Graded]], *, is_right: Callable[[float], bool] = lambda r: r > 0.5) -> Figures:
    """`is_right` tells a right answer by its reward, for pass@k and maj@k; mean@k is the mean of the rewards."""
    assert problems, "an evaluation without problems has no figures"
    assert all(problems), "a problem without answers has no figures"
    k = min(len(answers) for answers in problems)
    mean = estimate(average(answer.reward for answer in answers) for answers in problems)
    passed = estimate(_pass(answers, k, is_right) for answers in problems)
    voted = estimate(majority(answers, is_right) for answers in problems)
    length = estimate(average(answer.length for answer in answers) for answers in problems)
    tries = sorted({*(2**power for power in range(k.bit_length())), k})
    return Figures(
        num_problems=len(problems),
        num_samples=sum(len(answers) for answers in problems),
        k=k,
        mean_at_k=mean.value,
        mean_at_k_se=mean.error,
        pass_at_k=passed.value,
        pass_at_k_se=passed.error,
        maj_at_k=voted.value,
        maj_at_k_se=voted.error,
        pass_at={str(num): average(_pass(answers, num, is_right) for answers in problems) for num in tries},
        mean_length=length.value,
        mean_length_se=length.error,
        truncation_rate=average(average(answer.is_truncated for answer in answers) for answers in problems),
    )


def pass_at(num_answers: int, num_right: int, tries: int) -> float:
    """Chance that of `tries` answers, drawn without putting back from those there are, one at least is right.

    Over many sets of `num_answers` its mean is that of tries independent answers: it is unbiased, which the share of
    problems solved by the first `tries` is too, at a larger variance.
    """
    assert 0 <= num_right <= num_answers, f"{num_right} right of {num_answers}"
    assert 1 <= tries <= num_answers, f"{tries} tries of {num_answers} answers"
    return 1.0 - math.comb(num_answers - num_right, tries) / math.comb(num_answers, tries)


def majority(answers: Sequence[Graded], is_right: Callable[[float], bool]) -> float:
    """Whether the answer given most often is right; of several given equally often, the share that is right.

    An answer that says nothing has no vote. Equal votes have been graded alike, or else count by their share.
    """
    votes = Counter(answer.vote for answer in answers if answer.vote is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [vote for vote, count in votes.items() if count == most]
    return average(average(is_right(a.reward) for a in answers if a.vote == winner) for winner in winners)


def estimate(values: Iterable[float]) -> Estimate:
    """The mean, and the sample's standard deviation over the root of its size."""
    numbers = list(values)
    mean = average(numbers)
    if len(numbers) < 2:
        return Estimate(value=mean, error=None)
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return Estimate(value=mean, error=math.sqrt(variance / len(numbers)))


def average(values: Iterable[float]) -> float:
    """0 where there is nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _pass(answers: Sequence[Graded], tries: int, is_right: Callable[[float], bool]) -> float:
    return pass_at(len(answers), sum(is_right(answer.reward) for answer in answers), tries)
