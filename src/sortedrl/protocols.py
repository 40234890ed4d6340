"""Protocols of the parts that the controller calls besides the engine and the learner.

`run/builders/loop.py` passes the real ones in; the simulator and the conformance suite pass simpler ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sortedrl.buffer import Buffer
from sortedrl.records import Sample


class Score(Protocol):
    """The reward of one answer; `key` is (sample id, attempt) when the answer was submitted.

    An optional `is_skipped` tells that the learner was told to leave out the answer of this attempt, an optional
    `is_lost` that nobody can score it any more, because its environment is gone: the sample starts over.
    """

    @property
    def key(self) -> tuple[int, int]: ...

    @property
    def reward(self) -> float: ...


class Scorer(Protocol):
    """Scores complete answers in the background while the engine generates others.

    Each answer is submitted once. If a replay verifies it meanwhile and changes no token, its score still counts.
    """

    def submit(self, sample: Sample) -> None: ...

    def poll(self, timeout: float) -> Sequence[Score]: ...


class Turns(Protocol):
    """Gives turns that end with tool calls to their environments, and feeds what these return (`environment/loop.py`).

    It changes the buffer by itself. A run without tools has none.
    """

    @property
    def num_calling(self) -> int:
        """Samples whose environments work."""
        ...

    def resume(self) -> None:
        """Give the turns of a restored buffer to their environments again."""
        ...

    def take(self, sample: Sample, *, must_verify: bool = False) -> bool:
        """Give a turn that just ended to its environment; False if the answer is complete and needs a score.

        `must_verify`: a replay must check its tokens before they can be trained.
        """
        ...

    def collect(self, timeout: float) -> Sequence[Sample]:
        """Feed what has returned, waiting up to `timeout` for the first; returns samples that are complete by it."""
        ...

    def drop(self, sample: Sample) -> None:
        """Ignore what the environment of a sample will return, because the sample starts over."""
        ...

    def start_over(self, sample: Sample) -> None:
        """Requeue a complete sample from the start, because its environment is gone before it gave a reward."""
        ...

    def forget(self, sample: int) -> None:
        """The sample is trained: its environment is no longer needed."""
        ...


class EvaluationHook(Protocol):
    """An evaluation between two updates, while no training sample runs."""

    def is_due(self, num_trained: int, /) -> bool: ...

    def run(self, version: int, num_trained: int, /) -> None: ...


class CheckpointHook(Protocol):
    """Writes a checkpoint between two updates, while no sample runs."""

    def is_due(self, num_updates: int, /) -> bool: ...

    def run(self, buffer: Buffer, controller_state: Mapping[str, Any], /) -> None: ...
