"""benchmarks/study/study_figures.py: paired differences, intervals and verdicts against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.study import study_figures as figures


def record(
    arm: str, seed: int, accuracies: list[float], *, bubble: float = 0.5, seconds: float = 10.0
) -> dict[str, Any]:
    """The record of a run that is evaluated every 100 samples."""
    points = [
        {"samples": 100 * at, "seconds": seconds * at, "accuracy": accuracy, "length": 5.0}
        for at, accuracy in enumerate(accuracies)
    ]
    others = ("goodput", "staleness", "length_first", "length_last", "flat_batches", "gradient_variation")
    return {
        "algorithm": "a",
        "arm": arm,
        "seed": seed,
        "rate": 1e-4,
        "curve": points,
        "tokens": 1000,
        "bubble": bubble,
        **dict.fromkeys(others, 0.0),
        **dict.fromkeys(("lost", "duplicated", "staleness_max"), 0),
    }


def test_where_a_curve_first_has_an_accuracy() -> None:
    curve = record("x", 0, [0.2, 0.6, 0.5, 0.8])["curve"]
    assert figures.reached(curve, 0.4, "samples") == pytest.approx(50.0)  # half way from 0.2 to 0.6
    assert figures.reached(curve, 0.6, "seconds") == pytest.approx(10.0)
    assert figures.reached(curve, 0.7, "samples") == pytest.approx(200 + 100 * 2 / 3)
    assert figures.reached(curve, 0.9, "samples") is None


def test_the_bootstrap_goes_through_all_draws() -> None:
    # Two values: 00, 01, 10, 11, each a quarter of the draws.
    assert figures.bootstrap([0.0, 1.0]) == (0.5, 0.0, 1.0)
    # Three values, one of them 1: the means 0, 1/3, 2/3, 1 have 8, 12, 6 and 1 of 27 draws. 1/27 is more than 2.5 %.
    assert figures.bootstrap([0.0, 0.0, 1.0]) == pytest.approx((1 / 3, 0.0, 1.0))
    # Five values: the smallest mean has one draw in 3,125, so both ends lie inside the range.
    mean, low, high = figures.bootstrap([0.0, 1.0, 2.0, 3.0, 4.0])
    assert mean == 2.0
    assert 0.0 < low < 2.0 < high < 4.0
    assert low + high == pytest.approx(4.0), "symmetric values have a symmetric interval"
    assert figures.bootstrap([3.0]) == (3.0, -math.inf, math.inf)


def test_the_final_accuracy_is_that_of_the_last_three_evaluations() -> None:
    assert figures.final(record("x", 0, [0.1, 0.9, 0.4, 0.5, 0.6])) == pytest.approx(0.5)


def test_differences_are_taken_seed_by_seed() -> None:
    # Seeds differ by more than the arms. Paired by seed, the arm is better by exactly 0.1 without any spread.
    runs = [record("sync", seed, [0.1, *[0.2 + 0.2 * seed] * 3]) for seed in range(3)]
    runs += [record("sorted-replay", seed, [0.1, *[0.3 + 0.2 * seed] * 3], bubble=0.1) for seed in range(3)]
    first, second = figures.tabulate(runs, "a")
    assert first["accuracy_difference"] == pytest.approx((0.0, 0.0, 0.0))
    assert second["accuracy_difference"] == pytest.approx((0.1, 0.1, 0.1))
    assert second["speed_ratio"] == pytest.approx((1.0, 1.0, 1.0))
    assert first["samples_to_0.5"] is None, "one seed never reaches this accuracy"


@pytest.mark.parametrize(
    ("interval", "answer"),
    [((0.5, 0.41, 0.6), "yes"), ((0.5, 0.3, 0.6), "not decidable"), ((0.2, 0.1, 0.3), "no"), (None, "not decidable")],
)
def test_a_verdict_needs_the_whole_interval(interval: Any, answer: str) -> None:
    assert figures.verdict(interval, 0.4)["answer"] == answer


def test_claims_are_judged_for_sorted_arms_alone() -> None:
    runs = [record("sync", seed, [0.1, 0.5, *[0.6] * 3], bubble=0.8) for seed in range(2)]
    runs += [record("sync-large", seed, [0.1, 0.5, *[0.6] * 3]) for seed in range(2)]
    runs += [record("sorted-partial", seed, [0.1, 0.6, *[0.66] * 3], bubble=0.2) for seed in range(2)]
    gain, fewer, cut = figures.judge(runs, "a")
    assert {found["arm"] for found in (gain, fewer, cut)} == {"sorted-partial"}
    assert gain["interval"][0] == pytest.approx(0.1)
    assert (gain["answer"], cut["answer"]) == ("yes", "yes")
    # Accuracy 0.54 is reached by sync after 140 samples and by the arm after 88, on both seeds.
    assert fewer["interval"][0] == pytest.approx(1 - 88 / 140)
    assert fewer["answer"] == "no"
