"""The part of the loop for tools: gives finished turns to environments, and feeds back what these return.

    turn finished --take--> CALLING --collect--> fed, PENDING | complete, FINISHED | lost, PENDING from the start
    complete, FINISHED --reward lost, start_over--> PENDING from the start

The controller calls it at a few points (`protocols.Turns`), and it changes the buffer as the controller does. A runner
works on turns in the background; a dialect reads calls and writes results (both are real in a run, and simple in the
simulator). It uses no clock but the one that is passed in.

Guarantees: a turn whose result is kept is not called again, unless its environment is repeatable and its state is
needed, and then the call is recorded before it is made; a result that comes after its sample started over is ignored;
each call is recorded; a sample whose tokens became too old while a tool worked gets its fate before it may run again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sortedrl.buffer import Buffer
from sortedrl.clock import Clock
from sortedrl.environment.base import ToolCall, ToolResult, Turn, TurnResult
from sortedrl.environment.past import PastTurn, following_turn, past_turn
from sortedrl.records import IGNORED, CallRecord, FinishReason, Sample
from sortedrl.schedule import Fate, Knobs
from sortedrl.telemetry.events import Emit, SampleRequeued, ToolsCalled, ToolsReturned


class TurnRunner(Protocol):
    """Works on turns in the background (`environment/runner.py`)."""

    def submit(self, turn: Turn) -> None: ...

    def poll(self, timeout: float) -> Sequence[TurnResult]: ...

    def forget(self, sample: int) -> None: ...


class TurnDialect(Protocol):
    """Reads calls from a sample's tokens and turns results into tokens (`environment/dialect.py`)."""

    def calls(self, sample: Sample) -> Sequence[ToolCall]: ...

    def history(self, sample: Sample) -> Sequence[Sequence[ToolCall]]: ...

    def fed(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> Sequence[int]: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class _Open:
    """A turn that its environment works on."""

    turn: Turn
    began: float
    must_verify: bool  # its tokens were sampled over a cache of older weights
    num_repeated: int = 0  # calls of kept turns that are made again for it


@dataclass(slots=True, kw_only=True, frozen=True)
class _Ended:
    """A complete answer whose last turn called tools: their results were not fed."""

    tokens: list[int]
    is_over: bool  # no object was left after it


class TurnLoop:
    """`past`: the past turns of a restored buffer's samples, by sample and number."""

    def __init__(
        self,
        *,
        buffer: Buffer,
        runner: TurnRunner,
        dialect: TurnDialect,
        knobs: Knobs,
        max_turns: int,
        clock: Clock,
        emit: Emit,
        past: Mapping[int, Mapping[int, PastTurn]] | None = None,
    ) -> None:
        self._buffer = buffer
        self._runner = runner
        self._dialect = dialect
        self._knobs = knobs
        self._max_turns = max_turns
        self._clock = clock
        self._emit = emit
        self._past: dict[int, dict[int, PastTurn]] = {sample: dict(turns) for sample, turns in (past or {}).items()}
        self._open: dict[int, _Open] = {}
        self._dropped: dict[int, Turn] = {}  # turns whose samples started over while they were worked on, by serial
        self._serial = 0
        self._asked: dict[int, int] = {}  # the serial of the newest turn that asks for a reward, by sample
        self._ended = {
            sample: _Ended(tokens=held.tokens, is_over=turns[held.num_turns].is_over)
            for sample, turns in self._past.items()
            if (held := buffer.samples.get(sample)) is not None and held.finish_reason is not None
            if held.num_turns in turns and turns[held.num_turns].is_last
        }
        self._lost: dict[int, list[int]] = {}  # answers that started over because their objects were lost, by sample
        self.counts: Counter[str] = Counter()  # turns, calls, failed, repeated, lost, cut by the turn limit

    @property
    def num_calling(self) -> int:
        return len(self._open)

    def resume(self) -> None:
        for sample in list(self._buffer.calling.values()):
            if sample.id not in self._open:
                must_verify = self._knobs.goes_on_unverified  # perhaps not, but nobody remembers
                self._submit(sample, self._dialect.calls(sample), must_verify)

    def take(self, sample: Sample, *, must_verify: bool = False) -> bool:
        calls = self._dialect.calls(sample)
        if not calls:
            return False
        if sample.num_turns >= self._max_turns:
            self.counts["cut"] += 1
            return False
        self._buffer.call(sample, len(calls))
        self._submit(sample, calls, must_verify)
        return True

    def collect(self, timeout: float) -> list[Sample]:
        complete: list[Sample] = []
        for result in self._runner.poll(timeout):
            opened = self._open.get(result.sample)
            if opened is None or opened.turn.serial != result.serial:
                self._ignore(result)
                continue
            if result.must_repeat:
                self._repeat(self._buffer.calling[result.sample], opened)
                continue
            del self._open[result.sample]
            sample = self._buffer.calling[result.sample]
            if self._apply(sample, opened, result):
                complete.append(sample)
        return complete

    def drop(self, sample: Sample) -> None:
        opened = self._open.pop(sample.id, None)
        self._past.pop(sample.id, None)
        if opened is not None:
            self._dropped[opened.turn.serial] = opened.turn
            self._tell(sample, opened, "dropped")

    def reward_turn(self, sample: Sample) -> Turn:
        """The turn that asks for the reward of a complete trajectory."""
        ended = self._ended_turn(sample)
        # What was lost twice in the same way is not tried a third time.
        is_over = (ended is not None and ended.is_over) or self._lost.get(sample.id) == sample.tokens
        turn = self._turn(sample, asks_reward=True, is_over=is_over)
        self._asked[sample.id] = turn.serial
        return turn

    def start_over(self, sample: Sample) -> None:
        """The object of a complete trajectory is lost, so nobody can tell its reward: it starts over."""
        self.counts["lost"] += 1
        self._lost[sample.id] = sample.tokens
        self._requeue(sample, Fate.RESTART, told="lost")

    def repeat_reward_turn(self, turn: Turn) -> Turn | None:
        """The same turn, with leave to make the calls of kept turns again; None if its answer is no longer there.

        An answer that was written anew is asked for again, so only the newest request may call tools.
        """
        sample = self._buffer.samples.get(turn.sample)
        if sample is None or sample.finish_reason is None or self._num_turns(sample) != turn.number:
            return None
        if self._asked[sample.id] != turn.serial:
            return None
        self._announce(sample, turn)
        return replace(turn, may_repeat=True)

    def forget(self, sample: int) -> None:
        """The sample is trained."""
        self._past.pop(sample, None)
        self._asked.pop(sample, None)
        self._ended.pop(sample, None)
        self._lost.pop(sample, None)
        self._runner.forget(sample)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _submit(self, sample: Sample, calls: Sequence[ToolCall], must_verify: bool) -> None:
        turn = self._turn(sample, calls=calls)
        self._open[sample.id] = _Open(turn=turn, began=self._clock.now(), must_verify=must_verify)
        self._emit(ToolsCalled(self._clock.now(), sample.id, sample.attempt, turn.number, len(calls)))
        self._runner.submit(turn)

    def _turn(self, sample: Sample, **asked: Any) -> Turn:
        self._serial += 1
        number, past = sample.num_turns, self._past.get(sample.id, {})
        made = list(self._dialect.history(sample)) if number else []
        if asked.get("asks_reward") and self._ended_turn(sample) is not None:
            number, made = number + 1, [*made, self._dialect.calls(sample)]
        return following_turn(sample, self._serial, number, made, past, **asked)

    def _ended_turn(self, sample: Sample) -> _Ended | None:
        """How the answer's last turn ended if its results were not fed; None if it called no tools."""
        ended = self._ended.get(sample.id)
        return ended if ended is not None and ended.tokens == sample.tokens else None

    def _num_turns(self, sample: Sample) -> int:
        """The number of turns with tools of a complete answer, also of one whose results were not fed."""
        return sample.num_turns + (self._ended_turn(sample) is not None)

    def _repeat(self, sample: Sample, opened: _Open) -> None:
        """The object of a repeatable environment is gone: have the calls of the kept turns made again."""
        turn, num_repeated = replace(opened.turn, may_repeat=True), self._announce(sample, opened.turn)
        self._open[sample.id] = replace(opened, turn=turn, num_repeated=opened.num_repeated + num_repeated)
        self._runner.submit(turn)

    def _announce(self, sample: Sample, turn: Turn) -> int:
        """Record the calls of kept turns that are made again, before they are; returns how many."""
        calls = [_repeated(call) for made in turn.history for call in made]
        self._buffer.announce_calls(sample, turn.number, calls)
        self.counts["repeated"] += len(calls)
        return len(calls)

    def _apply(self, sample: Sample, opened: _Open, result: TurnResult) -> bool:
        """Record the end of a turn in the buffer; returns whether the answer is complete by it."""
        if result.is_lost:
            self.counts["lost"] += 1
            self._past.pop(sample.id, None)
            self._tell(sample, opened, "lost", result)
            self._requeue(sample, Fate.RESTART)
            return False
        self.counts["turns"] += 1
        self.counts["calls"] += len(result.results)
        self.counts["failed"] += sum(bool(r.error) for r in result.results)
        self._remember(sample, opened, result)
        fed = self._dialect.fed(opened.turn.calls, [r.text for r in result.results])
        if result.is_over or not fed or sample.num_tokens + len(fed) >= sample.budget:
            reason = FinishReason.STOP if result.is_over or not fed else FinishReason.LENGTH
            self._tell(sample, opened, "complete", result)
            self._buffer.finish(sample, reason)
            self._ended[sample.id] = _Ended(tokens=sample.tokens, is_over=result.is_over)
            fate = self._fate(sample, opened)
            if self._exceeds(sample) or (fate == Fate.REPLAY and self._knobs.goes_on_unverified):
                self._requeue(sample, fate)
                return False
            return True
        self._buffer.feed(sample, fed)
        self._tell(sample, opened, "fed", result, len(fed))
        if (fate := self._fate(sample, opened)) != Fate.RESUME:
            self._requeue(sample, fate)
        return False

    def _remember(self, sample: Sample, opened: _Open, result: TurnResult) -> None:
        """Keep the state after this turn, and note its calls in the buffer."""
        turn, past = opened.turn, self._past.setdefault(sample.id, {})
        for later in [number for number in past if number > turn.number]:
            del past[later]
        past[turn.number] = past_turn(result)
        records = [_record(call, made) for call, made in zip(turn.calls, result.results, strict=True)]
        if result.state is not None:
            records[-1] = replace(records[-1], state=json.dumps(result.state))
        self._buffer.record_calls(sample, turn.number, records)

    def _ignore(self, result: TurnResult) -> None:
        """Record the calls of a turn whose sample started over meanwhile."""
        turn = self._dropped.pop(result.serial)
        self.counts["ignored"] += len(result.results)
        sample = self._buffer.samples.get(result.sample)
        if sample is not None and result.results:
            made = [_record(call, r) for call, r in zip(turn.calls, result.results, strict=True)]
            self._buffer.record_calls(sample, turn.number, [replace(record, error=IGNORED) for record in made])

    def _fate(self, sample: Sample, opened: _Open) -> Fate:
        """How a sample goes on whose environment is done; it holds older tokens if weights were published meanwhile."""
        if sample.staleness(self._buffer.version) == 0:
            return Fate.REPLAY if opened.must_verify else Fate.RESUME
        if self._exceeds(sample):
            return self._knobs.on_bound
        return Fate.REPLAY if opened.must_verify else self._knobs.interrupted

    def _exceeds(self, sample: Sample) -> bool:
        bound, buffer = self._knobs.max_staleness, self._buffer
        return bound is not None and buffer.staleness(sample, buffer.version) > bound

    def _requeue(self, sample: Sample, fate: Fate, *, told: str = "") -> None:
        assert fate != Fate.WAIT, f"sample {sample.id} passed the bound while its environment worked"
        discarded = self._buffer.requeue(sample, fate.mode)
        if fate == Fate.RESTART:
            self._past.pop(sample.id, None)
        self._emit(SampleRequeued(self._clock.now(), sample.id, told or fate, discarded))

    def _tell(
        self, sample: Sample, opened: _Open, outcome: str, result: TurnResult | None = None, num_fed: int = 0
    ) -> None:
        now = self._clock.now()
        num_failed = 0 if result is None else sum(bool(r.error) for r in result.results)
        self._emit(
            ToolsReturned(
                now,
                sample.id,
                sample.attempt,
                opened.turn.number,
                now - opened.began,
                outcome,
                num_fed,
                num_failed,
                opened.num_repeated,
            )
        )


def _record(call: ToolCall, result: ToolResult) -> CallRecord:
    digest = hashlib.blake2b(result.text.encode("utf-8", "replace"), digest_size=16).hexdigest()
    return CallRecord(
        tool=call.name,
        arguments=_arguments(call),
        digest=digest,
        num_chars=len(result.text),
        error=result.error,
        seconds=result.seconds,
    )


def _repeated(call: ToolCall) -> CallRecord:
    """A call of a kept turn that is made again to bring a state back."""
    return CallRecord(
        tool=call.name, arguments=_arguments(call), digest="", num_chars=0, error="", seconds=0.0, is_repeated=True
    )


def _arguments(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), default=str)
