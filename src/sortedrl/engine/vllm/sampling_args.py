"""What a request tells vLLM's worker besides its tokens: the terms on which its answer is drawn.

They travel in `SamplingParams.extra_args`, as plain numbers. `core.py` writes them, `worker.py` reads them in
its own process; vLLM itself looks at none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedrl.engine.base import Sampling

EXTRA_KEY = "sortedrl"


@dataclass(slots=True, kw_only=True, frozen=True)
class Terms:
    seed: int
    start: int  # answer tokens that stand behind the prompt already: the position of the first one drawn
    sampling: Sampling
    tolerance: float = 0.0  # of a replay

    def extra_args(self) -> dict[str, Any]:
        drawn = (self.sampling.temperature, self.sampling.top_k, self.sampling.top_p, self.sampling.min_p)
        return {EXTRA_KEY: [self.seed & (1 << 64) - 1, self.start, self.tolerance, *drawn]}

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> Terms | None:
        """None for a request that somebody else made."""
        values = (extra_args or {}).get(EXTRA_KEY)
        if values is None:
            return None
        seed, start, tolerance, temperature, top_k, top_p, min_p = values
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        return cls(seed=seed, start=start, sampling=sampling, tolerance=tolerance)
