"""The protocol between the controller and whatever samples tokens.

An engine has a fixed number of slots and no queue of its own: the controller submits at most as many requests as there
are free slots. Tokens arrive in `Delta` events only; `Finished`, `Partial` and `Failed` end an attempt. Every event
carries (sample, attempt), so that an event of an attempt that is over can be told and ignored, and the engine's clock.

What an engine keeps true:
- the version of a token is that of the weights that sampled it, or that verified it by replay;
- log-probs are of the distribution really sampled from (temperature included);
- a request's answer never exceeds its budget, cached tokens included;
- `interrupt` returns within one decode step and loses no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from sortedrl.records import FinishReason, Mode


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


@dataclass(slots=True, kw_only=True)
class Request:
    """One attempt at one sample. `cached` holds the answer so far; it is empty for a fresh attempt."""

    sample: int
    attempt: int
    prompt: Sequence[int]
    budget: int  # answer tokens in total, cached ones included
    seed: int
    sampling: Sampling
    mode: Mode = Mode.FRESH
    cached: Sequence[int] = ()
    replay_tolerance: float = 0.0


@dataclass(slots=True, kw_only=True)
class Event:
    sample: int
    attempt: int
    clock: float


@dataclass(slots=True, kw_only=True)
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


@dataclass(slots=True, kw_only=True)
class Verified(Event):
    """A replay has checked `cached` tokens and kept the first `accepted`. Comes before the attempt's first Delta."""

    cached: int
    accepted: int


@dataclass(slots=True, kw_only=True)
class Finished(Event):
    reason: FinishReason


@dataclass(slots=True, kw_only=True)
class Partial(Event):
    """The attempt was interrupted; its tokens have been delivered."""


@dataclass(slots=True, kw_only=True)
class Failed(Event):
    """The attempt failed; the engine lives on."""

    error: str


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
    waits: bool  # decodes only inside `poll`, so that samples can stay in their slots while an update runs


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was made; all only grow but `running`."""

    running: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    prompt_tokens: int = 0  # prefilled prompt tokens
    recomputed_tokens: int = 0  # cached answer tokens prefilled again, by resume or replay
    busy_slot_s: float = 0.0  # integral of running slots over time
    extra: dict[str, Any] = field(default_factory=dict)

    def plus(self, other: EngineStats, sign: int = 1) -> EngineStats:
        return EngineStats(
            running=self.running,
            decode_steps=self.decode_steps + sign * other.decode_steps,
            decoded_tokens=self.decoded_tokens + sign * other.decoded_tokens,
            prompt_tokens=self.prompt_tokens + sign * other.prompt_tokens,
            recomputed_tokens=self.recomputed_tokens + sign * other.recomputed_tokens,
            busy_slot_s=self.busy_slot_s + sign * other.busy_slot_s,
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
        """Stop these samples, or all, and return what they wrote: their last Delta, if any, and a Partial each."""
        ...

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        """Take up new weights; tokens sampled once the handle is done are stamped with `version`."""
        ...

    def stats(self) -> EngineStats:
        """The counters as they are now; a record of its own at every call."""
        ...

    def close(self) -> None: ...
