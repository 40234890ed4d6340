"""The protocol between the controller and a learner, which turns batches into new weights.

`start` takes a batch and returns an `Update` to wait for. A learner that works in the caller's thread has finished the
update when `start` returns. The controller publishes the new weights to the engines, through `source`.
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
    """An update that was started."""

    def done(self) -> bool: ...

    def result(self) -> UpdateResult: ...


class Learner(Protocol):
    @property
    def source(self) -> Any:
        """The object from which engines read the current weights (see `weights.py`)."""
        ...

    def start(self, batch: Batch) -> Update: ...
