"""The study's figures, intervals and claims: paired differences and verdicts against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.study import claims, intervals
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


def test_the_interval_is_students() -> None:
    # Mean 2, standard deviation sqrt(2.5); the table's t for 4 degrees of freedom is 2.776.
    mean, low, high = intervals.student([0.0, 1.0, 2.0, 3.0, 4.0])
    half = 2.7764 * math.sqrt(2.5 / 5)
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), abs=1e-4)
    assert intervals.student([3.0]) == (3.0, -math.inf, math.inf)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (30, 2.042)])
def test_quantiles_of_t_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert intervals.t_quantile(freedom) == pytest.approx(value, abs=5e-4)


def test_coverage_is_nominal_for_a_normal_population_and_too_low_for_the_bootstrap() -> None:
    normal = np.random.default_rng(5).normal(size=20_000)
    assert intervals.coverage(intervals.student_ends, normal, 5, rounds=2000) == pytest.approx(0.95, abs=0.015)
    assert intervals.coverage(intervals.percentile_ends, normal, 5, rounds=1000) < 0.9


def test_residuals_are_centred_and_scaled_by_the_standard_deviation() -> None:
    # Mean 2 and standard deviation 1; mean 0 and standard deviation 2 ** .5; no spread; one value.
    found = intervals.residuals([[1.0, 2.0, 3.0], [-1.0, 1.0], [4.0, 4.0], [7.0]])
    assert found == pytest.approx([-1.0, 0.0, 1.0, -(0.5**0.5), 0.5**0.5])


def test_power_grows_with_the_difference() -> None:
    assert intervals.power(0.0, 1.0, 10, rounds=4000) == pytest.approx(0.05, abs=0.015)
    assert intervals.power(2.0, 1.0, 10, rounds=2000) > 0.99


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


def test_claims_can_be_judged_on_the_large_cohort() -> None:
    # The arm ends where sync ends and reaches it as fast; the large cohort is slower, and ends lower.
    runs = [record("sync", seed, [0.1, 0.5, *[0.6] * 3]) for seed in range(2)]
    runs += [record("sync-large", seed, [0.1, 0.3, *[0.5] * 3]) for seed in range(2)]
    runs += [record("sorted-partial", seed, [0.1, 0.5, *[0.6] * 3]) for seed in range(2)]
    assert figures.judge(runs, "a", "sync")[0]["answer"] == "no"
    gain, fewer, _ = figures.judge(runs, "a", "sync-large")
    assert gain["interval"][0] == pytest.approx(0.2)
    # Accuracy 0.45: after 175 samples of the large cohort, after 87.5 of the arm.
    assert fewer["interval"][0] == pytest.approx(0.5)
    assert claims.pooled(runs, "a", "sync-large")["early"][0] == pytest.approx(0.2)


def test_an_accuracy_that_is_never_reached_counts_as_the_whole_run() -> None:
    curve = record("x", 0, [0.1, 0.2, 0.3])["curve"]
    assert figures.reached_or_end(curve, 0.9) == 200
    assert figures.reached_or_end(curve, 0.2) == pytest.approx(100)
