"""The table of algorithms, and the objective that an algorithm and the `learner` section define together.

`config/config.py` asks which algorithms exist and which compare siblings. `learner/torch.py` asks for the objective
once. A key that the section leaves open takes the algorithm's value; a key that it sets overrides it. So a variant of
an algorithm is a setting, never a branch in code. docs/guides/algorithms.md has the formulas. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from sortedrl.errors import ConfigError
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

_Level = Literal["token", "sequence"]
Mean = Literal["token", "sequence", "constant"]
_Overlong = Literal["keep", "mask", "shape"]
_Importance = Literal["none", "token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]
_FlatGroups = Literal["keep", "zero", "replace"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Algorithm:
    """The defaults of an algorithm. The section can override all except advantage functions, siblings and critic."""

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
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def has_loss_kl(self) -> bool:
        return self.has_reference and self.kl_in == "loss"

    @property
    def learns_from_all(self) -> bool:
        """Whether samples whose advantage is 0 give a gradient too."""
        return self.algorithm.has_critic or self.has_loss_kl or self.entropy_coef > 0


def _find_algorithm(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise ConfigError(f"learner.algorithm {name!r} is unknown: use one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def is_grouped(name: str, group_size: int) -> bool:
    """Whether the algorithm trains the siblings of a prompt together."""
    return _find_algorithm(name).needs_siblings and group_size > 1


def needs_more_siblings(name: str, group_size: int) -> bool:
    """Whether the algorithm compares siblings and `group_size` gives it none."""
    algorithm = _find_algorithm(name)
    return algorithm.needs_siblings and algorithm.without_siblings is None and group_size < 2


def advantage_function_of(algorithm: Algorithm, group_size: int, scope: str) -> tuple[AdvantageFunction, str]:
    """The advantage function and its scope."""
    if group_size > 1 or algorithm.without_siblings is None:
        return algorithm.advantage, scope
    return algorithm.without_siblings, "running"


def objective_of(settings: Any) -> Objective:
    """The objective that a `learner` section describes. Keys that it lacks or leaves open take their defaults."""
    algorithm = _find_algorithm(settings.algorithm)
    values: dict[str, Any] = {}
    for field in fields(Objective):
        value = getattr(settings, field.name, None)
        if field.name != "algorithm" and (value is not None or hasattr(algorithm, field.name)):
            values[field.name] = getattr(algorithm, field.name) if value is None else value
    return Objective(algorithm=algorithm, **values)
