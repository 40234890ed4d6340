"""What an update knows of its samples before the first step, and how that reaches the tokens of a micro-batch.

`learner/torch.py` makes one `Terms` per update; `policy_loss` takes the `Tokens` that it gives for each micro-batch. A
sample is known by its place in the batch: `pack` carries one number per sample to each of its tokens, and that number
is the place, so that whatever is known of a sample or of its tokens can be looked up.

What it keeps true: divisors depend on the mini-batch alone, never on how it is split; a sample without tokens counts
nowhere, and neither do tokens that the policy did not sample.

Shapes: a sampled answer tokens, t sampled tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from sortedrl.learner.advantage import flat_groups, is_truncated, overlong_penalty, reward_of
from sortedrl.learner.algorithms import Mean, Objective
from sortedrl.learner.critic import gae, whitened
from sortedrl.learner.loss import Tokens, divergence
from sortedrl.learner.pack import MicroBatch
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


ByPlace = Mapping[int, Tensor]
"""A number for each token of a sample, [t], by the sample's place in the batch."""


@dataclass(slots=True, kw_only=True)
class Terms:
    samples: Sequence[Sample]
    version: int  # in force when the batch was taken
    advantages: Sequence[float]  # one per sample
    is_masked: Sequence[bool]  # gives no gradient
    is_filtered: Sequence[bool]  # gives no gradient and counts in no mean
    learns_from_all: bool = False  # also where the advantage is 0
    loss_mean: Mean = "token"
    token_advantages: ByPlace | None = None  # instead of `advantages`
    old: ByPlace | None = None
    reference: ByPlace | None = None
    values: ByPlace = field(default_factory=dict)
    returns: ByPlace | None = None

    def learned(self, places: Iterable[int]) -> list[int]:
        """Those that there is something to learn from."""
        return [
            place
            for place in places
            if self.samples[place].num_sampled
            and not (self.is_masked[place] or self.is_filtered[place])
            and (self.learns_from_all or self.advantages[place] != 0)
        ]

    def num_tokens(self, places: Iterable[int]) -> int:
        """Answer tokens that count in a mean over tokens."""
        return sum(
            self.samples[place].num_sampled
            for place in places
            if not (self.is_masked[place] or self.is_filtered[place])
        )

    def divisor(self, places: Iterable[int]) -> int:
        """What the loss of a mini-batch is divided by."""
        if self.loss_mean == "token":
            return self.num_tokens(places)
        counted = [place for place in places if self.samples[place].num_sampled and not self.is_filtered[place]]
        if self.loss_mean == "sequence":
            return len(counted)
        return sum(self.samples[place].budget for place in counted)

    def tokens(self, micro: MicroBatch) -> Tokens:
        places, lengths = places_of(micro)
        device = micro.targets_a.device
        repeats = torch.tensor(lengths, device=device)

        def spread(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).repeat_interleave(repeats)

        def joined(values: ByPlace | None) -> Tensor | None:
            return None if values is None else torch.cat([values[place] for place in places])

        advantages_a = joined(self.token_advantages)
        if advantages_a is None:
            advantages_a = spread([self.advantages[place] for place in places])
        return Tokens(
            sample_a=torch.tensor(places, device=device).repeat_interleave(repeats),
            behaviour_a=micro.behaviour_a,
            advantages_a=advantages_a,
            staleness_a=torch.tensor(self._staleness(places), device=device),
            old_a=joined(self.old),
            reference_a=joined(self.reference),
            scale_a=spread([1 / length for length in lengths]) if self.loss_mean == "sequence" else None,
            values_a=joined(self.values) if self.returns is not None else None,
            returns_a=joined(self.returns),
        )

    def _staleness(self, places: Sequence[int]) -> list[int]:
        ages: list[int] = []
        for place in places:
            for segment in (s for s in self.samples[place].segments if not s.is_masked):
                ages += [self.version - segment.version] * len(segment.tokens)
        return ages


def marks(num_samples: int, places: Iterable[int]) -> list[float]:
    """The number per sample that `pack` carries: its place counted from 1, and 0 for what is not to be computed."""
    found = [0.0] * num_samples
    for place in places:
        found[place] = place + 1.0
    return found


def places_of(micro: MicroBatch) -> tuple[list[int], list[int]]:
    """The places of a micro-batch's samples in the order of their tokens, and how many tokens each has."""
    found, lengths = torch.unique_consecutive(micro.mark_a, return_counts=True)
    return [int(mark) - 1 for mark in found.tolist()], lengths.tolist()


def by_place(micro: MicroBatch, values_a: Tensor) -> dict[int, Tensor]:
    """Values at a micro-batch's tokens, sample by sample."""
    places, lengths = places_of(micro)
    return dict(zip(places, values_a.split(lengths), strict=True))
