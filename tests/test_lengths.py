"""The length estimator: what it guesses, worked out by hand, and how its account of guesses is kept."""

from __future__ import annotations

import math

import pytest

from sortedrl.lengths import Calibration, LengthEstimator


def taught(**lengths: list[int]) -> LengthEstimator:
    estimator = LengthEstimator()
    for prompt, values in lengths.items():
        for value in values:
            estimator.learn(-1, prompt, value)
    return estimator


def test_nothing_is_known_at_first() -> None:
    assert LengthEstimator().expected("a") == 0.0
    assert LengthEstimator().expected("a", reached=7) == 7.0


def test_finished_siblings_are_averaged_before_anything_was_trained() -> None:
    assert LengthEstimator().expected("a", finished=[10, 30]) == 20.0


def test_an_unknown_prompt_is_guessed_at_the_mean_over_all() -> None:
    assert taught(a=[10, 20], b=[60]).expected("c") == 30.0


def test_own_answers_are_drawn_towards_the_mean_over_all() -> None:
    # Over all: (10 + 20 + 60) / 3 = 30, which counts as one answer. Own: 10, 20, and a finished sibling of 40.
    assert taught(a=[10, 20], b=[60]).expected("a", finished=[40]) == (30 + 10 + 20 + 40) / 4


def test_never_below_what_the_sample_has_reached() -> None:
    assert taught(a=[10, 20]).expected("a", reached=16) == 16.0
    assert taught(a=[10, 20]).expected("a", reached=14) == 15.0


def test_guesses_are_compared_with_what_was_trained() -> None:
    estimator = taught(a=[8], b=[32])  # over all 20
    estimator.start(1, "a")  # (20 + 8) / 2 = 14
    estimator.start(2, "b")  # (20 + 32) / 2 = 26
    estimator.start(3, "c")  # nothing of its own: not counted
    estimator.learn(1, "a", 7)
    estimator.learn(2, "b", 52)
    estimator.learn(3, "c", 1)
    calibration = estimator.calibration
    assert (calibration.num_guesses, calibration.num_pairs, calibration.num_in_order) == (2, 1, 1)
    assert calibration.log_error == pytest.approx(math.log(2))  # 14 for 7, 26 for 52


def test_pairs_in_the_wrong_order_count_against_it() -> None:
    calibration = Calibration()
    assert calibration.in_order is None
    for guess, length in ((1.0, 10), (2.0, 20), (3.0, 5), (3.0, 9)):  # right, wrong, a tie that says nothing
        calibration.add(guess, length)
    assert calibration.in_order == 0.5


def test_state_survives() -> None:
    estimator = taught(a=[10, 20], b=[60])
    again = LengthEstimator.from_state_dict(estimator.state_dict())
    assert again.expected("a") == estimator.expected("a")
    assert again.expected("c") == 30.0
