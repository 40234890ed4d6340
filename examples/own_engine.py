"""Your own engine: a complete implementation of the protocol in `sortedrl/engine/base.py`.

    python examples/own_engine.py      # runs the conformance suite of `sortedrl.testing` on it

The model is a table of logits by the previous token, so everything about the protocol is here and nothing about
transformers. A real engine does the same with a KV cache. Tokens are drawn with the noise that all engines share;
this is what makes replay exact.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sortedrl.engine.base import (
    Capabilities,
    CompletedHandle,
    Delta,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    InFlight,
    Partial,
    Request,
    Verified,
    masked_places,
)
from sortedrl.engine.sampling.noise import SCHEME, gumbel_scalar
from sortedrl.errors import EngineError
from sortedrl.records import FinishReason, Mode
from sortedrl.testing import EngineCase, run_checks

VOCAB = 16
Table = list[list[float]]  # logits of the next token, by the previous one


def logprobs_after(table: Table, token: int, temperature: float) -> list[float]:
    logits = [logit / (temperature or 1.0) for logit in table[token]]
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


@dataclass(slots=True)
class RunningAnswer:
    """One running request: the answer so far, and the part of it that no event has delivered yet."""

    request: Request
    tokens: list[int]
    start: int  # where the undelivered tokens begin
    logprobs: list[float] = field(default_factory=list)  # of the undelivered tokens
    slot_s: float = 0.0


class TableEngine:
    def __init__(self, table: Table, *, slots: int) -> None:
        self.table = table
        self.slots = slots
        self.version = 0
        self.attempts: dict[int, RunningAnswer] = {}  # by sample
        self.events: list[EngineEvent] = []  # not yet returned
        self.counters = EngineStats()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(slots=self.slots, exact_replay=True, keep_kv=False, waits=True, noise=SCHEME)

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        if len(requests) > self.slots - len(self.attempts):
            raise EngineError(f"{len(requests)} requests for {self.slots - len(self.attempts)} free slots")
        for request in requests:
            if any(not 0 <= token < VOCAB for token in (*request.prompt, *request.cached)):
                self._tell(Failed, request, error=f"a token is outside the vocabulary of {VOCAB}")
                continue
            self.counters.prompt_tokens += len(request.prompt)
            self.counters.recomputed_tokens += len(request.cached)
            attempt = RunningAnswer(request, tokens=list(request.cached), start=len(request.cached))
            self.attempts[request.sample] = attempt
            if request.mode is Mode.REPLAY:
                self._verify(attempt)

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        """Decode until an attempt ends or the time is over; with a timeout of 0, one step."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.attempts and not self._step() and time.monotonic() < deadline:
            pass
        return self._take_events()

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        stopped = set(self.attempts) if samples is None else set(samples) & set(self.attempts)
        for sample in stopped:
            attempt = self.attempts.pop(sample)
            self._deliver(attempt)
            self._tell(Partial, attempt.request)
        return self._take_events(None if samples is None else stopped)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        for attempt in self.attempts.values():
            self._deliver(attempt)  # these tokens belong to the old version
        self.table, self.version = source, version
        return CompletedHandle()

    def stats(self) -> EngineStats:
        return replace(self.counters, running=len(self.attempts))

    def close(self) -> None:
        self.attempts.clear()

    # ---- sampling ------------------------------------------------------------------------------------------------

    def _draw(self, request: Request, before: Sequence[int], position: int) -> tuple[int, float]:
        """The token at a position of the answer: argmax(logits / temperature + noise), and its log-prob."""
        previous = before[position - 1] if position else request.prompt[-1]
        logprobs = logprobs_after(self.table, previous, request.sampling.temperature)
        noise = [0.0] * VOCAB
        if request.sampling.temperature:
            last = len(request.prompt) + position - 1  # index of the last token read, prompt included
            noise = [gumbel_scalar(request.seed, last, token) for token in range(VOCAB)]
        token = max(range(VOCAB), key=lambda token: logprobs[token] + noise[token])
        return token, logprobs[token]

    def _step(self) -> bool:
        """One token for every running attempt; returns whether an attempt ended."""
        began, num_running = time.monotonic(), len(self.attempts)
        ended = [attempt for attempt in self.attempts.values() if self._reason(attempt) is not None]
        for attempt in () if ended else self.attempts.values():
            token, logprob = self._draw(attempt.request, attempt.tokens, len(attempt.tokens))
            attempt.tokens.append(token)
            attempt.logprobs.append(logprob)
            self.counters.decoded_tokens += 1
            if self._reason(attempt) is not None:
                ended.append(attempt)
        seconds = time.monotonic() - began
        self.counters.decode_steps += 1
        self.counters.busy_slot_s += seconds * num_running
        for attempt in self.attempts.values():
            attempt.slot_s += seconds
        for attempt in ended:
            self._deliver(attempt)
            self._tell(Finished, attempt.request, reason=self._reason(attempt))
            del self.attempts[attempt.request.sample]
        return bool(ended)

    def _reason(self, attempt: RunningAnswer) -> FinishReason | None:
        """Why the answer is complete, if it is. A stop token among tokens that were only cached ends no answer."""
        request, num_tokens = attempt.request, len(attempt.tokens)
        is_new = num_tokens > len(request.cached) or request.mode is Mode.REPLAY
        is_masked = any(num_tokens - 1 in place for place in masked_places(request.spans))
        if is_new and not is_masked and num_tokens and attempt.tokens[-1] in request.sampling.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= request.budget else None

    def _verify(self, attempt: RunningAnswer) -> None:
        """Replay: keep the cached tokens up to the first that the current weights would not have drawn."""
        request = attempt.request
        masked = {position for place in masked_places(request.spans) for position in place}
        kept: list[float] = []
        for position, cached in enumerate(request.cached):
            token, logprob = self._draw(request, request.cached, position)
            if position not in masked and token != cached:
                break
            kept.append(0.0 if position in masked else logprob)
        num_kept = attempt.start = len(kept)
        del attempt.tokens[num_kept:]
        self._tell(Verified, request, cached=len(request.cached), accepted=num_kept)
        if num_kept:
            self._tell_tokens(attempt, start=0, tokens=attempt.tokens[:], logprobs=kept, verified=num_kept)

    # ---- events --------------------------------------------------------------------------------------------------

    def _deliver(self, attempt: RunningAnswer) -> None:
        tokens = attempt.tokens[attempt.start :]
        if tokens:
            self._tell_tokens(attempt, start=attempt.start, tokens=tokens, logprobs=attempt.logprobs)
        attempt.start, attempt.logprobs, attempt.slot_s = len(attempt.tokens), [], 0.0

    def _tell_tokens(self, attempt: RunningAnswer, **fields: Any) -> None:
        self._tell(Delta, attempt.request, version=self.version, slot_s=attempt.slot_s, **fields)

    def _tell(self, kind: type[EngineEvent], request: Request, **fields: Any) -> None:
        event = kind(sample=request.sample, attempt=request.attempt, clock=time.monotonic(), **fields)
        self.events.append(event)

    def _take_events(self, samples: set[int] | None = None) -> list[EngineEvent]:
        """Events of these samples, or all; others stay for the next call."""
        taken = [event for event in self.events if samples is None or event.sample in samples]
        self.events = [event for event in self.events if samples is not None and event.sample not in samples]
        return taken


