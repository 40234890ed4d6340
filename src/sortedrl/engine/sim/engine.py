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
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sortedrl.clock import VirtualClock
from sortedrl.engine.base import (
    Capabilities,
    Delta,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    Handle,
    InFlight,
    Partial,
    Request,
    SegmentDelta,
    Verified,
)
from sortedrl.engine.sim.cost import DecodeCost, UnitCost
from sortedrl.engine.sim.script import Answers, Script, SpelledOut
from sortedrl.records import FinishReason, Mode, Segment


@dataclass(slots=True)
class Progress:
    """Steps taken and time decoded so far; every running attempt measures itself against it."""

    steps: int = 0
    decode_s: float = 0.0


@dataclass(slots=True, eq=False)
class Running:
    """An attempt. While it is parked `since_step` stands still, and so does its length."""

    request: Request
    progress: Progress
    order: int  # of submission: answers that end in one step are told in this order
    since_length: int  # answer tokens it had at `since_step`
    since_step: int
    since_s: float  # decode time at which its untold slot time began
    delivered: int  # answer tokens that events have told of
    since_mark: int  # publications that events have told of
    end: int  # answer tokens it will have under these weights
    events: Sequence[EngineEvent] = ()  # to be told first
    end_step: int = -1  # the step at which it is entered to end; any other entry of it is void
    is_parked: bool = False

    @property
    def length(self) -> int:
        """Answer tokens it has."""
        return self.since_length if self.is_parked else self.since_length + self.progress.steps - self.since_step

    @length.setter
    def length(self, tokens: int) -> None:
        self.since_length, self.since_step = tokens, self.progress.steps

    @property
    def context(self) -> int:
        return len(self.request.prompt) + self.length


class Marks:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._marks: list[tuple[int, float, int]] = []  # (steps, decode time) so far, version before
        self._between: list[Segment] = []  # for each of them, what an attempt wrote that decoded since the one before

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, made: Progress, version: int) -> None:
        """Another version than this one writes from here on; if this one wrote nothing, it leaves no mark."""
        steps, decode_s, _ = self._marks[-1] if self._marks else (0, 0.0, 0)
        if self._marks and made.steps == steps:
            return
        self._marks.append((made.steps, made.decode_s, version))
        zeros: Any = bytes(made.steps - steps) if self._answers.is_blank else b""
        self._between.append(Segment(version, zeros, zeros, made.decode_s - decode_s))

    def untold(self, running: Running, version: int) -> list[Segment]:
        """What an attempt wrote and no event has told; `version` is the one that writes now."""
        if running.is_parked:
            return []  # it told all when it was parked
        made, num_marks, first = running.progress, len(self._marks), running.since_mark
        start, since_s, ahead = running.delivered, running.since_s, running.since_length - running.since_step
        end = running.delivered = ahead + made.steps
        running.since_mark, running.since_s = num_marks, made.decode_s
        written, request = self._answers.written, running.request
        segments: list[Segment] = []
        if first < num_marks:
            steps, decode_s, writer = self._marks[first]
            if (count := ahead + steps - start) > 0:
                segments.append(Segment(writer, *written(request, start, count, writer), decode_s - since_s))
            segments += self._whole(request, first + 1, ahead)
            steps, since_s, _ = self._marks[-1]
            start = ahead + steps
        if end > start:
            segments.append(Segment(version, *written(request, start, end - start, version), made.decode_s - since_s))
        elif segments and segments[-1] is self._between[-1]:
            segments[-1] = replace(segments[-1])
        return segments

    def _whole(self, request: Request, first: int, ahead: int) -> list[Segment]:
        """Of an attempt that decoded all the while: what it wrote from each mark to the next."""
        if self._answers.is_blank:
            return self._between[first:]
        return [
            Segment(writer, *self._answers.written(request, ahead + steps, until - steps, writer), until_s - decode_s)
            for (steps, decode_s, _), (until, until_s, writer) in pairwise(self._marks[first - 1 :])
        ]


