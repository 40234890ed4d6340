"""What the controller calls besides engine and learner: who scores answers, evaluates, and saves the run.

Protocols only. `build/parts.py` and `trainer.py` put the parts in; the controller knows no more of them than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sortedrl.records import Sample


class Score(Protocol):
    @property
    def key(self) -> tuple[int, int]: ...

    @property
    def reward(self) -> float: ...


class Scorer(Protocol):
    """Scores complete answers while the engine goes on."""

    def submit(self, sample: Sample) -> None: ...

    def poll(self, timeout: float) -> Sequence[Score]: ...


class Pause(Protocol):
    """Something that needs the engine to itself between two updates, such as an evaluation."""

    def is_due(self, num_trained: int) -> bool: ...

    def run(self, version: int, num_trained: int) -> None: ...


class Save(Protocol):
    """Makes a checkpoint between two updates, while nothing runs."""

    def is_due(self, num_updates: int) -> bool: ...

    def run(self) -> None: ...
