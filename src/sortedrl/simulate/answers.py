"""Simulated answers: the length of each answer under each version of the weights; every token is 0.

`run.py` gives one `TraceAnswers` to the simulated engine. Guarantees: an answer's length depends only on its sample,
its seed and the version, so every strategy gets the same answers. A replay keeps each cached token with probability
(1 - divergence) per version since the token was written or last verified. A token that was written over a cache of
older versions counts as old as the oldest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sortedrl.engine.base import Request

_MASK = (1 << 64) - 1
_ZEROS = [bytes(count) for count in range(2048)]  # immutable, so that answers can share them


class TraceAnswers:
    """The answers of a trace, as the simulated engine asks for them.

    `lengths` and `seeds` are indexed by sample; `siblings[i]` is the range of samples with the same prompt as sample i.
    `drift` is the factor by which each version changes lengths (1.02: longer, 0.98: shorter). A request whose seed is
    not the sample's own was restarted with fresh noise. It gets the length of another answer to its prompt, or of any
    answer in the trace if `siblings` is None. `keeps_cache`: answers go on over their caches when weights change.
    """

    is_blank = True

    def __init__(
        self,
        lengths: Sequence[int],
        seeds: Sequence[int],
        *,
        siblings: Sequence[range] | None = None,
        divergence: float = 0.0,
        drift: float = 1.0,
        cap: int,
        keeps_cache: bool = False,
    ) -> None:
        self.lengths = lengths
        self.seeds = seeds
        self.siblings = siblings
        self.divergence = divergence
        self.hazard = -math.log1p(-divergence)  # rate at which a token changes, per version
        self.drift = drift
        self.cap = cap
        self.keeps_cache = keeps_cache
        self.is_steady = drift == 1.0

    def length(self, request: Request, version: int) -> int:
        """The length of the whole answer under this version."""
        sample = request.sample
        if request.seed != self.seeds[sample]:
            prompt = range(len(self.lengths)) if self.siblings is None else self.siblings[sample]
            sample = prompt[_mix(request.seed) % len(prompt)]
        length = self.lengths[sample]
        if self.drift == 1.0:
            return length
        try:
            return min(max(round(length * self.drift**version), 1), self.cap)
        except OverflowError:  # longer than any number
            return self.cap

    # ---- the protocol `Answers` of the simulated engine -------------------------------------------------------------

    def accepted(self, request: Request, version: int) -> int:
        limit = min(len(request.cached), self.length(request, version), request.budget)
        if self.hazard == 0.0:
            return limit
        # One draw for the whole prefix: the token-versions (tokens x age) up to the first token that changed.
        room = -math.log(_uniform(request.seed, version)) / self.hazard
        accepted = 0
        oldest = request.spans[0].version if self.keeps_cache and request.spans else version
        for written, count, is_masked in request.spans:
            age = 0 if is_masked else version - min(written, oldest)
            if age * count > room:
                accepted += int(room / age)
                break
            room -= age * count
            accepted += count
        return min(accepted, limit)

    def is_complete(self, request: Request, length: int, version: int) -> bool:
        return self.length(request, version) <= length < self.cap  # at the cap it was truncated

    def end(self, request: Request, length: int, version: int) -> int:
        sample = request.sample
        is_own = request.seed == self.seeds[sample] and self.is_steady  # a short cut for what `length` would return
        whole = self.lengths[sample] if is_own else self.length(request, version)
        return whole if whole > length else length + 1

    def written(self, request: Request, start: int, count: int, version: int, cache: int) -> tuple[Any, Any]:
        zeros = _ZEROS[count] if count < len(_ZEROS) else bytes(count)
        return zeros, zeros


def _mix(number: int) -> int:
    """A pseudo-random 64-bit number that depends only on `number` (the finalizer of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _uniform(seed: int, version: int) -> float:
    """A pseudo-random number in (0, 1]."""
    return (_mix(_mix(seed) ^ version) + 1) / 2**64
