"""The simulated engine: the protocol on a virtual clock, with answers that a script determines.

Every running sequence makes one token per step of `step_s`; prefill, replay and publication are free. It moves from one
completion to the next, not from token to token. Simulator and property tests run the real controller on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sortedrl.clock import VirtualClock
from sortedrl.engine.base import (
    Capabilities,
    Delta,
    EngineStats,
    Event,
    Failed,
    Finished,
    InFlight,
    Partial,
    Request,
    Verified,
)
from sortedrl.records import FinishReason, Mode


class Script(Protocol):
    """A policy reduced to what the schedule sees: which token stands where, under which version."""

    def token(self, seed: int, position: int, version: int) -> int: ...

    def logprob(self, seed: int, position: int, version: int) -> float: ...

    def is_last(self, seed: int, position: int, version: int) -> bool:
        """Whether an answer ends with this token."""
        ...

    def length(self, seed: int, start: int, version: int) -> int:
        """Length of an answer that goes on from `start` tokens."""
        ...


@dataclass(slots=True, kw_only=True)
class Running:
    request: Request
    length: int  # answer tokens it has
    end: int  # answer tokens it will have under these weights
    delivered: int  # answer tokens that events have told of
    events: list[Event] = field(default_factory=list)  # to be told first


class Done:
    """A publication that took no time."""

    def wait(self) -> None:
        return None


class SimEngine:
    """`fails(request)` gives the answer length at which an attempt fails, or None."""

    def __init__(
        self,
        script: Script,
        *,
        slots: int,
        clock: VirtualClock,
        step_s: float = 1.0,
        fails: Callable[[Request], int | None] = lambda request: None,
    ) -> None:
        self.script = script
        self.slots = slots
        self.clock = clock
        self.step_s = step_s
        self.fails = fails
        self.version = 0
        self.running: dict[int, Running] = {}
        self._stats = EngineStats()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slots=self.slots, exact_replay=True, keep_kv=True, deterministic=True)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            assert len(self.running) < self.slots, "more requests than free slots"
            accepted, told = len(request.cached), []
            if request.mode == Mode.REPLAY:
                accepted = self._accepted(request)
                verified = Verified(cached=len(request.cached), accepted=accepted, **self._stamp(request))
                told = [verified, self._delta(request, 0, accepted, slot_s=0.0, verified=accepted)]
            self._stats.recomputed_tokens += len(request.cached)
            self._stats.prompt_tokens += len(request.prompt)
            running = Running(request=request, length=accepted, end=0, delivered=accepted, events=told)
            running.end = self._end(running)
            self.running[request.sample] = running

    def poll(self, timeout: float | None = None) -> list[Event]:
        if not self.running:
            return []
        steps = min(running.end - running.length for running in self.running.values())
        timer = self.clock.next_timer()
        if timer is not None:
            steps = min(steps, max(1, -int(-(timer - self.clock.now()) // self.step_s)))
        for running in self.running.values():
            running.length += steps
        self._stats.decode_steps += steps
        self._stats.decoded_tokens += steps * len(self.running)
        self._stats.busy_slot_s += steps * self.step_s * len(self.running)
        self.clock.advance(self.clock.now() + steps * self.step_s)
        return [event for running in list(self.running.values()) for event in self._progress(running)]

    def interrupt(self, samples: Iterable[int] | None = None) -> list[Event]:
        events: list[Event] = []
        for sample in list(self.running) if samples is None else list(samples):
            running = self.running.pop(sample, None)
            if running is not None:
                events += [*self._flush(running), Partial(**self._stamp(running.request))]
        return events

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Done:
        assert in_flight != InFlight.ABORT or not self.running, "samples still run"
        for running in self.running.values():
            running.events = self._flush(running)
        self.version = version
        for running in self.running.values():
            running.end = self._end(running)
        return Done()

    def stats(self) -> EngineStats:
        return replace(self._stats, running=len(self.running))

    def close(self) -> None:
        self.running.clear()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _accepted(self, request: Request) -> int:
        """How many cached tokens the present weights would write again."""
        for position, token in enumerate(request.cached):
            if position == request.budget or self.script.token(request.seed, position, self.version) != token:
                return position
            if self.script.is_last(request.seed, position, self.version):
                return position + 1
        return len(request.cached)

    def _end(self, running: Running) -> int:
        """Where the attempt ends: by itself, at its budget, or by a failure."""
        request, length = running.request, running.length
        is_verified = request.mode == Mode.REPLAY and length == running.delivered > 0
        if is_verified and self.script.is_last(request.seed, length - 1, self.version):
            return length
        end = min(self.script.length(request.seed, length, self.version), request.budget)
        failure = self.fails(request)
        return end if failure is None else max(min(end, failure), length)

    def _progress(self, running: Running) -> list[Event]:
        request = running.request
        if running.length < running.end:
            told, running.events = running.events, []
            return told
        del self.running[request.sample]
        events = self._flush(running)
        failure = self.fails(request)
        if failure is not None and running.length >= failure:
            return [*events, Failed(error="scripted failure", **self._stamp(request))]
        is_last = running.length > 0 and self.script.is_last(request.seed, running.length - 1, self.version)
        reason = FinishReason.STOP if is_last or running.length < request.budget else FinishReason.LENGTH
        return [*events, Finished(reason=reason, **self._stamp(request))]

    def _flush(self, running: Running) -> list[Event]:
        """Everything not yet told of an attempt."""
        events, running.events = running.events, []
        count = running.length - running.delivered
        if count:
            events.append(self._delta(running.request, running.delivered, count, slot_s=count * self.step_s))
            running.delivered = running.length
        return events

    def _delta(self, request: Request, start: int, count: int, *, slot_s: float, verified: int = 0) -> Delta:
        positions = range(start, start + count)
        return Delta(
            start=start,
            tokens=[self.script.token(request.seed, position, self.version) for position in positions],
            logprobs=[self.script.logprob(request.seed, position, self.version) for position in positions],
            version=self.version,
            slot_s=slot_s,
            verified=verified,
            **self._stamp(request),
        )

    def _stamp(self, request: Request) -> dict[str, Any]:
        return {"sample": request.sample, "attempt": request.attempt, "clock": self.clock.now()}
