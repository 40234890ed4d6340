"""The protocol between the controller and a rollout engine: requests go in, events come out.

An engine has a fixed number of slots and no queue: the controller submits at most as many requests as there are free
slots. Tokens arrive in `Delta` events, or as the segments of `SegmentDelta` and `Finished`. `Finished`, `Partial` and
`Failed` end an attempt. Every event carries (sample, attempt) and the engine's clock, so that the controller can
recognise and ignore an event of an earlier attempt.

Every engine guarantees, by the names that `sortedrl.testing` uses:
- budget: an answer never exceeds its request's budget, which includes cached tokens;
- stops: a stop token or a stop string ends the answer and is part of it;
- log-probs: they belong to the distribution that was really sampled from (temperature included);
- versions: the version of a token is the version of the weights that sampled it, or that verified it by replay;
- seed: with `exact_replay`, an answer depends on its weights, prompt and seed alone, and a replay equals a restart;
- noise: with the shared scheme in `noise`, a token is argmax(logits / temperature + noise) of that scheme;
- masked tokens: masked cached tokens are context: a replay keeps them as given, with log-prob 0, unless it rejects an
  earlier token; a stop token before or among them ends a turn, not the answer, and sampling continues after them;
- interruption: `interrupt` returns within one decode step and loses no token, and nothing decodes after it;
- publication: what is sampled after it comes from the new weights, in running answers too;
- slots: more requests than free slots are refused;
- failures: a request that cannot be served fails alone, and an engine that lost its process returns its samples;
- sleep: with `sleeps`, `sleep` frees weights and KV cache, and after `publish` and `wake` answers continue under the
  published weights; calls in another order are refused (`sleep_state.py`);
- loop: all of these together, so that a run trains every sample once and within its staleness bound.

The constructors of requests and events accept positional arguments, because Python is several times faster that way
and a simulation creates millions of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sortedrl.records import FinishReason, Mode, Segment

OWN_NOISE = "own"  # the noise of an engine that draws with noise which other engines do not have


@dataclass(slots=True, kw_only=True, frozen=True)
class Sampling:
    """How to draw tokens. Temperature 0 is greedy, with log-probs of temperature 1. Filters apply after temperature.

    A stop token, or the token that completes a stop string, ends the answer and is part of it.
    """

    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()


class Span(NamedTuple):
    """A run of consecutive tokens from one version, or of injected tokens that were not sampled (masked)."""

    version: int
    num_tokens: int
    is_masked: bool = False


def masked_places(spans: Iterable[Span]) -> list[range]:
    """The positions of the masked tokens, one range per masked span."""
    places: list[range] = []
    end = 0
    for span in spans:
        if span.is_masked:
            places.append(range(end, end + span.num_tokens))
        end += span.num_tokens
    return places


def first_spans(spans: Sequence[Span], length: int) -> list[Span]:
    """The spans of the first `length` tokens."""
    kept: list[Span] = []
    for span in spans:
        if length > 0:
            kept.append(span._replace(num_tokens=min(span.num_tokens, length)))
        length -= span.num_tokens
    return kept


@dataclass(slots=True)
class Request:
    """One attempt at one sample. `cached` holds the answer so far and `spans` the versions that wrote it; a fresh
    attempt has neither."""

    sample: int
    attempt: int
    prompt: Sequence[int]
    budget: int  # answer tokens in total, cached ones included
    seed: int  # in [0, 2**63)
    sampling: Sampling
    mode: Mode = Mode.FRESH
    cached: Sequence[int] = ()
    spans: Sequence[Span] = ()
    replay_tolerance: float = 0.0


@dataclass(slots=True)
class EngineEvent:
    sample: int
    attempt: int
    clock: float


@dataclass(slots=True)
class Delta(EngineEvent):
    """Answer tokens of one version from position `start` on. They replace what the sample held from there.

    `slot_s` is the slot time spent on decoding them. The first `verified` tokens are cached tokens that a replay
    confirmed: they were not decoded again and cost no slot time.
    """

    start: int
    tokens: list[int]
    logprobs: list[float]
    version: int
    slot_s: float = 0.0
    verified: int = 0


@dataclass(slots=True)
class SegmentDelta(EngineEvent):
    """Answer tokens from position `start` on as segments, one per version: one event in place of several Deltas.

    The receiver may change the list and its last segment; the other segments may be shared with the engine.
    """

    start: int
    segments: list[Segment]


@dataclass(slots=True)
class Verified(EngineEvent):
    """A replay checked `cached` tokens and kept the first `accepted`. It precedes the attempt's first tokens."""

    cached: int
    accepted: int


