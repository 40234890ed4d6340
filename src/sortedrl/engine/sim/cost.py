"""What a simulated engine's work takes: the protocol of cost models, and the one in which only steps count.

`SimEngine` asks it; `simulate/costs.py` has the models of real hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class DecodeCost(Protocol):
    """What the engine's work takes, in seconds, and how many tokens its KV cache holds (None: any number)."""

    @property
    def kv_tokens(self) -> int | None: ...

    def decode_s(self, running: int, context: int, steps: int) -> float:
        """`steps` steps of `running` sequences that have `context` tokens altogether before the first."""
        ...

    def prefill_s(self, lengths: Iterable[int]) -> float: ...

    def publish_s(self) -> float: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class UnitCost:
    """A step takes `step_s` whatever runs; prefill, publication and update take nothing."""

    step_s: float = 1.0
    kv_tokens: int | None = None

    def decode_s(self, running: int, context: int, steps: int) -> float:
        return steps * self.step_s

    def prefill_s(self, lengths: Iterable[int]) -> float:
        return 0.0

    def publish_s(self) -> float:
        return 0.0

    def update_s(self, tokens: int) -> float:
        return 0.0
