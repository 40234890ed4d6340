"""The `simulate` command without its options: a question about a trace, and the answer.

What it keeps true: everything that can be wrong with the question is found before the first strategy runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sortedrl.errors import ConfigError
from sortedrl.schedule import Strategy
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.occupancy import OccupancyCurve
from sortedrl.simulate.run import PROMPT_TOKENS, knobs_for, simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.summary import Summary

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(slots=True, kw_only=True, frozen=True)
class Question:
    """`slots` are those of one replica; `strategies` is a comma-separated list or `all`."""

    trace: str
    strategies: str
    slots: int
    update_batch: int
    knobs: Mapping[str, Any]
    cost: str = "unit"
    hardware: str = "h100"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1
    replicas: int = 1
    prompt_tokens: int = PROMPT_TOKENS
    divergence: float = 0.0
    drift: float = 1.0
    update_s: float | None = None
    samples: int | None = None
    seed: int = 0
    group_size: int = 1
    cap: int | None = None
    column: str = "length"

    @property
    def strategy_names(self) -> list[str]:
        if self.strategies.strip() == "all":
            return [strategy.value for strategy in Strategy]
        names = [name.strip() for name in self.strategies.split(",") if name.strip()]
        if not names:
            raise ConfigError(f"no strategy is named: choose from {', '.join(Strategy)}, or all")
        return names


@dataclass(slots=True, kw_only=True, frozen=True)
class Found:
    summaries: list[Summary]
    notes: list[str]

    def table(self) -> Table:
        from sortedrl.simulate.page import simulation_table

        return simulation_table(self.summaries)


def answer(question: Question, *, html: Path | None = None) -> Found:
    """One summary per strategy; with `html` a page of their slots too."""
    names = question.strategy_names
    for name in names:
        knobs_for(name, question.update_batch, **question.knobs)
    trace = load_trace(
        question.trace,
        samples=question.samples,
        seed=question.seed,
        cap=question.cap,
        column=question.column,
        group_size=question.group_size,
    )
    cost = load_cost(
        question.cost,
        hardware=question.hardware,
        model=question.model,
        tensor_parallel=question.tensor_parallel,
        replicas=question.replicas,
        longest=question.prompt_tokens + trace.cap,
    )
    notes = [trace.note] if trace.note else []
    summaries: list[Summary] = []
    curves: list[OccupancyCurve] = []
    for name in names:
        curve = OccupancyCurve()
        summaries.append(
            simulate(
                trace,
                strategy=name,
                slots=question.slots * question.replicas,
                update_batch=question.update_batch,
                group_size=question.group_size,
                cost=cost,
                divergence=question.divergence,
                drift=question.drift,
                seed=question.seed,
                update_s=question.update_s,
                prompt_tokens=question.prompt_tokens,
                emit=curve.emit if html is not None else None,
                **question.knobs,
            )
        )
        curves.append(curve)
    if html is not None:
        from sortedrl.simulate.page import write_page

        costs = "unit costs" if question.cost == "unit" else f"{question.model} on {question.hardware}"
        text = f"{trace.source}: {trace.num_samples:,} answers, U = {question.update_batch}, {costs}"
        page = write_page(html, summaries, curves, title="Slots in use, by strategy", text=text)
        notes.append(f"page: {page}")
    return Found(summaries=summaries, notes=notes)
