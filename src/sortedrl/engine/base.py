"""The protocol between the controller and whatever samples tokens.

An engine has a fixed number of slots and no queue of its own: the controller submits at most as many requests as there
are free slots. Tokens arrive in `Delta` events, or as the segments of `Written` and `Finished`; `Finished`, `Partial`
and `Failed` end an attempt. Every event carries (sample, attempt), so that an event of an attempt that is over can be
told and ignored, and the engine's clock.

What an engine keeps true:
- the version of a token is that of the weights that sampled it, or that verified it by replay;
- log-probs are of the distribution really sampled from (temperature included);
- a request's answer never exceeds its budget, cached tokens included;
- masked cached tokens are context: a replay keeps them as given, with log-prob 0, unless it rejects a token before; a
  stop token before or among them ends a turn, not the answer, and sampling goes on behind them;
- `interrupt` returns within one decode step and loses no token.

Requests and events can be made without keywords, which Python does several times as fast: a simulation makes millions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from sortedrl.records import FinishReason, Mode, Segment


@dataclass(slots=True, kw_only=True, frozen=True)
class Sampling:
    """Temperature 0 is greedy; its log-probs are those of temperature 1. Filters come behind the temperature.

    An answer ends with a stop token, or with the token that completes a stop string; both stay part of it.
    """

    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()


class Span(NamedTuple):
    """So many tokens in a row that one version wrote, or, masked, that nobody sampled: they were fed in."""

    version: int
    num_tokens: int
    is_masked: bool = False


def masked_places(spans: Iterable[Span]) -> list[range]:
    """Where masked tokens stand."""
    places: list[range] = []
    end = 0
    for span in spans:
        if span.is_masked:
            places.append(range(end, end + span.num_tokens))
        end += span.num_tokens
    return places


@dataclass(slots=True)
class Request:
    """One attempt at one sample. `cached` holds the answer so far, and `spans` who wrote it; both are empty for a fresh
    attempt."""

    sample: int
    attempt: int
    prompt: Sequence[int]
    budget: int  # answer tokens in total, cached ones included
    seed: int
    sampling: Sampling
    mode: Mode = Mode.FRESH
    cached: Sequence[int] = ()
    spans: Sequence[Span] = ()
    replay_tolerance: float = 0.0


@dataclass(slots=True)
class Event:
    sample: int
    attempt: int
    clock: float


@dataclass(slots=True)
class Delta(Event):
    """Answer tokens from position `start` on; what the sample held from there is replaced.

    `slot_s` is the slot time that decoding them took. The first `verified` of them stood there before and were checked
    by a replay: they cost none, and were not decoded again.
    """

    start: int
    tokens: list[int]
    logprobs: list[float]
    version: int
    slot_s: float = 0.0
    verified: int = 0


@dataclass(slots=True)
class Written(Event):
    """What one version after the other wrote behind the `start` tokens of the answer, in one event in place of a Delta
    for each. The list is the receiver's from here on, and so is the last segment; the others may be shared."""

    start: int
    segments: list[Segment]


@dataclass(slots=True)
class Verified(Event):
    """A replay has checked `cached` tokens and kept the first `accepted`. Comes before the attempt's first tokens."""

    cached: int
    accepted: int


@dataclass(slots=True)
class Finished(Event):
    """The answer is complete. An engine may tell its last tokens along with that, as in a Written event."""

    reason: FinishReason
    start: int = 0
    segments: list[Segment] = field(default_factory=list)


@dataclass(slots=True)
class Partial(Event):
    """The attempt was interrupted; its tokens have been delivered."""


@dataclass(slots=True)
class Failed(Event):
    """The attempt failed; the engine lives on."""

    error: str


def as_deltas(events: Iterable[Event]) -> Iterator[Event]:
    """The events with Deltas for all that was told in segments, for those who would rather know one kind."""
    for event in events:
        if isinstance(event, Written | Finished):
            start = event.start
            for s in event.segments:
                yield Delta(event.sample, event.attempt, event.clock, start, s.tokens, s.logprobs, s.version, s.slot_s)
                start += len(s.tokens)
        if isinstance(event, Finished):
            yield Finished(event.sample, event.attempt, event.clock, event.reason)
        elif not isinstance(event, Written):
            yield event


class InFlight(StrEnum):
    """What becomes of running requests when weights are published."""

    ABORT = "abort"  # nothing may run: the caller has interrupted
    KEEP = "keep"  # go on with the old KV cache (mixed-kv)
    REPREFILL = "reprefill"  # recompute the KV cache under the new weights, then go on


@dataclass(slots=True, kw_only=True, frozen=True)
class Capabilities:
    slots: int
    exact_replay: bool
    keep_kv: bool
    waits: bool  # decodes nothing from an `interrupt` to the next `poll`: samples can stay in their slots for an update


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was made; all only grow but `running`."""

    running: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    prompt_tokens: int = 0  # prefilled prompt tokens
    recomputed_tokens: int = 0  # cached answer tokens prefilled again, by resume or replay
    busy_slot_s: float = 0.0  # integral of running slots over time
    prefill_slot_s: float = 0.0  # of it, while tokens were read; 0 where an engine cannot tell
    extra: dict[str, Any] = field(default_factory=dict)

    def plus(self, other: EngineStats, sign: int = 1) -> EngineStats:
        return EngineStats(
            running=self.running,
            decode_steps=self.decode_steps + sign * other.decode_steps,
            decoded_tokens=self.decoded_tokens + sign * other.decoded_tokens,
            prompt_tokens=self.prompt_tokens + sign * other.prompt_tokens,
            recomputed_tokens=self.recomputed_tokens + sign * other.recomputed_tokens,
            busy_slot_s=self.busy_slot_s + sign * other.busy_slot_s,
            prefill_slot_s=self.prefill_slot_s + sign * other.prefill_slot_s,
            extra=self.extra,
        )

    def minus(self, earlier: EngineStats) -> EngineStats:
        """What was counted since `earlier`."""
        return self.plus(earlier, sign=-1)


class Handle(Protocol):
    """A publication under way."""

    def wait(self) -> None: ...


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Start requests; more than there are free slots is an error."""
        ...

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Work until an attempt ends or `timeout` seconds are over. All attempts that end in one step come together."""
        ...

    def interrupt(self, samples: Iterable[int] | None = None) -> list[Event]:
        """Stop these samples, or all, and return what they wrote: their last tokens, if any, and a Partial each.

        An empty list is a halt for an update: an engine that `waits` need not stop any, but may where that serves it.
        """
        ...

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        """Take up new weights; tokens sampled once the handle is done are stamped with `version`."""
        ...

    def stats(self) -> EngineStats:
        """The counters as they are now; a record of its own at every call."""
        ...

    def close(self) -> None: ...
