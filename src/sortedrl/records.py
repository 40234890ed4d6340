"""The nouns that every part shares: prompts, samples, their segments, and update batches.

Standard library only, so that buffer, schedule and a user's own tools can hold them without torch. A sample lives
through states and is mutable, but only `buffer.py` changes it; everything else is frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SAME_REWARD = 1e-6  # rewards that differ by less are alike


class State(StrEnum):
    """Where a sample is on its way into an update."""

    PENDING = "pending"  # waits for a slot; may hold tokens of an interrupted attempt
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"  # the answer is complete, its reward is not known yet
    SCORED = "scored"  # ready to be trained, once its siblings are
    TRAINED = "trained"  # consumed; never leaves this state within an epoch


class Mode(StrEnum):
    """How an engine takes up a sample: from nothing, from its cached tokens, or by checking them first."""

    FRESH = "fresh"
    RESUME = "resume"
    REPLAY = "replay"


class FinishReason(StrEnum):
    STOP = "stop"  # the model ended the answer
    LENGTH = "length"  # the token budget ended it
    FAILED = "failed"  # the engine failed on it too often; it is scored as it is


@dataclass(slots=True, kw_only=True, frozen=True)
class Prompt:
    """One task instance. `content` is what reward functions see: text, or a list of chat messages."""

    id: str
    tokens: tuple[int, ...]
    content: str | list[dict[str, str]]
    columns: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Segment:
    """Consecutive answer tokens that one version of the weights sampled, or last verified by replay; never empty."""

    version: int
    tokens: list[int]
    logprobs: list[float]
    slot_s: float = 0.0  # slot-seconds spent on decoding these tokens


@dataclass(slots=True, kw_only=True)
class Sample:
    """One answer to a prompt, from load to training."""

    id: int
    prompt: Prompt
    index: int  # among its siblings
    epoch: int
    cohort: int
    seed: int
    budget: int  # answer tokens in total, however often it is interrupted
    state: State = State.PENDING
    attempt: int = 0  # counts submissions; an event of an older attempt is ignored
    mode: Mode = Mode.FRESH  # how it is submitted next
    segments: list[Segment] = field(default_factory=list)  # versions only grow from one to the next
    finish_reason: FinishReason | None = None
    reward: float | None = None
    known_length: int = 0  # the longest answer seen in any attempt, complete or not
    num_interrupts: int = 0
    num_restarts: int = 0
    num_failures: int = 0
    trained_version: int | None = None  # the version in force when it was trained

    @property
    def group(self) -> tuple[int, str]:
        """What siblings have in common."""
        return (self.epoch, self.prompt.id)

    @property
    def num_tokens(self) -> int:
        count = 0
        for segment in self.segments:  # asked so often that a generator would show in a simulation's time
            count += len(segment.tokens)
        return count

    @property
    def tokens(self) -> list[int]:
        tokens = self.segments[0].tokens[:] if self.segments else []
        for segment in self.segments[1:]:
            tokens.extend(segment.tokens)  # a simulation's stand-in for a list can do this too
        return tokens

    @property
    def logprobs(self) -> list[float]:
        return [logprob for segment in self.segments for logprob in segment.logprobs]

    @property
    def versions(self) -> list[int]:
        return [segment.version for segment in self.segments for _ in segment.tokens]

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token, or None before there is one."""
        return self.segments[0].version if self.segments else None

    def staleness(self, version: int) -> int:
        """By how many versions the oldest token lags behind `version`."""
        oldest = self.oldest_version
        return 0 if oldest is None else version - oldest


@dataclass(slots=True, kw_only=True, frozen=True)
class Batch:
    """What one update trains on: samples in the order in which mini-batches are cut."""

    update: int  # counts updates from 0
    version: int  # in force when the batch was taken
    samples: tuple[Sample, ...]
    progress: float = 0.0  # share of the run's samples trained before this batch, for schedules


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether rewards do not differ, so that comparing them teaches nothing."""
    return max(rewards) - min(rewards) < SAME_REWARD


def sample_seed(run_seed: int, epoch: int, prompt_id: str, index: int) -> int:
    """A 63-bit seed that depends on the sample's identity alone, never on when or where it runs."""
    text = f"{run_seed}/{epoch}/{index}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def restart_seed(seed: int, num_restarts: int) -> int:
    """The seed of a sample that draws fresh noise at its n-th restart."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{num_restarts}".encode(), digest_size=8).digest(), "little") >> 1
