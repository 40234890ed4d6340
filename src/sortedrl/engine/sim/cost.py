"""Cost models for the simulated engine: the protocol, and a model in which only decode steps take time.

`SimEngine` calls it; `simulate/costs.py` has the models of real hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class DecodeCost(Protocol):
    """How long the engine's work takes, in seconds, and how many tokens its KV cache holds (None: unlimited)."""

    @property
    def kv_tokens(self) -> int | None: ...

    def decode_s(self, running: int, context: int, steps: int) -> float:
        """The time of `steps` steps of `running` sequences with `context` tokens in total before the first step."""
        ...

    def prefill_s(self, lengths: Iterable[int]) -> float: ...

    def verify_s(self, tokens: int) -> float:
        """The time, on top of the prefill, to draw at the positions of `tokens` cached tokens and compare."""
        ...

    def publish_s(self) -> float: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class UnitCost:
    """A step takes `step_s`, however many sequences run; prefill, verification, publication and update are free."""

    step_s: float = 1.0
    kv_tokens: int | None = None

    def decode_s(self, running: int, context: int, steps: int) -> float:
        return steps * self.step_s

    def prefill_s(self, lengths: Iterable[int]) -> float:
        return 0.0

    def verify_s(self, tokens: int) -> float:
        return 0.0

    def publish_s(self) -> float:
        return 0.0

    def update_s(self, tokens: int) -> float:
        return 0.0