def table_of(step: int) -> Table:
    """The weights after so many updates: each update moves the table a little."""
    noise = random.Random(0)
    table = [[noise.gauss(0, 1) for _ in range(VOCAB)] for _ in range(VOCAB)]
    for update in range(1, step + 1):
        noise = random.Random(update)
        table = [[logit + noise.gauss(0, 0.02) for logit in row] for row in table]
    return table


def forced_logprobs(step: int, request: Request, tokens: Sequence[int]) -> list[float]:
    """Log-probs of an answer by an independent pass, for comparison with the engine's."""
    table, before = table_of(step), [request.prompt[-1], *tokens]
    temperature = request.sampling.temperature
    return [logprobs_after(table, before[i], temperature)[token] for i, token in enumerate(tokens)]


def main() -> None:
    engine = TableEngine(table_of(0), slots=4)
    case = EngineCase(
        engine=engine,
        prompts=[[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8]],
        source=table_of,
        logprobs=forced_logprobs,
        spoil=lambda request: replace(request, prompt=[VOCAB]),
        advance=lambda: engine.poll(0),
    )
    results = run_checks(case)
    for name, result in results.items():
        print(f"{result:15} {name}")
    sys.exit(any(result.startswith("failed") for result in results.values()))


if __name__ == "__main__":
    main()
