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
from sortedrl.records import SAME_REWARD, FinishReason, Sample, is_flat

EPSILON = SAME_REWARD  # a spread below this is none, and it keeps divisions finite
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


# ---- one function per estimator: rewards, their groups, and the scope's statistics, to advantages ------------------

Scope = Callable[[np.ndarray], Moments]
"""Takes the batch's values into what the scope remembers, and gives the statistics to whiten them with."""

AdvantageFunction = Callable[[np.ndarray, Sequence[Hashable], Scope], np.ndarray]


def against_scope(rewards: np.ndarray, _groups: Sequence[Hashable], scope: Scope) -> np.ndarray:
    """Each reward against all of its scope, in units of the scope's spread."""
    return whiten(rewards, scope(rewards))


def centred_against_scope(rewards: np.ndarray, groups: Sequence[Hashable], scope: Scope) -> np.ndarray:
    """Each reward less its siblings' mean, then against all of its scope."""
    centred = against_mean(rewards, groups, scope)
    return whiten(centred, scope(centred))


def against_siblings(rewards: np.ndarray, groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """Each reward against its siblings' mean, in units of their spread."""
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        advantages[members] = whiten(rewards[members], Moments.of(rewards[members]))
    return advantages


def against_mean(rewards: np.ndarray, groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """Each reward less its siblings' mean; 0 where they do not differ."""
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        if not is_flat(rewards[members].tolist()):
            advantages[members] = rewards[members] - rewards[members].mean()
    return advantages


def against_others(rewards: np.ndarray, groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """Each reward less the mean of its siblings without it; 0 where they do not differ, and for a sample alone."""
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        if not is_flat(rewards[members].tolist()):
            others = (rewards[members].sum() - rewards[members]) / (len(members) - 1)
            advantages[members] = rewards[members] - others
    return advantages


def against_others_so_far(rewards: np.ndarray, _groups: Sequence[Hashable], scope: Scope) -> np.ndarray:
    """Each reward less the mean of all others of its scope; 0 where none differ, and for the very first alone."""
    seen = scope(rewards)
    if seen.std < EPSILON:
        return np.zeros_like(rewards)
    return rewards - (seen.weight * seen.mean - rewards) / (seen.weight - 1)


def by_critic(rewards: np.ndarray, _groups: Sequence[Hashable], _scope: Scope) -> np.ndarray:
    """The rewards as they are: a critic turns them into advantages token by token (`critic.py`)."""
    return rewards


# ---- what becomes of rewards before -------------------------------------------------------------------------------


def overlong_penalty(num_tokens: int, budget: int, buffer: float) -> float:
    """DAPO's soft punishment: 0 until the last `buffer` share of the budget, from there linearly down to -1."""
    room = buffer * budget
    return -min(max(num_tokens - (budget - room), 0.0) / room, 1.0)


def is_truncated(sample: Sample) -> bool:
    return sample.finish_reason is FinishReason.LENGTH


def flat_groups(samples: Sequence[Sample]) -> list[bool]:
    """Of each sample, whether it has siblings that were all rewarded alike: DAPO leaves such groups out."""
    rewards = np.array([reward_of(sample) for sample in samples])
    flags = [False] * len(samples)
    for members in _members([sample.group for sample in samples]):
        if len(members) > 1 and is_flat(rewards[members].tolist()):
            for member in members:
                flags[member] = True
    return flags


class AdvantageEstimator:
    """An advantage function with the statistics that its scope remembers from earlier batches."""

    def __init__(self, function: AdvantageFunction, scope: str = "batch", *, horizon: float = RUNNING_HORIZON) -> None:
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
        """Advantages in the samples' order, and metrics on the batch. Remembers the batch: call once per update.

        `rewards` are what the samples' own became by shaping or a penalty; the metrics tell of the samples' own.
        """
        given = np.array([reward_of(sample) for sample in samples], dtype=np.float64)
        shaped = given if rewards is None else np.array(rewards, dtype=np.float64)
        groups = [sample.group for sample in samples]
        cohorts = [sample.cohort for sample in samples]
        advantages = self.function(shaped, groups, lambda values: self._moments(cohorts, values))
        return advantages.tolist(), self._metrics(samples, given, groups, advantages)

    def state_dict(self) -> dict[str, Any]:
        cohorts = {str(cohort): moments.as_list() for cohort, moments in self._cohorts.items()}
        return {"running": self._running.as_list(), "cohorts": cohorts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running = Moments.from_list(state["running"])
        self._cohorts = {int(cohort): Moments.from_list(values) for cohort, values in state["cohorts"].items()}

    def _moments(self, cohorts: Sequence[int], values: np.ndarray) -> Moments:
        """Take the batch into what the scope remembers, and return the statistics to whiten it with."""
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
        # A batch may mix cohorts, and the first samples of one have no spread yet: what is known of all is pooled.
        pooled = Moments()
        for members in _members(cohorts):
            cohort = cohorts[members[0]]
            moments = self._cohorts.setdefault(cohort, Moments())
            moments.add(Moments.of(values[members]))
            pooled.add(moments)
        for cohort in sorted(self._cohorts)[:-COHORTS_KEPT]:
            del self._cohorts[cohort]
        return pooled

    def _metrics(
        self, samples: Sequence[Sample], rewards: np.ndarray, groups: Sequence[Hashable], advantages: np.ndarray
    ) -> dict[str, float]:
        without_spread = is_flat(rewards.tolist())
        truncated = [is_truncated(sample) for sample in samples]
        families = [rewards[members] for members in _members(groups) if len(members) > 1]
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "advantage_mean": float(advantages.mean()),
            "advantage_std": float(advantages.std()),
            "advantage_max": float(np.abs(advantages).max()),
            "zero_advantage_fraction": float((advantages == 0).mean()),
            "truncated_fraction": float(np.mean(truncated)),
            "degenerate_all_right": float(without_spread and rewards[0] > 0),
            "degenerate_all_wrong": float(without_spread and rewards[0] <= 0),
            "degenerate_all_truncated": float(all(truncated)),
            "degenerate_groups": float(sum(is_flat(family.tolist()) for family in families)),
        }


def reward_of(sample: Sample) -> float:
    assert sample.reward is not None, f"sample {sample.id} is in a batch without a reward"
    return sample.reward


def _members(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions that share a key, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    return list(members.values())
