"""Scores complete answers in the background, while the engine continues to generate.

`SampleScorer` submits answers as they complete and polls for scores; `run/builders` makes the pool. Reward functions
have TRL's signature, `fn(prompts, completions, **columns) -> list[float]`. The scoring threads decode answers and write
them as JSON, so that the training loop does not wait for either. Functions read text that a model wrote, so a call
can hang, crash or return nonsense. Functions that can be imported by name run in worker processes, others in threads
(`reward/caller.py`).

Guarantees: `poll` returns every submission once, in no fixed order, unless failures stop the run; a sample on which a
function fails gets reward 0 and an error, and no other sample is affected; failures are counted by function and kind;
no call lasts longer than `timeout_s`; a worker process that dies or runs out of memory is replaced, and the samples it
was scoring are scored again, one by one.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self

from sortedrl.errors import RewardError
from sortedrl.reward.answer_text import Text, UnreadAnswer
from sortedrl.reward.caller import (
    ProcessCaller,
    RewardCaller,
    RewardFunction,
    ThreadCaller,
    find_function,
)
from sortedrl.reward.process import MEMORY_BYTES, as_plain
from sortedrl.reward.worker import CallFailed, FailureKind

_GATHER = 8  # answers for which a call is made at once
_GATHER_S = 0.01  # how long fewer answers wait for others, unless somebody waits for them
_MAX_BATCH = 64  # samples in one call
_MIN_MEMORY_BYTES = 64 << 20  # what a bare Python process needs
MAX_REWARD = 3.4028234663852886e38  # the largest float32; statistics over larger rewards overflow
_MAX_CALLS = 4096  # finished calls that are kept until `take_calls`

_Key = tuple[int, int]  # sample, attempt
_Row = tuple[Text, Text, Mapping[str, object], Sequence[int], Mapping[str, float]]
"""Prompt, completion, columns, tokens of the completion, and the progress of training at submission."""
OnError = Literal["zero", "skip", "stop"]
"""What happens to an answer that could not be scored, see `RewardPool`."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardScore:
    key: _Key
    reward: float
    error: str | None = None  # why there is no score; then `function` failed in this `kind` of way
    function: str = ""
    kind: FailureKind | None = None
    is_skipped: bool = False  # the sample must have no weight in training
    is_lost: bool = False  # the answer's environment is gone before it gave its reward: the sample must start over
    by_function: Mapping[str, float] | None = None  # if there are several functions: what each one returned


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardCall:
    """One finished call of a reward function, for telemetry."""

    worker: int
    seconds: float
    ended: float  # time.monotonic()
    num_samples: int


@dataclass(slots=True, kw_only=True, frozen=True)
class _Failure:
    kind: FailureKind
    function: str
    message: str

    @property
    def name(self) -> str:
        """The name under which such failures are counted."""
        return f"{self.function}: {self.kind}"


@dataclass(slots=True, kw_only=True, eq=False)
class _Ticket:
    """A submission on its way through the stages."""

    key: _Key
    row: _Row  # its completion is empty until `answer` has been read
    answer: UnreadAnswer | None
    frame: tuple[str, str, str] | None  # prompt, columns and progress as JSON; None without worker processes
    line: str = ""  # the row as JSON, for worker processes
    values: dict[int, float | None] = field(default_factory=dict)  # by index of the function
    failure: _Failure | None = None
    is_alone: bool = False  # a call with it failed: call it alone, so that no other sample fails with it

    def record(self, function: RewardFunction, outcome: float | str | CallFailed | None, timeout_s: float) -> None:
        if isinstance(outcome, float | int) and abs(outcome) > MAX_REWARD:
            outcome = CallFailed(FailureKind.OUT_OF_RANGE, f"{outcome:g}")
        if outcome is None or isinstance(outcome, float | int):
            self.values[function.index] = outcome
            return
        failed = outcome if isinstance(outcome, CallFailed) else CallFailed(FailureKind.NOT_A_NUMBER, outcome)
        message = f"reward function {function.name} {_explain(failed, timeout_s)}"
        self.failure = _Failure(kind=failed.kind, function=function.name, message=message)

    def reward(self, functions: Sequence[RewardFunction], weights: Sequence[float]) -> float | _Failure:
        """The weighted sum over the functions that did not return None."""
        if self.failure is not None:
            return self.failure
        given = [(weight, self.values[index]) for index, weight in enumerate(weights)]
        if all(value is None for _, value in given):
            names = ", ".join(function.name for function in functions)
            message = f"reward function {names} returned None: make one of them return a number for each answer"
            return _Failure(kind=FailureKind.NO_REWARD, function=names, message=message)
        total = float(sum(weight * value for weight, value in given if value is not None))
        if not abs(total) <= MAX_REWARD:  # infinities of both signs add up to NaN
            names = ", ".join(function.name for function in functions)
            message = f"the weighted sum of {names} is {total:g}, too large for a reward: lower reward.weights"
            return _Failure(kind=FailureKind.OUT_OF_RANGE, function=names, message=message)
        return total


