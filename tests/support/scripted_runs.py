"""Runs of the real controller on the simulated engine, with a scripted policy, learner and scorer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import Request, Sampling
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.protocols import Turns
from sortedrl.records import Batch, Prompt, Sample, sample_seed
from sortedrl.schedule import Knobs
from sortedrl.simulate.run import SimUpdate
from sortedrl.telemetry.events import Event

END = 0


@lru_cache(maxsize=200_000)
def uniform(*key: object) -> float:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


@dataclass(slots=True, kw_only=True)
class ScriptedPolicy:
    """A policy whose lengths and tokens are a pure function of seed and version, and change between versions.

    As with a real model, an answer is complete if and only if its last token is `END`. An answer that is already longer
    than its version's length gets that token next.
    """

    longest: int = 12
    length_change: float = 0.0  # chance that a version draws a new length for an answer
    divergence: float = 0.0  # chance that a version changes a token
    lengths: dict[int, int] = field(default_factory=dict)  # fixed lengths by seed; other lengths are drawn

    def full_length(self, seed: int, version: int) -> int:
        if seed in self.lengths:
            return self.lengths[seed]
        drawn = version
        while drawn > 0 and uniform("redraw", seed, drawn) >= self.length_change:
            drawn -= 1
        return 1 + int(self.longest * uniform("length", seed, drawn) ** 3)

    def token(self, seed: int, position: int, version: int) -> int:
        if self.is_last(seed, position, version):
            return END
        drawn = version
        while drawn > 0 and uniform("diverge", seed, position, drawn) >= self.divergence:
            drawn -= 1
        return 1 + int(1000 * uniform("token", seed, position, drawn))

    def logprob(self, seed: int, position: int, version: int) -> float:
        return -uniform("logprob", seed, position, version)

    def is_last(self, seed: int, position: int, version: int) -> bool:
        return position >= self.full_length(seed, version) - 1

    def length(self, seed: int, start: int, version: int) -> int:
        return max(self.full_length(seed, version), start + 1)


@dataclass(slots=True, kw_only=True)
class RecordingLearner:
    """Takes `seconds` of virtual time per update and keeps the batches that it was given."""

    clock: VirtualClock
    seconds: float = 0.0
    batches: list[Batch] = field(default_factory=list)
    source: object = None

    def start(self, batch: Batch) -> SimUpdate:
        self.batches.append(batch)
        update = SimUpdate(clock=self.clock, ready_at=self.clock.now() + self.seconds)
        if self.seconds:
            self.clock.set_timer(update.ready_at)
        return update


@dataclass(slots=True, kw_only=True, frozen=True)
class ScriptedScore:
    key: tuple[int, int]
    reward: float
    is_lost: bool = False


@dataclass(slots=True, kw_only=True)
class DelayedScorer:
    """Returns a score only after it was polled `lag` times, and keeps what it was asked: samples and their tokens.

    At the rate `lost`, the environment of an answer is gone before it gave its reward.
    """

    lag: int = 0
    lost: float = 0.0
    asked: list[tuple[int, list[int]]] = field(default_factory=list)
    queue: list[tuple[int, ScriptedScore]] = field(default_factory=list)
    num_lost: int = 0

    def submit(self, sample: Sample) -> None:
        reward = float(sum(sample.tokens) % 2)
        is_lost = uniform("lost", sample.id, sample.attempt) < self.lost
        self.num_lost += is_lost
        if not is_lost:  # otherwise it may be asked again
            self.asked.append((sample.id, sample.tokens))
        self.queue.append((self.lag, ScriptedScore(key=(sample.id, sample.attempt), reward=reward, is_lost=is_lost)))

    def poll(self, timeout: float) -> list[ScriptedScore]:
        done = [score for left, score in self.queue if left <= 0]
        self.queue = [(left - 1, score) for left, score in self.queue if left > 0]
        return done


@dataclass(slots=True, kw_only=True)
class ScriptedRun:
    controller: Controller
    learner: RecordingLearner
    engine: SimEngine
    clock: VirtualClock
    events: list[Event]

    @property
    def batches(self) -> list[list[int]]:
        return [[sample.id for sample in batch.samples] for batch in self.learner.batches]

    @property
    def trained(self) -> list[Sample]:
        return [sample for batch in self.learner.batches for sample in batch.samples]


def scripted_run(
    knobs: Knobs,
    *,
    policy: ScriptedPolicy,
    slots: int,
    num_samples: int,
    siblings: int = 1,
    grouped: bool = False,
    budget: int = 64,
    update_s: float = 0.0,
    score_lag: int = 0,
    lost_scores: float = 0.0,
    run_seed: int = 0,
    seed_of: Callable[[int], int] | None = None,
    fails: Callable[[Request], int | None] = lambda request: None,
    make_turns: Callable[[Buffer, VirtualClock, Callable[[Event], None]], Turns] | None = None,
    **settings: Any,
) -> ScriptedRun:
    """Build a run of `num_samples`; `siblings` of them share a prompt. `settings` are further `LoopSettings`."""
    clock, events = VirtualClock(), []
    engine = SimEngine(policy, slots=slots, clock=clock, fails=fails)
    learner = RecordingLearner(clock=clock, seconds=update_s)
    loaded = 0

    def load_samples(cohort: int, count: int) -> list[Sample]:
        nonlocal loaded
        first, loaded = loaded, min(loaded + count, num_samples)
        samples = []
        for number in range(first, loaded):
            prompt = Prompt(id=f"p{number // siblings}", tokens=(1, 2, 3), content="")
            index = number % siblings
            seed = sample_seed(run_seed, 0, prompt.id, index) if seed_of is None else seed_of(number)
            samples.append(
                Sample(id=number, prompt=prompt, index=index, epoch=0, cohort=cohort, seed=seed, budget=budget)
            )
        return samples

    buffer = Buffer(grouped=grouped)
    turns = None if make_turns is None else make_turns(buffer, clock, events.append)
    scorer = DelayedScorer(lag=score_lag, lost=lost_scores)
    controller = Controller(
        buffer,
        LoopParts(engine=engine, learner=learner, scorer=scorer, load_samples=load_samples, turns=turns),
        LoopSettings(knobs=knobs, total_samples=num_samples, sampling=Sampling(), **settings),
        clock=clock,
        emit=events.append,
    )
    return ScriptedRun(controller=controller, learner=learner, engine=engine, clock=clock, events=events)
