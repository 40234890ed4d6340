"""The simulated engine: the engine protocol on a virtual clock, with answers that a script or trace determines.

The simulator and property tests run the real controller on it. It jumps from one completion to the next, never from
token to token: every decoding sequence makes one token per step, so the step at which it ends is known when it starts,
and a heap of these steps gives the next completion in O(log slots). The cost model says how long a step, a prefill and
a publication take; with `UnitCost` a step takes `step_s` and all else is free.

Guarantees: no sequence decodes during a prefill (of prompts, of cached tokens, or after a publication or a lack of
memory); if the cost model limits the KV cache, the youngest sequences are parked when it is full, and continue after
another prefill when there is room; slot time is the time in which a sequence decodes.
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
from sortedrl.engine.sim.script import Answers, Script, ScriptedAnswers
from sortedrl.records import FinishReason, Mode, Segment


@dataclass(slots=True)
class SimProgress:
    """Steps taken and time decoded so far. All running attempts share one and store differences to it."""

    steps: int = 0
    decode_s: float = 0.0


@dataclass(slots=True, eq=False)
class RunningAttempt:
    """An attempt in the engine. While it is parked, its length does not change."""

    request: Request
    progress: SimProgress
    order: int  # of submission: answers that end in one step are reported in this order
    since_length: int  # answer tokens it had at `since_step`
    since_step: int
    since_s: float  # decode time up to which its slot time has been delivered
    delivered: int  # answer tokens in events so far
    since_mark: int  # version marks in events so far
    end: int  # the answer's length when it ends, under the current weights
    cache: int  # the oldest version in its KV cache
    events: Sequence[EngineEvent] = ()  # to deliver before its next tokens
    end_step: int = -1  # the step at which it ends; entries of it under other steps are out of date
    is_parked: bool = False

    @property
    def length(self) -> int:
        """The current number of answer tokens."""
        return self.since_length if self.is_parked else self.since_length + self.progress.steps - self.since_step

    @length.setter
    def length(self, tokens: int) -> None:
        self.since_length, self.since_step = tokens, self.progress.steps

    @property
    def context(self) -> int:
        return len(self.request.prompt) + self.length


class VersionMarks:
    """The steps at which the version changed, from which the segments of every attempt are made."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._marks: list[tuple[int, float, int]] = []  # (steps, decode time, version that ends here)
        self._between: list[Segment] = []  # for each mark, the segment of an attempt that decoded since the mark before

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, progress: SimProgress, version: int) -> None:
        """End `version` here. A version under which no step was taken gets no mark."""
        steps, decode_s, _ = self._marks[-1] if self._marks else (0, 0.0, 0)
        if self._marks and progress.steps == steps:
            return
        self._marks.append((progress.steps, progress.decode_s, version))
        zeros: Any = bytes(progress.steps - steps) if self._answers.is_blank else b""
        self._between.append(Segment(version, zeros, zeros, progress.decode_s - decode_s))

    def take_undelivered(self, running: RunningAttempt, version: int) -> list[Segment]:
        """The segments that no event has delivered yet; `version` is the current one. Marks them as delivered."""
        if running.is_parked:
            return []  # all was delivered when it was parked
        progress, num_marks, first = running.progress, len(self._marks), running.since_mark
        start, since_s, ahead = running.delivered, running.since_s, running.since_length - running.since_step
        end = running.delivered = ahead + progress.steps
        running.since_mark, running.since_s = num_marks, progress.decode_s
        written, request, cache = self._answers.written, running.request, running.cache
        segments: list[Segment] = []
        if first < num_marks:
            steps, decode_s, writer = self._marks[first]
            if (count := ahead + steps - start) > 0:
                segments.append(
                    Segment(writer, *written(request, start, count, writer, min(cache, writer)), decode_s - since_s)
                )
            segments += self._full_segments(running, first + 1, ahead)
            steps, since_s, _ = self._marks[-1]
            start = ahead + steps
        if end > start:
            segments.append(
                Segment(version, *written(request, start, end - start, version, cache), progress.decode_s - since_s)
            )
        elif segments and segments[-1] is self._between[-1]:
            segments[-1] = replace(segments[-1])
        return segments

    def _full_segments(self, running: RunningAttempt, first: int, ahead: int) -> list[Segment]:
        """The segments between marks, for an attempt that decoded all the time."""
        if self._answers.is_blank:
            return self._between[first:]
        written, request, cache = self._answers.written, running.request, running.cache
        return [
            Segment(
                writer,
                *written(request, ahead + steps, until - steps, writer, min(cache, writer)),
                until_s - decode_s,
            )
            for (steps, decode_s, _), (until, until_s, writer) in pairwise(self._marks[first - 1 :])
        ]


REPLAY, STOP, LENGTH = (
    Mode.REPLAY,
    FinishReason.STOP,
    FinishReason.LENGTH,
)  # access to enum members is slow in Python 3.11
_in_order = operator.attrgetter("order")
RESERVE_SHARE = 1 / 64  # of the KV cache must stay free when a parked sequence continues


