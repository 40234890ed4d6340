"""The protocol between the controller and whatever turns a batch into new weights.

`start` hands over a batch and returns at once with an `Update` to wait on; a learner that works in the caller's thread
may as well have finished by then. The weights that result are published by the controller, through `source`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from sortedrl.records import Batch


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateResult:
    optimizer_steps: int
    metrics: dict[str, float] = field(default_factory=dict)


class Update(Protocol):
    """An update under way."""

    def done(self) -> bool: ...

    def result(self) -> UpdateResult: ...


class Learner(Protocol):
    @property
    def source(self) -> Any:
        """Where engines get the current weights from (see `weights.py`)."""
        ...

    def start(self, batch: Batch) -> Update: ...
