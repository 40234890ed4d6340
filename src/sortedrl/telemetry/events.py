"""The events of a run, one record each; `t` is seconds on the run's clock (virtual in a simulation).

Nobody changes a record; they are not frozen, and can be made without keywords, only because that makes them several
times as cheap, and there are millions.

The controller makes them and hands them to an injected `emit`; nothing that decides reads them back. `kind` names the
class in `events.jsonl`, whose first line is a RunStarted and names the schema. A new field needs a default, so that
older files stay readable; a change that readers must know of needs a new `SCHEMA_VERSION` and a line in `SCHEMAS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 2
SCHEMAS = {1: "slot time cannot be told by cause"}
"""What files of older schemas lack."""


@dataclass(slots=True)
class Event:
    t: float

    @property
    def kind(self) -> str:
        return type(self).__name__

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(slots=True)
class RunStarted(Event):
    strategy: str
    seed: int
    slots: int
    update_batch: int
    total_samples: int
    schema_version: int = SCHEMA_VERSION


@dataclass(slots=True)
class CohortLoaded(Event):
    cohort: int
    update: int  # updates done so far
    samples: list[int]


@dataclass(slots=True)
class AttemptStarted(Event):
    sample: int
    attempt: int
    mode: str
    cached: int  # answer tokens it starts from
    slot: int  # the lowest free row: a timeline draws it there
    version: int


@dataclass(slots=True)
class AttemptVerified(Event):
    sample: int
    attempt: int
    cached: int
    accepted: int


@dataclass(slots=True)
class AttemptEnded(Event):
    sample: int
    attempt: int
    outcome: str  # stop | length | interrupted | failed
    num_tokens: int  # answer tokens it holds now
    slot: int
    error: str = ""


@dataclass(slots=True)
class SampleScored(Event):
    sample: int
    attempt: int
    reward: float


@dataclass(slots=True)
class RewardCalled(Event):
    """A call of a reward worker is over, and its outcome was taken at `t`."""

    worker: int
    seconds: float
    lag_s: float  # from the end of the call to `t`
    num_samples: int


@dataclass(slots=True)
class ScoresAwaited(Event):
    """Nothing but scores was waited for, until `t`."""

    seconds: float
    num_paused: int = 0  # samples that stood still in their slots meanwhile


@dataclass(slots=True)
class SampleRequeued(Event):
    """What became of a sample that was not in the batch: resume, replay or restart."""

    sample: int
    decision: str
    discarded: int  # answer tokens thrown away


@dataclass(slots=True)
class BatchTaken(Event):
    """A harvest. The lists run over the batch's samples in training order."""

    update: int
    version: int
    samples: list[int]
    lengths: list[int]
    rewards: list[float]
    staleness: list[int]  # of the oldest token
    staleness_token_sum: list[int]  # summed over tokens
    truncated: int
    num_interrupted: int
    slot_s: float  # slot-seconds that decoded the batch's tokens
    num_paused: int = 0  # samples that wait in their slots until the weights are published
    # What the engine did since the last harvest, evaluations left out; None: it was not asked.
    busy_s: float | None = None  # slot-seconds in which it computed
    prefill_s: float = 0.0  # of these, for reading tokens
    prompt_tokens: int = 0  # read
    recomputed_tokens: int = 0  # answer tokens read again


@dataclass(slots=True)
class UpdateDone(Event):
    update: int
    version: int  # that the update made
    optimizer_steps: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class WeightsPublished(Event):
    version: int
    seconds: float


@dataclass(slots=True)
class Evaluated(Event):
    version: int
    samples_trained: int
    sampled_accuracy: float
    greedy_accuracy: float
    mean_length: float
    by_group: dict[str, dict[str, float]] = field(default_factory=dict)
    sampled_accuracy_se: float | None = None  # over prompts; one prompt has none
    pass_at_k: float | None = None  # a right one among a prompt's sampled answers
    truncation_rate: float | None = None
    sampled_reward: float | None = None  # more than the accuracy where a wrong answer earns something


@dataclass(slots=True)
class CheckpointSaved(Event):
    version: int
    seq: int  # of the ledger
    seconds: float


@dataclass(slots=True)
class RunResumed(Event):
    version: int
    lineage: int  # how often the run was resumed


@dataclass(slots=True)
class RunEnded(Event):
    reason: str  # complete | stopped


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The `emit` of a run that nobody listens to."""