@dataclass(slots=True)
class SimPublication:
    """A publication. Its time passes on the virtual clock when it is waited for."""

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
        self.answers: Answers = script if isinstance(script, Answers) else ScriptedAnswers(script=script)
        self.slots = slots
        self.clock = clock
        self.step_s = step_s
        self.cost: DecodeCost = cost or UnitCost(step_s=step_s)
        self.fails = fails
        self._limit = self.cost.kv_tokens  # size of the KV cache in tokens; None: unlimited
        self.version = 0
        self.running: dict[int, RunningAttempt] = {}  # by sample, in order of submission, parked ones included
        self.parked: deque[RunningAttempt] = deque()  # attempts without room in the KV cache, oldest first
        self._progress = SimProgress()
        self._ends: list[int] = []  # heap of the steps at which attempts end
        self._ending: dict[int, list[RunningAttempt]] = {}  # those attempts; some entries are out of date
        self._serial = 0
        self._context = 0  # tokens of all decoding attempts, prompts included
        self._prompts = 0  # of these, the prompt tokens
        self._marks = VersionMarks(self.answers)
        self._prefill_s = 0.0  # prefill time that the clock has not spent yet
        self._with_events: list[RunningAttempt] = []  # attempts with events for the next poll
        self._stats = EngineStats()
        self._num_parked = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slots=self.slots, exact_replay=True, keep_kv=True, waits=True)

    def submit(self, requests: Iterable[Request]) -> None:
        prefilled: list[int] = []
        progress, num_marks, limit = self._progress, len(self._marks), self._limit
        steps, decode_s, num_prompt, num_verified = progress.steps, progress.decode_s, 0, 0
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
                num_verified += verified.cached
            end = self._end(request, length, bool(events))
            running = RunningAttempt(
                request, progress, order, length, steps, decode_s, length, num_marks, end, self.version, events
            )
            if events:
                self._with_events.append(running)
            self.running[request.sample] = running
            if has_room:
                self._context += prompt + length
                self._prompts += prompt
                self._push(running)
            else:
                running.is_parked = True
                self.parked.append(running)
            self._serial = order
        assert len(self.running) <= self.slots, "more requests than free slots: submit no more than are free"
        self._stats.prompt_tokens += num_prompt
        self._prefill_s += self.cost.prefill_s(prefilled)
        if num_verified:
            self._prefill_s += self.cost.verify_s(num_verified)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        if not self.running:
            return []
        timer, progress, ends = self.clock.next_timer(), self._progress, self._ends
        while True:
            if self._prefill_s and not self._spend_prefill(timer):
                return []
            self._decode(self._next_stop(timer))
            if ends[0] <= progress.steps or (timer is not None and self.clock.now() >= timer):
                break
            self._make_room()
        events: list[EngineEvent] = []
        if self._with_events:
            for running in self._with_events:
                events += running.events
                running.events = ()
            self._with_events.clear()
        now = self.clock.now()
        while ends and ends[0] <= progress.steps:
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
                self._remove(running)
                events.append(Partial(sample, running.request.attempt, self.clock.now()))
        if not self.running:
            self._clear_ends()
        if self.parked and events:
            self._unpark()
        return events

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> Handle:
        assert in_flight != InFlight.ABORT or not self.running, (
            "weights published with abort while samples run: interrupt them first"
        )
        if self.running:
            self._marks.add(self._progress, self.version)
        self.version = version
        if not self.answers.is_steady:
            self._clear_ends()
            for running in self.running.values():
                running.end = self._end(running.request, running.length)
                if not running.is_parked:
                    self._push(running)
        if self.running and in_flight == InFlight.REPREFILL:
            for running in self.running.values():
                running.cache = version
            self._stats.recomputed_tokens += self._context - self._prompts
            self._prefill_s += self.cost.prefill_s(r.context for r in self.running.values() if not r.is_parked)
        return SimPublication(self.clock, self.cost.publish_s())

    def stats(self) -> EngineStats:
        return replace(self._stats, running=len(self.running), extra={"parked": self._num_parked})

    def close(self) -> None:
        self.running.clear()
        self.parked.clear()
        self._clear_ends()

    # ---- time -------------------------------------------------------------------------------------------------------

    @property
    def _num_decoding(self) -> int:
        return len(self.running) - len(self.parked)

    def _spend_prefill(self, timer: float | None) -> bool:
        """Spend the prefill time, up to the timer. Returns whether decoding can continue."""
        if not self._prefill_s:
            return True
        left = self._prefill_s if timer is None else min(self._prefill_s, timer - self.clock.now())
        self._stats.busy_slot_s += left * self._num_decoding
        self._stats.prefill_slot_s += left * self._num_decoding
        self._prefill_s = 0.0 if left >= self._prefill_s else self._prefill_s - left
        self.clock.advance(self.clock.now() + left)
        return self._prefill_s == 0.0

    def _next_stop(self, timer: float | None) -> int:
        """Steps until an attempt ends, the KV cache is full, or the timer is reached."""
        ends, ending = self._ends, self._ending
        while ending[ends[0]][0].end_step != ends[0]:
            step = ends[0]
            ending[step] = [running for running in ending[step] if running.end_step == step]
            if not ending[step]:
                del ending[heapq.heappop(ends)]
        count = len(self.running) - len(self.parked)
        steps = ends[0] - self._progress.steps
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
        count, progress, stats = len(self.running) - len(self.parked), self._progress, self._stats
        seconds = self.cost.decode_s(count, self._context, steps)
        self._context += steps * count
        progress.steps += steps
        progress.decode_s += seconds
        stats.decode_steps += steps
        stats.decoded_tokens += steps * count
        stats.slot_steps += steps * self.slots
        stats.busy_slot_steps += steps * count
        stats.busy_slot_s += seconds * count
        self.clock.advance(self.clock.now() + seconds)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _has_room(self, context: int) -> bool:
        """Whether the KV cache has room for a new sequence. Parked ones come first."""
        if self._limit is None or not self.running:
            return True
        return not self.parked and self._context + context <= self._limit

    def _make_room(self) -> None:
        """Park the youngest attempts until one more step fits. The last one always decodes."""
        limit = self._limit
        if limit is None:
            return
        youngest = reversed(self.running.values())
        while self._context + self._num_decoding > limit and self._num_decoding > 1:
            running = next(r for r in youngest if not r.is_parked)
            running.events = self._flush(running)
            self._stop_decoding(running)
            running.since_length, running.is_parked = running.length, True
            self.parked.appendleft(running)
            self._num_parked += 1

    def _unpark(self) -> None:
        """Continue parked attempts, oldest first, while there is room. They are prefilled again."""
        prefilled: list[int] = []
        limit = self._limit
        while self.parked and limit is not None:
            running = self.parked[0]
            needed = self._context + running.context + RESERVE_SHARE * limit
            if needed > limit and self._num_decoding > 0:
                break
            self.parked.popleft()
            running.is_parked, running.cache = False, self.version
            running.since_step, running.since_s = self._progress.steps, self._progress.decode_s
            running.since_mark = len(self._marks)
            self._context += running.context
            self._prompts += len(running.request.prompt)
            self._push(running)
            prefilled.append(running.context)
            self._stats.recomputed_tokens += running.length
        if prefilled:
            self._prefill_s += self.cost.prefill_s(prefilled)

    # ---- attempts ---------------------------------------------------------------------------------------------------

    def _push(self, running: RunningAttempt) -> None:
        """Note the step at which it ends; earlier notes become out of date."""
        step = running.end_step = running.since_step + running.end - running.since_length
        ending = self._ending.get(step)
        if ending is None:
            self._ending[step] = [running]
            heapq.heappush(self._ends, step)
        else:
            ending.append(running)

    def _clear_ends(self) -> None:
        self._ends.clear()
        self._ending.clear()

    def _remove(self, running: RunningAttempt) -> None:
        del self.running[running.request.sample]
        if running.is_parked:
            self.parked.remove(running)
        else:
            self._stop_decoding(running)

    def _stop_decoding(self, running: RunningAttempt) -> None:
        """Remove it from the counts of decoding attempts."""
        prompt = len(running.request.prompt)
        self._context -= prompt + running.since_length + self._progress.steps - running.since_step
        self._prompts -= prompt
        running.end_step = -1

    def _verify(self, request: Request) -> tuple[Verified, Delta]:
        """Replay: how many cached tokens are kept, and these tokens under the current version."""
        cached, accepted = len(request.cached), self.answers.accepted(request, self.version)
        tokens, logprobs = self.answers.written(request, 0, accepted, self.version, self.version)
        stamp = {"sample": request.sample, "attempt": request.attempt, "clock": self.clock.now()}
        again = Delta(
            start=0, tokens=tokens, logprobs=logprobs, version=self.version, slot_s=0.0, verified=accepted, **stamp
        )
        return Verified(cached=cached, accepted=accepted, **stamp), again

    def _end(self, request: Request, length: int, is_verified: bool = False) -> int:
        """The length at which an attempt with `length` tokens ends: by a stop, at its budget, or by a failure.

        Only an answer that a replay has just verified may be complete already; others get at least one more token.
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

    def _finish(self, running: RunningAttempt, now: float, events: list[EngineEvent]) -> None:
        """Remove an attempt that has reached its end, and add its last events."""
        request, length, start = running.request, running.end, running.delivered
        if running.events:
            events += running.events
            running.events = ()
        segments = self._marks.take_undelivered(running, self.version)
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

    def _flush(self, running: RunningAttempt) -> list[EngineEvent]:
        """The undelivered events of an attempt."""
        events, start, request = [*running.events], running.delivered, running.request
        running.events = ()
        segments = self._marks.take_undelivered(running, self.version)
        if segments:
            events.append(SegmentDelta(request.sample, request.attempt, self.clock.now(), start, segments))
        return events
