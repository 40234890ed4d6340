"""An attempt of the simulated engine: how long its answer is follows from how many steps were taken since it began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sortedrl.engine.base import Event, Request


@dataclass(slots=True)
class Progress:
    """Steps taken and time decoded so far; every running attempt measures itself against it."""

    steps: int = 0
    decode_s: float = 0.0


@dataclass(slots=True, eq=False)
class Running:
    """An attempt. While it is parked `since_step` stands still, and so does its length."""

    request: Request
    progress: Progress
    order: int  # of submission: answers that end in one step are told in this order
    since_length: int  # answer tokens it had at `since_step`
    since_step: int
    since_s: float  # decode time at which its untold slot time began
    delivered: int  # answer tokens that events have told of
    since_mark: int  # publications that events have told of
    end: int  # answer tokens it will have under these weights
    events: Sequence[Event] = ()  # to be told first
    end_step: int = -1  # the step at which it is entered to end; any other entry of it is void
    is_parked: bool = False

    @property
    def length(self) -> int:
        """Answer tokens it has."""
        return self.since_length if self.is_parked else self.since_length + self.progress.steps - self.since_step

    @length.setter
    def length(self, tokens: int) -> None:
        self.since_length, self.since_step = tokens, self.progress.steps

    @property
    def context(self) -> int:
        return len(self.request.prompt) + self.length