@dataclass(slots=True)
class Finished(EngineEvent):
    """The answer is complete. The event may carry its last tokens, in the same form as a SegmentDelta."""

    reason: FinishReason
    start: int = 0
    segments: list[Segment] = field(default_factory=list)


@dataclass(slots=True)
class Partial(EngineEvent):
    """The attempt was interrupted; earlier events delivered all its tokens."""


@dataclass(slots=True)
class Failed(EngineEvent):
    """The attempt failed; the engine still works."""

    error: str


def as_deltas(events: Iterable[EngineEvent]) -> Iterator[EngineEvent]:
    """The same events with all segments expanded into Deltas."""
    for event in events:
        if isinstance(event, SegmentDelta | Finished):
            start = event.start
            for s in event.segments:
                yield Delta(event.sample, event.attempt, event.clock, start, s.tokens, s.logprobs, s.version, s.slot_s)
                start += len(s.tokens)
        if isinstance(event, Finished):
            yield Finished(event.sample, event.attempt, event.clock, event.reason)
        elif not isinstance(event, SegmentDelta):
            yield event


class InFlight(StrEnum):
    """What happens to running requests when weights are published."""

    ABORT = "abort"  # no request may be running: the caller interrupted them all
    KEEP = "keep"  # continue with the old KV cache (mixed-kv)
    REPREFILL = "reprefill"  # recompute the KV cache under the new weights, then continue


@dataclass(slots=True, kw_only=True, frozen=True)
class Capabilities:
    slots: int
    exact_replay: bool
    keep_kv: bool
    waits: bool  # decodes nothing between `interrupt` and the next `poll`: samples may keep their slots in an update
    noise: str = OWN_NOISE  # the scheme of its sampling noise, `noise.SCHEME` for the shared one; the ledger records it
    replay_probe: str = ""  # what a probe of its replay found (`replay_probe.py`), if there was one
    sleeps: bool = False  # it is a `SleepingEngine`


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was created. All but `running` only grow."""

    running: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    slot_steps: int = 0  # decode steps x slots
    busy_slot_steps: int = 0  # those of them in which the slot ran
    prompt_tokens: int = 0  # prefilled prompt tokens
    recomputed_tokens: int = 0  # cached answer tokens prefilled again, by resume or replay
    busy_slot_s: float = 0.0  # integral of running slots over time
    prefill_slot_s: float = 0.0  # the part of busy_slot_s spent on prefill; 0 if the engine cannot tell
    extra: dict[str, Any] = field(default_factory=dict)

    def plus(self, other: EngineStats, sign: int = 1) -> EngineStats:
        return EngineStats(
            running=self.running,
            decode_steps=self.decode_steps + sign * other.decode_steps,
            decoded_tokens=self.decoded_tokens + sign * other.decoded_tokens,
            slot_steps=self.slot_steps + sign * other.slot_steps,
            busy_slot_steps=self.busy_slot_steps + sign * other.busy_slot_steps,
            prompt_tokens=self.prompt_tokens + sign * other.prompt_tokens,
            recomputed_tokens=self.recomputed_tokens + sign * other.recomputed_tokens,
            busy_slot_s=self.busy_slot_s + sign * other.busy_slot_s,
            prefill_slot_s=self.prefill_slot_s + sign * other.prefill_slot_s,
            extra=self.extra,
        )

    def minus(self, earlier: EngineStats) -> EngineStats:
        """The counts since `earlier`."""
        return self.plus(earlier, sign=-1)


class Handle(Protocol):
    """A weight publication in progress."""

    def wait(self) -> None: ...


class CompletedHandle:
    """A Handle for engines whose `publish` returns only when the weights are in use."""

    def wait(self) -> None:
        pass


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Start requests. More requests than free slots is an error."""
        ...

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        """Work until an attempt ends or `timeout` seconds passed. Attempts that end in one step come together.

        An engine may return earlier, with what it has.
        """
        ...

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        """Stop these samples, or all, and return their last tokens, if any, and one Partial each.

        An empty list pauses decoding for an update: an engine with `waits` may keep its requests, or stop some.
        """
        ...

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        """Load new weights. Tokens sampled after the handle is done carry `version`."""
        ...

    def stats(self) -> EngineStats:
        """A new record of the current counters."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that gives its device's memory to a learner for the time of an update."""

    def sleep(self) -> None:
        """Free the memory of weights and KV cache. No sample may be running."""
        ...

    def wake(self) -> None:
        """Serve requests again. Weights must have been published since `sleep`, because the old ones are gone."""
        ...


def as_sleeping(engine: Engine) -> SleepingEngine:
    """The engine itself, which must be one that sleeps."""
    assert isinstance(engine, SleepingEngine), "only an engine with `sleeps` is sent to sleep"
    return engine
