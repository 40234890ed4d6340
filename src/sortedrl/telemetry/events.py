"""The events of a run, one dataclass per kind. `t` is seconds on the run's clock (virtual in a simulation).

The controller creates the events and passes them to an injected `emit`; no component makes decisions from them. `kind`
is the class name, and names the event in `events.jsonl`. The first line of that file is a RunStarted, which carries the
schema version. A new field needs a default, so that older files stay readable. A change that readers must know about
needs a new `SCHEMA_VERSION` and a line in `SCHEMA_GAPS`.

Events are never modified after creation. They are neither frozen nor keyword-only, because that makes creation several
times cheaper, and a simulation creates millions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 2
SCHEMA_GAPS = {1: "it does not record slot time by cause"}
"""What files of older schema versions lack."""


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
    max_staleness: int | None = None  # the schedule's bound; None: no bound, or not recorded


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
    cached: int  # answer tokens that the attempt starts from
    slot: int  # the lowest free slot; a timeline draws the attempt in this row
    version: int


@dataclass(slots=True)
class AttemptVerified(Event):
    """A replay has checked the cached tokens and kept the first `accepted` of them."""

    sample: int
    attempt: int
    cached: int
    accepted: int


@dataclass(slots=True)
class AttemptEnded(Event):
    sample: int
    attempt: int
    outcome: str  # stop | length | interrupted | failed
    num_tokens: int  # answer tokens that the sample now has
    slot: int
    error: str = ""


@dataclass(slots=True)
class SampleScored(Event):
    sample: int
    attempt: int
    reward: float


@dataclass(slots=True)
class FunctionsScored(Event):
    """What each of several reward functions gave an answer, before weights. Its SampleScored follows."""

    sample: int
    attempt: int
    rewards: dict[str, float]  # by function; without those that returned None


@dataclass(slots=True)
class RewardFailed(Event):
    """An answer could not be scored. Its SampleScored follows, with the reward 0 that it gets instead."""

    sample: int
    attempt: int
    error: str  # the reward function, and how it failed


@dataclass(slots=True)
class RewardCalled(Event):
    """A call to a reward worker has ended, and the controller received its result at `t`."""

    worker: int
    seconds: float
    lag_s: float  # from the end of the call to `t`
    num_samples: int


@dataclass(slots=True)
class ScoresAwaited(Event):
    """The controller had nothing to do but wait for scores, for `seconds` until `t`."""

    seconds: float
    num_paused: int = 0  # samples that were paused in their slots during the wait


@dataclass(slots=True)
class ToolsCalled(Event):
    """A turn ended with tool calls: the sample left its slot, and its environment works."""

    sample: int
    attempt: int
    turn: int  # turns with tools before this one
    num_calls: int


@dataclass(slots=True)
class ToolsReturned(Event):
    """The environment is done with a turn, or the sample no longer waits for it."""

    sample: int
    attempt: int
    turn: int
    seconds: float  # since the turn was submitted
    outcome: str  # fed | complete | lost | dropped
    num_fed: int = 0  # tokens
    num_failed: int = 0  # calls with an error
    num_repeated: int = 0  # calls of kept turns that were made again


@dataclass(slots=True)
class SampleRequeued(Event):
    """How a sample will continue: resume, replay, restart, give-up; lost: from the start, without its environment."""

    sample: int
    decision: str
    discarded: int  # answer tokens that are thrown away


@dataclass(slots=True)
class BatchTaken(Event):
    """A harvest. The lists have one entry per sample of the batch, in training order."""

    update: int
    version: int
    samples: list[int]
    lengths: list[int]
    rewards: list[float]
    staleness: list[int]  # of the sample's oldest token
    staleness_token_sum: list[int]  # summed over the sample's tokens
    truncated: int
    num_interrupted: int
    slot_s: float  # slot-seconds that decoded the batch's tokens
    num_paused: int = 0  # samples that stay paused in their slots until the new weights are published
    # The engine's work since the last harvest, without evaluations; None: the engine did not report it.
    busy_s: float | None = None  # slot-seconds in which the engine computed
    prefill_s: float = 0.0  # part of `busy_s` spent on prefill
    prompt_tokens: int = 0  # prompt tokens prefilled
    recomputed_tokens: int = 0  # answer tokens prefilled again


@dataclass(slots=True)
class UpdateDone(Event):
    update: int
    version: int  # the version that the update created
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
    sampled_accuracy_se: float | None = None  # standard error over prompts; None with a single prompt
    pass_at_k: float | None = None  # share of prompts with at least one right answer among the sampled ones
    truncation_rate: float | None = None
    sampled_reward: float | None = None  # differs from the accuracy where wrong answers get partial reward


@dataclass(slots=True)
class CheckpointBegun(Event):
    """Everything was copied for a checkpoint that is written in the background; the run waited for that."""

    version: int
    seconds: float


@dataclass(slots=True)
class CheckpointSaved(Event):
    version: int
    seq: int  # last sequence number of the ledger
    seconds: float  # that the run waited; 0 if the checkpoint was written in the background
    background_s: float = 0.0  # from its begin until it had its name, if it was written in the background


@dataclass(slots=True)
class LearnerRestarted(Event):
    """A rank of the learner was lost, and all ranks were started again."""

    number: int  # of the restart, from 1
    reason: str
    point: str  # where they started from
    updates_repeated: int
    seconds: float


@dataclass(slots=True)
class MachineMeasured(Event):
    """Load and memory of the trainer's machine at an update; fields that the machine does not tell are None."""

    cores_used: float  # CPU seconds of the trainer's process per second, since the last measurement
    load: float | None = None  # processes that run or wait for a core, mean over the last minute
    cores: int | None = None
    process_bytes: int | None = None  # resident memory of the trainer's process
    available_bytes: int | None = None  # memory that the machine can still give
    gpu_bytes: int | None = None  # memory that the trainer's process holds on its GPU
    disk_free_bytes: int | None = None  # on the disk of the run directory


@dataclass(slots=True)
class RunResumed(Event):
    version: int
    lineage: int  # how many times the run was resumed
    gap: str = ""  # why the events before this one are incomplete, if they are; then the ledger's counts follow
    updates: int = 0
    samples_trained: int = 0
    waiting: list[int] = field(default_factory=list)  # samples that are loaded and not trained


@dataclass(slots=True)
class RunEnded(Event):
    reason: str  # complete | stopped


KINDS: dict[str, type[Event]] = {
    name: cls
    for name, cls in list(globals().items())
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}
"""Event classes by `kind`."""

Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """An `emit` that drops every event."""
