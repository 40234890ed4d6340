"""One attempt while vLLM runs it: what is asked of vLLM, and what its outputs mean.

`engine.py` makes one per request, and the tower reads its outputs; nothing else touches it meanwhile. A
replay asks for the verdict on its cached tokens and for the answer behind them in one request; only when a cached token
does not stand is a second request made, from the token that takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sortedrl.engine.local.attempt import Attempt
from sortedrl.engine.vllm.sampling_args import Terms
from sortedrl.records import Mode


class Turn(Enum):
    """What becomes of a flight after an output."""

    ON = auto()
    FINISHED = auto()
    STOPPED = auto()
    BROKEN = auto()  # logits that are not finite
    FAILED = auto()  # vLLM says so
    AGAIN = auto()  # a cached token did not stand: ask again from there


@dataclass(slots=True, kw_only=True, frozen=True)
class Check:
    """The verdict on cached tokens: how many stand, their log-probs, and what is drawn in place of the next."""

    accepted: int
    logprobs: list[float]
    drawn: tuple[int, float] | None

    @classmethod
    def read(cls, cached: Sequence[int], positions: Sequence[Any], is_masked: Sequence[bool]) -> Check:
        """`positions`: per cached token, log-probs by token: of the cached one, and of the one to stand there.

        A masked token is context: it stands, whatever would be drawn there.
        """
        logprobs: list[float] = []
        for index, (token, entry, is_given) in enumerate(zip(cached, positions, is_masked, strict=True)):
            if is_given:
                logprobs.append(0.0)
                continue
            others = [other for other in entry if other != token]
            if others:
                return cls(accepted=index, logprobs=logprobs, drawn=(others[0], entry[others[0]].logprob))
            logprobs.append(entry[token].logprob)
        return cls(accepted=len(cached), logprobs=logprobs, drawn=None)


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    attempt: Attempt
    is_checking: bool = False  # the verdict on its cached tokens is still to come
    is_stopped: bool = False  # it is being interrupted: a second request must not be made
    is_parked: bool = False  # it is interrupted for a moment only, and stays in the air
    collector: Any = None
    task: asyncio.Task[None] | None = None
    is_started: bool = False  # its first output has come
    is_open: bool = False  # vLLM is at work on it
    clock: float = 0.0  # when its last output came
    check: Check | None = None
    num_decoded: int = 0  # tokens of the last output that were drawn
    num_hits: int = 0  # tokens whose KV was there already, as the first output tells

    @classmethod
    def begin(cls, attempt: Attempt) -> Flight:
        return cls(attempt=attempt, is_checking=attempt.request.mode is Mode.REPLAY and bool(attempt.tokens))

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to ask vLLM."""
        return self.attempt.ending is not None and not self.is_checking

    def tokens(self) -> list[int]:
        return [*self.attempt.request.prompt, *self.attempt.tokens]

    def params(self, make: Any, output_kind: Any) -> Any:
        """vLLM's SamplingParams (`make`): one to one what the request asks for."""
        request = self.attempt.request
        terms = Terms(
            seed=request.seed,
            start=len(self.attempt.tokens),
            sampling=request.sampling,
            tolerance=request.replay_tolerance,
        )
        return make(
            temperature=request.sampling.temperature,
            # An answer that is complete if it stands needs no token more, but vLLM wants to write one.
            max_tokens=max(1, request.budget - len(self.attempt.tokens)),
            stop_token_ids=list(request.sampling.stop_tokens),
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=1 if self.is_checking else None,
            detokenize=False,
            output_kind=output_kind,
            extra_args=terms.extra_args(),
        )

    def take(self, output: Any, clock: float) -> Turn:
        """Write an output into the attempt."""
        if not self.is_started:
            self.is_started, self.attempt.last_delivery_s, self.num_hits = True, clock, output.num_cached_tokens or 0
        self.clock, self.num_decoded = clock, 0
        (answer,) = output.outputs
        self.is_open = answer.finish_reason is None
        if self.is_checking and output.prompt_logprobs:
            turn = self._settle_check(output.prompt_logprobs)
            if turn is not Turn.ON:
                return turn
        for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True):
            if not self.attempt.add(token, entry[token].logprob):
                if self.is_stopped:  # the step was broken off: it has written nothing
                    return Turn.ON if self.is_open else Turn.STOPPED
                return Turn.BROKEN
            self.num_decoded += 1
            if self.attempt.decode is not None and self.attempt.ending is not None:
                return Turn.FINISHED  # by a stop string, of which vLLM knows nothing: it may have gone on
        match answer.finish_reason:
            case None:
                return Turn.ON
            case "abort":
                return Turn.STOPPED
            case "stop" | "length":
                assert self.attempt.ending is not None, "vLLM ended an answer that is not complete"
                return Turn.FINISHED
            case _:
                return Turn.FAILED

    def _settle_check(self, prompt_logprobs: Sequence[Any]) -> Turn:
        attempt, self.is_checking = self.attempt, False
        answer = prompt_logprobs[len(attempt.request.prompt) :]
        self.check = Check.read(attempt.tokens, answer, attempt.is_masked)
        if not attempt.keep(self.check.accepted, self.check.logprobs):
            return Turn.BROKEN
        if self.check.drawn is not None:
            if not attempt.add(*self.check.drawn):
                return Turn.BROKEN
            self.num_decoded = 1
        if attempt.ending is not None:
            return Turn.FINISHED
        return Turn.ON if self.check.drawn is None else Turn.AGAIN
