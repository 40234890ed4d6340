"""What it pays that a trajectory in a tool holds no slot: makespans on the real engine, and the simulator's forecast.

    python -m benchmarks.schedule.tools [--model tiny|smollm2] [--samples 1024] [--slots 64] [--pass-ms 2.0] [--json]

Lengths, turns and tool times of the trajectories are drawn, with a long tail, so that tools take 35 % and then 68 % of
a trajectory's time. The local engine decodes every token, and a real environment sleeps for every call. Three ways:
continuous rollout with slots free during tools, the same with slots held (no more trajectories are open than slots),
and synchronous rollout with slots held. Weights do not change.

The claim is about engines whose step costs the same for few rows as for many, as on a GPU, where a step reads all
weights. Two settings come near to it on a CPU:

- `tiny` has 64 slots. No model does that on a CPU, so the model is small, every pass takes at least `--pass-ms`, and
  the engine works as with a large model: prompts and tool results share passes with decoding slots, and prefixes are
  kept while tools work. With `--pass-ms 0` passes take what this machine needs, and free slots save little.
- `smollm2` is SmolLM2-135M with 8 slots, in which nothing is stretched: a step reads 540 MB of weights, and with eight
  rows it costs little more than with one. A synchronous batch of 8 has a shorter tail than one of 64, so less is to be
  gained over synchronous rollout.

Before the runs, the cost of a step is measured, and the loop's own time per turn, with other trajectories whose tools
return at once. From these costs and the trajectories the simulator forecasts every makespan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
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
from sortedrl.config import SortedConfig
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.attempt import Attempt
from sortedrl.engine.base import CompletedHandle, Delta, InFlight, Request, Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.environment.base import ToolCall, describe
from sortedrl.environment.loop import TurnLoop
from sortedrl.environment.runner import EnvironmentRunner
from sortedrl.learner.base import UpdateResult
from sortedrl.records import Batch, FinishReason, Mode, Prompt, Sample
from sortedrl.run.builders.parts import load_model, model_path
from sortedrl.schedule import resolve_knobs
from sortedrl.simulate.fit import FittedCost, least_squares
from sortedrl.simulate.run import InstantScorer, simulate
from sortedrl.simulate.tools import ToolTrace, TraceTools, draw_tools
from sortedrl.simulate.traces import Trace, load_trace
from sortedrl.telemetry.events import ignore

SHARES = (0.35, 0.68)  # of a trajectory's time that its tools take
WAYS = {"released": ("april", False), "held": ("april", True), "sync, held": ("sync", True)}  # strategy, holds slots
MEAN_TURNS = 3  # with tools, of a trajectory
PROMPT_TOKENS, VOCAB = 16, 64  # prompts are of the first tokens of the vocabulary
LIMITS = {0.35: {"held": 0.8, "sync, held": 0.25}, 0.68: {"held": 0.65, "sync, held": 0.25}}
FORECAST_LIMIT = 0.15


@dataclass(slots=True, kw_only=True, frozen=True)
class Setting:
    lengths: str
    max_length: int
    samples: int
    slots: int
    pass_ms: float
    workers: int  # threads that wait in tools, more than trajectories ever do
    kept_prefixes: int
    timed_lengths: tuple[int, ...]  # at which the cost of a step is measured
    threads: int


SETTINGS = {
    "tiny": Setting(
        lengths="lognormal(240, 1.1, 2816)",
        max_length=3072,
        samples=1024,
        slots=64,
        pass_ms=2.0,
        workers=320,
        kept_prefixes=256,
        timed_lengths=(0, 100, 300),
        threads=1,
    ),
    "smollm2": Setting(
        lengths="lognormal(40, 1.1, 400)",
        max_length=640,
        samples=72,
        slots=8,
        pass_ms=0.0,
        workers=72,
        kept_prefixes=48,
        timed_lengths=(0, 60),
        threads=2,
    ),
}


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


class DrawnAttempt(Attempt):
    """An attempt whose turn ends where its budget ends."""

    __slots__ = ()

    @property
    def ending(self) -> FinishReason | None:
        return None if super().ending is None else FinishReason.STOP


class TurnEngine(LocalEngine):
    """The local engine as with a large model, with turns that end where they were drawn, and with the same weights."""

    tools: ToolTrace

    def __init__(self, model: torch.nn.Module, *, pass_s: float, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._is_mixing = True
        if pass_s:
            self._decoder = SlowDecoder(self._decoder, pass_s)  # type: ignore[assignment]  # passes everything else on

    def begin(self, tools: ToolTrace) -> None:
        """Start a run with other trajectories."""
        assert not self.num_running, "a run has left attempts behind"
        self.tools, self._version = tools, 0
        self._kept.clear(())

    def submit(self, requests: Iterable[Request]) -> None:
        self._pending += [DrawnAttempt.begin(replace(request, budget=self._end_of(request))) for request in requests]

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        """Only the version changes, so that every cache stays valid."""
        self._version = version
        return CompletedHandle()

    def _end_of(self, request: Request) -> int:
        return next(end for end in self.tools.ends[request.sample] if end > len(request.cached))


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
    """A decoder whose passes take at least `pass_s`, in which other threads can work, as during a pass on a GPU."""

    def __init__(self, inner: Any, pass_s: float) -> None:
        self._inner, self._pass_s = inner, pass_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        began = time.perf_counter()
        logits = self._inner.forward(*arguments)
        time.sleep(max(self._pass_s - (time.perf_counter() - began), 0.0))
        return logits


def make_engine(options: Any) -> TurnEngine:
    setting = SETTINGS[options.model]
    return TurnEngine(
        make_model(setting.max_length) if options.model == "tiny" else load_smollm2(),
        pass_s=options.pass_ms / 1000,
        slots=options.slots,
        max_length=setting.max_length,
        path="native",
        drafts="off",
        kept_prefixes=setting.kept_prefixes,
    )


def load_smollm2() -> torch.nn.Module:
    model, _ = load_model(model_path(SortedConfig(model={"path": "smollm2-135m"})))
    return model.eval()


def make_model(max_length: int) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_length,
    )
    return LlamaForCausalLM(shape).eval()


# ---- costs -----------------------------------------------------------------------------------------------------------


def measure_costs(engine: TurnEngine, slots: int, setting: Setting) -> tuple[FittedCost, float]:
    """The costs that the forecast uses, and how many seconds a token takes in a slot, everything included."""
    time_steps(engine, slots, 100)  # the first call allocates
    steps: list[tuple[list[float], float]] = []
    for num in sorted({num for num in (1, 2, slots // 2, slots) if 1 <= num <= slots}):
        for start in setting.timed_lengths:
            step_s = min(time_steps(engine, num, start) for _ in range(3))
            steps.append(([1.0, num, num * (PROMPT_TOKENS + start)], step_s))
    rows, seconds = np.array([row for row, _ in steps]), np.array([s for _, s in steps])
    base_s, slot_s, window_s = least_squares(rows / seconds[:, None], np.ones_like(seconds)).tolist()
    # Prompts and tool results share passes with decoding slots, so that a prefill has no cost of its own.
    nothing = dict.fromkeys(
        ("several_s", "poll_s", "host_s", "update_base_s", "update_token_s", "publication_s", "harvest_s"), 0.0
    )
    nothing |= dict.fromkeys(("call_s", "start_s", "token_s"), 0.0)
    cost = FittedCost(base_s=base_s, slot_s=slot_s, window_s=window_s, prompt_tokens=PROMPT_TOKENS, **nothing)
    work = draw(setting.lengths, 8 * slots, 0.0, 0.0, seed=1)  # tools that return at once
    done, num_turns = run(engine, work, "released", slots, setting.workers), sum(map(len, work.tools.ends))
    num_tokens = sum(ends[-1] for ends in work.tools.ends)
    poll_s = max(done["makespan_s"] - forecast(work, "released", slots, cost), 0.0) / num_turns
    return replace(cost, poll_s=poll_s), done["makespan_s"] * done["busy"] * slots / num_tokens


def time_steps(engine: TurnEngine, num: int, start: int, steps: int = 32) -> float:
    """Seconds of a step in which `num` sequences run, the answers of which have `start` tokens and a few more."""
    length = start + steps
    engine.begin(ToolTrace(ends=[[start + 1, start + 9 + steps]] * num, seconds=[[0.0]] * num))
    prompts = [(number % VOCAB,) * PROMPT_TOKENS for number in range(num)]
    engine.submit([Request(n, 0, prompts[n], length, n, Sampling(), Mode.FRESH, (), ()) for n in range(num)])
    answers: dict[int, list[int]] = {n: [] for n in range(num)}
    while engine.num_running:
        for event in engine.poll():
            if isinstance(event, Delta):
                answers[event.sample] += event.tokens
    cached = {n: [*tokens, *[0] * 8] for n, tokens in answers.items()}
    engine.submit([Request(n, 1, prompts[n], length, n, Sampling(), Mode.RESUME, cached[n], ()) for n in range(num)])
    while engine._prefilling or engine._pending:
        engine.poll(0.0)
    before = engine.stats()
    while engine.num_running:
        engine.poll()
    used = engine.stats().minus(before)
    return (engine.stats().extra["decode_s"] - before.extra["decode_s"]) / used.decode_steps


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(engine: TurnEngine, work: Workload, way: str, slots: int, workers: int) -> dict[str, Any]:
    """Roll the workload out one way; returns its makespan and what the engine did."""
    strategy, is_held = WAYS[way]
    knobs = resolve_knobs(
        strategy, slots, open_trajectories=slots if is_held else None, max_staleness=None if strategy == "april" else 0
    )
    buffer, clock = Buffer(), WallClock()
    runner = EnvironmentRunner(describe(Waiting), timeout_s=600.0, workers=workers, run_in="thread")
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
            engine=engine,
            learner=FrozenLearner(),  # type: ignore[arg-type]
            scorer=InstantScorer(),
            load_samples=lambda cohort, count: work.load(buffer.num_loaded, count, cohort),
            turns=turns,
        ),
        LoopSettings(knobs=knobs, total_samples=work.trace.num_samples, sampling=Sampling()),
        clock=clock,
    )
    runner.start()
    engine.begin(work.tools)
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


def draw(lengths: str, samples: int, share: float, token_s: float, seed: int) -> Workload:
    """Trajectories whose tools take `share` of their time, if each token takes `token_s`."""
    trace = load_trace(lengths, samples=samples, seed=seed)
    mean_s = share / (1 - share) * sum(trace.lengths) / samples * token_s / MEAN_TURNS
    return Workload(trace=trace, tools=draw_tools(f"{MEAN_TURNS} x {mean_s:.6f}", trace.lengths, seed))


def measure(options: Any) -> dict[str, Any]:
    slots, setting = options.slots, SETTINGS[options.model]
    torch.set_num_threads(setting.threads)
    engine = make_engine(options)
    cost, token_s = measure_costs(engine, slots, setting)
    found: dict[str, Any] = {}
    for share in SHARES:
        work, ways = draw(setting.lengths, options.samples, share, token_s, options.seed), {}
        for way in WAYS:
            expected = forecast(work, way, slots, cost)
            ways[way] = {**run(engine, work, way, slots, setting.workers), "forecast_s": expected}
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
        "model": options.model,
        "samples": options.samples,
        "slots": slots,
        "pass_ms": options.pass_ms,
        "cost": cost.as_dict(),
        "token_s": token_s,
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
    parser.add_argument("--model", choices=list(SETTINGS), default="tiny")
    parser.add_argument("--samples", type=int, help="default: as the setting of the model has it; so are the next two")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--pass-ms", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for key in ("samples", "slots", "pass_ms"):
        if getattr(options, key) is None:
            setattr(options, key, getattr(SETTINGS[options.model], key))
    result = measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
        print(f"saved {save('tools' if options.model == 'tiny' else f'tools_{options.model}', result)}")
    raise SystemExit(1 if result["missed"] else 0)


if __name__ == "__main__":
    main()
