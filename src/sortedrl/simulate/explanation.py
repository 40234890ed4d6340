"""Why a plan recommends what it does: what an idle slot costs on this engine, and what sorting wins from it.

`plan.py` makes one for every proposal. If most of a decode step is paid however many sequences run, an idle slot is
expensive and filling it pays off. If a step's time grows with the sequences that it runs, as for a tiny model on a CPU,
idle slots cost little, and `sync` can be as fast as a sorted strategy. To show the difference, the same workload is
simulated once more with steps of constant time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sortedrl.simulate.costs import CostModel

_CHEAP, _EXPENSIVE = 0.25, 0.75  # of a busy slot: below, an idle slot costs little; above, nearly as much
_NEARLY_EQUAL = 0.05  # of the speed of sync
_LONG_UPDATES = 0.4  # share of the time from which on updates are worth a sentence


@dataclass(slots=True, kw_only=True, frozen=True)
class StepCost:
    """The time of a decode step as a straight line over the running sequences, at the mean context."""

    fixed_s: float
    per_sequence_s: float
    slots: int

    @classmethod
    def of(cls, cost: CostModel, *, slots: int, context: int) -> StepCost:
        def step_s(running: int) -> float:
            at = running * context
            return cost.decode_s(running, at, 2) - cost.decode_s(running, at, 1)  # without what a call costs once

        if slots == 1:
            return cls(fixed_s=step_s(1), per_sequence_s=0.0, slots=1)
        few = min(2, slots - 1)  # a single sequence may be cheaper than the line
        slope = max((step_s(slots) - step_s(few)) / (slots - few), 0.0)
        return cls(fixed_s=max(step_s(slots) - slots * slope, 0.0), per_sequence_s=slope, slots=slots)

    @property
    def full_s(self) -> float:
        """A step in which every slot runs."""
        return self.fixed_s + self.slots * self.per_sequence_s

    @property
    def fixed_share(self) -> float:
        """The share of a full step that is paid however many sequences run."""
        return self.fixed_s / self.full_s if self.full_s else 1.0


@dataclass(slots=True, kw_only=True, frozen=True)
class ConstantSteps:
    """`cost` with steps that take `step_s` whatever they compute; a prefill is one step."""

    cost: CostModel
    step_s: float

    @property
    def kv_tokens(self) -> int | None:
        return self.cost.kv_tokens

    def decode_s(self, running: int, context: int, steps: int) -> float:
        return steps * self.step_s

    def prefill_s(self, lengths: Iterable[int]) -> float:
        return self.step_s if list(lengths) else 0.0

    def verify_s(self, tokens: int) -> float:
        return 0.0

    def publish_s(self) -> float:
        return self.cost.publish_s()

    def update_s(self, tokens: int) -> float:
        return self.cost.update_s(tokens)


@dataclass(slots=True, kw_only=True, frozen=True)
class Explanation:
    """`speedup` and `constant_speedup`: the speed of `settings` against sync here, and with steps of constant time."""

    step: StepCost
    settings: str
    speedup: float
    constant_speedup: float
    update_share: float  # of the time of sync

    def sentences(self) -> list[str]:
        step = self.step
        line = f"{_ms(step.fixed_s)} + {_ms(step.per_sequence_s)} per running sequence"
        grows = "hardly grows" if step.fixed_share > _EXPENSIVE else "grows"
        lines = [
            f"On this engine the time of a decode step {grows} with the sequences that it runs ({line}). With all "
            f"{step.slots} slots, an idle slot costs {step.fixed_share:.0%} of a busy one{self._weight()}: "
            f"{self.settings} runs at {self.speedup:.2f}x the speed of sync{self._verdict()}."
        ]
        if step.fixed_share <= _EXPENSIVE:
            lines.append(
                "On an engine whose steps take equally long however many sequences they decode or prefill, it would "
                f"run at {self.constant_speedup:.2f}x."
            )
        if self.update_share >= _LONG_UPDATES:
            lines.append(f"Updates take {self.update_share:.0%} of the time of sync, and no strategy shortens them.")
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": {**asdict(self.step), "fixed_share": self.step.fixed_share},
            "settings": self.settings,
            "speedup": self.speedup,
            "constant_speedup": self.constant_speedup,
            "update_share": self.update_share,
            "text": " ".join(self.sentences()),
        }

    def _weight(self) -> str:
        share = self.step.fixed_share
        return ", so idle slots cost little" if share < _CHEAP else ", nearly as much" if share > _EXPENSIVE else ""

    def _verdict(self) -> str:
        if abs(self.speedup - 1.0) <= _NEARLY_EQUAL:
            return ", which is the same within 5 %"
        is_slower = self.speedup < 1.0
        return ", because prefilling interrupted answers again costs more than the slots it fills" if is_slower else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
