"""One attempt at one sample while an engine runs it: the answer so far, and how much of it the caller has received.

The local engine and the vLLM engine create attempts and change them.
Guarantees: every token past `delivered` has its log-prob in `logprobs`, and one version of the weights sampled or
verified all of these tokens, because the engine delivers before every publication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sortedrl.engine.base import Delta, Request, Span, first_spans, masked_places
from sortedrl.engine.sampling.draw import Draw
from sortedrl.records import FinishReason, Mode

_TAIL_TOKENS = 4  # extra tokens to decode when looking for a stop string: one character may need several tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    request: Request
    tokens: list[int]  # the whole answer, cached tokens included
    stops: frozenset[int]
    decode: Callable[[list[int]], str] | None = None  # None without stop strings
    logprobs: list[float] = field(default_factory=list)  # of the tokens that are not delivered yet
    delivered: int = 0  # number of answer tokens that the caller has received
    verified: int = 0  # tokens that a replay kept and that are not delivered yet
    is_truncated: bool = False  # the caller holds tokens that are no longer part of the answer
    last_delivery_s: float = 0.0  # the engine's decode seconds at the last delivery
    spans: Sequence[Span] = ()  # spans of the cached tokens that are kept
    turn_start: int = 0  # index of the first token after the last masked (injected) one

    @classmethod
    def begin(cls, request: Request, decode: Callable[[list[int]], str] | None = None) -> Attempt:
        """Start an attempt; drops the cached tokens past the budget or past a stop token."""
        stops = frozenset(request.sampling.stop_tokens)
        cached = [] if request.mode is Mode.FRESH else list(request.cached[: request.budget])
        turn_start = _turn_start(request.spans)
        end = next((index + 1 for index in range(turn_start, len(cached)) if cached[index] in stops), len(cached))
        tokens = cached[:end]
        return cls(
            request=request,
            tokens=tokens,
            stops=stops,
            decode=decode if request.sampling.stop_strings else None,
            delivered=len(tokens),
            is_truncated=end < len(request.cached),
            spans=request.spans,
            turn_start=turn_start,
        )

    @property
    def length(self) -> int:
        """Positions in the KV cache once the model has read the last token."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def is_masked(self) -> list[bool]:
        """For each answer token, whether it was injected instead of sampled."""
        flags = [span.is_masked for span in self.spans for _ in range(span.num_tokens)][: len(self.tokens)]
        return flags + [False] * (len(self.tokens) - len(flags))

    @property
    def has_masked(self) -> bool:
        """Whether any answer token was injected instead of sampled."""
        return any(span.is_masked for span in self.spans)

    @property
    def next_draw(self) -> Draw:
        return Draw(self.request.seed, self.length - 1, self.request.sampling)

    @property
    def ending(self) -> FinishReason | None:
        """Why the answer is complete; None while it is not."""
        if len(self.tokens) > self.turn_start and (self.tokens[-1] in self.stops or self._has_stop_string()):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.request.budget else None

    def _has_stop_string(self) -> bool:
        """Whether the end of the answer contains a stop string.

        A token is at least one byte, so decoding as many tokens as the longest stop string has bytes is enough.
        """
        if self.decode is None:
            return False
        strings = self.request.sampling.stop_strings
        num_last = max(len(string.encode()) for string in strings) + _TAIL_TOKENS
        text = self.decode(self.tokens[max(len(self.tokens) - num_last, self.turn_start) :])
        return any(string in text for string in strings)

    def add(self, token: int, logprob: float) -> bool:
        """Append a sampled token. Returns False and appends nothing if the log-prob is not finite."""
        if not math.isfinite(logprob):
            return False
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return True

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append sampled tokens whose log-probs are known to be finite."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)

    def keep(self, accepted: int, logprobs: Sequence[float]) -> bool:
        """Keep only the verified prefix, and deliver it anew. Returns False as `add` does."""
        if not all(map(math.isfinite, logprobs)):
            return False
        del self.tokens[accepted:]
        self.spans = first_spans(self.spans, accepted)
        self.turn_start = _turn_start(self.spans)
        self.logprobs = list(logprobs)
        self.delivered = 0
        self.verified = accepted
        self.is_truncated = True
        return True

    def deliver(self, *, version: int, clock: float, decode_s: float) -> Delta | None:
        """Return a Delta with everything that the caller has not received; None if it has everything."""
        if self.delivered == len(self.tokens) and not self.is_truncated:
            self.last_delivery_s = decode_s
            return None
        delta = Delta(
            sample=self.request.sample,
            attempt=self.request.attempt,
            clock=clock,
            start=self.delivered,
            tokens=self.tokens[self.delivered :],
            logprobs=self.logprobs,
            version=version,
            slot_s=decode_s - self.last_delivery_s,
            verified=self.verified,
        )
        self.delivered, self.verified, self.is_truncated = len(self.tokens), 0, False
        self.logprobs, self.last_delivery_s = [], decode_s
        return delta


def _turn_start(spans: Sequence[Span]) -> int:
    """Index of the first token after the last masked span."""
    places = masked_places(spans)
    return places[-1].stop if places else 0