def _explain(failed: CallFailed, timeout_s: float) -> str:
    match failed.kind:
        case FailureKind.TIMEOUT:
            return f"took longer than {timeout_s:g} s: make it quicker on such answers, or raise reward.timeout_s"
        case FailureKind.DIED:
            return f"ended its worker process ({failed.detail}): check whether it exits, crashes or runs out of memory"
        case FailureKind.MEMORY:
            return f"ran out of memory ({failed.detail}): make it need less on such answers, or raise reward.memory_mb"
        case FailureKind.RAISED:
            return f"raised {failed.detail}: make it return a number for malformed answers too"
        case FailureKind.MALFORMED:
            return f"{failed.detail}: make it return a list with one number per completion"
        case FailureKind.OUT_OF_RANGE:
            return f"returned {failed.detail} as a reward: make it return numbers that float32 can hold, up to 3.4e38"
        case FailureKind.NOT_A_NUMBER | FailureKind.NO_REWARD:
            return f"returned {failed.detail} as a reward: make it return a finite number, or None if it does not apply"


def _read_answers(tickets: Sequence[_Ticket]) -> None:
    """Decode the answers that were submitted as tokens, and write the rows as JSON if worker processes need them."""
    unread: dict[Any, list[tuple[_Ticket, UnreadAnswer]]] = {}
    for ticket in tickets:
        if ticket.answer is not None:
            unread.setdefault(ticket.answer.read, []).append((ticket, ticket.answer))
    for read, pairs in unread.items():
        for (ticket, _), text in zip(pairs, read([answer for _, answer in pairs]), strict=True):
            prompt, _, columns, tokens, progress = ticket.row
            ticket.row, ticket.answer = (prompt, text, columns, tokens, progress), None
    for ticket in tickets:
        if ticket.frame is not None:
            prompt, columns, progress = ticket.frame
            _, text, _, tokens, _ = ticket.row
            ticket.line = (
                f"[{prompt},{json.dumps(text)},{columns},{json.dumps(list(tokens), default=as_plain)},{progress}]"
            )
            ticket.frame = None


