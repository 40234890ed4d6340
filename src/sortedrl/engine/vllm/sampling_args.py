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
    num_cached: int  # answer tokens sent along with the prompt
    sampling: Sampling
    tolerance: float = 0.0  # of a replay

    def to_extra_args(self) -> dict[str, Any]:
        shape = (self.sampling.temperature, self.sampling.top_k, self.sampling.top_p, self.sampling.min_p)
        return {EXTRA_KEY: [self.seed, self.num_cached, self.tolerance, *shape]}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> SamplingArgs | None:
        """The arguments of a request from this engine; None for any other request."""
        values = (extra_args or {}).get(EXTRA_KEY)
        if values is None:
            return None
        seed, num_cached, tolerance, temperature, top_k, top_p, min_p = values
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        return cls(seed=seed, num_cached=num_cached, sampling=sampling, tolerance=tolerance)
