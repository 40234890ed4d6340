"""The planner: which strategy and knobs give the most speed for how much staleness, found by simulation.

`sortedrl plan` calls `search`. Candidates come from a seeded grid over strategy, cohort size, lookahead, staleness
bound, what interrupted samples do, and admission. They are simulated on a part of the trace; the better half goes on to
a longer part, until the last few have met all of it. Speed is trained tokens per wall second, updates and publications
included; staleness the mean over trained tokens.

What it keeps true: every candidate meets the same answers; `sync` is simulated as far as the finalists are, as what
they are compared with; nobody is recommended for training on far larger batches than were asked for, as schedules that
wait for samples at the bound may do: fewer updates would pass for speed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.schedule import Strategy
from sortedrl.simulate.costs import CostModel
from sortedrl.simulate.run import PROMPT_TOKENS, knobs_for, simulate
from sortedrl.simulate.traces import Trace
from sortedrl.telemetry.summary import Summary

FIRST_PART = 4  # the first round runs on this part of the trace, each further one on twice as much
MIN_UPDATES = 8  # that a round must have, lest its end be all of it
MAX_UPDATES = 32  # of the last round; a longer trace is cut
FINALISTS = 8
BATCH_LIMIT = 1.5  # mean update batch over the one asked for
NEAR_BEST = 0.95  # a recommendation may be this much slower than the fastest if it is less stale


@dataclass(slots=True, kw_only=True, frozen=True)
class Workload:
    """What every candidate is simulated with."""

    trace: Trace
    slots: int
    update_batch: int
    cost: CostModel
    group_size: int = 1
    divergence: float = 1e-4
    prompt_tokens: int = PROMPT_TOKENS
    seed: int = 0

    def cut(self, samples: int) -> Workload:
        """The same on the first samples of the trace, in whole groups."""
        count = max(samples // self.group_size, 1) * self.group_size
        trace = self.trace
        return replace(self, trace=replace(trace, lengths=trace.lengths[:count], prompts=trace.prompts[:count]))

    def run(self, candidate: Candidate) -> Point:
        summary = simulate(
            self.trace,
            strategy=candidate.strategy,
            slots=self.slots,
            update_batch=self.update_batch,
            group_size=self.group_size,
            cost=self.cost,
            divergence=self.divergence,
            prompt_tokens=self.prompt_tokens,
            seed=self.seed,
            **candidate.knobs,
        )
        return Point(candidate=candidate, summary=summary)


@dataclass(slots=True, kw_only=True, frozen=True)
class Candidate:
    """A strategy and the knobs set on top of its preset."""

    strategy: str
    knobs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, frozen=True)
class Point:
    """What a candidate came to."""

    candidate: Candidate
    summary: Summary

    @property
    def speed(self) -> float:
        return self.summary.tokens_per_s or 0.0

    @property
    def staleness(self) -> float:
        return self.summary.staleness_token_mean or 0.0

    @property
    def mean_batch(self) -> float:
        return self.summary.samples / max(self.summary.updates, 1)

    def beats(self, other: Point) -> bool:
        """At least as fast and as fresh, and better in one of the two."""
        is_as_good = self.speed >= other.speed and self.staleness <= other.staleness
        return is_as_good and (self.speed, self.staleness) != (other.speed, other.staleness)

    def as_dict(self, base: Point) -> dict[str, Any]:
        summary = self.summary
        return {
            "strategy": self.candidate.strategy,
            "knobs": self.candidate.knobs,
            "speedup": self.speed / base.speed if base.speed else None,
            "tokens_per_s": summary.tokens_per_s,
            "staleness_token_mean": summary.staleness_token_mean,
            "staleness_max": summary.staleness_max,
            "bubble_ratio": summary.bubble_ratio,
            "goodput": summary.goodput,
            "updates": summary.updates,
            "mean_batch": self.mean_batch,
            "rollout_s": summary.rollout_s,
            "update_s": summary.update_s,
            "wall_s": summary.wall_s,
        }


@dataclass(slots=True, kw_only=True, frozen=True)
class Plan:
    workload: Workload  # as the last round simulated it
    front: list[Point]  # fastest last
    recommended: Point
    sync: Point
    num_candidates: int
    num_simulations: int

    def config(self, base: SortedConfig | None = None) -> SortedConfig:
        """The recommendation as a configuration; what a plan does not decide is taken from `base`."""
        tree = base.model_dump() if base is not None else _plain_config(self.workload)
        schedule = {"strategy": self.recommended.candidate.strategy, "update_batch": self.workload.update_batch}
        tree["schedule"] = {**schedule, **self.recommended.candidate.knobs}
        tree["engine"]["slots"] = self.workload.slots
        tree["run"]["name"] = f"planned-{self.recommended.candidate.strategy}"
        return SortedConfig(**tree)

    def as_dict(self) -> dict[str, Any]:
        return {
            "front": [point.as_dict(self.sync) for point in self.front],
            "recommended": self.recommended.as_dict(self.sync),
            "sync": self.sync.as_dict(self.sync),
            "num_candidates": self.num_candidates,
            "num_simulations": self.num_simulations,
            "samples": self.workload.trace.num_samples,
        }


def search(
    workload: Workload,
    *,
    max_staleness: int | None = None,
    overlap: bool = False,
    num_candidates: int = 48,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Find the front.

    `overlap`: whether rollout may go on during updates, which takes devices that the learner does not need. `tell`
    hears after each simulation how many are done, of how many.
    """
    if num_candidates < 1:
        raise ConfigError(f"a plan needs at least one candidate, not {num_candidates}: raise --candidates")
    candidates = choose_candidates(workload.update_batch, max_staleness, num_candidates, seed, overlap=overlap)
    lengths = rounds(workload)
    sizes = _field_sizes(len(candidates), len(lengths))
    total, done = sum(sizes) + 1, 0
    points: list[Point] = []
    for length, size in zip(lengths, sizes, strict=True):
        part = workload.cut(length)
        points = []
        for candidate in candidates[:size]:
            points.append(part.run(candidate))
            done += 1
            tell(done, total)
        points = [p for p in points if p.mean_batch <= BATCH_LIMIT * workload.update_batch]
        candidates = [point.candidate for point in best_first(points)]
    last = workload.cut(lengths[-1])
    known = next((point for point in points if point.candidate == _SYNC), None)
    sync = known or last.run(_SYNC)
    tell(total, total)
    front = pareto_front([*points, sync])
    return Plan(
        workload=last,
        front=front,
        recommended=recommend(front),
        sync=sync,
        num_candidates=sizes[0],
        num_simulations=done + (known is None),
    )


