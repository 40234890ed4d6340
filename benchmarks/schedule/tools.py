"""What it pays that a trajectory in a tool holds no slot: makespans on the real engine, and the simulator's forecast.

    python -m benchmarks.schedule.tools [--samples 192] [--slots 8] [--json]

The embedded model follows chains with a tool whose calls take drawn times, of 35 % and then 68 % of a trajectory's own
time. Weights do not change. Three ways: continuous rollout with slots free during tools, the same with slots held (no
more trajectories are open than slots), and synchronous rollout with slots held. The simulator gets the turns and tool
times of these trajectories and the engine's measured seconds per step, and forecasts each makespan.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import Any

from benchmarks.record import make_parser, save
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import CompletedHandle
from sortedrl.engine.sim.cost import UnitCost
from sortedrl.environment.loop import TurnLoop
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch, Sample
from sortedrl.run.builders.environment import find_environment
from sortedrl.run.builders.parts import build_parts
from sortedrl.schedule import resolve_knobs
from sortedrl.simulate.run import simulate
from sortedrl.simulate.tools import ToolTrace
from sortedrl.simulate.traces import Trace
from sortedrl.tasks.tools import Book
from sortedrl.telemetry.events import ignore

SHARES = (0.35, 0.68)
WAYS = {"released": ("april", None), "held": ("april", "slots"), "sync, held": ("sync", "slots")}
UPDATE_BATCH = 32


class SlowBook(Book):
    """A book whose pages take their time: `mean_s` on average, drawn by row and turn."""

    mean_s = 0.0
    environment_kind = "repeatable"

    def reset(self, book: dict[str, str], **row: object) -> None:
        super().reset(book)
        self.key, self.turn = f"{sorted(book.items())}{row.get('prompt')}", 0

    def lookup(self, who: str) -> str:
        """
        Looks up whom a person points to.

        Args:
            who: Name of the person.
        """
        time.sleep(drawn_s(self.key, self.turn) * self.mean_s)
        self.turn += 1
        return super().lookup(who)


def drawn_s(key: str, turn: int) -> float:
    """A time with mean 1 and a tail."""
    return random.Random(f"{key}/{turn}").expovariate(1.0)


class FrozenLearner:
    """Takes batches and changes nothing."""

    source = None

    def start(self, batch: Batch) -> FrozenLearner:
        return self

    def done(self) -> bool:
        return True

    def result(self) -> UpdateResult:
        return UpdateResult(optimizer_steps=0)


class FrozenEngine:
    """The engine without publications: weights do not change, so nothing has to be read again."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, *arguments: Any) -> CompletedHandle:
        return CompletedHandle()


class QuickScorer:
    """Scores everything at once."""

    def __init__(self) -> None:
        self._scores: list[Any] = []

    def submit(self, sample: Sample) -> None:
        self._scores.append(type("Quick", (), {"key": (sample.id, sample.attempt), "reward": 0.0})())

    def poll(self, timeout: float) -> list[Any]:
        done, self._scores = self._scores, []
        return done


def run(parts: Any, config: SortedConfig, way: str) -> tuple[float, list[Sample], float]:
    """Makespan, the finished trajectories, and the engine's decode seconds per step."""
    strategy, bound = WAYS[way]
    slots, samples = config.engine.slots, config.run.samples
    knobs = resolve_knobs(
        strategy, UPDATE_BATCH, open_trajectories=slots if bound == "slots" else None, max_staleness="none"
    )
    trained: list[Sample] = []
    learner = FrozenLearner()
    learner.start = lambda batch: (trained.extend(batch.samples), learner)[1]  # type: ignore[method-assign]
    parts.loader.load_state_dict({"num_loaded": 0, "stream": {"cursor": 0, "seed": config.run.seed}})
    buffer, clock = Buffer(), WallClock()
    turns = TurnLoop(
        buffer=buffer,
        runner=parts.environment.runner,
        dialect=parts.environment.dialect,
        knobs=knobs,
        max_turns=config.environment.max_turns,
        clock=clock,
        emit=ignore,
    )
    loop = Controller(
        buffer,
        LoopParts(
            engine=FrozenEngine(parts.engine),  # type: ignore[arg-type]  # passes everything else on
            learner=learner,  # type: ignore[arg-type]
            scorer=QuickScorer(),
            load_samples=parts.loader.load,
            turns=turns,
        ),
        LoopSettings(knobs=knobs, total_samples=samples, sampling=parts.sampling),
        clock=clock,
    )
    before, began = parts.engine.stats(), time.perf_counter()
    assert loop.run(), "the run was stopped"
    took, used = time.perf_counter() - began, parts.engine.stats().minus(before)
    for sample in trained:
        parts.environment.runner.forget(sample.id)
    return took, trained, used.busy_slot_s / max(used.busy_slot_steps, 1)


