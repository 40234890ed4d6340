"""Decode steps between two changes of the running slots: facts that are computed once and hold for all these steps.

The local engine makes a `SteadySteps` when its slots have changed, and decodes with it until an attempt ends, starts or
is interrupted. With a small model the arithmetic of a step is short, so a step does no work per attempt: one check over
all tokens tells whether any attempt may have ended, and attempts receive their tokens later, together.

Shapes: b running slots, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.base import Sampling
from sortedrl.engine.local.cache import SlotCache, StepPlan
from sortedrl.engine.sampling.draw import Choice, are_plain, shape_logits


@dataclass(slots=True, kw_only=True)
class SteadySteps:
    plan: StepPlan
    tokens_b: torch.Tensor  # input of the next step
    samplings: Sequence[Sampling] | None  # None: no attempt changes its logits
    stops: frozenset[int]  # stop tokens of all attempts
    has_stop_strings: bool  # some attempt has stop strings
    num_left: int  # steps until the first attempt reaches its budget
    is_step_done: bool = False  # the plan's current step has been decoded

    @classmethod
    def begin(cls, active: Sequence[Attempt], cache: SlotCache) -> SteadySteps:
        samplings = [attempt.request.sampling for attempt in active]
        return cls(
            plan=cache.plan_decode([attempt.length for attempt in active]),
            tokens_b=torch.tensor([attempt.tokens[-1] for attempt in active], device=cache.device),
            samplings=None if are_plain(samplings) else samplings,
            stops=frozenset().union(*{attempt.stops for attempt in active}),
            has_stop_strings=any(attempt.decode is not None for attempt in active),
            num_left=min(attempt.request.budget - len(attempt.tokens) for attempt in active),
        )

    def next_plan(self, cache: SlotCache) -> StepPlan:
        """The next step's plan; the same plan again after a failed step."""
        if self.is_step_done:
            if self.plan.num_steps > 1:
                self.plan.advance()
            else:
                self.plan = cache.plan_decode((self.plan.positions_t + 2).tolist(), self.plan.group_sizes)
            self.is_step_done = False
        return self.plan

    def shape(self, logits_bv: torch.Tensor) -> torch.Tensor:
        """Apply temperatures and filters."""
        return logits_bv if self.samplings is None else shape_logits(logits_bv, self.samplings)

    def record(self, choice: Choice) -> bool:
        """Record the tokens of a step. Returns True if no attempt can have ended and all log-probs are finite."""
        self.is_step_done, self.tokens_b = True, choice.tokens_r
        self.num_left -= 1
        return (
            self.num_left > 0
            and not self.has_stop_strings
            and self.stops.isdisjoint(choice.tokens)
            and math.isfinite(sum(choice.logprobs))
        )