def rounds(workload: Workload) -> list[int]:
    """Samples of each round, growing to the whole trace or to as much of it as a plan needs."""
    whole = min(workload.trace.num_samples, MAX_UPDATES * workload.update_batch)
    length = min(whole, max(whole // FIRST_PART, MIN_UPDATES * workload.update_batch))
    lengths = []
    while length < whole:
        lengths.append(length)
        length *= 2
    return [*lengths, whole]


def _field_sizes(count: int, num_rounds: int) -> list[int]:
    """Half as many in each further round; more finalists than that if there are few rounds."""
    sizes = [count]
    for _ in range(num_rounds - 1):
        sizes.append(min(sizes[-1], max(sizes[-1] // 2, FINALISTS)))
    return sizes


# ---- candidates -----------------------------------------------------------------------------------------------------

_SYNC = Candidate(strategy=Strategy.SYNC.value)
_COHORTS = (2, 4, 8)
_LOOKAHEADS = (0, 1, 2, 4)
_ADMISSIONS = ("load-order", "longest-expected-first")


def grid(max_staleness: int | None) -> Iterator[Candidate]:
    """All that could be tried, whether or not it keeps the bound."""
    yield _SYNC
    for n in _COHORTS:
        yield Candidate(strategy="sync-large", knobs={"cohort_batches": n})
        yield Candidate(strategy="april", knobs={"cohort_batches": n})
        yield Candidate(strategy="tail-batching", knobs={"cohort_batches": n})
    bounds = [1, 2, 4, "none"] if max_staleness is None else [s for s in (1, 2, 4) if s < max_staleness]
    if max_staleness:
        bounds.append(max_staleness)
    for n, lookahead in itertools.product(_COHORTS, _LOOKAHEADS):
        shape = {"cohort_batches": n, "lookahead": lookahead}
        for admission in _ADMISSIONS:
            yield Candidate(strategy="sorted-on-policy", knobs={**shape, "admission": admission})
            yield Candidate(strategy="sorted-replay", knobs={**shape, "admission": admission})
        for bound in bounds:
            bounded = {**shape, "max_staleness": bound}
            fates = ("wait",) if bound == "none" else ("wait", "replay", "restart")
            for on_bound in fates:
                yield Candidate(strategy="sorted-partial", knobs={**bounded, "on_bound": on_bound})
            if lookahead:
                yield Candidate(strategy="async", knobs=bounded)


def choose_candidates(
    update_batch: int, max_staleness: int | None, count: int, seed: int, *, overlap: bool = False
) -> list[Candidate]:
    """One of each strategy that keeps the bound, then others at random, in an order that the seed gives."""
    fitting = [candidate for candidate in grid(max_staleness) if _keeps(candidate, update_batch, max_staleness)]
    if not overlap:
        fitting = [candidate for candidate in fitting if candidate.strategy != Strategy.ASYNC]
    random.Random(seed).shuffle(fitting)
    first: dict[str, Candidate] = {}
    for candidate in fitting:
        first.setdefault(candidate.strategy, candidate)
    others = [candidate for candidate in fitting if first[candidate.strategy] is not candidate]
    return [*first.values(), *others][:count]


def _keeps(candidate: Candidate, update_batch: int, max_staleness: int | None) -> bool:
    try:
        bound = knobs_for(candidate.strategy, update_batch, **candidate.knobs).max_staleness
    except ConfigError:
        return False
    return max_staleness is None or (bound is not None and bound <= max_staleness)


# ---- choosing -------------------------------------------------------------------------------------------------------


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats, one of each figure, from the freshest to the fastest."""
    front: dict[tuple[float, float], Point] = {}
    for point in points:
        if not any(other.beats(point) for other in points):
            front.setdefault((point.staleness, point.speed), point)
    return [front[key] for key in sorted(front)]


def best_first(points: Sequence[Point]) -> list[Point]:
    """Front by front, the fastest of each first."""
    left, ranked = list(points), []
    while left:
        layer = [point for point in left if not any(other.beats(point) for other in left)]
        ranked += sorted(layer, key=lambda point: -point.speed)
        left = [point for point in left if all(point is not taken for taken in layer)]
    return ranked


def recommend(front: Sequence[Point]) -> Point:
    """The freshest of those that are nearly as fast as the fastest."""
    fastest = max(point.speed for point in front)
    return min((p for p in front if p.speed >= NEAR_BEST * fastest), key=lambda p: (p.staleness, -p.speed))


def _plain_config(workload: Workload) -> dict[str, Any]:
    tree = SortedConfig().model_dump()
    tree["learner"]["group_size"] = workload.group_size
    tree["learner"]["algorithm"] = "grpo" if workload.group_size > 1 else "reinforce++"
    tree["engine"]["max_new_tokens"] = workload.trace.cap
    tree["run"]["samples"] = workload.trace.num_samples
    return tree
