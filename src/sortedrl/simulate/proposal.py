"""What `sortedrl plan` asks, and the proposal that answers it: a plan, its configuration, and how far to trust it.

The command line makes a `PlanQuestion` and shows the `Proposal`. With a run directory, trace, costs, slots, update
batch and all other settings are that run's, unless they are given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.fit import Fit, fit_runs
from sortedrl.simulate.forecast import Forecast, forecast
from sortedrl.simulate.plan import Plan, Point, Workload, search
from sortedrl.simulate.run import PROMPT_TOKENS
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.summary import Summary, number, share

DEFAULT_SLOTS = 128
DEFAULT_DIVERGENCE = 1e-4


@dataclass(slots=True, kw_only=True, frozen=True)
class PlanQuestion:
    """None leaves a setting to the run, or to its default."""

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
    check: Forecast | None  # of the run that the costs were fitted to
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        record = self.plan.as_dict()
        record["recommended"]["config"] = self.config.to_toml()
        fitted = None if self.fit is None or self.check is None else {**self.fit.as_dict(), **self.check.as_dict()}
        return {**record, "fit": fitted}

    def write(self, path: Path) -> None:
        """Written aside and renamed, so that a reader never sees half a file."""
        aside = path.with_name(path.name + ".part")
        try:
            aside.write_text(self.config.to_toml(), encoding="utf-8")
            os.replace(aside, path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file with --out") from None

    def table(self) -> Table:
        """The front, from the freshest to the fastest, below `sync`."""
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
        """In words: what is recommended, and how well the costs are known."""
        point, sync = self.plan.recommended, self.plan.sync
        speedup = point.speed / sync.speed if sync.speed else 0.0
        name = point.candidate.strategy
        lines = [f"{name}: {speedup:.2f}x the speed of sync, token-mean staleness {point.staleness:.2f}"]
        if self.fit is not None and self.check is not None:
            lines.append(
                f"costs fitted to {self.check.strategy}: R2 {self.fit.r2:.2f} over {self.fit.num_stretches} stretches; "
                f"that run's rollout {self.check.rollout_s:.1f} s predicted, {self.check.measured_rollout_s:.1f} s "
                f"measured, its bubble {self.check.bubble_ratio:.3f} and {self.check.measured_bubble_ratio:.3f}"
            )
            if self.fit.assumed:
                lines.append(f"assumed, since that run cannot tell: {', '.join(self.fit.assumed)}")
        return lines


def propose(question: PlanQuestion, tell: Callable[[int, int], None] = lambda done, total: None) -> Proposal:
    """Find the plan; everything that is wrong with the question is found before the first simulation."""
    if question.trace is None and question.from_run is None:
        raise ConfigError("a plan needs lengths: give --trace FILE, or --from-run DIR")
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
        tell=tell,
    )
    return Proposal(plan=plan, config=plan.config(base), fit=fitted, check=check, notes=notes)


def _workload(
    question: PlanQuestion, base: SortedConfig | None, summary: Summary | None, fitted: Fit | None
) -> tuple[Workload, list[str]]:
    own: dict[str, Any] = {"slots": DEFAULT_SLOTS, "group_size": 1, "prompt_tokens": PROMPT_TOKENS}
    own |= {"update_batch": None, "divergence": DEFAULT_DIVERGENCE, "cap": None}
    if base is not None and summary is not None and fitted is not None:
        own = {
            "slots": base.slots,
            "group_size": base.learner.group_size if base.is_grouped else 1,
            "prompt_tokens": fitted.cost.prompt_tokens,
            "update_batch": base.schedule.update_batch,
            "divergence": DEFAULT_DIVERGENCE if summary.divergence_rate is None else summary.divergence_rate,
            "cap": base.engine.max_new_tokens if question.trace is None else None,
        }
    asked = {name: value for name, value in asdict(question).items() if name in own and value is not None}
    chosen = {**own, **asked}
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
