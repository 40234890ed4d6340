"""The map "which strategy when": the speed of strategies over a grid of conditions, from the simulator.

`plan.py` looks up the condition that is most like a workload, tries what the map advises there first, and tells how far
map and simulation agree. `benchmarks/schedule/strategy_map.py` makes the map (`presets/strategy_map.json`) with
`measure` and checks it at conditions between the grid's points.

A condition has no units: what matters is the tail of the lengths, how many samples an update takes per slot, how much
of a decode step is paid however many sequences run, the learner's share of the time of `sync`, and how many tokens of
a mean answer diverge from the next version. The learning rate enters through the last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import product
from statistics import mean, pstdev
from typing import Any

from sortedrl.schedule import defining_knobs
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace, load_trace

SLOTS, MEDIAN, NUM_SAMPLES, PROMPT_TOKENS = 32, 400, 1024, 128  # of the simulations behind the map
NEARLY_AS_FAST = 0.95  # a strictly on-policy strategy that has this share of the highest speed is preferred


@dataclass(slots=True, kw_only=True, frozen=True)
class Condition:
    """What decides which strategy is fastest."""

    tail: float  # standard deviation of the logarithm of lengths
    batch_per_slot: float  # samples of an update, over slots
    fixed_share: float  # of a full decode step, paid however many sequences run
    learner_share: float  # of the time of `sync`
    diverged: float  # tokens of a mean answer that differ after an update: divergence x mean length

    def distance(self, other: Condition) -> float:
        """Shares count as they are; quantities that span powers of ten count by their logarithm."""
        shares = (self.fixed_share - other.fixed_share, self.learner_share - other.learner_share)
        logs = [math.log10(a / b) for a, b in ((self.batch_per_slot, other.batch_per_slot), (self._d, other._d))]
        return math.hypot(self.tail - other.tail, *shares, *(value / 2 for value in logs))

    @property
    def _d(self) -> float:
        return max(self.diverged, 1e-3)

    def words(self) -> str:
        return (
            f"tail {self.tail:.2g}, update batch / slots {self.batch_per_slot:.2g}, fixed share of a step "
            f"{self.fixed_share:.0%}, learner {self.learner_share:.0%}, {self.diverged:.2g} diverged tokens per answer"
        )


AXES: Mapping[str, tuple[float, ...]] = {
    "tail": (0.2, 0.7, 1.1, 1.5),
    "batch_per_slot": (0.25, 1.0, 4.0),
    "fixed_share": (0.0, 0.3, 0.6, 0.9),
    "learner_share": (0.1, 0.5),
    "diverged": (0.01, 0.07, 0.7),
}

Choice = tuple[str, Mapping[str, Any]]
"""A strategy and its knobs."""
CHOICES: Mapping[str, Choice] = {
    "sync": ("sync", {}),
    "sync-large": ("sync-large", {"cohort_batches": 4}),
    "sorted-on-policy, lookahead 2": ("sorted-on-policy", {"lookahead": 2}),
    "sorted-replay": ("sorted-replay", {}),
    "sorted-replay, lookahead 2": ("sorted-replay", {"lookahead": 2}),
    "sorted-replay, lookahead 4": ("sorted-replay", {"lookahead": 4}),
    "sorted-partial, lookahead 2": ("sorted-partial", {"lookahead": 2}),
    "async, staleness 2": ("async", {"lookahead": 2, "max_staleness": 2, "on_bound": "replay"}),
    "async-on-policy": ("async-on-policy", {"lookahead": 2}),
}
_STALENESS: Mapping[str, int | None] = {
    "sync-large": 3,
    "sorted-partial, lookahead 2": None,
    "async, staleness 2": 2,
}  # largest, of a trained token; others have 0


@dataclass(slots=True, kw_only=True, frozen=True)
class MapPoint:
    """The simulated speed of each choice against `sync` in one condition."""

    condition: Condition
    speedups: Mapping[str, float]

    def advice(self, *, max_staleness: int | None = None, overlap: bool = False) -> str:
        """The name of the fastest choice that is allowed; a strictly on-policy one if that is nearly as fast."""
        allowed = [name for name in self.speedups if is_allowed(name, max_staleness=max_staleness, overlap=overlap)]
        fastest = max(self.speedups[name] for name in allowed)
        near = [name for name in allowed if self.speedups[name] >= NEARLY_AS_FAST * fastest]
        return max(near, key=lambda name: (staleness_of(name) == 0, self.speedups[name]))


def staleness_of(name: str) -> int | None:
    return _STALENESS.get(name, 0)


def is_allowed(name: str, *, max_staleness: int | None, overlap: bool) -> bool:
    """Whether a choice keeps the staleness bound, and runs during updates only if it may."""
    bound = staleness_of(name)
    if defining_knobs(CHOICES[name][0]).get("overlap") and not overlap:
        return False
    return max_staleness is None or (bound is not None and bound <= max_staleness)


def nearest(points: Sequence[MapPoint], condition: Condition) -> MapPoint:
    return min(points, key=lambda point: point.condition.distance(condition))


@cache
def shipped_map() -> tuple[MapPoint, ...]:
    text = (resources.files("sortedrl.simulate") / "presets" / "strategy_map.json").read_text(encoding="utf-8")
    return from_json(json.loads(text))


def from_json(record: Mapping[str, Any]) -> tuple[MapPoint, ...]:
    names, points = record["choices"], record["points"]
    return tuple(
        MapPoint(
            condition=Condition(**dict(zip(AXES, point[: len(AXES)], strict=True))),
            speedups=dict(zip(names, point[len(AXES) :], strict=True)),
        )
        for point in points
    )


def to_json(points: Iterable[MapPoint]) -> dict[str, Any]:
    rows = [[*asdict(p.condition).values(), *(round(value, 3) for value in p.speedups.values())] for p in points]
    return {"axes": list(AXES), "choices": list(CHOICES), "points": rows}


# ---- making the map --------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, frozen=True)
class ShapedCost:
    """Costs of an engine whose full decode step takes one second.

    A share of the step is fixed. The rest is arithmetic, which every token costs, also one that is prefilled or
    verified.
    """

    slots: int
    fixed_share: float
    update_token_s: float = 0.0

    @property
    def kv_tokens(self) -> int | None:
        return None

    @property
    def _token_s(self) -> float:
        return (1 - self.fixed_share) / self.slots

    def decode_s(self, running: int, context: int, steps: int) -> float:
        return steps * (self.fixed_share + running * self._token_s)

    def prefill_s(self, lengths: Iterable[int]) -> float:
        total = sum(lengths)
        return self.fixed_share + total * self._token_s if total else 0.0

    def verify_s(self, tokens: int) -> float:
        return 0.0  # the prefill has computed them

    def publish_s(self) -> float:
        return 0.0

    def update_s(self, tokens: int) -> float:
        return tokens * self.update_token_s


def measure(condition: Condition, *, seed: int = 0, choices: Sequence[str] = tuple(CHOICES)) -> MapPoint:
    """Simulate the choices in one condition."""
    trace = load_trace(f"lognormal({MEDIAN}, {condition.tail}, {20 * MEDIAN})", samples=NUM_SAMPLES, seed=seed)
    cost = ShapedCost(slots=SLOTS, fixed_share=condition.fixed_share)
    share, num_tokens = condition.learner_share, sum(trace.lengths) + PROMPT_TOKENS * trace.num_samples
    alone_s = sum(trace.lengths) * _run(trace, "sync", condition, cost, seed)
    cost = ShapedCost(
        slots=SLOTS,
        fixed_share=condition.fixed_share,
        update_token_s=share / (1 - share) * alone_s / num_tokens,
    )
    base_s = _run(trace, "sync", condition, cost, seed)
    speedups = {name: base_s / _run(trace, name, condition, cost, seed) for name in choices}
    return MapPoint(condition=condition, speedups=speedups)


def _run(trace: Trace, name: str, condition: Condition, cost: ShapedCost, seed: int) -> float:
    """The simulated seconds per trained token of one choice."""
    strategy, knobs = CHOICES[name]
    summary = simulate(
        trace,
        strategy=strategy,
        slots=SLOTS,
        update_batch=max(1, round(SLOTS * condition.batch_per_slot)),
        cost=cost,
        divergence=min(condition.diverged / mean(trace.lengths), 0.5),
        prompt_tokens=PROMPT_TOKENS,
        seed=seed,
        **knobs,
    )
    assert summary.tokens_per_s, "a simulation has a speed"
    return 1 / summary.tokens_per_s


def grid() -> Iterator[Condition]:
    for values in product(*AXES.values()):
        yield Condition(**dict(zip(AXES, values, strict=True)))


def tail_of(lengths: Sequence[int]) -> float:
    """The standard deviation of the logarithm of lengths."""
    return pstdev([math.log(max(length, 1)) for length in lengths])