REPLAY, STOP, LENGTH = Mode.REPLAY, FinishReason.STOP, FinishReason.LENGTH  # Python 3.11 finds members slowly
_in_order = operator.attrgetter("order")
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
        self._limit = self.cost.kv_tokens  # of the KV cache, if it has one
        self.version = 0
        self.running: dict[int, Running] = {}  # by sample, in order of submission; the parked ones too
        self.parked: deque[Running] = deque()  # those that the KV cache has no room for, oldest first
        self._progress_made = Progress()
        self._ends: list[int] = []  # heap of the steps at which attempts end
        self._ending: dict[int, list[Running]] = {}  # those attempts; some entries are void
        self._serial = 0
        self._context = 0  # tokens of all that decode, prompts included
        self._prompts = 0  # of these, those of prompts
        self._marks = Marks(self.answers)  # publications
        self._stall_s = 0.0  # prefill that is still to be paid
        self._tellers: list[Running] = []  # attempts that have something to tell at the next poll
        self._stats = EngineStats()
        self._num_parked = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slots=self.slots, exact_replay=True, keep_kv=True, waits=True)

    def submit(self, requests: Iterable[Request]) -> None:
        prefilled: list[int] = []
        made, num_marks, limit = self._progress_made, len(self._marks), self._limit
        steps, decode_s, num_prompt = made.steps, made.decode_s, 0
        for order, request in enumerate(requests, self._serial + 1):
            length, prompt = len(request.cached), len(request.prompt)
            num_prompt += prompt
            has_room = limit is None or self._has_room(prompt + length)
            if has_room:
                self._stats.recomputed_tokens += length
                prefilled.append(prompt + length)
            events: Sequence[EngineEvent] = ()
            if request.mode is REPLAY:
                verified, again = self._verify(request)
                events, length = (verified, again), verified.accepted
            end = self._end(request, length, bool(events))
            running = Running(request, made, order, length, steps, decode_s, length, num_marks, end, events)
            if events:
                self._tellers.append(running)
            self.running[request.sample] = running
            if has_room:
                self._context += prompt + length
                self._prompts += prompt
                self._push(running)
            else:
                running.is_parked = True
                self.parked.append(running)
            self._serial = order
        assert len(self.running) <= self.slots, "more requests than free slots"
        self._stats.prompt_tokens += num_prompt
        self._stall_s += self.cost.prefill_s(prefilled)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        if not self.running:
            return []
        timer, made, ends = self.clock.next_timer(), self._progress_made, self._ends
        while True:
            if self._stall_s and not self._pay_stall(timer):
                return []
            self._decode(self._next_stop(timer))
            if ends[0] <= made.steps or (timer is not None and self.clock.now() >= timer):
                break
            self._make_room()
        events: list[EngineEvent] = []
        if self._tellers:
            for running in self._tellers:
                events += running.events
                running.events = ()
            self._tellers.clear()
        now = self.clock.now()
        while ends and ends[0] <= made.steps:
            step = heapq.heappop(ends)
            ending = self._ending.pop(step)
            if len(ending) > 1:
                ending.sort(key=_in_order)
            for running in ending:
                if running.end_step == step:
                    self._finish(running, now, events)
        if self.parked:
            self._unpark()
        return events

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for sample in list(self.running) if samples is None else list(samples):
            running = self.running.get(sample)
            if running is not None:
                events += self._flush(running)
                self._leave(running)
                events.append(Partial(sample, running.request.attempt, self.clock.now()))
        if not self.running:
            self._forget_ends()
        if self.parked and events:
            self._unpark()
        return events

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        assert in_flight != InFlight.ABORT or not self.running, "samples still run"
        if self.running:
            self._marks.add(self._progress_made, self.version)
        self.version = version
        if not self.answers.is_steady:
            self._forget_ends()
            for running in self.running.values():
                running.end = self._end(running.request, running.length)
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
        self._forget_ends()

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
        ends, ending = self._ends, self._ending
        while ending[ends[0]][0].end_step != ends[0]:
            step = ends[0]
            ending[step] = [running for running in ending[step] if running.end_step == step]
            if not ending[step]:
                del ending[heapq.heappop(ends)]
        count = len(self.running) - len(self.parked)
        steps = ends[0] - self._progress_made.steps
        if self._limit is not None and count > 1:
            steps = min(steps, max(self._limit - self._context, 0) // count)
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
        count, made, stats = len(self.running) - len(self.parked), self._progress_made, self._stats
        seconds = self.cost.decode_s(count, self._context, steps)
        self._context += steps * count
        made.steps += steps
        made.decode_s += seconds
        stats.decode_steps += steps
        stats.decoded_tokens += steps * count
        stats.busy_slot_s += seconds * count
        self.clock.advance(self.clock.now() + seconds)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _has_room(self, context: int) -> bool:
        """Whether a sequence can be taken in now; those that were parked before come first."""
        if self._limit is None or not self.running:
            return True
        return not self.parked and self._context + context <= self._limit

    def _make_room(self) -> None:
        """Park the youngest until one more step fits; the last one decodes whatever happens."""
        limit = self._limit
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
        limit = self._limit
        while self.parked and limit is not None:
            running = self.parked[0]
            needed = self._context + running.context + RESERVE_SHARE * limit
            if needed > limit and self._num_decoding > 0:
                break
            self.parked.popleft()
            running.is_parked = False
            running.since_step, running.since_s = self._progress_made.steps, self._progress_made.decode_s
            running.since_mark = len(self._marks)
            self._context += running.context
            self._prompts += len(running.request.prompt)
            self._push(running)
            prefilled.append(running.context)
            self._stats.recomputed_tokens += running.length
        if prefilled:
            self._stall_s += self.cost.prefill_s(prefilled)

    # ---- attempts ---------------------------------------------------------------------------------------------------

    def _push(self, running: Running) -> None:
        """Enter where it ends; what was entered for it before is void."""
        step = running.end_step = running.since_step + running.end - running.since_length
        ending = self._ending.get(step)
        if ending is None:
            self._ending[step] = [running]
            heapq.heappush(self._ends, step)
        else:
            ending.append(running)

    def _forget_ends(self) -> None:
        self._ends.clear()
        self._ending.clear()

    def _leave(self, running: Running) -> None:
        del self.running[running.request.sample]
        if running.is_parked:
            self.parked.remove(running)
        else:
            self._part(running)

    def _part(self, running: Running) -> None:
        """It decodes no longer."""
        prompt = len(running.request.prompt)
        self._context -= prompt + running.since_length + self._progress_made.steps - running.since_step
        self._prompts -= prompt
        running.end_step = -1

    def _verify(self, request: Request) -> tuple[Verified, Delta]:
        """Check the cached tokens: how many are kept, and these once more under the present version."""
        cached, accepted = len(request.cached), self.answers.accepted(request, self.version)
        tokens, logprobs = self.answers.written(request, 0, accepted, self.version)
        stamp = {"sample": request.sample, "attempt": request.attempt, "clock": self.clock.now()}
        again = Delta(
            start=0, tokens=tokens, logprobs=logprobs, version=self.version, slot_s=0.0, verified=accepted, **stamp
        )
        return Verified(cached=cached, accepted=accepted, **stamp), again

    def _end(self, request: Request, length: int, is_verified: bool = False) -> int:
        """Where an attempt with `length` tokens ends: by itself, at its budget, or by a failure.

        Only what a replay has just verified may be complete as it is; whatever runs on writes at least one token more.
        """
        if is_verified and length > 0 and self.answers.is_complete(request, length, self.version):
            return length
        end = self.answers.end(request, length, self.version)
        if end > request.budget:
            end = request.budget
        if self.fails is None:
            return end
        failure = self.fails(request)
        return end if failure is None else max(min(end, failure), length)

    def _finish(self, running: Running, now: float, events: list[EngineEvent]) -> None:
        """Add the last events of an attempt that has reached its end."""
        request, length, start = running.request, running.end, running.delivered
        if running.events:
            events += running.events
            running.events = ()
        segments = self._marks.untold(running, self.version)
        sample, attempt, prompt = request.sample, request.attempt, len(request.prompt)
        del self.running[sample]
        self._context -= prompt + length
        self._prompts -= prompt
        failure = None if self.fails is None else self.fails(request)
        if failure is not None and length >= failure:
            if segments:
                events.append(SegmentDelta(sample, attempt, now, start, segments))
            events.append(Failed(sample, attempt, now, "scripted failure"))
            return
        is_stop = length < request.budget or self.answers.is_complete(request, length, self.version)
        events.append(Finished(sample, attempt, now, STOP if is_stop else LENGTH, start, segments))

    def _flush(self, running: Running) -> list[EngineEvent]:
        """Everything not yet told of an attempt."""
        events, start, request = [*running.events], running.delivered, running.request
        running.events = ()
        segments = self._marks.untold(running, self.version)
        if segments:
            events.append(SegmentDelta(request.sample, request.attempt, self.clock.now(), start, segments))
        return events
