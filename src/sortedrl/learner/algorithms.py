"""The table of algorithms, and the objective that an algorithm and the `learner` section define together.

`config/config.py` asks which algorithms exist and which compare siblings. `learner/torch.py` asks for the objective
once. A key that the section leaves open takes the algorithm's value; a key that it sets overrides it. So a variant of
an algorithm is a setting, never a branch in code. docs/guides/algorithms.md has the formulas. An algorithm or an
advantage function of the user's is found here too (`external/plugins.py`). This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sortedrl.external.plugins import PlugPoint
from sortedrl.learner.advantage import (
    AdvantageFunction,
    centred_and_whitened,
    centred_on_siblings,
    leave_one_out,
    leave_one_out_over_scope,
    raw_rewards,
    whitened_over_scope,
    whitened_over_siblings,
)

if TYPE_CHECKING:
    from torch import Tensor

_Level = Literal["token", "sequence"]
Mean = Literal["token", "sequence", "constant"]
_Overlong = Literal["keep", "mask", "shape"]
_Importance = Literal["none", "token", "sequence"]
MaskLevel = Literal["token", "sequence", "geometric"]
Estimator = Literal["k1", "k2", "k3"]
_FlatGroups = Literal["keep", "zero", "replace"]


class Surrogate(Protocol):
    """The loss of each answer token, from the ratio to the policy that sampled it and from its advantage."""

    def __call__(
        self, objective: Objective, ratio_a: Tensor, advantages_a: Tensor, logprobs_a: Tensor, /
    ) -> Tensor: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class Algorithm:
    """The defaults of an algorithm. The section can override all except surrogate, siblings and critic."""

    advantage: AdvantageFunction
    without_siblings: AdvantageFunction | None = None  # replaces `advantage` if group_size is 1; scope "running"
    ratio: _Level = "token"  # what is clipped: each token's ratio, or the geometric mean over its sample
    loss_mean: Mean = "token"  # over tokens, over the samples' means, or over the tokens that the budget allows
    clip_low: float = 0.2
    clip_high: float = 0.28
    overlong: _Overlong = "keep"  # truncated answers: like any other, without gradient, or with a length penalty
    flat_groups: _FlatGroups = "keep"  # if all siblings score the same: count them in means, do not, or replace them
    needs_siblings: bool = False
    has_critic: bool = False
    surrogate: Surrogate | None = None  # None: the clipped surrogate of PPO


# fmt: off
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({
    "reinforce++":          Algorithm(advantage=whitened_over_scope),
    "reinforce++-baseline": Algorithm(advantage=centred_and_whitened, needs_siblings=True),
    "grpo":                 Algorithm(advantage=whitened_over_siblings, needs_siblings=True),
    "dr_grpo":              Algorithm(advantage=centred_on_siblings, needs_siblings=True,
                                      loss_mean="constant", clip_high=0.2),
    "rloo":                 Algorithm(advantage=leave_one_out, without_siblings=leave_one_out_over_scope,
                                      needs_siblings=True, loss_mean="constant", clip_high=0.2),
    "dapo":                 Algorithm(advantage=whitened_over_siblings, needs_siblings=True,
                                      overlong="shape", flat_groups="zero"),
    "gspo":                 Algorithm(advantage=whitened_over_siblings, needs_siblings=True,
                                      ratio="sequence", loss_mean="sequence", clip_low=3e-4, clip_high=4e-4),
    "ppo":                  Algorithm(advantage=raw_rewards, has_critic=True, clip_high=0.2),
})
# fmt: on

ADVANTAGES: Mapping[str, AdvantageFunction] = MappingProxyType(
    {
        "whitened-over-scope": whitened_over_scope,
        "centred-and-whitened": centred_and_whitened,
        "whitened-over-siblings": whitened_over_siblings,
        "centred-on-siblings": centred_on_siblings,
        "leave-one-out": leave_one_out,
    }
)
_COMPARE_SIBLINGS = (centred_and_whitened, whitened_over_siblings, centred_on_siblings, leave_one_out)

ALGORITHM = PlugPoint(
    key="learner.algorithm",
    noun="algorithm",
    argument="algorithm",
    group="sortedrl.algorithms",
    names=tuple(ALGORITHMS),
    page="docs/guides/own_algorithm.md",
    fault=lambda found: "" if isinstance(found, Algorithm) else f"its type is {type(found).__name__}, not Algorithm",
)
ADVANTAGE = PlugPoint(
    key="learner.advantage",
    noun="advantage function",
    argument="advantage",
    group="sortedrl.advantages",
    names=tuple(ADVANTAGES),
    page="docs/guides/own_advantage.md",
    fault=lambda found: "" if callable(found) else f"its type is {type(found).__name__}, which cannot be called",
)


@dataclass(slots=True, kw_only=True, frozen=True)
class Objective:
    """What is optimised: the algorithm's values, overridden by the section's keys."""

    algorithm: Algorithm
    ratio: _Level
    loss_mean: Mean
    clip_low: float
    clip_high: float
    overlong: _Overlong
    flat_groups: _FlatGroups
    overlong_buffer: float = 0.2
    importance: _Importance = "none"
    importance_cap: float | Literal["none"] = 2.0
    importance_mask: MaskLevel | Literal["none"] = "none"
    importance_low: float = 0.5
    importance_high: float = 5.0
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coef: float = 0.1
    value_clip: float = 0.2

    @property
    def weight_cap(self) -> float | None:
        return None if self.importance_cap == "none" else self.importance_cap

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether log-probs are computed at the start of the update, to compare them with those of sampling."""
        return self.importance != "none" or self.importance_mask != "none"

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def has_loss_kl(self) -> bool:
        return self.has_reference and self.kl_in == "loss"

    @property
    def learns_from_all(self) -> bool:
        """Whether samples whose advantage is 0 give a gradient too."""
        return self.algorithm.has_critic or self.has_loss_kl or self.entropy_coef > 0


