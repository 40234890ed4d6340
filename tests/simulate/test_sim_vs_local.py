"""Property test: with the same scripted answers, the simulated and the local engine lead to the same decisions.

The local engine is the real one (batching, prefill, replay, interruption, delivery, cache). Only its decoder is
replaced: it reads from the cache which sample a row belongs to, and forces that sample's scripted token. One decode
step is one second of virtual time on both sides.

Shapes: t packed tokens, r rows of logits, v vocabulary, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import Handle, InFlight, Request, Sampling
from sortedrl.engine.local.cache import DecodePlan
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.sim.engine import RunningAttempt, SimEngine
from sortedrl.errors import ConfigError
from sortedrl.records import Prompt, Sample
from sortedrl.schedule import Admission, Knobs, Order, Strategy, resolve_knobs
from sortedrl.telemetry import events
from tests.support.scripted_runs import END, DelayedScorer, RecordingLearner, ScriptedPolicy
from tests.support.tiny_models import tiny_model

FIRST_SAMPLE_TOKEN = 16  # tokens from here on name a sample; those below are answers
MAX_SAMPLES = 40
PROMPT_TOKENS = 3
BUDGETS = (4, 30)
SOME = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# Events that divide the log: between two of these, several answers may end in any order.
DECISIONS = (events.CohortLoaded, events.AttemptStarted, events.BatchTaken, events.WeightsPublished)


@dataclass(slots=True, kw_only=True)
class SmallPolicy(ScriptedPolicy):
    """A policy with a small vocabulary."""

    def token(self, seed: int, position: int, version: int) -> int:
        if self.is_last(seed, position, version):
            return END
        return 1 + ScriptedPolicy.token(self, seed, position, version) % (FIRST_SAMPLE_TOKEN - 1)


class ScriptedDecoder:
    """Forces scripted tokens. The prompt's tokens name its sample, and later positions find the name by attention in
    the engine's own cache. If a slot is moved, copied or refilled wrongly, it writes the answer of another sample.
    """

    name = "scripted"

    def __init__(self, policy: SmallPolicy, clock: VirtualClock, vocab: int, head_dim: int) -> None:
        self.policy, self.clock, self.vocab, self.head_dim = policy, clock, vocab, head_dim
        self.version = 0

    def refresh(self, module: torch.nn.Module) -> None:
        self.version += 1

    def forward(self, tokens_t: Any, positions_t: Any, rows_r: Any, plan: Any) -> torch.Tensor:
        if isinstance(plan, DecodePlan):
            self.clock.advance(self.clock.now() + 1.0)
        names_a_sample_t = tokens_t >= FIRST_SAMPLE_TOKEN
        q_thd = torch.zeros(len(tokens_t), 1, self.head_dim)
        k_thd, v_thd = torch.zeros_like(q_thd), torch.zeros_like(q_thd)
        q_thd[:, 0, 0] = 200.0  # so that only the prompt's keys count
        k_thd[:, 0, 0] = names_a_sample_t.float()
        v_thd[:, 0, 0] = torch.where(names_a_sample_t, tokens_t - FIRST_SAMPLE_TOKEN, -1000).float()
        samples_t = plan.attend(0, q_thd, torch.cat([k_thd, v_thd], 1), 1.0)[:, 0, 0].round().int()
        if rows_r is not None:
            samples_t, positions_t = samples_t[rows_r], positions_t[rows_r]
        logits_rv = torch.full((len(samples_t), self.vocab), -1e6)
        for row, (sample, position) in enumerate(zip(samples_t.tolist(), positions_t.tolist(), strict=True)):
            logits_rv[row, self.policy.token(sample, position + 1 - PROMPT_TOKENS, self.version)] = 0.0
        return logits_rv


class PrefilledSim(SimEngine):
    """A simulated engine in which, as in the local engine, the first token of an attempt comes from its prefill.

    This changes the order in which answers end: an attempt that starts next to running ones is one step ahead.
    """

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        super().submit(requests)
        self._draw_first(self.running[request.sample] for request in requests)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        for running in self.running.values():
            running.events = self._flush(running)
        handle = super().publish(version, source, in_flight)
        for running in self.running.values():
            running.since_mark = len(self._marks)
        if in_flight == InFlight.REPREFILL:
            self._draw_first(self.running.values())
        return handle

    def _draw_first(self, attempts: Iterable[RunningAttempt]) -> None:
        for running in attempts:
            if running.length < running.end:
                running.length += 1
                self._context += 1
                self._push(running)


@lru_cache(maxsize=1)
def model() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return tiny_model("llama", **sizes, num_key_value_heads=1, vocab_size=FIRST_SAMPLE_TOKEN + MAX_SAMPLES)


def local_engine(policy: SmallPolicy, slots: int, clock: VirtualClock) -> LocalEngine:
    engine = LocalEngine(model(), slots=slots, max_length=PROMPT_TOKENS + max(BUDGETS), path="lean", clock=clock.now)
    engine._decoder = ScriptedDecoder(policy, clock, FIRST_SAMPLE_TOKEN + MAX_SAMPLES, head_dim=8)
    return engine


@dataclass(slots=True, kw_only=True)
class Case:
    knobs: Knobs
    policy: SmallPolicy
    slots: int
    num_samples: int
    siblings: int
    grouped: bool
    budget: int
    update_s: float
    log: list[events.Event] = field(default_factory=list)

    def run(self, *, is_local: bool) -> list[object]:
        clock, log = VirtualClock(), []
        make = (
            local_engine if is_local else (lambda policy, slots, clock: PrefilledSim(policy, slots=slots, clock=clock))
        )
        learner = RecordingLearner(clock=clock, seconds=self.update_s, source=SimpleNamespace(module=model()))
        controller = Controller(
            Buffer(grouped=self.grouped),
            LoopParts(
                engine=make(self.policy, self.slots, clock),
                learner=learner,
                scorer=DelayedScorer(),
                load_samples=self.loader(),
            ),
            LoopSettings(
                knobs=self.knobs, total_samples=self.num_samples, sampling=Sampling(temperature=0.0, stop_tokens=(END,))
            ),
            clock=clock,
            emit=log.append,
        )
        assert controller.run()
        trained = [(sample.id, sample.tokens, sample.versions) for batch in learner.batches for sample in batch.samples]
        return [*decisions(log), trained, clock.now()]

    def loader(self) -> Any:
        waiting = list(range(self.num_samples))

        def load(cohort: int, count: int) -> list[Sample]:
            numbers = [waiting.pop(0) for _ in range(min(count, len(waiting)))]
            return [self.sample(number, cohort) for number in numbers]

        return load

    def sample(self, number: int, cohort: int) -> Sample:
        prompt = Prompt(
            id=f"p{number // self.siblings}", tokens=(FIRST_SAMPLE_TOKEN + number,) * PROMPT_TOKENS, content=""
        )
        return Sample(
            id=number,
            prompt=prompt,
            index=number % self.siblings,
            epoch=0,
            cohort=cohort,
            seed=number,
            budget=self.budget,
        )


# Fields for the timeline, and fields that differ between engines or learners.
APART = {"slot", "slot_s", "metrics", "busy_s", "prefill_s", "prompt_tokens", "recomputed_tokens"}


def decisions(log: list[events.Event]) -> list[object]:
    """The decisions in order; ends of answers between two decisions are sorted.

    The results of replays are listed separately, because their time depends on how long the engine is polled.
    """
    told: list[object] = []
    between: list[tuple[object, ...]] = []
    kept: list[tuple[int, int, int, int]] = []
    for event in log:
        if isinstance(event, events.AttemptVerified):
            kept.append((event.sample, event.attempt, event.cached, event.accepted))
            continue
        fields = {name: value for name, value in event.as_dict().items() if name not in APART}
        row = tuple((name, str(value)) for name, value in fields.items())
        if isinstance(event, DECISIONS):
            told += [sorted(between), row]
            between = []
        else:
            between.append(row)
    return [*told, sorted(between), sorted(kept)]


@st.composite
def cases(draw: st.DrawFn, strategy: Strategy) -> Case:
    siblings = draw(st.sampled_from([1, 1, 2]))
    update_batch = siblings * draw(st.integers(1, 4))
    explicit: dict[str, Any] = {"order": draw(st.sampled_from([None, *Order]))}
    if strategy not in (Strategy.SYNC, Strategy.TAIL_BATCHING):
        explicit["cohort_batches"] = draw(st.sampled_from([None, 1, 2, 3]))
    if strategy not in (Strategy.SYNC, Strategy.SYNC_LARGE, Strategy.APRIL, Strategy.TAIL_BATCHING):
        explicit["lookahead"] = draw(st.sampled_from([None, 0, 1, 2]))
        explicit["max_staleness"] = draw(st.sampled_from([None, 0, 1, "none"]))
        explicit["on_bound"] = draw(st.sampled_from([None, "replay", "restart", "wait"]))
        explicit["interrupted"] = draw(st.sampled_from([None, "resume", "replay", "restart"]))
        explicit["overlap"] = draw(st.sampled_from([None, None, True]))
        explicit["admission"] = draw(st.sampled_from([None, Admission.LONGEST_EXPECTED_FIRST]))
    try:
        knobs = resolve_knobs(strategy, update_batch, **explicit)
    except ConfigError:
        knobs = resolve_knobs(strategy, update_batch, **{**explicit, "on_bound": "restart"})
    return Case(
        knobs=knobs,
        policy=SmallPolicy(
            longest=draw(st.sampled_from([2, 12, 25])),
            length_change=draw(st.sampled_from([0.0, 0.2, 0.9])),
            divergence=draw(st.sampled_from([0.0, 0.02, 0.2])),
        ),
        slots=draw(st.integers(1, 8)),
        num_samples=siblings * draw(st.integers(1, MAX_SAMPLES // siblings)),
        siblings=siblings,
        grouped=siblings > 1 and draw(st.booleans()),
        budget=draw(st.sampled_from(BUDGETS)),
        update_s=draw(st.sampled_from([0.0, 1.0, 3.0])),
    )


@pytest.mark.parametrize("strategy", list(Strategy))
def test_same_decisions_in_the_same_order(strategy: Strategy) -> None:
    @SOME
    @given(case=cases(strategy))
    def check(case: Case) -> None:
        simulated, live = case.run(is_local=False), case.run(is_local=True)
        assert simulated == live

    check()


def test_a_replay_runs_on_through_a_publication() -> None:
    """Sample 4 is replayed and runs while weights are published under which it would have ended: one more token."""
    knobs = resolve_knobs(Strategy.ASYNC, 1, cohort_batches=4, on_bound="replay")
    policy = SmallPolicy(longest=12, length_change=0.9)
    case = Case(knobs=knobs, policy=policy, slots=3, num_samples=8, siblings=1, grouped=False, budget=4, update_s=0.0)
    assert case.run(is_local=False) == case.run(is_local=True)


def test_another_answer_is_noticed() -> None:
    """The comparison can fail: a live model whose third answer is one token longer decides otherwise."""
    lengths = {number: 3 + number for number in range(8)}
    knobs = resolve_knobs(Strategy.SORTED_PARTIAL, 2)
    shape = {
        "knobs": knobs,
        "slots": 3,
        "num_samples": 8,
        "siblings": 1,
        "grouped": False,
        "budget": 30,
        "update_s": 0.0,
    }
    told = Case(policy=SmallPolicy(lengths=lengths), **shape).run(is_local=False)
    assert told == Case(policy=SmallPolicy(lengths=lengths), **shape).run(is_local=True)
    assert told != Case(policy=SmallPolicy(lengths={**lengths, 2: 6}), **shape).run(is_local=True)
