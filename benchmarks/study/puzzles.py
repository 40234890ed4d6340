"""The task of the freshness study: Knights and Knaves with five people, and held-out puzzles that tuning never saw.

`freshness.py` names it in `task.name`. Earlier studies and the quickstart's settings looked at the first 256 held-out
puzzles. This task holds out those after the first 512.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.tasks.base import RewardFunc, Row, Rows
from sortedrl.tasks.knights import KnightsTask, verify

NUM_TUNING = 512


@dataclass(slots=True, kw_only=True, frozen=True)
class FreshPuzzles:
    """The puzzles of `KnightsTask` with one number of people. Held out are later puzzles than the task's first."""

    seed: int = 0
    people: int = 5
    name: str = "knights after tuning"
    group_column: str | None = None
    reward_funcs: Sequence[RewardFunc] = (verify,)

    @property
    def train(self) -> Rows:
        return self._knights.train

    def heldout(self, num: int) -> list[Row]:
        return self._knights.heldout(NUM_TUNING + num)[NUM_TUNING:]

    @property
    def _knights(self) -> KnightsTask:
        return KnightsTask(seed=self.seed, people={self.people: 1.0})
