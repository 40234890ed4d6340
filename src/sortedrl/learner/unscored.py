"""Samples whose reward is not known, and a learner that leaves them out.

`build/learner.py` makes the learner; the scorer tells it which samples those are (`reward.on_error = "skip"`). For
ledger and schedule they are trained like any other, but they have no weight: neither a gradient nor a say in the
statistics of siblings or batch. What is to be left out is saved with the learner's state, since such a sample may wait
over a checkpoint.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from sortedrl.learner.base import UpdateResult
from sortedrl.learner.torch import LearnerSettings, TorchLearner
from sortedrl.records import Batch


class LeftOut:
    """The attempts that could not be scored, one per sample at most."""

    def __init__(self) -> None:
        self._attempts: dict[int, int] = {}

    def add(self, sample: int, attempt: int) -> None:
        self._attempts[sample] = attempt

    def kept(self, batch: Batch) -> Batch | None:
        """The batch without them, which are then forgotten; None if nothing is left of it."""
        samples = tuple(s for s in batch.samples if self._attempts.pop(s.id, None) != s.attempt)
        return replace(batch, samples=samples) if samples else None

    def state(self) -> list[list[int]]:
        return [[sample, attempt] for sample, attempt in self._attempts.items()]

    def load(self, state: list[list[int]]) -> None:
        self._attempts = {pair[0]: pair[1] for pair in state}


def nothing_done() -> Future[UpdateResult]:
    """The update by a batch of which nothing is left."""
    update: Future[UpdateResult] = Future()
    update.set_result(UpdateResult(optimizer_steps=0))
    return update


class SkippingLearner(TorchLearner):
    def __init__(self, model: Any, settings: LearnerSettings, *, temperature: float, overlap: bool = False) -> None:
        super().__init__(model, settings, temperature=temperature, overlap=overlap)
        self._left_out = LeftOut()

    def skip(self, sample: int, attempt: int) -> None:
        """Leave a sample out of its update; if it is answered anew before, that attempt counts."""
        self._left_out.add(sample, attempt)

    def start(self, batch: Batch) -> Future[UpdateResult]:
        kept = self._left_out.kept(batch)
        return nothing_done() if kept is None else super().start(kept)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "left_out": self._left_out.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._left_out.load(state.get("left_out", []))