def forecast(trained: list[Sample], slots: int, way: str, mean_s: float, step_s: float) -> float:
    """The makespan that the simulator expects for the same trajectories."""
    trained = sorted(trained, key=lambda sample: sample.id)
    ends, seconds, fed = [], [], 3
    for sample in trained:
        at, places = 0, []
        for segment in sample.segments:
            if segment.is_masked:
                places.append(at)
            at += len(segment.tokens)
        key = f"{sorted(sample.prompt.columns['book'].items())}{sample.prompt.content}"  # type: ignore[attr-defined]
        ends.append([*places, at])
        seconds.append([drawn_s(key, turn) * mean_s for turn in range(len(places))])
    lengths = [each[-1] for each in ends]
    trace = Trace(lengths=lengths, prompts=list(range(len(lengths))), cap=max(lengths) + 1, source="run")
    strategy, bound = WAYS[way]
    summary = simulate(
        trace,
        strategy=strategy,
        slots=slots,
        update_batch=UPDATE_BATCH,
        cost=UnitCost(step_s=step_s),  # type: ignore[arg-type]
        update_s=0.0,
        tools=ToolTrace(ends=ends, seconds=seconds, fed=fed),
        open_trajectories=slots if bound == "slots" else "none",
    )
    return summary.wall_s or 0.0


def measure(samples: int, slots: int) -> dict[str, Any]:
    config = SortedConfig(
        run={"samples": samples},
        task={"name": "tools"},
        model={"path": "tools-tiny"},
        schedule={"update_batch": UPDATE_BATCH},
        engine={"slots": slots, "max_new_tokens": 128},
        environment={"factory": SlowBook, "run_in": "thread", "workers": 64, "max_turns": 6, "timeout_s": 60},
        learner={"algorithm": "reinforce++", "group_size": 1},
        eval={"prompts": 0},
    )
    assert find_environment(config, None) is not None, "the benchmark needs its tool"  # type: ignore[arg-type]
    parts = build_parts(config)
    try:
        plain_s, trained, _ = run(parts, config, "held")
        own_s = plain_s * slots / samples  # of a trajectory, without tools
        num_turns = sum(sample.num_turns for sample in trained) / samples
        shares: dict[str, Any] = {}
        for share in SHARES:
            SlowBook.mean_s = share / (1 - share) * own_s / num_turns
            shares[f"{share:g}"] = _compare(parts, config, slots)
    finally:
        parts.close()
    return {"samples": samples, "slots": slots, "trajectory_s": own_s, "turns": num_turns, "by_tool_share": shares}


def _compare(parts: Any, config: SortedConfig, slots: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        took, trained, step_s = run(parts, config, way)
        expected = forecast([replace(sample) for sample in trained], slots, way, SlowBook.mean_s, step_s)
        found[way] = {"makespan_s": took, "forecast_s": expected, "error": expected / took - 1}
    free = found["released"]["makespan_s"]
    return {**found, "to_held": free / found["held"]["makespan_s"], "to_sync": free / found["sync, held"]["makespan_s"]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    result = measure(options.samples, options.slots)
    if not options.json:
        save("tools", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
