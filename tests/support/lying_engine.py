"""An engine that claims exact replay and verifies with other weights than it decodes with.

It stands for a GPU whose prefill rounds otherwise than its decoding. Tests and `tools/rehearsal.py` probe it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sortedrl.engine.base import Capabilities, Request
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.replay_probe import ReplayEvidence
from sortedrl.records import Mode
from tests.support.tiny_models import add_noise, source


class LyingEngine(LocalEngine):
    """A local engine in the place of vLLM on a GPU. `lie`: scale of the noise on its weights when it verifies."""

    needs_probe = True
    is_stock = True

    def __init__(self, model: Any, *, lie: float, slots: int, max_length: int, **_: Any) -> None:
        super().__init__(copy.deepcopy(model), slots=slots, max_length=max_length)
        self._honest, self._other = copy.deepcopy(model), copy.deepcopy(model)
        add_noise(self._other, lie, seed=1)
        self._evidence: ReplayEvidence | None = None

    @property
    def capabilities(self) -> Capabilities:
        told = super().capabilities
        if self._evidence is None:
            return replace(told, exact_replay=True)
        return replace(told, exact_replay=self._evidence.is_exact, replay_probe=str(self._evidence))

    def take_evidence(self, evidence: ReplayEvidence) -> None:
        self._evidence = evidence

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        is_replay = any(request.mode is Mode.REPLAY for request in requests)
        self.publish(0, source(self._other if is_replay else self._honest))
        super().submit(requests)
