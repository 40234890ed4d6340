"""The planner of `sortedrl plan`: finds, by simulation, fast strategies and knobs with little staleness.

The command line makes a `PlanQuestion`, calls `propose` and shows the `Proposal`: the plan, its configuration, and how
well the costs are known. `propose` builds a `Workload` and calls `search`.

The search draws candidates from a seeded grid over strategy, cohort size, lookahead, staleness bound, treatment of
interrupted samples, verification and admission. First comes what the map of strategies (`strategy_map.py`) advises in
such a condition. It simulates the candidates on a part of the trace. The better half continues on a longer part, until
the finalists have run on all of it. Speed is trained tokens per second of wall time, including updates and
publications. Staleness is the mean over trained tokens.

Guarantees: every candidate gets the same answers. `sync` is simulated on the same part as the finalists, as the
baseline. No recommended candidate trains on batches much larger than requested: a schedule that waits for samples at
the staleness bound may do so, and its fewer updates would look like speed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.ledger.atomic_file import atomic_file
from sortedrl.schedule import Strategy, defining_knobs
from sortedrl.simulate.costs import CostModel, load_cost
from sortedrl.simulate.explanation import ConstantSteps, Explanation, StepCost
from sortedrl.simulate.fit import Fit, fit_runs
from sortedrl.simulate.forecast import Forecast, forecast
from sortedrl.simulate.run import PROMPT_TOKENS, knobs_for, simulate
from sortedrl.simulate.strategy_map import CHOICES, Condition, nearest, shipped_map, tail_of
from sortedrl.simulate.traces import Trace, load_trace
from sortedrl.telemetry.summary import Summary, number, share

DEFAULT_SLOTS = 128
DEFAULT_DIVERGENCE = 1e-4
FIRST_PART = 4  # the first round runs on 1/4 of the trace; each further round on twice as much as the one before
MIN_UPDATES = 8  # of a round, so that the slow end of a run does not dominate it
MAX_UPDATES = 32  # of the last round; a longer trace is cut
FINALISTS = 8
BATCH_LIMIT = 1.5  # largest allowed ratio of the mean update batch to the requested one
POOR_FIT = 0.5  # R2 below which a plan is not to be relied on
NEAR_BEST = 0.95  # the recommended candidate has at least this share of the highest speed

ReportProgress = Callable[[int, int], None]


@dataclass(slots=True, kw_only=True, frozen=True)
class Workload:
    """The inputs that all candidates share."""

    trace: Trace
    slots: int
    update_batch: int
    cost: CostModel
    group_size: int = 1
    divergence: float = 1e-4
    prompt_tokens: int = PROMPT_TOKENS
    seed: int = 0

    def cut(self, samples: int) -> Workload:
        """This workload on the first `samples` answers of the trace, rounded to whole groups."""
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
    """The simulated result of one candidate."""

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
        """Whether this point is at least as fast and as fresh as the other, and better in one of the two."""
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
class MapAdvice:
    """What the map advises where conditions are most like the workload's, and what the simulation says to it."""

    condition: Condition  # of the workload
    name: str
    candidate: Candidate
    speedup: float  # on the map
    simulated: float = 0.0  # in the search's first round

    def sentence(self) -> str:
        return (
            f"The map of strategies advises {self.name} in such a condition ({self.condition.words()}): "
            f"{self.speedup:.2f}x the speed of sync there, {self.simulated:.2f}x simulated on your lengths and costs."
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "candidate": asdict(self.candidate)}


@dataclass(slots=True, kw_only=True, frozen=True)
class Plan:
    workload: Workload  # of the last round
    front: list[Point]  # the Pareto front, fastest last
    recommended: Point
    sync: Point
    num_candidates: int
    num_simulations: int
    map_advice: MapAdvice

    def config(self, base: SortedConfig | None = None) -> SortedConfig:
        """The recommendation as a configuration; settings that a plan does not decide are taken from `base`."""
        tree = base.model_dump() if base is not None else _default_config(self.workload)
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
            "map": self.map_advice.as_dict(),
            "samples": self.workload.trace.num_samples,
        }


