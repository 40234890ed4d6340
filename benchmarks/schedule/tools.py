"""What it pays that a trajectory in a tool holds no slot: makespans on the real engine, and the simulator's forecast.

    python -m benchmarks.schedule.tools [--samples 1536] [--slots 64] [--pass-ms 1.0] [--json]

Lengths, turns and tool times of the trajectories are drawn, with a long tail, so that tools take 35 % and then 68 % of
a trajectory's time. The local engine decodes every token, with a small model that is not trained, and a real
environment sleeps for every call. Three ways: continuous rollout with slots free during tools, the same with slots held
(no more trajectories are open than slots), and synchronous rollout with slots held. Weights do not change.

Every pass of the model takes at least `--pass-ms`, because on a GPU a step of few slots costs as much as one of many;
with 0 the passes take what this machine needs. Before the runs, steps, prefills and the loop's own time per turn are
measured. From these costs and the same trajectories the simulator forecasts every makespan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import make_parser, save
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import EngineEvent, Finished, Handle, InFlight, Request, Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.environment.base import ToolCall, describe
from sortedrl.environment.loop import TurnLoop
from sortedrl.environment.runner import EnvironmentRunner
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch, FinishReason, Mode, Prompt, Sample
from sortedrl.schedule import resolve_knobs
from sortedrl.simulate.fit import FittedCost, least_squares
from sortedrl.simulate.run import InstantScorer, simulate
from sortedrl.simulate.tools import ToolTrace, TraceTools, draw_tools
from sortedrl.simulate.traces import Trace, load_trace
from sortedrl.telemetry.events import ignore

SHARES = (0.35, 0.68)  # of a trajectory's time that its tools take
WAYS = {"released": ("april", False), "held": ("april", True), "sync, held": ("sync", True)}  # strategy, holds slots
LENGTHS = "lognormal(240, 1.1, 2816)"
MEAN_TURNS, MEAN_CONTEXT = 3, 300  # tools of a trajectory; tokens that a step reads of it
PROMPT_TOKENS, VOCAB, MAX_LENGTH = 16, 64, 3072
WORKERS = 320  # threads that wait in tools, more than trajectories ever do
LIMITS = {0.35: {"held": 0.8, "sync, held": 0.25}, 0.68: {"held": 0.65, "sync, held": 0.25}}
FORECAST_LIMIT = 0.15


class Waiting:
    """An environment whose tool takes the time that the row says."""

    environment_kind = "stateless"

    def reset(self, seconds: list[float], **row: object) -> None:
        self.seconds = seconds

    def wait(self, turn: int) -> str:
        """
        Waits as long as the turn's call takes.

        Args:
            turn: Number of the turn.
        """
        time.sleep(self.seconds[turn])
        return ""


class DrawnTools(TraceTools):
    """The dialect of drawn trajectories: a turn that is not the last one calls `wait`."""

    def calls(self, sample: Sample) -> list[ToolCall]:
        called = super().calls(sample)
        return [ToolCall(name="wait", arguments={"turn": sample.num_turns}) for _ in called]


@dataclass(slots=True, kw_only=True, frozen=True)
class SameWeights:
    """A source of weights that the engine already has."""

    module: Any


class DrawnTurns:
    """The local engine with turns that end where they were drawn, and with publications of the same weights."""

    def __init__(self, inner: LocalEngine, tools: ToolTrace) -> None:
        self._inner, self._tools = inner, tools

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, requests: Iterable[Request]) -> None:
        self._inner.submit([replace(request, budget=self._end_of(request)) for request in requests])

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        events = self._inner.poll(timeout)
        return [replace(e, reason=FinishReason.STOP) if isinstance(e, Finished) else e for e in events]

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        """Only the version changes, so running answers keep their cache."""
        return self._inner.publish(version, SameWeights(module=self._inner._model), InFlight.KEEP)

    def _end_of(self, request: Request) -> int:
        return next(end for end in self._tools.ends[request.sample] if end > len(request.cached))


class FrozenLearner:
    """Takes batches and changes nothing."""

    source = None

    def start(self, batch: Batch) -> FrozenLearner:
        return self

    def done(self) -> bool:
        return True

    def result(self) -> UpdateResult:
        return UpdateResult(optimizer_steps=0)


@dataclass(slots=True, kw_only=True, frozen=True)
class Workload:
    trace: Trace
    tools: ToolTrace

    def load(self, first: int, count: int, cohort: int) -> list[Sample]:
        rng = np.random.default_rng(first)
        samples = []
        for number in range(first, min(first + count, self.trace.num_samples)):
            tokens = tuple(rng.integers(VOCAB, size=PROMPT_TOKENS).tolist())
            prompt = Prompt(str(number), tokens, "", {"seconds": self.tools.seconds[number]})
            samples.append(Sample(number, prompt, number, 0, cohort, number, self.tools.longest + 1))
        return samples


class SlowDecoder:
    """A decoder whose passes take at least `pass_s`."""

    def __init__(self, inner: Any, pass_s: float) -> None:
        self._inner, self._pass_s = inner, pass_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        began = time.perf_counter()
        logits = self._inner.forward(*arguments)
        time.sleep(max(self._pass_s - (time.perf_counter() - began), 0.0))
        return logits


def make_engine(slots: int, pass_s: float) -> LocalEngine:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
    )
    engine = LocalEngine(LlamaForCausalLM(shape).eval(), slots=slots, max_length=MAX_LENGTH)
    if pass_s:
        engine._decoder = SlowDecoder(engine._decoder, pass_s)  # type: ignore[assignment]
    return engine


# ---- costs -----------------------------------------------------------------------------------------------------------


def measure_costs(engine: LocalEngine, slots: int) -> FittedCost:
    """The seconds of steps and prefills, each as the least-squares line through a few timed calls, and of a turn."""
    _time_batch(engine, slots, 100)  # the first call compiles and allocates
    steps: list[tuple[list[float], float]] = []
    prefills: list[tuple[list[float], float]] = []
    for num in sorted({1, 2, slots // 2, slots}):
        for cached in (0, 100, 300):
            for _ in range(3):
                prefill_s, step_s = _time_batch(engine, num, cached)
                prefills.append(([1.0, num, num * cached], prefill_s))
                steps.append(([1.0, num, num * (PROMPT_TOKENS + cached)], step_s))
    call_s, start_s, token_s = _line(prefills)
    base_s, slot_s, window_s = _line(steps)
    unmeasured = dict.fromkeys(("several_s", "poll_s", "host_s", "update_base_s", "update_token_s"), 0.0)
    cost = FittedCost(
        base_s=base_s,
        slot_s=slot_s,
        window_s=window_s,
        call_s=call_s,
        start_s=start_s,
        token_s=token_s,
        publication_s=0.0,
        harvest_s=0.0,
        prompt_tokens=PROMPT_TOKENS,
        **unmeasured,
    )
    work = draw(4 * slots, 0.0, 0.0, seed=1)  # tools that return at once
    took_s, num_turns = run(engine, work, "released", slots)["makespan_s"], sum(map(len, work.tools.ends))
    return replace(cost, poll_s=max(took_s - forecast(work, "released", slots, cost), 0.0) / num_turns)


def _time_batch(engine: LocalEngine, num: int, cached: int, steps: int = 32) -> tuple[float, float]:
    """Seconds of the prefill of `num` sequences with `cached` answer tokens, and of a step after it."""
    prompt, tokens = (1,) * PROMPT_TOKENS, [2] * cached
    mode = Mode.RESUME if cached else Mode.FRESH
    before = engine.stats()
    engine.submit(
        [Request(n, 0, prompt, cached + steps + 1, n, Sampling(), mode, tokens, ()) for n in range(num)],
    )
    while engine.num_running:
        engine.poll()
    used = {key: engine.stats().extra[key] - before.extra[key] for key in ("prefill_s", "decode_s")}
    return used["prefill_s"], used["decode_s"] / steps


def _line(points: Sequence[tuple[list[float], float]]) -> list[float]:
    rows, seconds = np.array([row for row, _ in points]), np.array([s for _, s in points])
    weights = 1 / seconds
    return least_squares(rows * weights[:, None], seconds * weights).tolist()


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(engine: LocalEngine, work: Workload, way: str, slots: int) -> dict[str, Any]:
    """Roll the workload out one way; returns its makespan and what the engine did."""
    strategy, is_held = WAYS[way]
    knobs = resolve_knobs(
        strategy, slots, open_trajectories=slots if is_held else None, max_staleness=None if strategy == "april" else 0
    )
    buffer, clock = Buffer(), WallClock()
    runner = EnvironmentRunner(describe(Waiting), timeout_s=600.0, workers=WORKERS, run_in="thread")
    turns = TurnLoop(
        buffer=buffer,
        runner=runner,
        dialect=DrawnTools(tools=work.tools),
        knobs=knobs,
        max_turns=max(map(len, work.tools.ends)),
        clock=clock,
        emit=ignore,
    )
    controller = Controller(
        buffer,
        LoopParts(
            engine=DrawnTurns(engine, work.tools),  # type: ignore[arg-type]  # passes everything else on
            learner=FrozenLearner(),  # type: ignore[arg-type]
            scorer=InstantScorer(),
            load_samples=lambda cohort, count: work.load(buffer.num_loaded, count, cohort),
            turns=turns,
        ),
        LoopSettings(knobs=knobs, total_samples=work.trace.num_samples, sampling=Sampling()),
        clock=clock,
    )
    runner.start()
    controller.engine.publish(0, None)  # the version of an earlier run was higher
    before, began = engine.stats(), time.perf_counter()
    try:
        assert controller.run(), "the run was stopped"
        took = time.perf_counter() - began
    finally:
        runner.close()
    assert buffer.num_trained == work.trace.num_samples, "trajectories were lost"
    assert turns.counts["calls"] == sum(map(len, work.tools.seconds)), "tools were called more or less often than drawn"
    used = engine.stats().minus(before)
    return {
        "makespan_s": took,
        "busy": used.busy_slot_steps / used.slot_steps,
        "prefilled_tokens": used.prompt_tokens + used.recomputed_tokens,
    }


def forecast(work: Workload, way: str, slots: int, cost: FittedCost) -> float:
    """The makespan that the simulator expects."""
    strategy, is_held = WAYS[way]
    summary = simulate(
        work.trace,
        strategy=strategy,
        slots=slots,
        update_batch=slots,
        cost=cost,
        update_s=0.0,
        prompt_tokens=PROMPT_TOKENS,
        in_flight=InFlight.KEEP,  # weights do not change, so nothing is read again
        tools=work.tools,
        open_trajectories=slots if is_held else "none",
        max_staleness="none",
    )
    assert summary.wall_s is not None, "a simulation has a makespan"
    return summary.wall_s


def draw(samples: int, share: float, token_s: float, seed: int) -> Workload:
    """Trajectories whose tools take `share` of their time, if each token takes `token_s`."""
    trace = load_trace(LENGTHS, samples=samples, seed=seed)
    mean_s = share / (1 - share) * sum(trace.lengths) / samples * token_s / MEAN_TURNS
    return Workload(trace=trace, tools=draw_tools(f"{MEAN_TURNS} x {mean_s:.6f}", trace.lengths, seed))


def measure(options: Any) -> dict[str, Any]:
    slots = options.slots
    engine = make_engine(slots, options.pass_ms / 1000)
    cost = measure_costs(engine, slots)
    token_s = cost.step_s(slots) + cost.window_s * slots * MEAN_CONTEXT
    found: dict[str, Any] = {}
    for share in SHARES:
        work, ways = draw(options.samples, share, token_s, options.seed), {}
        for way in WAYS:
            expected = forecast(work, way, slots, cost)
            ways[way] = {**run(engine, work, way, slots), "forecast_s": expected}
            ways[way]["error"] = expected / ways[way]["makespan_s"] - 1
        released = ways["released"]["makespan_s"]
        tool_s = sum(map(sum, work.tools.seconds))
        found[f"{share:g}"] = {
            "ways": ways,
            "share_as_drawn": tool_s / (tool_s + sum(work.trace.lengths) * token_s),
            "of_held": released / ways["held"]["makespan_s"],
            "of_sync": released / ways["sync, held"]["makespan_s"],
        }
    engine.close()
    return {
        "samples": options.samples,
        "slots": slots,
        "pass_ms": options.pass_ms,
        "cost": cost.as_dict(),
        "by_tool_share": found,
        "missed": missed(found),
    }


def missed(found: dict[str, Any]) -> list[str]:
    """The claims that these figures do not bear out."""
    said = []
    for share in SHARES:
        figures = found[f"{share:g}"]
        for key, way in (("of_held", "held"), ("of_sync", "sync, held")):
            if figures[key] > LIMITS[share][way]:
                said.append(f"{share:g}: {figures[key]:.2f} of {way}, more than {LIMITS[share][way]}")
        for way, one in figures["ways"].items():
            if abs(one["error"]) > FORECAST_LIMIT:
                said.append(f"{share:g}: the forecast of {way} is off by {one['error']:+.0%}")
    return said


def show(result: dict[str, Any]) -> None:
    table = Table("time in tools", "slots", "makespan s", "forecast s", "error", "busy slots", "prefilled tokens")
    for share, figures in result["by_tool_share"].items():
        for way, one in figures["ways"].items():
            table.add_row(
                f"{float(share):.0%}",
                way,
                f"{one['makespan_s']:.1f}",
                f"{one['forecast_s']:.1f}",
                f"{one['error']:+.1%}",
                f"{one['busy']:.2f}",
                f"{one['prefilled_tokens']:,}",
            )
    Console(width=110).print(table)
    for share, figures in result["by_tool_share"].items():
        print(f"{float(share):.0%} in tools: released / held {figures['of_held']:.2f}, / sync {figures['of_sync']:.2f}")
    print("missed: " + ("; ".join(result["missed"]) or "nothing"))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=1536)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--pass-ms", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
        print(f"saved {save('tools', result)}")
    raise SystemExit(1 if result["missed"] else 0)


if __name__ == "__main__":
    main()
