"""Advantages against values worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from sortedrl.errors import ConfigError
from sortedrl.learner import algorithms
from sortedrl.learner.advantage import AdvantageEstimator, Moments
from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.records import FinishReason
from tests.support.learners import advantage_estimator, rewarded_samples


def test_grpo_compares_siblings_only() -> None:
    # Group a: 1, 0, 0, 0: mean 1/4, variance 3/16, so (3/4) / (sqrt(3)/4) = sqrt(3) and -1/sqrt(3).
    # Group b: 5, 7: mean 6, spread 1, whatever the batch around it.
    samples = rewarded_samples([1, 5, 0, 0, 7, 0], prompts=["a", "b", "a", "a", "b", "a"])
    advantages, _ = advantage_estimator("grpo").estimate(samples)
    low = -1 / math.sqrt(3)
    assert advantages == pytest.approx([math.sqrt(3), -1, low, low, 1, low], rel=1e-5)


def test_grpo_gives_nothing_to_groups_without_spread() -> None:
    samples = rewarded_samples([1, 1, 0, 0, 1, 0, 3], prompts=["a", "a", "b", "b", "c", "c", "alone"])
    advantages, metrics = advantage_estimator("grpo").estimate(samples)
    assert advantages[:4] == [0, 0, 0, 0]
    assert advantages[4:6] == pytest.approx([1, -1], rel=1e-5)
    assert advantages[6] == 0
    assert metrics["degenerate_groups"] == 2  # a and b; one sample is no group
    assert metrics["zero_advantage_fraction"] == pytest.approx(5 / 7)


@pytest.mark.parametrize("scope", ["cohort", "running"])
def test_scope_does_not_touch_grpo(scope: str) -> None:
    estimator = advantage_estimator("grpo", scope)
    estimator.estimate(rewarded_samples([9, 9], prompts=["a", "a"]))
    advantages, _ = estimator.estimate(rewarded_samples([1, 0], prompts=["b", "b"]))
    assert advantages == pytest.approx([1, -1], rel=1e-5)


def test_groups_of_another_epoch_are_no_siblings() -> None:
    samples = rewarded_samples([1, 0, 4, 2], prompts=["a"] * 4)
    for sample in samples[2:]:
        sample.epoch = 1
    advantages, _ = advantage_estimator("grpo").estimate(samples)
    assert advantages == pytest.approx([1, -1, 1, -1], rel=1e-5)


def test_reinforce_whitens_over_the_batch() -> None:
    # Mean 1/4, spread sqrt(3)/4.
    advantages, metrics = advantage_estimator("reinforce++").estimate(rewarded_samples([1, 0, 0, 0]))
    low = -1 / math.sqrt(3)
    assert advantages == pytest.approx([math.sqrt(3), low, low, low], rel=1e-5)
    assert metrics["reward_mean"] == 0.25
    assert metrics["advantage_mean"] == pytest.approx(0, abs=1e-12)
    assert metrics["advantage_std"] == pytest.approx(1, rel=1e-5)


def test_cohort_scope_remembers_the_cohort_and_forgets_the_next() -> None:
    estimator = advantage_estimator("reinforce++", "cohort")
    first, _ = estimator.estimate(rewarded_samples([1, 1], cohort=3))
    assert first == [0, 0]
    # So far 1, 1, 0, 0: mean 1/2, spread 1/2; a batch of its own would have no spread.
    second, _ = estimator.estimate(rewarded_samples([0, 0], cohort=3))
    assert second == pytest.approx([-1, -1], rel=1e-5)
    third, _ = estimator.estimate(rewarded_samples([2, 4], cohort=4))
    assert third == pytest.approx([-1, 1], rel=1e-5)


def test_cohort_scope_pools_the_cohorts_of_a_batch() -> None:
    estimator = advantage_estimator("reinforce++", "cohort")
    estimator.estimate(rewarded_samples([1, 0, 1], cohort=0))
    # Cohort 0 so far 1, 0, 1, 0 and cohort 1 so far 4, together mean 6/5 and variance 18/5 - 36/25 = 54/25.
    mixed = rewarded_samples([0], cohort=0) + rewarded_samples([4], cohort=1)
    advantages, _ = estimator.estimate(mixed)
    spread = math.sqrt(54) / 5
    assert advantages == pytest.approx([-1.2 / spread, 2.8 / spread], rel=1e-5)


def test_running_scope_forgets_by_the_horizon() -> None:
    # With a horizon of 2 / ln 2 a batch of two halves what came before.
    estimator = advantage_estimator("reinforce++", "running", horizon=2 / math.log(2))
    estimator.estimate(rewarded_samples([1, 0]))
    # Weights 1/2, 1/2, 1, 1 on 1, 0, 1, 1: mean 2.5/3, variance of a coin 2.5/3 * 0.5/3.
    advantages, _ = estimator.estimate(rewarded_samples([1, 1]))
    mean = 2.5 / 3
    assert advantages == pytest.approx([(1 - mean) / math.sqrt(mean * (1 - mean))] * 2, rel=1e-5)


@pytest.mark.parametrize("scope", ["cohort", "running"])
def test_state_survives_json(scope: str) -> None:
    estimator = advantage_estimator("reinforce++", scope)
    estimator.estimate(rewarded_samples([1, 0, 0.5]))
    twin = advantage_estimator("reinforce++", scope)
    twin.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    samples = rewarded_samples([0, 0.25])
    assert twin.estimate(samples) == estimator.estimate(samples)
    fresh = advantage_estimator("reinforce++", scope).estimate(samples)[0]
    assert fresh != twin.estimate(samples)[0]


def test_old_cohorts_are_dropped() -> None:
    estimator = advantage_estimator("reinforce++", "cohort")
    for cohort in range(200):
        estimator.estimate(rewarded_samples([1, 0], cohort=cohort))
    kept = estimator.state_dict()["cohorts"]
    assert sorted(map(int, kept)) == list(range(136, 200))


def test_merged_moments_equal_those_of_the_whole() -> None:
    values = [3.0, -1.0, 0.5, 0.5, 10.0, 2.0]
    merged = Moments()
    for part in (values[:1], values[1:4], [], values[4:]):
        merged.add(Moments.of(part))
    mean = sum(values) / 6
    assert merged.mean == pytest.approx(mean)
    assert merged.std == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in values) / 6))


@pytest.mark.parametrize(
    ("rewards", "reason", "expected"),
    [
        ([1, 1], FinishReason.STOP, (1, 0, 0)),
        ([0, 0], FinishReason.STOP, (0, 1, 0)),
        ([1, 0], FinishReason.STOP, (0, 0, 0)),
        ([0, 0], FinishReason.LENGTH, (0, 1, 1)),
    ],
)
def test_degenerate_batches_are_counted(rewards: list[float], reason: FinishReason, expected: tuple[int, ...]) -> None:
    advantages, metrics = advantage_estimator("reinforce++").estimate(rewarded_samples(rewards, reason=reason))
    names = ("degenerate_all_right", "degenerate_all_wrong", "degenerate_all_truncated")
    assert tuple(metrics[name] for name in names) == expected
    assert all(math.isfinite(advantage) for advantage in advantages)


def test_unknown_scopes_are_refused() -> None:
    with pytest.raises(ConfigError, match="cohort"):
        advantage_estimator("grpo", "epoch")


def test_samples_without_siblings_are_compared_with_all_others_so_far() -> None:
    function, scope = algorithms.advantage_function_of(ALGORITHMS["rloo"], group_size=1, scope="batch")
    estimator = AdvantageEstimator(function, scope, horizon=4)
    first, _ = estimator.estimate(rewarded_samples([1.0, 0.0, 0.0]))
    assert first == pytest.approx([1.0 - 0.0, 0.0 - 0.5, 0.0 - 0.5])  # the mean of the other two
    saved = estimator.state_dict()
    # Two samples later the three before count exp(-2/4) each, and no sample is in its own baseline.
    kept = math.exp(-0.5)
    expected = [1.0 - (kept * 1.0 + 0.0) / (3 * kept + 1), 0.0 - (kept * 1.0 + 1.0) / (3 * kept + 1)]
    second = rewarded_samples([1.0, 0.0])
    assert estimator.estimate(second)[0] == pytest.approx(expected)
    again = AdvantageEstimator(function, scope, horizon=4)
    again.load_state_dict(json.loads(json.dumps(saved)))
    assert again.estimate(second)[0] == pytest.approx(expected)


def test_samples_without_siblings_that_were_all_rewarded_alike_give_nothing() -> None:
    function, scope = algorithms.advantage_function_of(ALGORITHMS["rloo"], group_size=1, scope="batch")
    estimator = AdvantageEstimator(function, scope)
    assert estimator.estimate(rewarded_samples([1.0]))[0] == [0.0]
    assert estimator.estimate(rewarded_samples([1.0, 1.0]))[0] == [0.0, 0.0]
    assert estimator.estimate(rewarded_samples([0.0]))[0] == pytest.approx([-1.0], abs=1e-12)
