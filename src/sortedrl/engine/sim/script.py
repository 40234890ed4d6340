"""Where the simulated engine's answers come from: a script that gives every token, or only the lengths of answers.

`SimEngine` asks an `Answers`. Property tests give it a `Script`, which `ScriptedAnswers` turns into one; the simulator
takes answers from a trace (`simulate/answers.py`). Guarantees: the same request under the same version always gets the
same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sortedrl.engine.base import Request, masked_places


class Script(Protocol):
    """A policy as a table: the token at each position under each version."""

    def token(self, seed: int, position: int, version: int) -> int: ...

    def logprob(self, seed: int, position: int, version: int) -> float: ...

    def is_last(self, seed: int, position: int, version: int) -> bool:
        """Whether an answer ends with this token."""
        ...

    def length(self, seed: int, start: int, version: int) -> int:
        """Length of an answer that continues after `start` tokens."""
        ...


STALE_CACHE_LOGPROB = -0.5  # of each version between a token and the oldest part of the cache that it was drawn over


@runtime_checkable
class Answers(Protocol):
    """What the engine asks about answers. An implementation need not know their tokens."""

    @property
    def is_steady(self) -> bool:
        """Whether running answers keep their lengths when weights are published."""
        ...

    @property
    def is_blank(self) -> bool:
        """Whether all tokens and log-probs are zero bytes, which answers can share."""
        ...

    def accepted(self, request: Request, version: int) -> int:
        """How many cached tokens a replay under this version keeps."""
        ...

    def is_complete(self, request: Request, length: int, version: int) -> bool:
        """Whether an answer of this length is complete."""
        ...

    def end(self, request: Request, length: int, version: int) -> int:
        """The final length of an answer that continues after `length` tokens."""
        ...

    def written(
        self, request: Request, start: int, count: int, version: int, cache: int
    ) -> tuple[list[int], list[float]]:
        """`count` tokens and log-probs from position `start` on.

        `cache` is the oldest version in the KV cache over which `version` draws: an engine may keep it (`KEEP`).
        """
        ...


@dataclass(slots=True, kw_only=True)
class ScriptedAnswers:
    """The answers of a script.

    Over a cache of an older version, every other token is the one that the older version would write, and no log-prob
    is that of a version. So a test finds such a token if it is trained. End tokens are those of the current version.
    """

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
        if length == 0 or any(length - 1 in fed for fed in masked_places(request.spans)):
            return False
        return self.script.is_last(request.seed, length - 1, version)

    def end(self, request: Request, length: int, version: int) -> int:
        return self.script.length(request.seed, length, version)

    def written(
        self, request: Request, start: int, count: int, version: int, cache: int
    ) -> tuple[list[int], list[float]]:
        positions, seed = range(start, start + count), request.seed
        tokens = [
            self.script.token(seed, position, self._writer(seed, position, version, cache)) for position in positions
        ]
        off = STALE_CACHE_LOGPROB * (version - cache)
        logprobs = [self.script.logprob(seed, position, version) + off for position in positions]
        for position in (place for fed in masked_places(request.spans) for place in fed if place in positions):
            tokens[position - start], logprobs[position - start] = request.cached[position], 0.0
        return tokens, logprobs

    def _writer(self, seed: int, position: int, version: int, cache: int) -> int:
        """The version whose token stands at a position, if `version` draws over a cache of `cache`."""
        if version == cache or position % 2 == 0:
            return version
        is_last = self.script.is_last
        return version if is_last(seed, position, version) or is_last(seed, position, cache) else cache
