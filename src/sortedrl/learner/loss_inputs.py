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

import torch
from torch import Tensor

from sortedrl.learner.advantage import flat_groups, is_truncated, overlong_penalty, reward_of
from sortedrl.learner.algorithms import Mean, Objective
from sortedrl.learner.critic import gae, whitened
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
    penalties: dict[int, Tensor] = {}
    for index, reference_t in reference.items():
        sampled = [value for s in samples[index].segments if not s.is_masked for value in s.logprobs]
        behaviour_t = torch.tensor(sampled, device=reference_t.device)
        penalties[index] = objective.kl_coef * divergence(behaviour_t, reference_t, objective.kl_estimator)
    return penalties


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
    old: PerToken | None = None  # log-probs at the start of the update
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
            reference=reference if objective.has_loss_kl else None,
        )

    def add_values(self, objective: Objective, values: PerToken, rewards: Sequence[float], penalties: PerToken) -> None:
        """Set token advantages and returns from the critic's values.

        A sample's reward comes with its last token; KL penalties come with each token.
        """
        advantages: dict[int, Tensor] = {}
        for index, values_t in values.items():
            rewards_t = -penalties[index] if index in penalties else torch.zeros_like(values_t)
            rewards_t[-1] += rewards[index]
            advantages[index] = gae(rewards_t, values_t, gamma=objective.gamma, lam=objective.gae_lambda)
        self.values = values
        self.returns = {index: advantages[index] + values[index] for index in values}
        self.token_advantages = whitened(advantages)

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
        lengths = torch.tensor(micro.lengths, device=device)

        def repeated(per_sample: Sequence[float]) -> Tensor:
            return torch.tensor(per_sample, dtype=torch.float32, device=device).repeat_interleave(lengths)

        def joined(values: PerToken | None) -> Tensor | None:
            return None if values is None else torch.cat([values[index] for index in micro.indices])

        advantages_a = joined(self.token_advantages)
        if advantages_a is None:
            advantages_a = repeated([self.advantages[index] for index in micro.indices])
        return TokenInputs(
            sample_a=micro.sample_a,
            behaviour_a=micro.behaviour_a,
            advantages_a=advantages_a,
            staleness_a=torch.tensor(self._staleness(micro.indices), device=device),
            old_a=joined(self.old),
            reference_a=joined(self.reference),
            scale_a=repeated([1 / length for length in micro.lengths]) if self.loss_mean == "sequence" else None,
            values_a=joined(self.values),
            returns_a=joined(self.returns),
        )

    def _staleness(self, indices: Sequence[int]) -> list[int]:
        ages: list[int] = []
        for index in indices:
            for segment in (s for s in self.samples[index].segments if not s.is_masked):
                ages += [self.version - segment.version] * len(segment.tokens)
        return ages
