"""One attempt while vLLM runs it: what the engine asks vLLM for, and what vLLM's outputs mean.

`engine.py` makes one `VllmRequest` per request; only the request loop (`request_loop.py`) changes it. A replay asks in
one request for the verification of its cached tokens and for the tokens after them. Only if a cached token is rejected
does the loop send a second request, which continues from the token that replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.vllm.sampling_args import SamplingArgs
from sortedrl.records import Mode


class RequestState(Enum):
    """The state of a request after one of vLLM's outputs."""

    RUNNING = auto()
    FINISHED = auto()
    STOPPED = auto()  # interrupted
    NON_FINITE = auto()  # a log-prob is NaN or infinite
    FAILED = auto()  # vLLM reports an error
    RESUBMIT = auto()  # a replay rejected a cached token: send a second request from there


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayTurn:
    """The result of verifying cached tokens: how many are kept, their log-probs, and the token drawn after them."""

    accepted: int
    logprobs: list[float]
    drawn: tuple[int, float] | None  # replaces the first rejected token, with its log-prob; None if all are kept

    @classmethod
    def read(cls, cached: Sequence[int], positions: Sequence[Any], is_masked: Sequence[bool]) -> ReplayTurn:
        """`positions`: for each cached token, vLLM's log-probs by token: of the cached token and of the drawn one.

        A masked token is context: it is kept, even if another token would be drawn there.
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
class VllmRequest:
    attempt: Attempt
    is_verifying: bool = False  # a replay whose cached tokens are not verified yet
    is_stopped: bool = False  # it is being interrupted: the loop must not send a second request
    is_parked: bool = False  # it is stopped for a moment and will be sent again: it stays in the loop
    collector: Any = None  # where vLLM's outputs arrive
    task: asyncio.Task[None] | None = None  # reads them
    is_started: bool = False  # the first output has arrived
    is_open: bool = False  # vLLM is working on it
    clock: float = 0.0  # when the last output arrived
    replay: ReplayTurn | None = None
    num_decoded: int = 0  # tokens of the last output that were drawn
    num_cache_hits: int = 0  # tokens whose KV was cached, as the first output reports

    @classmethod
    def begin(cls, attempt: Attempt) -> VllmRequest:
        return cls(attempt=attempt, is_verifying=attempt.request.mode is Mode.REPLAY and bool(attempt.tokens))

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete without asking vLLM."""
        return self.attempt.ending is not None and not self.is_verifying

    def tokens(self) -> list[int]:
        return [*self.attempt.request.prompt, *self.attempt.tokens]

    def sampling_params(self, make: Any, output_kind: Any, *, is_stock: bool = False) -> Any:
        """The request's sampling as vLLM's SamplingParams, which `make` creates.

        `is_stock`: vLLM's own sampler draws, so it needs the seed and the filters; ours reads them in `extra_args`.
        """
        request = self.attempt.request
        sampling_args = SamplingArgs(
            seed=request.seed,
            num_cached=len(self.attempt.tokens),
            sampling=request.sampling,
            tolerance=request.replay_tolerance,
        )
        sampling = request.sampling
        drawn = {"seed": request.seed, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        return make(
            **(drawn if is_stock else {}),
            temperature=request.sampling.temperature,
            # A complete answer that is only verified needs no more token, but vLLM always draws one.
            max_tokens=max(1, request.budget - len(self.attempt.tokens)),
            stop_token_ids=list(request.sampling.stop_tokens),
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=1 if self.is_verifying else None,
            detokenize=False,
            output_kind=output_kind,
            extra_args=sampling_args.to_extra_args(),
        )

    def apply_output(self, output: Any, clock: float) -> RequestState:
        """Add the tokens of one of vLLM's outputs to the attempt."""
        if not self.is_started:
            self.is_started, self.attempt.last_delivery_s, self.num_cache_hits = (
                True,
                clock,
                output.num_cached_tokens or 0,
            )
        self.clock, self.num_decoded = clock, 0
        (answer,) = output.outputs
        self.is_open = answer.finish_reason is None
        if self.is_verifying:
            if len(output.prompt_logprobs or ()) < self.attempt.length:
                return self._unverified_state(answer.finish_reason)
            state = self._apply_replay(output.prompt_logprobs)
            if state is not RequestState.RUNNING:
                return state
        for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True):
            if not self.attempt.add(token, entry[token].logprob):
                if self.is_stopped:  # the abort flag ended this step early: its tokens are not valid
                    return RequestState.RUNNING if self.is_open else RequestState.STOPPED
                return RequestState.NON_FINITE
            self.num_decoded += 1
            if self.attempt.decode is not None and self.attempt.ending is not None:
                return RequestState.FINISHED  # by a stop string, which vLLM does not know: it may have decoded more
        match answer.finish_reason:
            case None:
                return RequestState.RUNNING
            case "abort":
                return RequestState.STOPPED
            case "stop" | "length":
                assert self.attempt.ending is not None, "vLLM ended an answer that is not complete"
                return RequestState.FINISHED
            case _:
                return RequestState.FAILED

    def _unverified_state(self, reason: str | None) -> RequestState:
        """The state after an output that does not verify the cached tokens; it adds no token.

        A request that is stopped before its prompt was read in full has such outputs. vLLM then returns the entry of
        the first token of the prompt alone, which is None. A token of an aborted step may come with it.
        """
        if reason == "error":
            return RequestState.FAILED
        if self.is_open:
            return RequestState.RUNNING
        assert self.is_stopped, "vLLM ended a request whose cached tokens it has not verified"
        return RequestState.STOPPED

    def _apply_replay(self, prompt_logprobs: Sequence[Any]) -> RequestState:
        attempt, self.is_verifying = self.attempt, False
        answer = prompt_logprobs[len(attempt.request.prompt) :]
        self.replay = ReplayTurn.read(attempt.tokens, answer, attempt.is_masked)
        if not attempt.keep(self.replay.accepted, self.replay.logprobs):
            return RequestState.NON_FINITE
        if self.replay.drawn is not None:
            if not attempt.add(*self.replay.drawn):
                return RequestState.NON_FINITE
            self.num_decoded = 1
        if attempt.ending is not None:
            return RequestState.FINISHED
        return RequestState.RUNNING if self.replay.drawn is None else RequestState.RESUBMIT
