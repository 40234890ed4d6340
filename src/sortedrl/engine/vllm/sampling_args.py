"""The per-request sampling arguments that vLLM's worker needs besides what vLLM passes on itself.

`request.py` writes them into `SamplingParams.extra_args` as plain numbers. `worker.py` reads them in the worker's
process. vLLM itself ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sortedrl.engine.base import Sampling

EXTRA_KEY = "sortedrl"


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingArgs:
    seed: int
    start: int  # answer tokens sent along with the prompt: the answer position of the first token drawn
    sampling: Sampling
    tolerance: float = 0.0  # of a replay

    def to_extra_args(self) -> dict[str, Any]:
        shape = (self.sampling.temperature, self.sampling.top_k, self.sampling.top_p, self.sampling.min_p)
        return {EXTRA_KEY: [self.seed & (1 << 64) - 1, self.start, self.tolerance, *shape]}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> SamplingArgs | None:
        """The arguments of a request from this engine; None for any other request."""
        values = (extra_args or {}).get(EXTRA_KEY)
        if values is None:
            return None
        seed, start, tolerance, temperature, top_k, top_p, min_p = values
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        return cls(seed=seed, start=start, sampling=sampling, tolerance=tolerance)