def search(
    workload: Workload,
    *,
    max_staleness: int | None = None,
    overlap: bool = False,
    num_candidates: int = 48,
    seed: int = 0,
    report_progress: ReportProgress = lambda done, total: None,
) -> Plan:
    """Find the Pareto front of speed and staleness, and recommend one of its points.

    `overlap` allows rollout during updates, which needs separate devices for the learner. After each simulation,
    `report_progress` gets the number of finished simulations and the total.
    """
    if num_candidates < 1:
        raise ConfigError(f"a plan needs at least one candidate, not {num_candidates}: raise --candidates")
    candidates = choose_candidates(workload.update_batch, max_staleness, num_candidates, seed, overlap=overlap)
    lengths = rounds(workload)
    first_part = workload.cut(lengths[0])
    base = first_part.run(_SYNC)
    advice = look_up(workload, base, max_staleness=max_staleness, overlap=overlap)
    candidates = [advice.candidate, *(c for c in candidates if c != advice.candidate)][: len(candidates)]
    sizes = _round_sizes(len(candidates), len(lengths))
    total, done = sum(sizes) + 2, 1
    points: list[Point] = []
    for length, size in zip(lengths, sizes, strict=True):
        part = workload.cut(length)
        points = []
        for candidate in candidates[:size]:
            points.append(part.run(candidate))
            done += 1
            report_progress(done, total)
        if not advice.simulated:
            advice = replace(advice, simulated=_ratio(points[0].speed, base.speed))
        points = [p for p in points if p.mean_batch <= BATCH_LIMIT * workload.update_batch]
        candidates = [point.candidate for point in best_first(points)]
    last = workload.cut(lengths[-1])
    known = next((point for point in points if point.candidate == _SYNC), None)
    sync = known or last.run(_SYNC)
    report_progress(total, total)
    front = pareto_front([*points, sync])
    return Plan(
        workload=last,
        front=front,
        recommended=recommend(front),
        sync=sync,
        num_candidates=sizes[0],
        num_simulations=done + (known is None),
        map_advice=advice,
    )


def look_up(workload: Workload, sync: Point, *, max_staleness: int | None, overlap: bool) -> MapAdvice:
    """The map's advice for a workload; `sync` was simulated on it and tells the learner's share of the time."""
    lengths = workload.trace.lengths
    condition = Condition(
        tail=tail_of(lengths),
        batch_per_slot=workload.update_batch / workload.slots,
        fixed_share=_step_cost(workload).fixed_share,
        learner_share=_ratio(sync.summary.update_s or 0.0, sync.summary.wall_s or 0.0),
        diverged=workload.divergence * sum(lengths) / len(lengths),
    )
    point = nearest(shipped_map(), condition)
    name = point.advice(max_staleness=max_staleness, overlap=overlap)
    strategy, knobs = CHOICES[name]
    candidate = Candidate(strategy=strategy, knobs=dict(knobs))
    return MapAdvice(condition=condition, name=name, candidate=candidate, speedup=point.speedups[name])


