"""What an update knows about its samples before the first step, and the loss inputs of a micro-batch made from it.

`learner/torch.py` makes one `LossInputs` per update. For each micro-batch, `LossInputs.tokens` gives `policy_loss` its
inputs at the answer tokens. Samples are identified by their index in the batch.

Guarantees: divisors depend only on the mini-batch, not on how it is split into micro-batches; samples without tokens
and tokens that the policy did not sample count nowhere.

Shapes: a sampled answer tokens, t sampled tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sortedrl.learner.advantage import flat_groups, is_truncated, overlong_penalty, reward_of
from sortedrl.learner.algorithms import Mean, Objective
from sortedrl.learner.critic import gae, whitened
from sortedrl.learner.device import to_device, to_host
from sortedrl.learner.loss import TokenInputs, divergence
from sortedrl.learner.pack import MicroBatch
from sortedrl.records import Batch, Sample

PerToken = Mapping[int, Tensor]
"""A number for each sampled token of a sample, [t], by the sample's index in the batch."""


def mini_batches(num_samples: int, num_parts: int) -> list[range]:
    """Split a batch into consecutive mini-batches whose sizes differ by at most one; none is empty."""
    parts = min(num_samples, num_parts)
    edges = [num_samples * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def shaped_rewards(samples: Sequence[Sample], objective: Objective) -> list[float]:
    """The samples' rewards, minus the penalty for long answers where the objective has one."""
    rewards = [reward_of(sample) for sample in samples]
    if objective.overlong == "shape":
        for index, sample in enumerate(samples):
            rewards[index] += overlong_penalty(sample.num_tokens, sample.budget, objective.overlong_buffer)
    return rewards


def kl_penalties(samples: Sequence[Sample], objective: Objective, reference: PerToken) -> dict[int, Tensor]:
    """What KL to the reference model takes from the reward, estimated with the behaviour policy's log-probs."""
    if not reference:
        return {}
    reference_a = torch.cat(list(reference.values()))
    sampled = [s.logprobs for index in reference for s in samples[index].segments if not s.is_masked]
    behaviour_a = to_device(np.concatenate(sampled).astype(np.float32), reference_a.device)
    penalties_a = objective.kl_coef * divergence(behaviour_a, reference_a, objective.kl_estimator)
    return dict(zip(reference, penalties_a.split([len(part_t) for part_t in reference.values()]), strict=True))


def less_penalties(rewards: Sequence[float], penalties: PerToken) -> list[float]:
    """The samples' rewards minus the penalties of their tokens."""
    if not penalties:
        return list(rewards)
    (sums_s,) = to_host([torch.stack([penalty_t.sum() for penalty_t in penalties.values()])])
    sums = dict(zip(penalties, sums_s.tolist(), strict=True))
    return [reward - sums[index] if index in sums else reward for index, reward in enumerate(rewards)]


def split_by_sample(micro: MicroBatch, values_a: Tensor) -> PerToken:
    """Values at a micro-batch's tokens, split by sample."""
    return dict(zip(micro.indices, values_a.split(micro.lengths), strict=True))


@dataclass(slots=True, kw_only=True)
class LossInputs:
    samples: Sequence[Sample]
    version: int  # of the weights when the batch was harvested
    advantages: Sequence[float]  # one per sample
    is_masked: Sequence[bool]  # these samples give no gradient
    is_filtered: Sequence[bool]  # these samples give no gradient and count in no mean
    learns_from_all: bool = False  # samples whose advantage is 0 give a gradient too
    loss_mean: Mean = "token"
    token_advantages: PerToken | None = None  # from the critic; they replace `advantages`
    start: PerToken | None = None  # log-probs at the start of the update, where the objective needs them
    has_old: bool = False  # the clipped ratio is to `start`, and importance weights bring the rest
    reference: PerToken | None = None  # log-probs of the reference model
    values: PerToken | None = None  # the critic's values at the start of the update
    returns: PerToken | None = None

    @classmethod
    def of(
        cls, batch: Batch, objective: Objective, advantages: Sequence[float], reference: PerToken | None
    ) -> LossInputs:
        samples = batch.samples
        return cls(
            samples=samples,
            version=batch.version,
            advantages=advantages,
            is_masked=[objective.overlong == "mask" and is_truncated(sample) for sample in samples],
            is_filtered=[False] * len(samples) if objective.flat_groups == "keep" else flat_groups(samples),
            learns_from_all=objective.learns_from_all,
            loss_mean=objective.loss_mean,
            has_old=objective.importance != "none",
            reference=reference if objective.has_loss_kl else None,
        )

    def add_values(self, objective: Objective, values: PerToken, rewards: Sequence[float], penalties: PerToken) -> None:
        """Set token advantages and returns from the critic's values.

        A sample's reward comes with its last token; KL penalties come with each token.
        """
        self.values, self.returns, self.token_advantages = values, {}, {}
        if not values:
            return
        lengths, values_a = [len(values_t) for values_t in values.values()], torch.cat(list(values.values()))
        rewards_a = torch.zeros_like(values_a)
        if penalties:
            rewards_a = rewards_a - torch.cat([penalties[index] for index in values])
        last_s = to_device(np.cumsum(lengths) - 1, values_a.device)
        reward_s = to_device(np.array([rewards[index] for index in values], dtype=np.float32), values_a.device)
        rewards_a = rewards_a.index_add(0, last_s, reward_s)
        advantages_a = gae(rewards_a, values_a, lengths, gamma=objective.gamma, lam=objective.gae_lambda)
        self.returns = dict(zip(values, (advantages_a + values_a).split(lengths), strict=True))
        self.token_advantages = dict(zip(values, whitened(advantages_a).split(lengths), strict=True))

    def learned(self, indices: Iterable[int]) -> list[int]:
        """Those of the samples that give a gradient."""
        return [
            index
            for index in indices
            if self.samples[index].num_sampled
            and not (self.is_masked[index] or self.is_filtered[index])
            and (self.learns_from_all or self.advantages[index] != 0)
        ]

    def num_tokens(self, indices: Iterable[int]) -> int:
        """The number of answer tokens that count in a mean over tokens."""
        return sum(
            self.samples[index].num_sampled
            for index in indices
            if not (self.is_masked[index] or self.is_filtered[index])
        )

    def divisor(self, indices: Iterable[int]) -> int:
        """The number that the summed loss of a mini-batch is divided by."""
        if self.loss_mean == "token":
            return self.num_tokens(indices)
        counted = [index for index in indices if self.samples[index].num_sampled and not self.is_filtered[index]]
        if self.loss_mean == "sequence":
            return len(counted)
        return sum(self.samples[index].budget for index in counted)

    def tokens(self, micro: MicroBatch) -> TokenInputs:
        """The inputs of the loss at the answer tokens of a micro-batch."""
        device = micro.targets_a.device

        def repeated(per_sample: Sequence[float]) -> Tensor:
            return to_device(np.repeat(np.array(per_sample, dtype=np.float32), micro.lengths), device)

        def joined(values: PerToken | None) -> Tensor | None:
            return None if values is None else torch.cat([values[index] for index in micro.indices])

        advantages_a = joined(self.token_advantages)
        if advantages_a is None:
            advantages_a = repeated([self.advantages[index] for index in micro.indices])
        start_a = joined(self.start)
        return TokenInputs(
            sample_a=micro.sample_a,
            behaviour_a=micro.behaviour_a,
            advantages_a=advantages_a,
            staleness_a=to_device(self._staleness(micro.indices), device),
            old_a=start_a if self.has_old else None,
            drift_a=None if start_a is None else start_a - micro.behaviour_a,
            reference_a=joined(self.reference),
            scale_a=repeated([1 / length for length in micro.lengths]) if self.loss_mean == "sequence" else None,
            values_a=joined(self.values),
            returns_a=joined(self.returns),
        )

    def _staleness(self, indices: Sequence[int]) -> np.ndarray:
        sampled = [s for index in indices for s in self.samples[index].segments if not s.is_masked]
        ages = np.array([self.version - segment.version for segment in sampled], dtype=np.int64)
        return np.repeat(ages, [len(segment.tokens) for segment in sampled])
