"""A learner that leaves out samples whose reward is not known.

`build.py` makes it; the scorer tells it which samples those are (`reward.on_error = "skip"`). For ledger and schedule
they are trained like any other, but they have no weight: neither a gradient nor a say in the statistics of siblings or
batch. What is to be left out is saved with the learner's state, since such a sample may wait over a checkpoint.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from sortedrl.learner.base import UpdateResult
from sortedrl.learner.torch import LearnerSettings, TorchLearner
from sortedrl.records import Batch


class SkippingLearner(TorchLearner):
    def __init__(self, model: Any, settings: LearnerSettings, *, temperature: float, overlap: bool = False) -> None:
        super().__init__(model, settings, temperature=temperature, overlap=overlap)
        self._left_out: dict[int, int] = {}  # attempt that could not be scored, by sample

    def skip(self, sample: int, attempt: int) -> None:
        """Leave a sample out of its update; if it is answered anew before, that attempt counts."""
        self._left_out[sample] = attempt

    def start(self, batch: Batch) -> Future[UpdateResult]:
        kept = tuple(s for s in batch.samples if self._left_out.pop(s.id, None) != s.attempt)
        if kept:
            return super().start(replace(batch, samples=kept))
        update: Future[UpdateResult] = Future()
        update.set_result(UpdateResult(optimizer_steps=0))
        return update

    def state_dict(self) -> dict[str, Any]:
        left_out = [[sample, attempt] for sample, attempt in self._left_out.items()]
        return {**super().state_dict(), "left_out": left_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._left_out = dict(state.get("left_out", []))