class _Stage:
    """A queue of tickets and the threads that call a set of functions on them, each thread with its own caller."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        callers: Sequence[RewardCaller],
        *,
        timeout_s: float,
        forward: Callable[[_Ticket], None],
        fail: Callable[[BaseException], None],
        calls: deque[RewardCall],
        first_worker: int,
    ) -> None:
        self._calls = calls
        self._functions = functions
        self._callers = callers
        self._timeout_s = timeout_s
        self._forward = forward
        self._fail = fail
        self._waiting: deque[_Ticket] = deque()
        self._changed = threading.Condition()
        self._max_batch = _MAX_BATCH
        self._is_closed = self._is_hurried = False
        self._ready = [threading.Event() for _ in callers]
        self._threads = [
            threading.Thread(target=self._serve, args=trio, name="reward", daemon=True)
            for trio in zip(callers, self._ready, range(first_worker, first_worker + len(callers)), strict=True)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        for event in self._ready:
            event.wait()

    def put(self, ticket: _Ticket) -> None:
        with self._changed:
            self._waiting.append(ticket)
            if len(self._waiting) == 1 or len(self._waiting) >= _GATHER or self._is_hurried:
                self._changed.notify()

    def hurry(self) -> None:
        """Somebody waits for the scores: call with what there is."""
        with self._changed:
            if self._waiting and not self._is_hurried:
                self._is_hurried = True
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for caller in self._callers:
            caller.stop()

    def join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:  # without memory for it, a thread does not start
                thread.join()

    def _serve(self, caller: RewardCaller, ready: threading.Event, worker: int) -> None:
        try:
            caller.start()
            ready.set()
            while batch := self._take():
                _read_answers(batch)
                self._score(caller, batch, worker)
        except BaseException as error:  # `poll` raises it: otherwise the run would wait for ever
            if not self._is_closed:
                self._fail(error)
        finally:
            ready.set()
            caller.close()

    def _take(self) -> list[_Ticket]:
        """The tickets of the next call: one that must be alone, or an equal share of the waiting ones."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
                self._changed.wait_for(self._has_enough, _GATHER_S)  # another thread may take them all meanwhile
            if self._is_closed:
                return []
            if self._waiting[0].is_alone:
                return [self._waiting.popleft()]
            batch: list[_Ticket] = []
            size = min(self._max_batch, math.ceil(len(self._waiting) / len(self._callers)))
            while len(batch) < size and self._waiting and not self._waiting[0].is_alone:
                batch.append(self._waiting.popleft())
            if self._waiting:
                self._changed.notify()  # for another thread
            else:
                self._is_hurried = False
            return batch

    def _has_enough(self) -> bool:
        """Whether to call now. Each call takes the interpreter from the engine a few times, so fewer are better."""
        return self._is_hurried or self._is_closed or not self._waiting or len(self._waiting) >= _GATHER

    def _score(self, caller: RewardCaller, batch: list[_Ticket], worker: int) -> None:
        for function in self._functions:
            tickets = [ticket for ticket in batch if ticket.failure is None and function.index not in ticket.values]
            if not tickets:
                continue
            outcomes: Sequence[float | str | CallFailed | None]
            start = time.monotonic()
            try:
                outcomes = caller.call(function, [t.row for t in tickets], [t.line for t in tickets])
                if len(tickets) == self._max_batch < _MAX_BATCH and time.monotonic() - start < self._timeout_s / 2:
                    self._max_batch += 1
            except CallFailed as failed:
                if self._retry(tickets, failed):
                    batch = [ticket for ticket in batch if ticket.failure is not None]
                    continue
                outcomes = [failed]
            finally:
                ended = time.monotonic()
                self._calls.append(
                    RewardCall(worker=worker, seconds=ended - start, ended=ended, num_samples=len(tickets))
                )
            for ticket, outcome in zip(tickets, outcomes, strict=True):
                ticket.record(function, outcome, self._timeout_s)
        for ticket in batch:
            self._forward(ticket)

    def _retry(self, tickets: list[_Ticket], failed: CallFailed) -> bool:
        """Queue tickets again, to be called one by one; False if the failure is certainly that of the only ticket."""
        # Another process may have killed the worker, or earlier calls may have filled its memory.
        is_accident = failed.kind in (FailureKind.DIED, FailureKind.MEMORY) and not tickets[0].is_alone
        if len(tickets) == 1 and not is_accident:
            return False
        if failed.kind is FailureKind.TIMEOUT:  # perhaps no answer hangs and the batch was too large
            self._max_batch = max(1, len(tickets) // 2)
        with self._changed:
            for ticket in reversed(tickets):
                ticket.is_alone = True
                self._waiting.appendleft(ticket)
            self._changed.notify(len(tickets))
        return True


class RewardPool:
    """Scores answers in the background by the weighted sum of reward functions.

    `on_error` applies to answers on which a function fails or all return None. `zero` gives them reward 0. `skip` does
    too and marks the score, so that they get no weight in training. `stop` gives them no score and sets `failure`: the
    caller must stop the run, and a resumed run scores them again.

    Functions in worker processes get columns as JSON has them: tuples become lists, keys become text. Each worker may
    use `memory_bytes` of data (None: no limit). It gets the usual environment variables and none that look like
    secrets; `keep_env` names further ones that a function needs.
    """

    def __init__(
        self,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        timeout_s: float,
        workers: int,
        weights: Sequence[float] | None = None,
        memory_bytes: int | None = MEMORY_BYTES,
        keep_env: Sequence[str] = (),
        on_error: OnError = "zero",
    ) -> None:
        self._functions = functions = _check_functions(reward_funcs)
        self._weights = _check_weights(weights, functions)
        if not timeout_s > 0 or workers < 1:
            raise RewardError(f"reward.timeout_s ({timeout_s}) must be above 0, reward.workers ({workers}) at least 1")
        if memory_bytes is not None and memory_bytes < _MIN_MEMORY_BYTES:
            raise RewardError(f"reward workers need at least {_MIN_MEMORY_BYTES >> 20} MiB: raise reward.memory_mb")
        self.errors: Counter[str] = Counter()  # polled failures by function and kind
        self.failure: RewardError | None = None  # the first failure, with on_error = stop
        self.progress: dict[str, float] = {}  # `trainer_state` of the functions; the trainer updates it
        self._on_error: OnError = on_error
        self._calls: deque[RewardCall] = deque(maxlen=_MAX_CALLS)
        self._done: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._num_waiting = 0
        self._fatal: BaseException | None = None
        self._is_started = self._is_closed = False
        self._stages: list[_Stage] = []
        # A ticket passes the worker processes first, then the threads. Stages are built from the last to the first.
        local = [function for function in functions if not function.is_importable]
        remote = [function for function in functions if function.is_importable]
        self._needs_json = bool(remote)
        if local:
            self._add_stage(local, [ThreadCaller(timeout_s=timeout_s) for _ in range(workers)], timeout_s)
        if remote:
            limits = {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
            callers = [ProcessCaller(remote, **limits, keep_env=keep_env) for _ in range(workers)]
            self._add_stage(remote, callers, timeout_s)

    def _add_stage(self, functions: list[RewardFunction], callers: Sequence[RewardCaller], timeout_s: float) -> None:
        after = self._stages[0] if self._stages else None

        def forward(ticket: _Ticket) -> None:
            if after is None or ticket.failure is not None:
                self._done.put(ticket)
            else:
                ticket.is_alone = False
                after.put(ticket)

        stage = _Stage(
            functions,
            callers,
            timeout_s=timeout_s,
            forward=forward,
            fail=self._stop_on,
            calls=self._calls,
            first_worker=0 if after is None else len(callers),
        )
        self._stages.insert(0, stage)

    def start(self) -> None:
        """Start the workers and wait until they are ready. Without this they start at the first `submit`."""
        self._start_threads()
        for stage in self._stages:
            stage.wait_ready()
        if self._fatal is not None:
            raise self._fatal

    def submit(
        self,
        key: _Key,
        prompt: Text,
        completion: Text | UnreadAnswer,
        columns: Mapping[str, object],
        tokens: Sequence[int] = (),
    ) -> None:
        """Queue an answer for scoring and return at once. A scoring thread reads an unread completion."""
        assert not self._is_closed, "submit after close"
        answer = completion if isinstance(completion, UnreadAnswer) else None
        text = "" if isinstance(completion, UnreadAnswer) else completion
        progress = dict(self.progress)
        frame = _frame(prompt, columns, progress) if self._needs_json else None
        self._start_threads()
        self._num_waiting += 1
        row = (prompt, text, columns, tokens, progress)
        self._stages[0].put(_Ticket(key=key, row=row, answer=answer, frame=frame))

    def poll(self, timeout: float = 0) -> list[RewardScore]:
        """Return the scores that are ready, waiting up to `timeout` seconds for the first if any is outstanding."""
        tickets: list[_Ticket | None] = []
        if timeout > 0 and self._num_waiting and self._fatal is None:
            for stage in self._stages:
                stage.hurry()
            try:
                tickets.append(self._done.get(timeout=timeout))
            except Empty:
                return []
        while not self._done.empty():  # no other thread takes from this queue
            tickets.append(self._done.get())
        if self._fatal is not None:
            raise self._fatal
        scores = [self._count(ticket) for ticket in tickets if ticket is not None]
        return [score for score in scores if score is not None]

    def take_calls(self) -> list[RewardCall]:
        """Return the calls that ended since the last time, at most the last 4096."""
        return [self._calls.popleft() for _ in range(len(self._calls))]

    @property
    def function_names(self) -> str:
        return ", ".join(function.name for function in self._functions)

    @property
    def num_waiting(self) -> int:
        """Answers submitted and not yet returned by `poll`."""
        return self._num_waiting

    def close(self) -> None:
        """Stop all workers. Waiting answers are not scored."""
        if self._is_closed:
            return
        self._is_closed = True
        for stage in self._stages:
            stage.close()
        if self._is_started:
            for stage in self._stages:
                stage.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_threads(self) -> None:
        if not self._is_started:
            self._is_started = True
            for stage in self._stages:
                stage.start()

    def _stop_on(self, error: BaseException) -> None:
        self._fatal = error
        self._done.put(None)  # wakes a poll

    def _count(self, ticket: _Ticket) -> RewardScore | None:
        self._num_waiting -= 1
        outcome = ticket.reward(self._functions, self._weights)
        if not isinstance(outcome, _Failure):
            return RewardScore(key=ticket.key, reward=outcome, by_function=self._by_function(ticket))
        return self._fail(ticket.key, outcome)

    def refuse(self, key: _Key, kind: FailureKind, function: str, message: str) -> RewardScore | None:
        """Count an answer that gets no reward for a reason outside of the functions; its score, as `on_error` says."""
        return self._fail(key, _Failure(kind=kind, function=function, message=message))

    def _fail(self, key: _Key, outcome: _Failure) -> RewardScore | None:
        if outcome.name not in self.errors:
            effect = {"zero": "gets reward 0", "skip": "gets no weight in training", "stop": "stops the run"}
            text = "%s (sample %d %s; further failures of this kind are counted, not logged)"
            logger.warning(text, outcome.message, key[0], effect[self._on_error])
        self.errors[outcome.name] += 1
        if self._on_error == "stop":
            remedy = "set reward.on_error to zero or skip to continue without such answers"
            self.failure = self.failure or RewardError(f"{outcome.message}; {remedy}")
            return None
        return RewardScore(
            key=key,
            reward=0.0,
            error=outcome.message,
            function=outcome.function,
            kind=outcome.kind,
            is_skipped=self._on_error == "skip",
        )

    def _by_function(self, ticket: _Ticket) -> dict[str, float] | None:
        """Return what each of several functions returned; functions of equal names get numbers."""
        if len(self._functions) == 1:
            return None
        names = [function.name for function in self._functions]
        keys = [f"{name} {index + 1}" if names.count(name) > 1 else name for index, name in enumerate(names)]
        return {key: value for index, key in enumerate(keys) if (value := ticket.values[index]) is not None}


def _check_functions(given: Callable[..., Any] | Sequence[Callable[..., Any]]) -> list[RewardFunction]:
    functions = [given] if callable(given) else list(given)
    if not functions:
        raise RewardError("no reward function is given: pass at least one fn(prompts, completions, **columns)")
    for function in functions:
        if not callable(function):
            raise RewardError(f"reward function {function!r} cannot be called: pass a function, not its name or result")
    return [find_function(function, index) for index, function in enumerate(functions)]


def _check_weights(weights: Sequence[float] | None, functions: list[RewardFunction]) -> list[float]:
    if weights is None:
        return [1.0] * len(functions)
    if len(weights) != len(functions) or not all(math.isfinite(weight) for weight in weights):
        raise RewardError(f"reward weights {list(weights)} must be {len(functions)} finite numbers, one per function")
    return list(weights)


def _frame(prompt: Text, columns: Mapping[str, object], progress: Mapping[str, float]) -> tuple[str, str, str]:
    """What of a row is JSON at once, so that `submit` refuses columns that JSON cannot hold."""
    try:
        return json.dumps(prompt), json.dumps(dict(columns), default=as_plain), json.dumps(progress, default=as_plain)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"a column among {sorted(columns)} cannot be sent to a reward worker ({error}): keep to text, numbers, "
            "lists and dicts, or wrap the reward function in a lambda, which runs in a thread of this process"
        ) from error
