"""A scripted policy whose answers have several turns, with real environments on a virtual clock."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.environment.base import EnvironmentSpec, Kind, ToolCall, Turn, TurnResult
from sortedrl.environment.dialect import turns_of
from sortedrl.environment.loop import TurnLoop
from sortedrl.environment.objects import EnvironmentObjects
from sortedrl.environment.runner import EnvironmentRunner
from sortedrl.environment.scorer import no_reward
from sortedrl.records import Sample
from sortedrl.reward.pool import OnError, RewardPool, RewardScore
from sortedrl.reward.scorer import SampleScorer
from sortedrl.schedule import Knobs
from sortedrl.simulate.virtual_runner import VirtualRunner
from sortedrl.telemetry.events import Emit
from tests.support.scripted_runs import END, uniform


@dataclass(slots=True, kw_only=True)
class TurnPolicy:
    """Any position may end a turn; tokens change between versions, and with them the ends of turns."""

    end_rate: float = 0.2
    divergence: float = 0.0

    def token(self, seed: int, position: int, version: int) -> int:
        drawn = version
        while drawn > 0 and uniform("diverge", seed, position, drawn) >= self.divergence:
            drawn -= 1
        if uniform("end", seed, position, drawn) < self.end_rate:
            return END
        return 1 + int(1000 * uniform("token", seed, position, drawn))

    def logprob(self, seed: int, position: int, version: int) -> float:
        return -uniform("logprob", seed, position, version)

    def is_last(self, seed: int, position: int, version: int) -> bool:
        return self.token(seed, position, version) == END

    def length(self, seed: int, start: int, version: int) -> int:
        position = start
        while not self.is_last(seed, position, version):
            position += 1
        return position + 1


class Adder:
    """An environment with state: each call adds to a sum that it returns."""

    made: ClassVar[list[tuple[int, int]]] = []  # arguments of every call in this process

    def reset(self, **row: Any) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.made.append((id(self), number))
        if number % 7 == 0:
            raise ValueError("no sevens")
        self.total += number
        return self.total

    def _snapshot(self) -> int:
        return self.total

    def _restore(self, state: int) -> None:
        self.total = state


class Echo(Adder):
    """The same without state."""

    def add(self, number: int) -> int:
        self.made.append((id(self), number))
        return number + 1


def calls_of(turn: Sequence[int]) -> list[ToolCall]:
    """Most turns of two tokens or more call the tool, some twice, some with a mistake."""
    if len(turn) < 2 or turn[0] % 4 == 0:
        return []
    calls = [ToolCall(name="add", arguments={"number": turn[0]})]
    if turn[0] % 3 == 0:
        calls.append(ToolCall(name="add", error="malformed"))
    if turn[0] % 5 == 0:
        calls.append(ToolCall(name="add", arguments={"number": turn[1]}))
    return calls


def fed_by(texts: Sequence[str]) -> list[int]:
    """Negative tokens, as many as there are results, that depend on all of their texts."""
    return [-1 - int(1000 * uniform(*texts, place)) for place in range(len(texts))]


class ScriptedDialect:
    def calls(self, sample: Sample) -> list[ToolCall]:
        return calls_of(turns_of(sample)[-1])

    def history(self, sample: Sample) -> list[list[ToolCall]]:
        return [calls_of(turn) for turn in turns_of(sample)[:-1]]

    def fed(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[int]:
        return fed_by(texts)


class DirectChannel:
    def __init__(self, objects: EnvironmentObjects) -> None:
        self.objects = objects

    def exchange(self, request: Any, timeout_s: float) -> dict[str, Any]:
        return self.objects.handle(dict(request))

    def stop(self) -> None: ...

    def close(self) -> None: ...


class DirectRunner:
    """Works on turns at once, in real objects."""

    def __init__(self, factory: type, kind: Kind) -> None:
        spec = EnvironmentSpec(factory=factory, name="E", kind=kind, tools=(), has_reward=True, needed=())
        self.runner = EnvironmentRunner(spec, run_in="thread", timeout_s=0.1)
        self.channel = DirectChannel(EnvironmentObjects(factory, kind=kind.value, max_chars=100))
        self.submitted: list[Turn] = []

    def submit(self, turn: Turn) -> None:
        self.submitted.append(turn)

    def poll(self, timeout: float) -> list[TurnResult]:
        return self._work(asks_reward=False)

    def poll_rewards(self, timeout: float) -> list[TurnResult]:
        return self._work(asks_reward=True)

    def forget(self, sample: int) -> None:
        self.channel.exchange({"op": "forget", "sample": sample, "serial": -1}, 1.0)

    def _work(self, *, asks_reward: bool) -> list[TurnResult]:
        turns = [turn for turn in self.submitted if turn.asks_reward == asks_reward]
        self.submitted = [turn for turn in self.submitted if turn.asks_reward != asks_reward]
        return [self.runner._work(self.channel, turn) for turn in turns]


class ZeroPool(RewardPool):
    """Every answer has the score 0 at once, in place of reward functions."""

    def __init__(self, on_error: OnError) -> None:
        super().__init__(no_reward, timeout_s=1.0, workers=1, on_error=on_error)
        self.keys: list[tuple[int, int]] = []

    def submit(self, key: tuple[int, int], *answer: Any) -> None:
        self.keys.append(key)

    def poll(self, timeout: float = 0) -> list[RewardScore]:
        keys, self.keys = self.keys, []
        return [RewardScore(key=key, reward=0.0) for key in keys]


def zeros(on_error: OnError = "zero", **callbacks: Any) -> SampleScorer:
    return SampleScorer(pool=ZeroPool(on_error), tokenizer=None, **callbacks)


@dataclass(slots=True, kw_only=True)
class ScriptedTools:
    """Makes the `TurnLoop` of a run, with real objects; `loss_rate` is the chance that a worker died before a turn."""

    kind: Kind
    knobs: Knobs
    max_turns: int
    longest_s: float
    loss_rate: float = 0.0
    seed: int = 0
    num_lost: int = 0
    results: list[TurnResult] = field(default_factory=list)
    loop: TurnLoop | None = None

    def make(self, buffer: Buffer, clock: VirtualClock, emit: Emit) -> TurnLoop:
        factory = Echo if self.kind is Kind.STATELESS else Adder
        spec = EnvironmentSpec(factory=factory, name="Adder", kind=self.kind, tools=(), has_reward=False, needed=())
        runner = EnvironmentRunner(spec, run_in="thread")
        objects = EnvironmentObjects(factory, kind=self.kind, max_chars=100)
        channel = DirectChannel(objects)

        def work(turn: Turn) -> tuple[TurnResult, float]:
            if uniform("lost", self.seed, turn.sample, turn.serial) < self.loss_rate:
                objects.handle({"op": "forget", "sample": turn.sample, "serial": -1})
                self.num_lost += 1
            result = runner._work(channel, turn)
            self.results.append(result)
            seconds = round(self.longest_s * uniform("tool", self.seed, turn.sample, turn.number) ** 3, 1)
            return result, seconds

        self.loop = TurnLoop(
            buffer=buffer,
            runner=VirtualRunner(clock=clock, work=work),
            dialect=ScriptedDialect(),
            knobs=self.knobs,
            max_turns=self.max_turns,
            clock=clock,
            emit=emit,
        )
        return self.loop


def expected_feeds(kind: Kind, sample: Sample) -> list[list[int]]:
    """What a fresh environment gives for the turns of a sample, one after the other."""
    made = (Echo if kind is Kind.STATELESS else Adder)()
    made.reset()
    feeds: list[list[int]] = []
    for turn in turns_of(sample)[: sample.num_turns]:
        texts: list[str] = []
        for call in calls_of(turn):
            if call.error:
                texts.append(json.dumps({"error": call.error}))
                continue
            try:
                texts.append(str(made.add(**call.arguments)))
            except ValueError as error:
                line = traceback.extract_tb(error.__traceback__)[-1].lineno
                texts.append(json.dumps({"error": f"ValueError: {error} (scripted_turns.py:{line})"}))
        feeds.append(fed_by(texts))
    return feeds
