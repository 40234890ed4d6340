"""The algorithms as a table, and the objective that an algorithm and the `learner` section make together.

`config.py` asks which algorithms there are and which compare siblings; `learner/torch.py` asks for the objective once,
when it is built. A key that the section leaves open is the algorithm's, one that it sets overrides it, so that a
variant is a setting and never a branch. docs/learning.md has the formulas. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from sortedrl.errors import ConfigError
from sortedrl.learner.advantage import (
    AdvantageFunction,
    against_mean,
    against_others,
    against_others_so_far,
    against_scope,
    against_siblings,
    by_critic,
    centred_against_scope,
)

Level = Literal["token", "sequence"]
Mean = Literal["token", "sequence", "constant"]
Overlong = Literal["keep", "mask", "shape"]
Importance = Literal["none", "token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]
FlatGroups = Literal["keep", "zero", "replace"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Algorithm:
    """What tells one algorithm from another; the section can override all but advantages, siblings and critic."""

    advantage: AdvantageFunction
    alone: AdvantageFunction | None = None  # in its place for samples without siblings; it takes the running scope
    ratio: Level = "token"  # what is clipped: each token's ratio, or the geometric mean over its sample
    loss_mean: Mean = "token"  # over tokens, over samples of their means, or over as many tokens as the budget allows
    clip_low: float = 0.2
    clip_high: float = 0.28
    overlong: Overlong = "keep"  # what truncated answers are: like any other, without gradient, or punished smoothly
    flat_groups: FlatGroups = "keep"  # siblings that were all rewarded alike: in the mean, in none, or made up for
    needs_siblings: bool = False
    has_critic: bool = False


# fmt: off
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({
    "reinforce++":          Algorithm(advantage=against_scope),
    "reinforce++-baseline": Algorithm(advantage=centred_against_scope, needs_siblings=True),
    "grpo":                 Algorithm(advantage=against_siblings, needs_siblings=True),
    "dr_grpo":              Algorithm(advantage=against_mean, needs_siblings=True,
                                      loss_mean="constant", clip_high=0.2),
    "rloo":                 Algorithm(advantage=against_others, alone=against_others_so_far, needs_siblings=True,
                                      loss_mean="constant", clip_high=0.2),
    "dapo":                 Algorithm(advantage=against_siblings, needs_siblings=True,
                                      overlong="shape", flat_groups="zero"),
    "gspo":                 Algorithm(advantage=against_siblings, needs_siblings=True,
                                      ratio="sequence", loss_mean="sequence", clip_low=3e-4, clip_high=4e-4),
    "ppo":                  Algorithm(advantage=by_critic, has_critic=True, clip_high=0.2),
})
# fmt: on


@dataclass(slots=True, kw_only=True, frozen=True)
class Objective:
    """What is optimised: the algorithm with the section's keys in place of its own."""

    algorithm: Algorithm
    ratio: Level
    loss_mean: Mean
    clip_low: float
    clip_high: float
    overlong: Overlong
    flat_groups: FlatGroups
    overlong_buffer: float = 0.2
    importance: Importance = "none"
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
        """Whether samples without an advantage move the weights too."""
        return self.algorithm.has_critic or self.has_loss_kl or self.entropy_coef > 0


def find_algorithm(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise ConfigError(f"learner.algorithm {name!r} is unknown: use one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def is_grouped(name: str, group_size: int) -> bool:
    """Whether the algorithm trains the siblings of a prompt together."""
    return find_algorithm(name).needs_siblings and group_size > 1


def needs_more_siblings(name: str, group_size: int) -> bool:
    """Whether the algorithm has nothing to compare a sample with."""
    algorithm = find_algorithm(name)
    return algorithm.needs_siblings and algorithm.alone is None and group_size < 2


def estimator_of(algorithm: Algorithm, group_size: int, scope: str) -> tuple[AdvantageFunction, str]:
    """The advantage function, and what it takes statistics over."""
    if group_size > 1 or algorithm.alone is None:
        return algorithm.advantage, scope
    return algorithm.alone, "running"


def objective_of(settings: Any) -> Objective:
    """The objective that a `learner` section describes; a key that it lacks or leaves open has its default."""
    algorithm = find_algorithm(settings.algorithm)
    values: dict[str, Any] = {}
    for field in fields(Objective):
        value = getattr(settings, field.name, None)
        if field.name != "algorithm" and (value is not None or hasattr(algorithm, field.name)):
            values[field.name] = getattr(algorithm, field.name) if value is None else value
    return Objective(algorithm=algorithm, **values)
