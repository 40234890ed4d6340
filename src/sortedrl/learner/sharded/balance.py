"""Divides the samples of a step into micro-batches for several ranks, so that ranks rarely wait for each other.

`rank.py` calls `plan_rounds` on every rank and lays out its own micro-batches only. In a round each rank computes one
micro-batch. Ranks exchange weights at every layer, so a round takes as long as its most expensive micro-batch. The cost
of a micro-batch is its tokens, plus the squares of its rows' lengths for attention.

Guarantees: all ranks make the same plan, because it depends on nothing but the arguments; each sample is in one
micro-batch; no micro-batch exceeds the token budget, unless it is a single sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sortedrl.learner.pack import PromptGroup, first_fit, prompt_groups
from sortedrl.records import Sample

_SLACK = 1.1  # prompts are divided into groups of an even share of the tokens times this, since samples are not split


@dataclass(slots=True, kw_only=True)
class MicroPlan:
    """The samples of a micro-batch, before it is laid out."""

    groups: list[PromptGroup] = field(default_factory=list)
    num_tokens: int = 0
    cost: float = 0.0

    def add(self, group: PromptGroup, cost: float) -> None:
        self.groups.append(group)
        self.num_tokens += group.num_tokens
        self.cost += cost


Round = list[MicroPlan | None]
"""A micro-batch for each rank, or None for a rank that has nothing to compute."""


def attention_weight(model: Any) -> float:
    """The cost of a pair of tokens in attention, in units of what a token costs in all matrix products."""
    config = model.config.get_text_config()
    sizes = config.num_hidden_layers * config.hidden_size
    return sizes / max(sum(parameter.numel() for parameter in model.parameters()), 1)


def plan_rounds(
    samples: Sequence[Sample], indices: Sequence[int], micro_tokens: int, num_ranks: int, attention: float
) -> list[Round]:
    """The rounds that take the least time, of a few divisions. `attention` is from `attention_weight`."""
    coarse = prompt_groups(samples, indices, micro_tokens)
    if not coarse:
        return []

    def cost_of(group: PromptGroup) -> float:
        prompt = len(group.prompt)
        return group.num_tokens + attention * sum((prompt + samples[i].num_tokens - 1) ** 2 for i in group.indices)

    packed = [_plan_of(groups, cost_of) for groups in first_fit(coarse, micro_tokens)]
    num_rounds = -(-len(packed) // num_ranks)
    divisions = [packed]
    for rounds in (num_rounds, num_rounds + 1):
        share = math.ceil(sum(group.num_tokens for group in coarse) / (rounds * num_ranks) * _SLACK)
        for limit in {micro_tokens, min(share, micro_tokens)}:
            costs = [(group, cost_of(group)) for group in prompt_groups(samples, indices, limit)]
            spread = _spread(costs, rounds * num_ranks, micro_tokens)
            if spread is not None:
                divisions.append(spread)
    return min((_in_rounds(plans, num_ranks) for plans in divisions), key=_duration)


def _plan_of(groups: Sequence[PromptGroup], cost_of: Any) -> MicroPlan:
    plan = MicroPlan()
    for group in groups:
        plan.add(group, cost_of(group))
    return plan


def _spread(groups: Sequence[tuple[PromptGroup, float]], count: int, micro_tokens: int) -> list[MicroPlan] | None:
    """Spread the groups over `count` micro-batches of even cost, the most expensive first; None if they do not fit."""
    plans = [MicroPlan() for _ in range(count)]
    for group, cost in sorted(groups, key=lambda pair: -pair[1]):
        fitting = [plan for plan in plans if not plan.groups or plan.num_tokens + group.num_tokens <= micro_tokens]
        if not fitting:
            return None
        min(fitting, key=lambda plan: plan.cost).add(group, cost)
    return [plan for plan in plans if plan.groups]


def _in_rounds(plans: Sequence[MicroPlan], num_ranks: int) -> list[Round]:
    """Micro-batches of similar cost in the same round."""
    ordered = sorted(plans, key=lambda plan: -plan.cost)
    rounds: list[Round] = []
    for first in range(0, len(ordered), num_ranks):
        members = ordered[first : first + num_ranks]
        rounds.append([*members, *[None] * (num_ranks - len(members))])
    return rounds


def _duration(rounds: Sequence[Round]) -> float:
    return sum(members[0].cost for members in rounds if members[0] is not None)
