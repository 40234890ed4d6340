"""A forecast of a finished run's rollout time and bubble: its schedule is simulated again with fitted costs.

`plan --from-run` uses it to show how well a fit predicts the run that it came from; benchmarks/schedule/forecast.py
uses it to show how well a fit predicts other strategies. Guarantees: a forecast uses the run's lengths, divergence rate
and knobs, but none of its measured times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.simulate.fit import FittedCost, Observed, Observer
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace, load_trace
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
        """Relative error; positive if the forecast is too long."""
        return self.rollout_s / self.measured_rollout_s - 1.0 if self.measured_rollout_s else 0.0

    @property
    def bubble_error(self) -> float:
        """Absolute error, because a bubble near zero has no useful relative error."""
        return self.bubble_ratio - self.measured_bubble_ratio

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rollout_error": self.rollout_error, "bubble_error": self.bubble_error}


def forecast(run_dir: str | Path, cost: FittedCost) -> Forecast:
    """Simulate the run in this directory with these costs, and compare the result with the measured times."""
    run_dir = Path(run_dir)
    config = SortedConfig.load(run_dir / "config.toml")
    measured = Summary.read(run_dir / "summary.json")
    observed = Observed()
    simulated = simulate(
        _recorded_trace(run_dir, config),
        strategy=config.strategy_name,
        slots=config.slots,
        update_batch=config.schedule.update_batch,
        group_size=config.learner.group_size if config.is_grouped else 1,
        cost=cost,
        divergence=measured.divergence_rate or 0.0,
        prompt_tokens=cost.prompt_tokens,
        seed=config.run.seed,
        emit=None if config.knobs.overlap else Observer(observed, prefilled=0).observe,
        exact=config.knobs,
    )
    rollout_s, bubble_ratio = simulated.rollout_s or 0.0, simulated.bubble_ratio or 0.0
    if not config.knobs.overlap:  # decisions do not depend on the clock, so the cost of each span can be computed apart
        priced = [(cost.span_s(span), span.running) for span in observed.spans]
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


def _recorded_trace(run_dir: Path, config: SortedConfig) -> Trace:
    """The run's answers without their first token, which comes from the prefill and takes no decode step."""
    lengths = load_trace(run_dir).lengths
    group = config.learner.group_size
    return Trace(
        lengths=[max(length - 1, 1) for length in lengths],
        prompts=[number // group for number in range(len(lengths))],
        cap=config.engine.max_new_tokens,
        source=str(config.run_dir),
    )
