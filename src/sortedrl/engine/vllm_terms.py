"""What a request tells vLLM's worker besides its tokens: the terms on which its answer is drawn.

They travel in `SamplingParams.extra_args`, as plain numbers. `vllm_core.py` writes them, `vllm_worker.py` reads them in
its own process; vLLM itself looks at none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXTRA_KEY = "sortedrl"


@dataclass(slots=True, kw_only=True, frozen=True)
class Terms:
    seed: int
    start: int  # answer tokens that stand behind the prompt already: the position of the first one drawn
    temperature: float
    tolerance: float = 0.0  # of a replay

    def extra_args(self) -> dict[str, Any]:
        return {EXTRA_KEY: [self.seed & (1 << 64) - 1, self.start, self.temperature, self.tolerance]}

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> Terms | None:
        """None for a request that somebody else made."""
        values = (extra_args or {}).get(EXTRA_KEY)
        if values is None:
            return None
        seed, start, temperature, tolerance = values
        return cls(seed=seed, start=start, temperature=temperature, tolerance=tolerance)
