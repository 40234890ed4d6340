"""From rewards to advantages: one number per sample, which the loss gives to each of its tokens.

`learner/torch.py` calls `AdvantageEstimator.estimate` once per update, over the whole batch and before mini-batches are
cut, so that cutting never splits a group. No torch. What it keeps true:
- GRPO compares siblings with each other and nothing else, so `advantage_scope` does not touch it;
- REINFORCE++ whitens rewards over its scope. Sorted batches hold answers of one length, so the scope matters: `batch`
  sees this batch only, `cohort` all samples trained so far of the cohorts in the batch, `running` all samples so far,
  the older the less. The samples at hand always count;
- where rewards do not differ there is nothing to learn: the advantage is exactly 0, and the case is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sortedrl.errors import ConfigError
from sortedrl.records import FinishReason, Sample

EPSILON = 1e-6  # a spread below this is none, and it keeps divisions finite
RUNNING_HORIZON = (
    1024.0  # samples after which a reward counts 1/e in `running`: several cohorts, so all lengths are seen
)
COHORTS_KEPT = 64  # cohorts whose statistics are kept; one is consumed long before as many others are loaded

SCOPES = ("batch", "cohort", "running")


@dataclass(slots=True, kw_only=True)
class Moments:
    """Weighted count, mean and sum of squared deviations, merged without loss of precision."""

    weight: float = 0.0
    mean: float = 0.0
    deviation: float = 0.0  # weighted sum of squared differences from the mean

    @property
    def std(self) -> float:
        return math.sqrt(self.deviation / self.weight) if self.weight > 0 else 0.0

    def add(self, other: Moments) -> None:
        weight = self.weight + other.weight
        if weight == 0:
            return
        delta = other.mean - self.mean
        self.mean += delta * other.weight / weight
        self.deviation += other.deviation + delta * delta * self.weight * other.weight / weight
        self.weight = weight

    def forget(self, factor: float) -> None:
        """Let what was seen count `factor` of what it did; mean and spread stay."""
        self.weight *= factor
        self.deviation *= factor

    def as_list(self) -> list[float]:
        return [self.weight, self.mean, self.deviation]

    @staticmethod
    def of(values: Sequence[float] | np.ndarray) -> Moments:
        array = np.asarray(values, dtype=np.float64)
        if array.size == 0:
            return Moments()
        mean = float(array.mean())
        return Moments(weight=float(array.size), mean=mean, deviation=float(((array - mean) ** 2).sum()))

    @staticmethod
    def from_list(values: Sequence[float]) -> Moments:
        weight, mean, deviation = values
        return Moments(weight=weight, mean=mean, deviation=deviation)


def whiten(rewards: np.ndarray, moments: Moments) -> np.ndarray:
    """Rewards in units of the spread around the mean; all 0 where there is no spread."""
    if moments.std < EPSILON:
        return np.zeros_like(rewards)
    return (rewards - moments.mean) / (moments.std + EPSILON)


def grpo(rewards: np.ndarray, groups: Sequence[Hashable], _scope: Moments) -> np.ndarray:
    """Each reward against its siblings' mean, in units of their spread."""
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        advantages[members] = whiten(rewards[members], Moments.of(rewards[members]))
    return advantages


def reinforce_pp(rewards: np.ndarray, _groups: Sequence[Hashable], scope: Moments) -> np.ndarray:
    """Each reward against all of its scope."""
    return whiten(rewards, scope)


ALGORITHMS: dict[str, Callable[[np.ndarray, Sequence[Hashable], Moments], np.ndarray]] = {
    "grpo": grpo,
    "reinforce++": reinforce_pp,
}


class AdvantageEstimator:
    """An algorithm with the statistics that its scope remembers from earlier batches."""

    def __init__(self, algorithm: str, scope: str = "batch", *, horizon: float = RUNNING_HORIZON) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"learner.algorithm {algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}")
        if scope not in SCOPES:
            raise ConfigError(f"learner.advantage_scope {scope!r} is unknown: use one of {', '.join(SCOPES)}")
        self.algorithm = algorithm
        self.scope = scope
        self.horizon = horizon
        self._running = Moments()
        self._cohorts: dict[int, Moments] = {}

    def estimate(self, samples: Sequence[Sample]) -> tuple[list[float], dict[str, float]]:
        """Advantages in the samples' order, and metrics on the batch. Remembers the batch: call once per update."""
        rewards = np.array([_reward(sample) for sample in samples], dtype=np.float64)
        groups = [sample.group for sample in samples]
        advantages = ALGORITHMS[self.algorithm](rewards, groups, self._moments(samples, rewards))
        return advantages.tolist(), self._metrics(samples, rewards, groups, advantages)

    def state_dict(self) -> dict[str, Any]:
        cohorts = {str(cohort): moments.as_list() for cohort, moments in self._cohorts.items()}
        return {"running": self._running.as_list(), "cohorts": cohorts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running = Moments.from_list(state["running"])
        self._cohorts = {int(cohort): Moments.from_list(values) for cohort, values in state["cohorts"].items()}

    def _moments(self, samples: Sequence[Sample], rewards: np.ndarray) -> Moments:
        """Take the batch into what the scope remembers, and return the statistics to whiten it with."""
        batch = Moments.of(rewards)
        match self.scope:
            case "running":
                self._running.forget(math.exp(-batch.weight / self.horizon))
                self._running.add(batch)
                return self._running
            case "cohort":
                return self._cohort_moments([sample.cohort for sample in samples], rewards)
            case _:
                return batch

    def _cohort_moments(self, cohorts: Sequence[int], rewards: np.ndarray) -> Moments:
        # A batch may mix cohorts, and the first samples of one have no spread yet: what is known of all is pooled.
        pooled = Moments()
        for members in _members(cohorts):
            cohort = cohorts[members[0]]
            moments = self._cohorts.setdefault(cohort, Moments())
            moments.add(Moments.of(rewards[members]))
            pooled.add(moments)
        for cohort in sorted(self._cohorts)[:-COHORTS_KEPT]:
            del self._cohorts[cohort]
        return pooled

    def _metrics(
        self, samples: Sequence[Sample], rewards: np.ndarray, groups: Sequence[Hashable], advantages: np.ndarray
    ) -> dict[str, float]:
        is_flat = bool(np.ptp(rewards) < EPSILON)
        is_truncated = [sample.finish_reason is FinishReason.LENGTH for sample in samples]
        families = [rewards[members] for members in _members(groups) if len(members) > 1]
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "advantage_mean": float(advantages.mean()),
            "advantage_std": float(advantages.std()),
            "advantage_max": float(np.abs(advantages).max()),
            "zero_advantage_fraction": float((advantages == 0).mean()),
            "truncated_fraction": float(np.mean(is_truncated)),
            "degenerate_all_right": float(is_flat and rewards[0] > 0),
            "degenerate_all_wrong": float(is_flat and rewards[0] <= 0),
            "degenerate_all_truncated": float(all(is_truncated)),
            "degenerate_groups": float(sum(np.ptp(family) < EPSILON for family in families)),
        }


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.id} is in a batch without a reward"
    return sample.reward


def _members(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions that share a key, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    return list(members.values())
