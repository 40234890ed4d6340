"""From rewards to advantages: one number per sample, which the loss applies to each of the sample's tokens.

`learner/torch.py` calls `AdvantageEstimator.estimate` once per update, on the whole batch, before it is split into
mini-batches. So no group is ever split. This module does not import torch.

Guarantees:
- GRPO compares siblings only, so `advantage_scope` has no effect on it;
- REINFORCE++ whitens rewards over its scope. Sorted batches hold answers of similar length, so the scope matters:
  `batch` is this batch only; `cohort` is all samples trained so far from the cohorts in the batch; `running` is all
  samples so far, with decaying weights. The current batch always counts;
- if rewards do not differ, the advantages are exactly 0 and the case is counted in the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sortedrl.errors import ConfigError, LearnerError
from sortedrl.records import SAME_REWARD, FinishReason, Sample, is_flat

_EPSILON = SAME_REWARD  # a smaller standard deviation counts as 0; also keeps divisions finite
# In the scope `running`, a reward's weight falls to 1/e after this many samples: several cohorts, so all lengths count.
_RUNNING_HORIZON = 1024.0
_COHORTS_KEPT = 64  # statistics of older cohorts are dropped; a cohort is used up long before 64 others are loaded

SCOPES = ("batch", "cohort", "running")


@dataclass(slots=True, kw_only=True)
class Moments:
    """Weighted count, mean and sum of squared deviations, which can be merged without loss of precision."""

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
        """Scale the weight of everything seen so far by `factor`; mean and standard deviation stay."""
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


def _whiten(rewards: np.ndarray, moments: Moments) -> np.ndarray:
    """Rewards minus the mean, in standard deviations; all 0 if the standard deviation is 0."""
    if moments.std < _EPSILON:
        return np.zeros_like(rewards)
    return (rewards - moments.mean) / (moments.std + _EPSILON)


# ---- advantage functions ---------------------------------------------------------------------------------------------

Scope = Callable[[np.ndarray], Moments]
"""Adds the batch's values to the scope's statistics and returns these."""

AdvantageFunction = Callable[[np.ndarray, Sequence[Hashable], Scope], np.ndarray]
"""From rewards, the group of each sample, and the scope, to advantages."""


def whitened_over_scope(rewards: np.ndarray, _groups: Sequence[Hashable], scope: Scope) -> np.ndarray:
    """Each reward minus the scope's mean, in the scope's standard deviations (REINFORCE++)."""
    return _whiten(rewards, scope(rewards))


def centred_and_whitened(rewards: np.ndarray, groups: Sequence[Hashable], scope: Scope) -> np.ndarray:
    """Each reward minus its siblings' mean, then whitened over the scope (REINFORCE++-baseline)."""
    centred = centred_on_siblings(rewards, groups, scope)
    return _whiten(centred, scope(centred))


