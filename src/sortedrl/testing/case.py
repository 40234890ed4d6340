"""The engine under test (`EngineCase`), and a caller that collects its answers as a ledger would.

To check an engine, make an `EngineCase` (see docs/reference/engines.md); the checks use nothing else. Guarantees: all
checks can share one engine, because each check leaves it idle and versions only increase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sortedrl.clock import Clock, WallClock
from sortedrl.engine.base import (
    Delta,
    Engine,
    EngineEvent,
    Failed,
    Finished,
    InFlight,
    Partial,
    Request,
    Sampling,
    Verified,
    as_deltas,
)
from sortedrl.records import FinishReason, Mode

_LIMIT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slot_s: float = 0.0
    reason: FinishReason | None = None
    error: str = ""
    num_partials: int = 0
    verified: list[tuple[int, int]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.reason is not None or bool(self.error) or self.num_partials > 0


class Caller:
    """Collects answers by sample: a Delta replaces the tokens from its start on."""

    def __init__(self, engine: Engine, limit_s: float = _LIMIT_S) -> None:
        self.engine = engine
        self.limit_s = limit_s  # without an event or a token
        self.answers: dict[int, Answer] = {}

    def take(self, events: Iterable[EngineEvent]) -> None:
        for event in as_deltas(events):
            answer = self.answers.setdefault(event.sample, Answer())
            match event:
                case Delta():
                    assert event.start <= len(answer.tokens), f"a Delta of sample {event.sample} leaves a gap"
                    assert len(event.tokens) == len(event.logprobs), "a Delta needs one log-prob per token"
                    answer.tokens[event.start :] = event.tokens
                    answer.logprobs[event.start :] = event.logprobs
                    answer.versions[event.start :] = [event.version] * len(event.tokens)
                    answer.slot_s += event.slot_s
                case Finished():
                    answer.reason = event.reason
                case Failed():
                    answer.error = event.error
                case Partial():
                    answer.num_partials += 1
                case Verified():
                    answer.verified.append((event.cached, event.accepted))

    @property
    def num_running(self) -> int:
        return self.engine.stats().running

    def serve(self, requests: Sequence[Request]) -> dict[int, Answer]:
        """Submit requests as slots become free, until all have ended; returns the answers by sample."""
        waiting = list(requests)
        before, began = -1, time.monotonic()
        while waiting or self.num_running:
            num_free = self.engine.capabilities.slots - self.num_running
            self.engine.submit(waiting[:num_free])
            del waiting[:num_free]
            events, decoded = self.engine.poll(), self.engine.stats().decoded_tokens
            self.take(events)
            if events or decoded != before:
                before, began = decoded, time.monotonic()
            assert time.monotonic() - began < self.limit_s, f"{self.num_running} samples run and make no progress"
        self.take(self.engine.poll())
        lost = [request.sample for request in requests if not self.answers.get(request.sample, Answer()).has_ended]
        assert not lost, f"no event ended sample {lost[0]}, and the engine runs nothing"
        return self.answers

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.poll(timeout=0))

    def interrupt(self, samples: Iterable[int] | None = None) -> None:
        self.take(self.engine.interrupt(samples))

    def again(self, request: Request, mode: Mode, **changes: Any) -> Request:
        """A request for the next attempt of the same sample, with the tokens that it has so far."""
        answer = self.answers.get(request.sample, Answer())
        cached = () if mode is Mode.FRESH else tuple(answer.tokens)
        return replace(request, attempt=request.attempt + 1, mode=mode, cached=cached, **changes)


@dataclass(slots=True, kw_only=True)
class EngineCase:
    """An engine and what the checks need to know about it.

    `source(step)` returns the weights after `step` publications; `source(0)` are the engine's first weights.
    `logprobs(step, request, tokens)` returns the log-probs of an answer under these weights, by an independent pass.
    """

    engine: Engine
    prompts: Sequence[Sequence[int]]
    source: Callable[[int], Any]
    logprobs: Callable[[int, Request, Sequence[int]], Sequence[float]]
    spoil: Callable[[Request], Request]  # changes a request so that it must fail
    answer_tokens: int = 48  # a budget that every answer uses up, long enough to interrupt
    tolerance: float = 1e-3  # of log-probs
    has_stop_tokens: bool = True
    decode: Callable[[list[int]], str] | None = None  # the engine's decoder, if it supports stop strings
    advance: Callable[[], list[EngineEvent]] | None = None  # one short piece of work; default: a short poll
    kill: Callable[[], None] | None = None  # kills the engine's process, if it has one
    during_update: Callable[[], None] | None = None  # called while a sleeping engine has left its device to the learner
    limit_s: float = _LIMIT_S  # longest time without progress before a check fails
    clock: Clock = field(default_factory=WallClock)
    version: int = 0
    next_sample: int = 0

    def requests(self, count: int, **changes: Any) -> list[Request]:
        """Requests for samples that the engine has not seen before."""
        first, self.next_sample = self.next_sample, self.next_sample + count
        made = [
            Request(
                sample=sample,
                attempt=0,
                prompt=list(self.prompts[sample % len(self.prompts)]),
                budget=self.answer_tokens,
                seed=7919 * sample + 17,
                sampling=Sampling(),
            )
            for sample in range(first, self.next_sample)
        ]
        return [replace(request, **changes) for request in made]

    def caller(self) -> Caller:
        assert self.engine.stats().running == 0, "an earlier check left samples running in the engine"
        return Caller(self.engine, self.limit_s)

    def run_until(self, caller: Caller, num_tokens: int) -> None:
        """Let the engine decode at least `num_tokens` more tokens, and few beyond that."""
        wanted = self.engine.stats().decoded_tokens + num_tokens
        began = time.monotonic()
        while self.engine.stats().decoded_tokens < wanted:
            caller.take(self.engine.poll(0.005) if self.advance is None else self.advance())
            assert time.monotonic() - began < self.limit_s, "the engine makes no progress"

    def publish(self, in_flight: InFlight = InFlight.ABORT) -> None:
        """Publish the next weights under the next version."""
        self.version += 1
        self.engine.publish(self.version, self.source(self.version), in_flight).wait()

    def is_close(self, ours: Sequence[float], theirs: Sequence[float]) -> bool:
        return len(ours) == len(theirs) and all(abs(a - b) <= self.tolerance for a, b in zip(ours, theirs, strict=True))
