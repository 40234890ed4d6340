"""Metrics of an evaluation, computed by hand and by enumerating all draws."""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import pytest

from sortedrl.run.scores import Graded, figures, majority, mean_and_error, pass_at


def graded(reward: float, vote: str | None = None, length: int = 10, *, is_truncated: bool = False) -> Graded:
    return Graded(reward=reward, vote=vote, length=length, is_truncated=is_truncated)


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("tries", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(num_right: int, tries: int) -> None:
    answers = [True] * num_right + [False] * (5 - num_right)
    draws = [any(draw) for draw in combinations(answers, tries)]
    assert pass_at(5, num_right, tries) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_of_many_answers_stays_a_probability() -> None:
    assert pass_at(1024, 1, 512) == pytest.approx(0.5)
    assert pass_at(1024, 600, 512) == 1.0


@pytest.mark.parametrize(
    ("votes", "wanted"),
    [
        (["4", "4", "5"], 1.0),  # two of three say what is right
        (["5", "5", "4"], 0.0),
        (["4", "5"], 0.5),  # a tie: one of the two
        (["4", "5", "6"], 1 / 3),
        ([None, None, "4"], 1.0),  # who says nothing has no vote
        ([None, None], 0.0),
    ],
)
def test_majority(votes: list[str | None], wanted: float) -> None:
    answers = [graded(float(vote == "4"), vote) for vote in votes]
    assert majority(answers, lambda reward: reward > 0.5) == pytest.approx(wanted)


def test_figures_of_two_problems() -> None:
    first = [graded(1.0, "4", 10), graded(0.0, "5", 20), graded(1.0, "4", 30), graded(0.0, None, 40, is_truncated=True)]
    second = [graded(0.0, "7", 4) for _ in range(4)]
    found = figures([first, second])
    assert (found.num_problems, found.num_samples, found.k) == (2, 8, 4)
    assert found.mean_at_k == pytest.approx(0.25)  # the mean of 1/2 and 0
    assert found.mean_at_k_se == pytest.approx(sqrt(0.125 / 2))  # variance of (1/2, 0) is 1/8
    assert found.pass_at_k == pytest.approx(0.5)
    assert found.pass_at_k_se == pytest.approx(0.5)
    # Two tries of the first problem fail in one of six draws.
    assert found.pass_at == pytest.approx({"1": 0.25, "2": 5 / 12, "4": 0.5})
    assert found.maj_at_k == pytest.approx(0.5)
    assert found.mean_length == pytest.approx(14.5)  # of 25 and 4
    assert found.mean_length_se == pytest.approx(10.5)
    assert found.truncation_rate == pytest.approx(1 / 8)


def test_problems_weigh_alike() -> None:
    found = figures([[graded(1.0, "4")], [graded(0.0, "5")] * 3])
    assert found.mean_at_k == pytest.approx(0.5)
    assert found.k == 1
    assert found.pass_at == {"1": 0.5}


def test_one_problem_has_no_standard_error() -> None:
    found = figures([[graded(1.0, "4")]])
    assert (found.mean_at_k, found.mean_at_k_se, found.mean_length_se) == (1.0, None, None)


def test_three_tries_are_listed_beside_powers_of_two() -> None:
    assert list(figures([[graded(0.0)] * 3]).pass_at) == ["1", "2", "3"]


def test_rewards_beyond_one_count_as_given() -> None:
    found = figures([[graded(2.0, "a")], [graded(-1.0, "b")]], is_right=lambda reward: reward >= 2.0)
    assert (found.mean_at_k, found.pass_at_k) == (0.5, 0.5)


def test_an_estimate_is_the_mean_and_its_standard_error() -> None:
    assert mean_and_error([1.0, 2.0, 3.0, 6.0]) == (3.0, pytest.approx(sqrt(14 / 3 / 4)))
