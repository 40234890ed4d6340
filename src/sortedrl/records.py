"""The nouns that every part shares: prompts, samples, their segments, cohorts, groups and update batches.

Standard library only, so that buffer, schedule and a user's own tools can hold them without torch. A sample lives
through states and is mutable, and so are cohorts and groups, but only `buffer.py` changes them. What a simulation makes
by the million can be made without keywords and is not frozen: Python makes such records several times as fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SAME_REWARD = 1e-6  # rewards that differ by less are alike


class State(StrEnum):
    """Where a sample is on its way into an update."""

    PENDING = "pending"  # waits for a slot; may hold tokens of an interrupted attempt
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"  # the answer is complete, its reward is not known yet
    SCORED = "scored"  # ready to be trained, once its siblings are
    TRAINED = "trained"  # consumed; never leaves this state within an epoch


_SCORED = State.SCORED  # asked for by the thousand, and Python 3.11 finds members slowly


class Mode(StrEnum):
    """How an engine takes up a sample: from nothing, from its cached tokens, or by checking them first."""

    FRESH = "fresh"
    RESUME = "resume"
    REPLAY = "replay"


class FinishReason(StrEnum):
    STOP = "stop"  # the model ended the answer
    LENGTH = "length"  # the token budget ended it
    FAILED = "failed"  # the engine failed on it too often; it is scored as it is


@dataclass(slots=True)
class Prompt:
    """One task instance, which nobody changes. `content` is what reward functions see: text, or chat messages."""

    id: str
    tokens: tuple[int, ...]
    content: str | list[dict[str, str]]
    columns: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Segment:
    """Consecutive answer tokens that one version of the weights sampled, or last verified by replay; never empty.

    Masked ones were sampled by nobody, but fed into the answer between two turns, as a tool's output is: they are
    context, with log-prob 0, and nothing is learned from them. Their version is that in force when they were fed or
    last replayed.
    """

    version: int
    tokens: list[int]
    logprobs: list[float]
    slot_s: float = 0.0  # slot-seconds spent on decoding these tokens
    is_masked: bool = False

    def extend(self, more: Segment) -> None:
        """Take in what the same version wrote next."""
        self.tokens += more.tokens  # a simulation's stand-in for a list can do this too
        self.logprobs += more.logprobs
        self.slot_s += more.slot_s

    def first(self, keep: int) -> Segment:
        """A segment of its own with the first tokens only."""
        slot_s = self.slot_s * (keep / len(self.tokens))
        return Segment(self.version, self.tokens[:keep], self.logprobs[:keep], slot_s, self.is_masked)

    def parted(self, masked: Sequence[range]) -> list[Segment]:
        """The same tokens, with those at these places, counted from its first, masked; slot time goes to the others."""
        if not masked:
            return [self]
        parts: list[Segment] = []
        end, num_sampled = 0, len(self.tokens) - sum(map(len, masked))
        for fed in (*masked, range(len(self.tokens), len(self.tokens))):
            if fed.start > end:
                slot_s = self.slot_s * (fed.start - end) / num_sampled
                parts.append(
                    Segment(self.version, self.tokens[end : fed.start], self.logprobs[end : fed.start], slot_s)
                )
            if fed:
                parts.append(Segment(self.version, self.tokens[fed.start : fed.stop], [0.0] * len(fed), 0.0, True))
            end = fed.stop
        return parts


@dataclass(slots=True)
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
    held: int | None = None  # tokens of its segments, as the buffer counted them; None: nobody has

    @property
    def group(self) -> tuple[int, str]:
        """What siblings have in common."""
        return (self.epoch, self.prompt.id)

    # Where siblings train apart, a sample is all that a Group is otherwise.

    @property
    def samples(self) -> list[Sample]:
        return [self]

    @property
    def is_ready(self) -> bool:
        return self.state is _SCORED

    @property
    def is_flat(self) -> bool:
        return False  # it takes two to differ

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return sum(len(segment.tokens) for segment in self.segments) if self.held is None else self.held

    @property
    def tokens(self) -> list[int]:
        tokens = self.segments[0].tokens[:] if self.segments else []
        for segment in self.segments[1:]:
            tokens += segment.tokens
        return tokens

    @property
    def logprobs(self) -> list[float]:
        return [logprob for segment in self.segments for logprob in segment.logprobs]

    @property
    def versions(self) -> list[int]:
        return [segment.version for segment in self.segments for _ in segment.tokens]

    @property
    def is_sampled(self) -> list[bool]:
        """Of each token, whether the policy wrote it: not so those that are masked."""
        return [not segment.is_masked for segment in self.segments for _ in segment.tokens]

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments if not segment.is_masked)

    def masked(self, start: int, stop: int) -> list[range]:
        """Where masked tokens stand between two positions, counted from the first of these."""
        found: list[range] = []
        position = 0
        for segment in self.segments:
            end = position + len(segment.tokens)
            if segment.is_masked and position < stop and end > start:
                found.append(range(max(position, start) - start, min(end, stop) - start))
            position = end
        return found

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token, or None before there is one."""
        return self.segments[0].version if self.segments else None

    def staleness(self, version: int) -> int:
        """By how many versions the oldest token lags behind `version`."""
        return version - self.segments[0].version if self.segments else 0

    def clear(self) -> int:
        """Throw the answer away; returns how many tokens it had."""
        discarded, self.held = self.num_tokens, 0
        self.segments.clear()
        return discarded

    def cut(self, start: int, again: int) -> float:
        """Drop the tokens from `start` on; returns the slot time of the first `again` of them."""
        slot_s, position = 0.0, 0
        kept: list[Segment] = []
        for segment in self.segments:
            length = len(segment.tokens)
            keep = min(max(start - position, 0), length)
            slot_s += segment.slot_s * (min(max(start + again - position, 0), length) - keep) / length
            if keep:
                kept.append(segment.first(keep))
            position += length
        self.segments = kept
        return slot_s