def whitened_over_siblings(rewards: np.ndarray, groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """Each reward minus its siblings' mean, in their standard deviations (GRPO)."""
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        advantages[members] = _whiten(rewards[members], Moments.of(rewards[members]))
    return advantages


def centred_on_siblings(rewards: np.ndarray, groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """Each reward minus its siblings' mean; 0 if they do not differ (Dr. GRPO)."""
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        if not is_flat(rewards[members].tolist()):
            advantages[members] = rewards[members] - rewards[members].mean()
    return advantages


def leave_one_out(rewards: np.ndarray, groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """Each reward minus the mean of its other siblings; 0 if they do not differ, and without siblings (RLOO)."""
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        if not is_flat(rewards[members].tolist()):
            others = (rewards[members].sum() - rewards[members]) / (len(members) - 1)
            advantages[members] = rewards[members] - others
    return advantages


def leave_one_out_over_scope(rewards: np.ndarray, _groups: Sequence[Hashable], scope: Scope) -> np.ndarray:
    """Each reward minus the mean of all others in the scope; 0 if none differ, and for the very first sample."""
    seen = scope(rewards)
    if seen.std < _EPSILON:
        return np.zeros_like(rewards)
    return rewards - (seen.weight * seen.mean - rewards) / (seen.weight - 1)


def raw_rewards(rewards: np.ndarray, _groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """The rewards unchanged: a critic turns them into advantages token by token (PPO, `critic.py`)."""
    return rewards


# ---- rewards before advantages ---------------------------------------------------------------------------------------


def overlong_penalty(num_tokens: int, budget: int, buffer: float) -> float:
    """DAPO's soft length penalty: 0 until the last `buffer` share of the budget, then linearly down to -1."""
    room = buffer * budget
    return -min(max(num_tokens - (budget - room), 0.0) / room, 1.0)


def is_truncated(sample: Sample) -> bool:
    return sample.finish_reason is FinishReason.LENGTH


def flat_groups(samples: Sequence[Sample]) -> list[bool]:
    """For each sample, whether it has siblings and all of them got the same reward: DAPO leaves such groups out."""
    rewards = np.array([reward_of(sample) for sample in samples])
    flags = [False] * len(samples)
    for members in _members([sample.group for sample in samples]):
        if len(members) > 1 and is_flat(rewards[members].tolist()):
            for member in members:
                flags[member] = True
    return flags


class AdvantageEstimator:
    """An advantage function with its scope's statistics of earlier batches."""

    def __init__(self, function: AdvantageFunction, scope: str = "batch", *, horizon: float = _RUNNING_HORIZON) -> None:
        if scope not in SCOPES:
            raise ConfigError(f"learner.advantage_scope {scope!r} is unknown: use one of {', '.join(SCOPES)}")
        self.function = function
        self.scope = scope
        self.horizon = horizon
        self._running = Moments()
        self._cohorts: dict[int, Moments] = {}

    def estimate(
        self, samples: Sequence[Sample], rewards: Sequence[float] | None = None
    ) -> tuple[list[float], dict[str, float]]:
        """Advantages in the samples' order, and metrics of the batch. Call it once per update: it keeps statistics.

        `rewards` replace the samples' rewards, after shaping or a penalty. The metrics use the samples' rewards.
        """
        given = np.array([reward_of(sample) for sample in samples], dtype=np.float64)
        shaped = given if rewards is None else np.array(rewards, dtype=np.float64)
        groups = [sample.group for sample in samples]
        cohorts = [sample.cohort for sample in samples]
        advantages = self._checked(self.function(shaped, groups, lambda values: self._moments(cohorts, values)), shaped)
        return advantages.tolist(), self._metrics(samples, given, groups, advantages)

    def _checked(self, returned: Any, rewards: np.ndarray) -> np.ndarray:
        """What the function returned, as one finite number per reward; the function may be the user's."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        try:
            advantages = np.asarray(returned, dtype=np.float64)
        except (TypeError, ValueError):
            raise LearnerError(f"the advantage function {name} returned {returned!r:.80}: return an array") from None
        if advantages.shape != rewards.shape:
            raise LearnerError(
                f"the advantage function {name} returned an array of shape {advantages.shape} for {len(rewards)} "
                "rewards: return one number per reward"
            )
        if np.isfinite(rewards).all() and not np.isfinite(advantages).all():
            raise LearnerError(f"the advantage function {name} returned a number that is not finite: correct it")
        return advantages

    def state_dict(self) -> dict[str, Any]:
        cohorts = {str(cohort): moments.as_list() for cohort, moments in self._cohorts.items()}
        return {"running": self._running.as_list(), "cohorts": cohorts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running = Moments.from_list(state["running"])
        self._cohorts = {int(cohort): Moments.from_list(values) for cohort, values in state["cohorts"].items()}

    def _moments(self, cohorts: Sequence[int], values: np.ndarray) -> Moments:
        """Add the batch to the scope's statistics and return those to whiten it with."""
        batch = Moments.of(values)
        match self.scope:
            case "running":
                self._running.forget(math.exp(-batch.weight / self.horizon))
                self._running.add(batch)
                return self._running
            case "cohort":
                return self._cohort_moments(cohorts, values)
            case _:
                return batch

    def _cohort_moments(self, cohorts: Sequence[int], values: np.ndarray) -> Moments:
        # Pooled, because a batch may mix cohorts, and the first rewards of a cohort may not differ yet.
        pooled = Moments()
        for members in _members(cohorts):
            cohort = cohorts[members[0]]
            moments = self._cohorts.setdefault(cohort, Moments())
            moments.add(Moments.of(values[members]))
            pooled.add(moments)
        for cohort in sorted(self._cohorts)[:-_COHORTS_KEPT]:
            del self._cohorts[cohort]
        return pooled

    def _metrics(
        self, samples: Sequence[Sample], rewards: np.ndarray, groups: Sequence[Hashable], advantages: np.ndarray
    ) -> dict[str, float]:
        is_flat_batch = is_flat(rewards.tolist())
        truncated = [is_truncated(sample) for sample in samples]
        groups_with_siblings = [rewards[members] for members in _members(groups) if len(members) > 1]
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "advantage_mean": float(advantages.mean()),
            "advantage_std": float(advantages.std()),
            "advantage_max": float(np.abs(advantages).max()),
            "zero_advantage_fraction": float((advantages == 0).mean()),
            "truncated_fraction": float(np.mean(truncated)),
            "degenerate_all_right": float(is_flat_batch and rewards[0] > 0),
            "degenerate_all_wrong": float(is_flat_batch and rewards[0] <= 0),
            "degenerate_all_truncated": float(all(truncated)),
            "degenerate_groups": float(sum(is_flat(group.tolist()) for group in groups_with_siblings)),
        }


def reward_of(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.id} is in a batch but has no reward"
    return sample.reward


def _members(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions that share a key, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    return list(members.values())
