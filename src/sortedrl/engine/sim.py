"""The simulated engine: the protocol on a virtual clock, with answers that something else determines.

Simulator and property tests run the real controller on it. It moves from one completion to the next, never from token
to token: every decoding sequence makes one token per step, so the step at which it ends is known when it starts, and a
heap of these gives the next completion in O(log slots). What a step, a prefill and a publication take is the cost
model's affair; with `UnitCost` a step takes `step_s` and all else is free.

What it keeps true: prefill (prompts, cached tokens, what a publication or a lack of memory makes it compute again)
stops decoding while it lasts; where the cost model limits the KV cache, the youngest sequences are parked when it is
full and go on, prefilled again, when there is room; slot time is the time in which a sequence decoded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sortedrl.clock import VirtualClock
from sortedrl.engine.base import (
    Capabilities,
    Delta,
    EngineStats,
    Event,
    Failed,
    Finished,
    Handle,
    InFlight,
    Partial,
    Request,
    Verified,
)
from sortedrl.engine.cost import DecodeCost, UnitCost
from sortedrl.engine.script import Answers, Script, SpelledOut
from sortedrl.engine.sim_attempt import Progress, Running
from sortedrl.records import FinishReason, Mode

RESERVE_SHARE = 1 / 64  # of the KV cache stays free when a parked sequence goes on, lest it be parked again at once


@dataclass(slots=True)
class Done:
    """A publication, which takes its time when it is waited for."""

    clock: VirtualClock | None = None
    seconds: float = 0.0

    def wait(self) -> None:
        if self.clock is not None:
            self.clock.advance(self.clock.now() + self.seconds)
            self.seconds = 0.0


class SimEngine:
    """`fails(request)` gives the answer length at which an attempt fails, or None."""

    def __init__(
        self,
        script: Script | Answers,
        *,
        slots: int,
        clock: VirtualClock,
        step_s: float = 1.0,
        cost: DecodeCost | None = None,
        fails: Callable[[Request], int | None] | None = None,
    ) -> None:
        self.script = script
        self.answers: Answers = script if isinstance(script, Answers) else SpelledOut(script=script)
        self.slots = slots
        self.clock = clock
        self.step_s = step_s
        self.cost: DecodeCost = cost or UnitCost(step_s=step_s)
        self.fails = fails
        self.version = 0
        self.running: dict[int, Running] = {}  # by sample, in order of submission; the parked ones too
        self.parked: deque[Running] = deque()  # those that the KV cache has no room for, oldest first
        self._progress_made = Progress()
        self._ends: list[tuple[int, int, int, Running]] = []  # heap of (step, order, serial, attempt); some are void
        self._serial = 0
        self._context = 0  # tokens of all that decode, prompts included
        self._prompts = 0  # of these, those of prompts
        self._marks: list[tuple[int, float, int]] = []  # publications: (steps, decode time) so far, version before
        self._stall_s = 0.0  # prefill that is still to be paid
        self._tellers: list[Running] = []  # attempts that have something to tell at the next poll
        self._stats = EngineStats()
        self._num_parked = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slots=self.slots, exact_replay=True, keep_kv=True, waits=True)

    def submit(self, requests: Iterable[Request]) -> None:
        prefilled: list[int] = []
        for request in requests:
            assert len(self.running) < self.slots, "more requests than free slots"
            length = len(request.cached)
            self._stats.prompt_tokens += len(request.prompt)
            has_room = self._has_room(len(request.prompt) + length)
            if has_room:
                self._stats.recomputed_tokens += length
                prefilled.append(len(request.prompt) + length)
            told = self._verify(request) if request.mode == Mode.REPLAY else None
            if told is not None:
                length = told[0].accepted
            self._serial += 1
            made = self._progress_made
            running = Running(
                request, made, self._serial, length, made.steps, made.decode_s, 0, length, len(self._marks)
            )
            running.end = self._end(running, is_verified=told is not None)
            if told is not None:
                running.events += told
                self._tellers.append(running)
            self.running[request.sample] = running
            if has_room:
                self._push(running)
                self._join(running)
            else:
                running.is_parked = True
                self.parked.append(running)
        self._stall_s += self.cost.prefill_s(prefilled)

    def poll(self, timeout: float | None = None) -> list[Event]:
        if not self.running:
            return []
        timer = self.clock.next_timer()
        while True:
            if not self._pay_stall(timer):
                return []
            self._decode(self._next_stop(timer))
            if self._ends[0][0] <= self._progress_made.steps or (timer is not None and self.clock.now() >= timer):
                break
            self._make_room()
        events: list[Event] = []
        for running in self._tellers:
            events += running.events
            running.events.clear()
        self._tellers.clear()
        while self._ends and (self._is_void(self._ends[0]) or self._ends[0][0] <= self._progress_made.steps):
            entry = heapq.heappop(self._ends)
            if not self._is_void(entry):
                events += self._progress(entry[3])
        self._unpark()
        return events

    def interrupt(self, samples: Iterable[int] | None = None) -> list[Event]:
        events: list[Event] = []
        for sample in list(self.running) if samples is None else list(samples):
            running = self.running.get(sample)
            if running is not None:
                events += self._flush(running)
                self._leave(running)
                events.append(Partial(sample=sample, attempt=running.request.attempt, clock=self.clock.now()))
        if not self.running:
            self._ends.clear()
        self._unpark()
        return events

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        assert in_flight != InFlight.ABORT or not self.running, "samples still run"
        if self.running:
            self._marks.append((self._progress_made.steps, self._progress_made.decode_s, self.version))
        self.version = version
        if not self.answers.is_steady:
            self._ends.clear()
            for running in self.running.values():
                running.end = self._end(running)
                if not running.is_parked:
                    self._push(running)
        if self.running and in_flight == InFlight.REPREFILL:
            self._stats.recomputed_tokens += self._context - self._prompts
            self._stall_s += self.cost.prefill_s(r.context for r in self.running.values() if not r.is_parked)
        return Done(self.clock, self.cost.publish_s())

    def stats(self) -> EngineStats:
        return replace(self._stats, running=len(self.running), extra={"parked": self._num_parked})

    def close(self) -> None:
        self.running.clear()
        self.parked.clear()
        self._ends.clear()

    # ---- time -------------------------------------------------------------------------------------------------------

    @property
    def _num_decoding(self) -> int:
        return len(self.running) - len(self.parked)

    def _pay_stall(self, timer: float | None) -> bool:
        """Let prefill take its time, up to the timer; returns whether decoding can go on."""
        if not self._stall_s:
            return True
        left = self._stall_s if timer is None else min(self._stall_s, timer - self.clock.now())
        self._stats.busy_slot_s += left * self._num_decoding
        self._stats.prefill_slot_s += left * self._num_decoding
        self._stall_s = 0.0 if left >= self._stall_s else self._stall_s - left
        self.clock.advance(self.clock.now() + left)
        return self._stall_s == 0.0

    def _next_stop(self, timer: float | None) -> int:
        """Steps until an attempt ends, the KV cache is full, or the timer is reached."""
        while self._is_void(self._ends[0]):
            heapq.heappop(self._ends)
        count = self._num_decoding
        steps = self._ends[0][0] - self._progress_made.steps
        if self.cost.kv_tokens is not None and count > 1:
            steps = min(steps, max(self.cost.kv_tokens - self._context, 0) // count)
        if timer is None or steps == 0:
            return steps
        left, low = timer - self.clock.now(), 1
        while low < steps:  # the least number of steps that reach the timer, at least one
            middle = (low + steps) // 2
            if self.cost.decode_s(count, self._context, middle) >= left:
                steps = middle
            else:
                low = middle + 1
        return low

    def _decode(self, steps: int) -> None:
        if steps == 0:
            return
        count = self._num_decoding
        seconds = self.cost.decode_s(count, self._context, steps)
        self._context += steps * count
        self._progress_made.steps += steps
        self._progress_made.decode_s += seconds
        self._stats.decode_steps += steps
        self._stats.decoded_tokens += steps * count
        self._stats.busy_slot_s += seconds * count
        self.clock.advance(self.clock.now() + seconds)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _has_room(self, context: int) -> bool:
        """Whether a sequence can be taken in now; those that were parked before come first."""
        limit = self.cost.kv_tokens
        if limit is None or not self.running:
            return True
        return not self.parked and self._context + context <= limit

    def _make_room(self) -> None:
        """Park the youngest until one more step fits; the last one decodes whatever happens."""
        limit = self.cost.kv_tokens
        if limit is None:
            return
        youngest = reversed(self.running.values())
        while self._context + self._num_decoding > limit and self._num_decoding > 1:
            running = next(r for r in youngest if not r.is_parked)
            running.events = self._flush(running)
            self._part(running)
            running.since_length, running.is_parked = running.length, True
            self.parked.appendleft(running)
            self._num_parked += 1

    def _unpark(self) -> None:
        """Let parked attempts go on, oldest first, as far as there is room; they are prefilled again."""
        prefilled: list[int] = []
        limit = self.cost.kv_tokens
        while self.parked and limit is not None:
            running = self.parked[0]
            needed = self._context + running.context + RESERVE_SHARE * limit
            if needed > limit and self._num_decoding > 0:
                break
            self.parked.popleft()
            running.is_parked = False
            running.since_step, running.since_s = self._progress_made.steps, self._progress_made.decode_s
            running.since_mark = len(self._marks)
            self._join(running)
            self._push(running)
            prefilled.append(running.context)
            self._stats.recomputed_tokens += running.length
        if prefilled:
            self._stall_s += self.cost.prefill_s(prefilled)

    # ---- attempts ---------------------------------------------------------------------------------------------------

    def _push(self, running: Running) -> None:
        self._serial += 1
        step = self._progress_made.steps + running.end - running.length
        heapq.heappush(self._ends, (step, running.order, self._serial, running))

    def _is_void(self, entry: tuple[int, int, int, Running]) -> bool:
        """Whether the attempt has left, or will end at another step than this."""
        step, _, _, running = entry
        if running.is_parked or self.running.get(running.request.sample) is not running:
            return True
        return step != running.since_step + running.end - running.since_length

    def _leave(self, running: Running) -> None:
        del self.running[running.request.sample]
        if running.is_parked:
            self.parked.remove(running)
        else:
            self._part(running)

    def _join(self, running: Running) -> None:
        self._context += running.context
        self._prompts += len(running.request.prompt)

    def _part(self, running: Running) -> None:
        self._context -= running.context
        self._prompts -= len(running.request.prompt)

    def _verify(self, request: Request) -> tuple[Verified, Delta]:
        """Check the cached tokens: how many are kept, and these once more under the present version."""
        cached, accepted = len(request.cached), self.answers.accepted(request, self.version)
        stamp = {"sample": request.sample, "attempt": request.attempt, "clock": self.clock.now()}
        verified = Verified(cached=cached, accepted=accepted, **stamp)
        return verified, self._delta(request, 0, accepted, self.version, slot_s=0.0, verified=accepted)

    def _end(self, running: Running, *, is_verified: bool = False) -> int:
        """Where the attempt ends: by itself, at its budget, or by a failure.

        Only what a replay has just verified may be complete as it is; whatever runs on writes at least one token more.
        """
        request, length = running.request, running.length
        if is_verified and length > 0 and self.answers.is_complete(request, length, self.version):
            return length
        end = min(self.answers.end(request, length, self.version), request.budget)
        failure = None if self.fails is None else self.fails(request)
        return end if failure is None else max(min(end, failure), length)

    def _progress(self, running: Running) -> list[Event]:
        """The last events of an attempt that has reached its end."""
        request, length = running.request, running.length
        events = self._flush(running)
        self._leave(running)
        sample, attempt, clock = request.sample, request.attempt, self.clock.now()
        failure = None if self.fails is None else self.fails(request)
        if failure is not None and length >= failure:
            return [*events, Failed(sample=sample, attempt=attempt, clock=clock, error="scripted failure")]
        is_stop = length < request.budget or self.answers.is_complete(request, length, self.version)
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        events.append(Finished(sample=sample, attempt=attempt, clock=clock, reason=reason))
        return events

    def _flush(self, running: Running) -> list[Event]:
        """Everything not yet told of an attempt: a Delta for each version that wrote some of it."""
        events, running.events = running.events, []
        if running.is_parked:
            return events  # it told all when it was parked
        made = self._progress_made
        for steps, decode_s, version in (*self._marks[running.since_mark :], (made.steps, made.decode_s, self.version)):
            start, stop = running.delivered, running.since_length + steps - running.since_step
            if stop > start:
                slot_s, running.since_s, running.delivered = decode_s - running.since_s, decode_s, stop
                events.append(self._delta(running.request, start, stop - start, version, slot_s=slot_s))
        running.since_s, running.since_mark = made.decode_s, len(self._marks)
        return events

    def _delta(
        self, request: Request, start: int, count: int, version: int, *, slot_s: float, verified: int = 0
    ) -> Delta:
        tokens, logprobs = self.answers.written(request, start, count, version)
        return Delta(
            sample=request.sample,
            attempt=request.attempt,
            clock=self.clock.now(),
            start=start,
            tokens=tokens,
            logprobs=logprobs,
            version=version,
            slot_s=slot_s,
            verified=verified,
        )
