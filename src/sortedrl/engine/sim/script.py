"""Where a simulated engine's answers come from: spelled out by a script, or known by their lengths alone.

`SimEngine` asks an `Answers`; property tests give it a `Script`, which `SpelledOut` turns into one, and the simulator
answers from a trace (`simulate/answers.py`). What they keep true: the same request under the same version always gets
the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sortedrl.engine.base import Request, masked_places


class Script(Protocol):
    """A policy reduced to what the schedule sees: which token stands where, under which version."""

    def token(self, seed: int, position: int, version: int) -> int: ...

    def logprob(self, seed: int, position: int, version: int) -> float: ...

    def is_last(self, seed: int, position: int, version: int) -> bool:
        """Whether an answer ends with this token."""
        ...

    def length(self, seed: int, start: int, version: int) -> int:
        """Length of an answer that goes on from `start` tokens."""
        ...


@runtime_checkable
class Answers(Protocol):
    """What the engine asks about answers; they need not be spelled out token by token."""

    @property
    def is_steady(self) -> bool:
        """Whether new weights leave the length of every answer under way as it is."""
        ...

    @property
    def is_blank(self) -> bool:
        """Whether tokens and log-probs are nothing but zeros, given as bytes: then answers can share them."""
        ...

    def accepted(self, request: Request, version: int) -> int:
        """How many cached tokens these weights would write again."""
        ...

    def is_complete(self, request: Request, length: int, version: int) -> bool:
        """Whether an answer of this length ends by itself."""
        ...

    def end(self, request: Request, length: int, version: int) -> int:
        """Length of an answer that has `length` tokens and goes on."""
        ...

    def written(self, request: Request, start: int, count: int, version: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs from position `start` on."""
        ...


@dataclass(slots=True, kw_only=True)
class SpelledOut:
    """Answers of a script, token by token."""

    script: Script
    is_steady: bool = False
    is_blank: bool = False

    def accepted(self, request: Request, version: int) -> int:
        places = masked_places(request.spans)
        turn = places[-1].stop if places else 0
        for position, token in enumerate(request.cached):
            if any(position in fed for fed in places):
                continue
            if position == request.budget or self.script.token(request.seed, position, version) != token:
                return position
            if position >= turn and self.script.is_last(request.seed, position, version):
                return position + 1
        return len(request.cached)

    def is_complete(self, request: Request, length: int, version: int) -> bool:
        return length > 0 and self.script.is_last(request.seed, length - 1, version)

    def end(self, request: Request, length: int, version: int) -> int:
        return self.script.length(request.seed, length, version)

    def written(self, request: Request, start: int, count: int, version: int) -> tuple[list[int], list[float]]:
        positions, seed = range(start, start + count), request.seed
        tokens = [self.script.token(seed, position, version) for position in positions]
        logprobs = [self.script.logprob(seed, position, version) for position in positions]
        for position in (place for fed in masked_places(request.spans) for place in fed if place in positions):
            tokens[position - start], logprobs[position - start] = request.cached[position], 0.0
        return tokens, logprobs
