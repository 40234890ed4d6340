"""Samples without a reward, and a learner that leaves them out of its updates.

`run/builders/learner.py` makes the learner. With `reward.on_error = "skip"`, the scorer tells it which samples could
not be scored. The ledger and the schedule treat such samples like any other, but they have no effect on training: they
give no gradient and do not count in the statistics of their siblings or of the batch. The list of such samples is saved
with the learner's state, because a sample may wait in the buffer when a checkpoint is written.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from sortedrl.learner.base import UpdateResult
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.torch import TorchLearner
from sortedrl.learner.update_runner import finished_update
from sortedrl.records import Batch


class UnscoredSamples:
    """The attempts that could not be scored; at most the latest one of each sample."""

    def __init__(self) -> None:
        self._attempts: dict[int, int] = {}

    def add(self, sample: int, attempt: int) -> None:
        self._attempts[sample] = attempt

    def remove_from(self, batch: Batch) -> Batch | None:
        """The batch without its unscored samples, or None if no sample is left. The samples are then forgotten."""
        samples = tuple(s for s in batch.samples if self._attempts.pop(s.id, None) != s.reward_attempt)
        return replace(batch, samples=samples) if samples else None

    def state(self) -> list[list[int]]:
        return [[sample, attempt] for sample, attempt in self._attempts.items()]

    def load(self, state: list[list[int]]) -> None:
        self._attempts = {pair[0]: pair[1] for pair in state}


def empty_update() -> Future[UpdateResult]:
    """The result of an update without samples."""
    return finished_update(UpdateResult(optimizer_steps=0))


class SkippingLearner(TorchLearner):
    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        *,
        temperature: float,
        overlap: bool = False,
        inspect_dir: Path | None = None,
        shares_device: bool = False,
    ) -> None:
        super().__init__(
            model,
            settings,
            temperature=temperature,
            overlap=overlap,
            inspect_dir=inspect_dir,
            shares_device=shares_device,
        )
        self._unscored = UnscoredSamples()

    def skip(self, sample: int, attempt: int) -> None:
        """Leave the answer of this attempt out of its update. An answer with other tokens counts again."""
        self._unscored.add(sample, attempt)

    def start(self, batch: Batch) -> Future[UpdateResult]:
        scored = self._unscored.remove_from(batch)
        return empty_update() if scored is None else super().start(scored)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "left_out": self._unscored.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._unscored.load(state.get("left_out", []))
