"""Steps of the local engine between two changes of its running slots: what is known once for all of them.

The local engine makes one when slots have changed, and takes steps with it until an attempt ends, starts or is
interrupted. At a small model a step's arithmetic is over soon, so nothing is asked per attempt and step: whether any of
them can have ended is one look at all tokens, and attempts get theirs when somebody needs them.

Shapes: b running slots, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sortedrl.engine.base import Sampling
from sortedrl.engine.local.attempt import Attempt
from sortedrl.engine.local.cache import SlotCache, Steps
from sortedrl.engine.sampling.draw import Choice, shape_logits
from sortedrl.engine.sampling.filters import is_filtered


@dataclass(slots=True, kw_only=True)
class Stretch:
    plan: Steps
    tokens_b: torch.Tensor  # what the next step feeds
    samplings: Sequence[Sampling] | None  # None: all take logits as they are
    stops: frozenset[int]  # of any attempt
    has_strings: bool  # any attempt may end with a text
    num_left: int  # tokens until the first budget is used up
    is_taken: bool = False  # the plan's step has been made

    @classmethod
    def begin(cls, active: Sequence[Attempt], cache: SlotCache) -> Stretch:
        samplings = [attempt.request.sampling for attempt in active]
        kinds = {id(sampling): sampling for sampling in samplings}.values()  # most requests share one
        is_plain = all(sampling.temperature in (0.0, 1.0) and not is_filtered(sampling) for sampling in kinds)
        return cls(
            plan=cache.plan_decode([attempt.length for attempt in active]),
            tokens_b=torch.tensor([attempt.tokens[-1] for attempt in active], device=cache.device),
            samplings=None if is_plain else samplings,
            stops=frozenset().union(*{attempt.stops for attempt in active}),
            has_strings=any(attempt.decode is not None for attempt in active),
            num_left=min(attempt.request.budget - len(attempt.tokens) for attempt in active),
        )

    def next_plan(self, cache: SlotCache) -> Steps:
        """Of the step to be made; the same again if that did not come to its end."""
        if self.is_taken:
            if self.plan.num_steps > 1:
                self.plan.advance()
            else:
                self.plan = cache.plan_decode((self.plan.positions_t + 2).tolist(), self.plan.runs)
            self.is_taken = False
        return self.plan

    def shape(self, logits_bv: torch.Tensor) -> torch.Tensor:
        return logits_bv if self.samplings is None else shape_logits(logits_bv, self.samplings)

    def take(self, choice: Choice) -> bool:
        """Count a step's tokens; whether all attempts surely go on, and their logits are sound."""
        self.is_taken, self.tokens_b = True, choice.tokens_r
        self.num_left -= 1
        return (
            self.num_left > 0
            and not self.has_strings
            and self.stops.isdisjoint(choice.tokens)
            and math.isfinite(sum(choice.logprobs))
        )
