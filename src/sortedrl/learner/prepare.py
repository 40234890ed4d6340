"""From a batch to the terms of its update: rewards as they are learned from, who counts, and the critic's advantages.

`learner/torch.py` calls these once per update, in order, before any weight has moved. The samples themselves are left
as they are.

Shapes: t sampled tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sortedrl.learner.advantage import flat_groups, is_truncated, overlong_penalty, reward_of
from sortedrl.learner.algorithms import Objective
from sortedrl.learner.critic import gae, whitened
from sortedrl.learner.loss import divergence
from sortedrl.learner.terms import ByPlace, Terms
from sortedrl.records import Batch, Sample


def cut(num_samples: int, num_parts: int) -> list[tuple[int, int]]:
    """Bounds of consecutive mini-batches, equal but for one sample; never an empty one."""
    parts = min(num_samples, num_parts)
    edges = [num_samples * part // parts for part in range(parts + 1)]
    return list(pairwise(edges))


def shaped_rewards(samples: Sequence[Sample], objective: Objective) -> list[float]:
    """The samples' rewards, less what length costs where the objective shapes it."""
    rewards = [reward_of(sample) for sample in samples]
    if objective.overlong == "shape":
        for place, sample in enumerate(samples):
            rewards[place] += overlong_penalty(sample.num_tokens, sample.budget, objective.overlong_buffer)
    return rewards


def kl_penalties(samples: Sequence[Sample], objective: Objective, reference: ByPlace) -> dict[int, Tensor]:
    """What KL to the reference takes from the reward, at tokens that the behaviour policy wrote."""
    found: dict[int, Tensor] = {}
    for place, reference_t in reference.items():
        sampled = [value for s in samples[place].segments if not s.is_masked for value in s.logprobs]
        behaviour_t = torch.tensor(sampled, device=reference_t.device)
        found[place] = objective.kl_coef * divergence(behaviour_t, reference_t, objective.kl_estimator)
    return found


def make_terms(batch: Batch, objective: Objective, advantages: Sequence[float], reference: ByPlace | None) -> Terms:
    samples = batch.samples
    return Terms(
        samples=samples,
        version=batch.version,
        advantages=advantages,
        is_masked=[objective.overlong == "mask" and is_truncated(sample) for sample in samples],
        is_filtered=[False] * len(samples) if objective.flat_groups == "keep" else flat_groups(samples),
        learns_from_all=objective.learns_from_all,
        loss_mean=objective.loss_mean,
        reference=reference if objective.has_loss_kl else None,
    )


def add_values(
    terms: Terms, objective: Objective, values: ByPlace, rewards: Sequence[float], penalties: ByPlace
) -> None:
    """Advantages and returns by the critic: the reward comes with the last token, penalties with each."""
    advantages: dict[int, Tensor] = {}
    for place, values_t in values.items():
        rewards_t = -penalties[place] if place in penalties else torch.zeros_like(values_t)
        rewards_t[-1] += rewards[place]
        advantages[place] = gae(rewards_t, values_t, gamma=objective.gamma, lam=objective.gae_lambda)
    terms.values = values
    terms.returns = {place: advantages[place] + values[place] for place in values}
    terms.token_advantages = whitened(advantages)