@dataclass(slots=True, kw_only=True)
class Cohort:
    """Samples loaded together, and how many of them are still to be trained."""

    id: int
    loaded_update: int  # updates started before it was loaded
    num_samples: int
    num_left: int


@dataclass(slots=True)
class Group:
    """Siblings that must be trained together."""

    samples: list[Sample] = field(default_factory=list)
    num_scored: int = 0

    @property
    def id(self) -> int:
        """Of its first sample, and so are seed and cohort."""
        return self.samples[0].id

    @property
    def seed(self) -> int:
        return self.samples[0].seed

    @property
    def cohort(self) -> int:
        return self.samples[0].cohort

    @property
    def is_ready(self) -> bool:
        return self.num_scored == len(self.samples)

    @property
    def known_length(self) -> int:
        return max(sample.known_length for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Of its longest answer."""
        return max(sample.num_tokens for sample in self.samples)

    def staleness(self, version: int) -> int:
        """Of its oldest answer."""
        return max(sample.staleness(version) for sample in self.samples)

    @property
    def is_flat(self) -> bool:
        """Whether it is siblings that were all rewarded alike."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return len(rewards) > 1 and is_flat(rewards)


Unit = Sample | Group
"""What is trained as a whole: siblings, where the algorithm compares them, or else each sample by itself."""


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


def sample_from_dict(record: dict[str, Any]) -> Sample:
    """The inverse of `asdict` on a sample."""
    fields = dict(record)
    prompt = dict(fields.pop("prompt"))
    prompt["tokens"] = tuple(prompt["tokens"])
    segments = [Segment(**segment) for segment in fields.pop("segments")]
    reason = fields.pop("finish_reason")
    return Sample(
        **{
            **fields,
            "prompt": Prompt(**prompt),
            "segments": segments,
            "state": State(fields["state"]),
            "mode": Mode(fields["mode"]),
            "finish_reason": None if reason is None else FinishReason(reason),
        }
    )