def find_algorithm(value: Any) -> Algorithm:
    return ALGORITHMS[value] if isinstance(value, str) and value in ALGORITHMS else ALGORITHM.find(value)


def find_advantage(value: Any) -> AdvantageFunction:
    return ADVANTAGES[value] if isinstance(value, str) and value in ADVANTAGES else ADVANTAGE.find(value)


def is_grouped(settings: Any) -> bool:
    """Whether the siblings of a prompt are trained together.

    They are for an algorithm that compares them, and for an advantage function that was chosen, since it may do so.
    """
    has_own = getattr(settings, "advantage", None) is not None
    return settings.group_size > 1 and (has_own or find_algorithm(settings.algorithm).needs_siblings)


def needs_more_siblings(settings: Any) -> bool:
    """Whether siblings are compared and `group_size` gives none."""
    algorithm, chosen = find_algorithm(settings.algorithm), getattr(settings, "advantage", None)
    if settings.group_size > 1:
        return False
    if chosen is not None:
        return find_advantage(chosen) in _COMPARE_SIBLINGS
    return algorithm.needs_siblings and algorithm.without_siblings is None


def advantage_function_of(
    algorithm: Algorithm, group_size: int, scope: str, chosen: Any = None
) -> tuple[AdvantageFunction, str]:
    """The advantage function and its scope; `chosen` is what `learner.advantage` names in place of the algorithm's."""
    if chosen is not None:
        return find_advantage(chosen), scope
    if group_size > 1 or algorithm.without_siblings is None:
        return algorithm.advantage, scope
    return algorithm.without_siblings, "running"


def objective_of(settings: Any) -> Objective:
    """The objective that a `learner` section describes. Keys that it lacks or leaves open take their defaults."""
    algorithm = find_algorithm(settings.algorithm)
    values: dict[str, Any] = {}
    for field in fields(Objective):
        value = getattr(settings, field.name, None)
        if field.name != "algorithm" and (value is not None or hasattr(algorithm, field.name)):
            values[field.name] = getattr(algorithm, field.name) if value is None else value
    return Objective(algorithm=algorithm, **values)
