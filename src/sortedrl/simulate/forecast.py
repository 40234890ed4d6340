"""A forecast of a run's rollout time and bubble: its schedule, simulated on its own lengths, priced at fitted costs.

`plan --from-run` uses it to say how well a fit predicts the very run it came from, benchmarks/forecast.py how well it
predicts other strategies. What it keeps true: nothing of the run's measured times goes into its forecast; lengths,
divergence rate and knobs do, since training makes them what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.schedule import Knobs
from sortedrl.simulate.fit import FittedCost, Observed, Observer, read_lengths
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace
from sortedrl.telemetry.summary import Summary


@dataclass(slots=True, kw_only=True, frozen=True)
class Forecast:
    strategy: str
    seed: int | None
    rollout_s: float
    measured_rollout_s: float
    bubble_ratio: float
    measured_bubble_ratio: float

    @property
    def rollout_error(self) -> float:
        """Relative; positive where the forecast is too long."""
        return self.rollout_s / self.measured_rollout_s - 1.0 if self.measured_rollout_s else 0.0

    @property
    def bubble_error(self) -> float:
        """In points, not relative: a bubble near zero has no useful relative error."""
        return self.bubble_ratio - self.measured_bubble_ratio

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rollout_error": self.rollout_error, "bubble_error": self.bubble_error}


def forecast(run_dir: str | Path, cost: FittedCost) -> Forecast:
    """Simulate the run in this directory with these costs, and compare."""
    run_dir = Path(run_dir)
    config = SortedConfig.load(run_dir / "config.toml")
    measured = Summary.read(run_dir / "summary.json")
    observed = Observed()
    simulated = simulate(
        run_trace(read_lengths(run_dir), config),
        strategy=config.schedule.strategy.value,
        slots=config.slots,
        update_batch=config.schedule.update_batch,
        group_size=config.learner.group_size if config.is_grouped else 1,
        cost=cost,
        divergence=measured.divergence_rate or 0.0,
        prompt_tokens=cost.prompt_tokens,
        seed=config.run.seed,
        emit=None if config.knobs.overlap else Observer(observed, prefilled=0).see,
        **explicit_knobs(config.knobs),
    )
    rollout_s, bubble_ratio = simulated.rollout_s or 0.0, simulated.bubble_ratio or 0.0
    if not config.knobs.overlap:  # decisions do not hang on the clock, so each stretch can be priced by itself
        priced = [(cost.stretch_s(stretch), stretch.running) for stretch in observed.stretches]
        rollout_s = sum(seconds for seconds, _ in priced) + simulated.updates * cost.harvest_s
        busy_slot_s = sum(max(seconds - cost.host_s, 0.0) * running for seconds, running in priced)
        bubble_ratio = 1.0 - busy_slot_s / (config.slots * rollout_s)
    return Forecast(
        strategy=measured.strategy,
        seed=measured.seed,
        rollout_s=rollout_s,
        measured_rollout_s=measured.rollout_s or 0.0,
        bubble_ratio=bubble_ratio,
        measured_bubble_ratio=measured.bubble_ratio or 0.0,
    )


def run_trace(lengths: Sequence[int], config: SortedConfig) -> Trace:
    """A run's lengths without the token that comes from the prefill, which takes no decode step."""
    group = config.learner.group_size
    return Trace(
        lengths=[max(length - 1, 1) for length in lengths],
        prompts=[number // group for number in range(len(lengths))],
        cap=config.engine.max_new_tokens,
        source=str(config.run_dir),
    )


def explicit_knobs(knobs: Knobs) -> dict[str, Any]:
    """Knobs as `resolve_knobs` takes them: the word for no bound instead of None."""
    values = {field.name: getattr(knobs, field.name) for field in fields(knobs) if field.name != "update_batch"}
    return {name: "none" if value is None else value for name, value in values.items()}
