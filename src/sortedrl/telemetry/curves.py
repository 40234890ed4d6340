"""The points of a run's curves, and how neighbours are merged where a curve has too many of them.

`RunView` appends an `UpdatePoint` for each update, with reward, lengths and the learner's metrics, an `EvaluationPoint`
for each evaluation, a `ReplayPoint` for each harvest after replays, and a `MachinePoint` for each measurement. Charts
read them.

Guarantees: merged points have exact sums and counts, so their means are those of all updates that they stand for. The
quantiles of merged points are means of quantiles, except the smallest and the largest, which are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

MAX_METRICS = 96  # names of learner metrics, and of reward functions, that a run can have on its pages

Number = TypeVar("Number", int, float)
MetricSum = tuple[float, int]
"""A sum and the number of values in it."""


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdatePoint:
    """One update and its batch, or several neighbours."""

    update: int  # the last one
    t: float  # when it was done
    samples_trained: int
    num_samples: int
    reward_sum: float
    token_sum: int
    lengths: tuple[float, ...]  # shortest, 10th percentile, median, 90th, longest
    metrics: Mapping[str, MetricSum] = field(default_factory=dict)  # of the learner
    rewards: Mapping[str, MetricSum] = field(default_factory=dict)  # by reward function, if there are several

    @property
    def reward(self) -> float:
        return self.reward_sum / self.num_samples

    @property
    def mean_length(self) -> float:
        return self.token_sum / self.num_samples


def join_updates(first: UpdatePoint, second: UpdatePoint) -> UpdatePoint:
    a, b = first.lengths, second.lengths
    inner = [(low + high) / 2 for low, high in zip(a[1:-1], b[1:-1], strict=True)]
    return replace(
        second,
        num_samples=first.num_samples + second.num_samples,
        reward_sum=first.reward_sum + second.reward_sum,
        token_sum=first.token_sum + second.token_sum,
        lengths=(min(a[0], b[0]), *inner, max(a[-1], b[-1])),
        metrics=join_sums(first.metrics, second.metrics),
        rewards=join_sums(first.rewards, second.rewards),
    )


def join_sums(first: Mapping[str, MetricSum], second: Mapping[str, MetricSum]) -> dict[str, MetricSum]:
    joined = dict(first)
    for name, (total, count) in second.items():
        before = joined.get(name, (0.0, 0))
        joined[name] = (before[0] + total, before[1] + count)
    return joined


@dataclass(slots=True, kw_only=True, frozen=True)
class EvaluationPoint:
    t: float
    samples_trained: int
    sampled: float
    greedy: float


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayPoint:
    """The replays between two harvests, or between several."""

    update: int = 0  # the update that follows them
    num_replays: int = 0
    share_sum: float = 0.0  # share of its cached tokens that a replay kept, summed over replays
    cached: int = 0
    accepted: int = 0


def join_replays(first: ReplayPoint, second: ReplayPoint) -> ReplayPoint:
    return ReplayPoint(
        update=second.update,
        num_replays=first.num_replays + second.num_replays,
        share_sum=first.share_sum + second.share_sum,
        cached=first.cached + second.cached,
        accepted=first.accepted + second.accepted,
    )


@dataclass(slots=True, kw_only=True, frozen=True)
class MachinePoint:
    """Load and memory of the machine at one moment, or the largest of several."""

    t: float
    cores_used: float
    load: float | None
    cores: int | None
    process_bytes: int | None
    available_bytes: int | None  # the smallest
    gpu_bytes: int | None
    disk_free_bytes: int | None  # the smallest


def join_machine(first: MachinePoint, second: MachinePoint) -> MachinePoint:
    return MachinePoint(
        t=second.t,
        cores_used=max(first.cores_used, second.cores_used),
        load=_of_known(max, first.load, second.load),
        cores=second.cores,
        process_bytes=_of_known(max, first.process_bytes, second.process_bytes),
        available_bytes=_of_known(min, first.available_bytes, second.available_bytes),
        gpu_bytes=_of_known(max, first.gpu_bytes, second.gpu_bytes),
        disk_free_bytes=_of_known(min, first.disk_free_bytes, second.disk_free_bytes),
    )


def _of_known(choose: Callable[..., Number], *values: Number | None) -> Number | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


class KnownNames:
    """Accepts names until there are `MAX_METRICS` of them, so that a file with ever new names costs no memory."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def sums(self, metrics: Mapping[str, float]) -> dict[str, MetricSum]:
        """Return the finite values under accepted names, each as a sum of one."""
        found: dict[str, MetricSum] = {}
        for name, value in metrics.items():
            if name not in self._names and len(self._names) < MAX_METRICS:
                self._names.add(name)
            if name in self._names and math.isfinite(value):
                found[name] = (float(value), 1)
        return found
