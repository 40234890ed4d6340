"""One attempt at one sample while the local engine runs it: the answer so far, and what the caller has of it.

The local engine alone makes and changes attempts. An attempt keeps true that tokens past `delivered` have their
log-probs in `logprobs`, and that one version of the weights sampled or verified all of these: the engine delivers at
every publication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sortedrl.engine.base import Delta, Request, Span, masked_places
from sortedrl.engine.sampling.draw import Draw
from sortedrl.records import FinishReason, Mode

_TAIL_TOKENS = 4  # read on top, since a character may need several tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    request: Request
    tokens: list[int]  # the whole answer, cached tokens included
    stops: frozenset[int]
    decode: Callable[[list[int]], str] | None = None  # where there are stop strings
    logprobs: list[float] = field(default_factory=list)
    delivered: int = 0  # answer tokens that the caller holds
    verified: int = 0  # tokens that a replay kept and the caller has not heard of
    is_cut: bool = False  # the caller holds more than `tokens`, and must hear of it
    slot_mark: float = 0.0  # the engine's decode seconds at the last delivery
    spans: Sequence[Span] = ()  # of the cached tokens, as far as they are kept
    turn: int = 0  # where the turn under way begins: behind the last token that was fed

    @classmethod
    def begin(cls, request: Request, decode: Callable[[list[int]], str] | None = None) -> Attempt:
        """Cached tokens past the budget, or past a stop token, are no part of the answer."""
        stops = frozenset(request.sampling.stop_tokens)
        cached = [] if request.mode is Mode.FRESH else list(request.cached[: request.budget])
        turn = _turn(request.spans)
        end = next((index + 1 for index in range(turn, len(cached)) if cached[index] in stops), len(cached))
        tokens = cached[:end]
        return cls(
            request=request,
            tokens=tokens,
            stops=stops,
            decode=decode if request.sampling.stop_strings else None,
            delivered=len(tokens),
            is_cut=end < len(request.cached),
            spans=request.spans,
            turn=turn,
        )

    @property
    def length(self) -> int:
        """Positions in the cache once the last token has been fed."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def is_masked(self) -> list[bool]:
        """Of each token, whether it was fed."""
        flags = [span.is_masked for span in self.spans for _ in range(span.num_tokens)][: len(self.tokens)]
        return flags + [False] * (len(self.tokens) - len(flags))

    @property
    def next_draw(self) -> Draw:
        return Draw(self.request.seed, len(self.tokens), self.request.sampling)

    @property
    def ending(self) -> FinishReason | None:
        """Why the answer is complete, if it is."""
        if len(self.tokens) > self.turn and (self.tokens[-1] in self.stops or self._has_stop_string()):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.request.budget else None

    def _has_stop_string(self) -> bool:
        """Whether the answer's end contains one; a token is at least a byte, so as many tokens as bytes will do."""
        if self.decode is None:
            return False
        strings = self.request.sampling.stop_strings
        num_last = max(len(string.encode()) for string in strings) + _TAIL_TOKENS
        text = self.decode(self.tokens[max(len(self.tokens) - num_last, self.turn) :])
        return any(string in text for string in strings)

    def add(self, token: int, logprob: float) -> bool:
        """Append a sampled token; False, and nothing appended, when its log-prob shows that the logits are broken."""
        if not math.isfinite(logprob):
            return False
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return True

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append sampled tokens that are known to be sound."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)

    def keep(self, accepted: int, logprobs: Sequence[float]) -> bool:
        """Keep the verified prefix; the caller is to replace all it holds. False as in `add`."""
        if not all(map(math.isfinite, logprobs)):
            return False
        del self.tokens[accepted:]
        self.spans = _cut(self.spans, accepted)
        self.turn = _turn(self.spans)
        self.logprobs = list(logprobs)
        self.delivered = 0
        self.verified = accepted
        self.is_cut = True
        return True

    def deliver(self, *, version: int, clock: float, decode_s: float) -> Delta | None:
        """What the caller does not have yet, as an event."""
        if self.delivered == len(self.tokens) and not self.is_cut:
            self.slot_mark = decode_s
            return None
        delta = Delta(
            sample=self.request.sample,
            attempt=self.request.attempt,
            clock=clock,
            start=self.delivered,
            tokens=self.tokens[self.delivered :],
            logprobs=self.logprobs,
            version=version,
            slot_s=decode_s - self.slot_mark,
            verified=self.verified,
        )
        self.verified = 0
        self.delivered, self.is_cut, self.logprobs, self.slot_mark = len(self.tokens), False, [], decode_s
        return delta


def _turn(spans: Sequence[Span]) -> int:
    """Where the last turn begins."""
    places = masked_places(spans)
    return places[-1].stop if places else 0


def _cut(spans: Sequence[Span], length: int) -> list[Span]:
    """The spans of the first tokens."""
    kept: list[Span] = []
    for span in spans:
        if length > 0:
            kept.append(span._replace(num_tokens=min(span.num_tokens, length)))
        length -= span.num_tokens
    return kept