def rounds(workload: Workload) -> list[int]:
    """The number of samples in each round; the last has the whole trace, or MAX_UPDATES updates."""
    whole = min(workload.trace.num_samples, MAX_UPDATES * workload.update_batch)
    length = min(whole, max(whole // FIRST_PART, MIN_UPDATES * workload.update_batch))
    lengths = []
    while length < whole:
        lengths.append(length)
        length *= 2
    return [*lengths, whole]


def _round_sizes(count: int, num_rounds: int) -> list[int]:
    """Candidates in each round: half as many in each further one, but at least FINALISTS."""
    sizes = [count]
    for _ in range(num_rounds - 1):
        sizes.append(min(sizes[-1], max(sizes[-1] // 2, FINALISTS)))
    return sizes


# ---- candidates -----------------------------------------------------------------------------------------------------

_SYNC = Candidate(strategy=Strategy.SYNC.value)
_SORTED = Candidate(strategy=Strategy.SORTED_REPLAY.value, knobs={"lookahead": 2})
_COHORTS = (2, 4, 8)
_LOOKAHEADS = (0, 1, 2, 4)
_ADMISSIONS = ("load-order", "longest-expected-first")


def grid(max_staleness: int | None) -> Iterator[Candidate]:
    """All candidates, including those that exceed the staleness bound."""
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
        yield Candidate(strategy="sorted-replay", knobs={**shape, "max_unverified": "none"})
        for bound in bounds:
            bounded = {**shape, "max_staleness": bound}
            for on_bound in ("wait",) if bound == "none" else ("wait", "replay", "restart"):
                yield Candidate(strategy="sorted-partial", knobs={**bounded, "on_bound": on_bound})
            if lookahead:
                yield Candidate(strategy="async", knobs=bounded)
        if lookahead:
            for unverified in (0, 2, "none"):
                yield Candidate(strategy="async-on-policy", knobs={**shape, "max_unverified": unverified})


def choose_candidates(
    update_batch: int, max_staleness: int | None, count: int, seed: int, *, overlap: bool = False
) -> list[Candidate]:
    """One candidate of each strategy that keeps the staleness bound, then random others; the seed fixes the order."""
    fitting = [candidate for candidate in grid(max_staleness) if _keeps_bound(candidate, update_batch, max_staleness)]
    if not overlap:
        fitting = [candidate for candidate in fitting if not defining_knobs(candidate.strategy).get("overlap")]
    random.Random(seed).shuffle(fitting)
    first: dict[str, Candidate] = {}
    for candidate in fitting:
        first.setdefault(candidate.strategy, candidate)
    others = [candidate for candidate in fitting if first[candidate.strategy] is not candidate]
    return [*first.values(), *others][:count]


def _keeps_bound(candidate: Candidate, update_batch: int, max_staleness: int | None) -> bool:
    try:
        bound = knobs_for(candidate.strategy, update_batch, **candidate.knobs).max_staleness
    except ConfigError:
        return False
    return max_staleness is None or (bound is not None and bound <= max_staleness)


# ---- ranking ---------------------------------------------------------------------------------------------------------


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other point beats, without duplicates, from the freshest to the fastest."""
    front: dict[tuple[float, float], Point] = {}
    for point in points:
        if not any(other.beats(point) for other in points):
            front.setdefault((point.staleness, point.speed), point)
    return [front[key] for key in sorted(front)]


def best_first(points: Sequence[Point]) -> list[Point]:
    """All points, Pareto front by Pareto front, the fastest of each front first."""
    left, ranked = list(points), []
    while left:
        layer = [point for point in left if not any(other.beats(point) for other in left)]
        ranked += sorted(layer, key=lambda point: -point.speed)
        left = [point for point in left if all(point is not taken for taken in layer)]
    return ranked


def recommend(front: Sequence[Point]) -> Point:
    """The freshest point among those that are nearly as fast as the fastest."""
    fastest = max(point.speed for point in front)
    return min((p for p in front if p.speed >= NEAR_BEST * fastest), key=lambda p: (p.staleness, -p.speed))


def _default_config(workload: Workload) -> dict[str, Any]:
    """The default configuration, adapted to the workload."""
    tree = SortedConfig().model_dump()
    tree["learner"]["group_size"] = workload.group_size
    tree["learner"]["algorithm"] = "grpo" if workload.group_size > 1 else "reinforce++"
    tree["engine"]["max_new_tokens"] = workload.trace.cap
    tree["run"]["samples"] = workload.trace.num_samples
    return tree


# ---- question and proposal -------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, frozen=True)
class PlanQuestion:
    """A setting that is None is taken from the run `from_run`, or else from the defaults."""

    trace: str | None = None
    from_run: Path | None = None
    hardware: str = "h100"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1
    replicas: int = 1
    slots: int | None = None
    update_batch: int | None = None
    max_staleness: int | None = None
    overlap: bool = False
    divergence: float | None = None
    prompt_tokens: int | None = None
    group_size: int | None = None
    samples: int | None = None
    cap: int | None = None
    column: str = "length"
    candidates: int = 48
    seed: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class Proposal:
    plan: Plan
    config: SortedConfig
    fit: Fit | None
    check: Forecast | None  # the costs' forecast of the run that they were fitted to
    explanation: Explanation
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        record = self.plan.as_dict()
        record["recommended"]["config"] = self.config.to_toml()
        fitted = None if self.fit is None or self.check is None else {**self.fit.as_dict(), **self.check.as_dict()}
        return {**record, "fit": fitted, "explanation": self.explanation.as_dict()}

    def write(self, path: Path) -> None:
        try:
            with atomic_file(path) as file:
                file.write(self.config.to_toml())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file with --out") from None

    def table(self) -> Table:
        """`sync` first, then the Pareto front from the freshest to the fastest."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption="* recommended")
        for header in ("", "strategy", "knobs"):
            table.add_column(header)
        for header in ("speed", "tokens/s", "staleness", "max", "bubble", "goodput"):
            table.add_column(header, justify="right", no_wrap=True)
        plan = self.plan
        for point in [plan.sync, *(point for point in plan.front if point is not plan.sync)]:
            table.add_row(*_row(point, plan))
        return table

    def advice(self) -> list[str]:
        """Sentences that say what is recommended and why, and how well the costs are known."""
        point, sync = self.plan.recommended, self.plan.sync
        speedup = point.speed / sync.speed if sync.speed else 0.0
        name = point.candidate.strategy
        lines = [f"{name}: {speedup:.2f}x the speed of sync, token-mean staleness {point.staleness:.2f}"]
        lines += [*self.explanation.sentences(), self.plan.map_advice.sentence()]
        if self.fit is not None and self.check is not None:
            lines.append(
                f"costs fitted to {self.check.strategy}: R2 {self.fit.r2:.2f} over {self.fit.num_stretches} calls; "
                f"predicted rollout {self.check.rollout_s:.1f} s (measured {self.check.measured_rollout_s:.1f} s), "
                f"predicted bubble {self.check.bubble_ratio:.3f} (measured {self.check.measured_bubble_ratio:.3f})"
            )
            if self.fit.r2 < POOR_FIT:
                lines.append(
                    f"the fit explains only {self.fit.r2:.0%} of the spread of measured times, perhaps because the "
                    "machine was busy: do not rely on this plan, repeat it with a run on an idle machine"
                )
            if self.fit.assumed:
                lines.append(f"assumed, because the run does not determine them: {', '.join(self.fit.assumed)}")
        return lines


def propose(question: PlanQuestion, report_progress: ReportProgress = lambda done, total: None) -> Proposal:
    """Find the plan. Every mistake in the question is reported before the search starts."""
    if question.trace is None and question.from_run is None:
        raise ConfigError("a plan needs answer lengths: give --trace FILE, or --from-run DIR")
    base = summary = fitted = check = None
    if question.from_run is not None:
        base = SortedConfig.load(question.from_run / "config.toml")
        summary = Summary.read(question.from_run / "summary.json")
        fitted = fit_runs([question.from_run])
        check = forecast(question.from_run, fitted.cost)
    workload, notes = _workload(question, base, summary, fitted)
    plan = search(
        workload,
        max_staleness=question.max_staleness,
        overlap=question.overlap,
        num_candidates=question.candidates,
        seed=question.seed,
        report_progress=report_progress,
    )
    explanation = explain(plan)
    return Proposal(plan=plan, config=plan.config(base), fit=fitted, check=check, explanation=explanation, notes=notes)


def explain(plan: Plan) -> Explanation:
    """What a slot costs in the plan's workload. A strictly on-policy sorted strategy shows what filling slots wins."""
    workload, sync = plan.workload, plan.sync
    step = _step_cost(workload)
    constant = replace(workload, cost=ConstantSteps(cost=workload.cost, step_s=step.full_s))
    summary = sync.summary
    return Explanation(
        step=step,
        settings=f"{_SORTED.strategy} with lookahead {_SORTED.knobs['lookahead']}",
        speedup=_ratio(workload.run(_SORTED).speed, sync.speed),
        constant_speedup=_ratio(constant.run(_SORTED).speed, constant.run(_SYNC).speed),
        update_share=_ratio(summary.update_s or 0.0, summary.wall_s or 0.0),
    )


def _step_cost(workload: Workload) -> StepCost:
    lengths = workload.trace.lengths
    context = workload.prompt_tokens + round(sum(lengths) / len(lengths))
    return StepCost.of(workload.cost, slots=workload.slots, context=context)


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0


def _workload(
    question: PlanQuestion, base: SortedConfig | None, summary: Summary | None, fitted: Fit | None
) -> tuple[Workload, list[str]]:
    """The workload that the question describes, and notes for the user."""
    defaults: dict[str, Any] = {"slots": DEFAULT_SLOTS, "group_size": 1, "prompt_tokens": PROMPT_TOKENS}
    defaults |= {"update_batch": None, "divergence": DEFAULT_DIVERGENCE, "cap": None}
    if base is not None and summary is not None and fitted is not None:
        defaults = {
            "slots": base.slots,
            "group_size": base.learner.group_size if base.is_grouped else 1,
            "prompt_tokens": fitted.cost.prompt_tokens,
            "update_batch": base.schedule.update_batch,
            "divergence": DEFAULT_DIVERGENCE if summary.divergence_rate is None else summary.divergence_rate,
            "cap": base.engine.max_new_tokens if question.trace is None else None,
        }
    asked = {name: value for name, value in asdict(question).items() if name in defaults and value is not None}
    chosen = {**defaults, **asked}
    if chosen["slots"] < 1:
        raise ConfigError(f"slots must be at least 1, not {chosen['slots']}: raise --slots")
    cap = chosen.pop("cap")
    trace = load_trace(
        question.trace if question.trace is not None else str(question.from_run),
        samples=question.samples,
        seed=question.seed,
        cap=cap,
        column=question.column,
        group_size=chosen["group_size"],
    )
    chosen["slots"] *= question.replicas
    chosen["update_batch"] = chosen["update_batch"] or chosen["slots"]
    longest = trace.cap + chosen["prompt_tokens"]
    shape = {"tensor_parallel": question.tensor_parallel, "replicas": question.replicas, "longest": longest}
    cost = fitted.cost if fitted is not None else None
    if cost is None:
        cost = load_cost("roofline", hardware=question.hardware, model=question.model, **shape)
    return Workload(trace=trace, cost=cost, seed=question.seed, **chosen), [trace.note] if trace.note else []


def _row(point: Point, plan: Plan) -> list[str]:
    knobs = ", ".join(f"{name}={value}" for name, value in point.candidate.knobs.items())
    speedup = point.speed / plan.sync.speed if plan.sync.speed else 0.0
    summary = point.summary
    return [
        "*" if point is plan.recommended else "",
        point.candidate.strategy,
        knobs,
        f"{speedup:.2f}x",
        number(summary.tokens_per_s),
        number(point.staleness, 2),
        number(summary.staleness_max),
        share(summary.bubble_ratio),
        share(summary.goodput),
    ]
