"""The records that all parts share: prompts, samples and their segments, cohorts, groups and update batches.

Standard library only, so that buffer, schedule and users' own tools need no torch. Samples, cohorts and groups change
over time, but only `buffer.py` changes them. Records that a simulation makes by the million are not frozen and take
positional arguments, because Python creates such records several times as fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SAME_REWARD = 1e-6  # rewards that differ by less count as equal


class State(StrEnum):
    """Where a sample is between loading and training."""

    PENDING = "pending"  # waits for a slot; may hold tokens of an interrupted attempt
    RUNNING = "running"  # holds a slot
    CALLING = "calling"  # a turn ended, and its environment works on the tool calls; holds no slot
    FINISHED = "finished"  # the answer is complete, its reward is not known yet
    SCORED = "scored"  # can be trained, once its siblings can
    TRAINED = "trained"  # final


_SCORED = State.SCORED  # a module name, because Python 3.11 looks up enum members slowly


class Mode(StrEnum):
    """How an engine starts an attempt: from the prompt, from the cached tokens, or by verifying the cached tokens."""

    FRESH = "fresh"
    RESUME = "resume"
    REPLAY = "replay"


class FinishReason(StrEnum):
    STOP = "stop"  # the model ended the answer
    LENGTH = "length"  # the token budget ended it
    FAILED = "failed"  # the engine failed on it too often


@dataclass(slots=True)
class Prompt:
    """One prompt, never changed. `content` is what reward functions get: text or chat messages."""

    id: str
    tokens: tuple[int, ...]
    content: str | list[dict[str, str]]
    columns: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Segment:
    """A run of answer tokens that one version of the weights sampled, or last verified by replay; never empty.

    A masked segment holds tokens that were injected between two turns, such as a tool's output. They are context with
    log-prob 0, and the loss ignores them. Their version is the one at which they were injected or last replayed.
    """

    version: int
    tokens: list[int]
    logprobs: list[float]
    slot_s: float = 0.0  # slot-seconds spent decoding these tokens
    is_masked: bool = False

    def extend(self, more: Segment) -> None:
        """Append tokens that the same version wrote next."""
        self.tokens += more.tokens  # += also works on the simulator's compact token lists
        self.logprobs += more.logprobs
        self.slot_s += more.slot_s

    def first(self, keep: int) -> Segment:
        """A new segment with the first `keep` tokens."""
        slot_s = self.slot_s * (keep / len(self.tokens))
        return Segment(self.version, self.tokens[:keep], self.logprobs[:keep], slot_s, self.is_masked)

    def parted(self, masked: Sequence[range]) -> list[Segment]:
        """Split the segment so that the tokens at the `masked` positions are masked; the others share the slot time."""
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


IGNORED = "ignored"  # the error of a call whose sample had started over when it returned


@dataclass(slots=True, kw_only=True, frozen=True)
class CallRecord:
    """A tool call and what is known of its result, for the ledger."""

    tool: str
    arguments: str  # JSON
    digest: str  # of the text that was fed
    num_chars: int  # of that text
    error: str  # empty, the kind of failure, or IGNORED
    seconds: float
    is_repeated: bool = False  # made again to bring a state back; nothing was fed
    state: str | None = None  # the environment's snapshot after the turn as JSON, with its last call


@dataclass(slots=True)
class Sample:
    """One answer to a prompt, from loading to training."""

    id: int
    prompt: Prompt
    index: int  # among its siblings
    epoch: int
    cohort: int
    seed: int
    budget: int  # most answer tokens in total, over all attempts
    state: State = State.PENDING
    attempt: int = 0  # counts submissions; events of older attempts are ignored
    mode: Mode = Mode.FRESH  # of the next attempt
    segments: list[Segment] = field(default_factory=list)  # versions never decrease
    finish_reason: FinishReason | None = None  # kept, like `reward`, while a complete answer is verified
    reward: float | None = None
    reward_attempt: int = 0  # the attempt whose answer got the reward; verifying the answer does not change it
    known_length: int = 0  # most tokens in any attempt so far
    num_interrupts: int = 0
    num_restarts: int = 0
    num_failures: int = 0
    trained_version: int | None = None  # current version when it was trained
    held: int | None = None  # number of tokens in `segments`, if the buffer has counted them
    tool_s: float = 0.0  # time in tools, the most between two starts over
    tool_s_now: float = 0.0  # the same since it started over last

    @property
    def group(self) -> tuple[int, str]:
        """Key of the group: siblings have the same."""
        return (self.epoch, self.prompt.id)

    # The interface of `Group`, for samples that are trained alone.

    @property
    def samples(self) -> list[Sample]:
        return [self]

    @property
    def is_ready(self) -> bool:
        return self.state is _SCORED

    @property
    def is_flat(self) -> bool:
        return False  # a single reward has nothing to differ from

    @property
    def num_tokens(self) -> int:
        """Number of answer tokens so far."""
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
        """For each token, whether the policy sampled it. Injected tokens are masked."""
        return [not segment.is_masked for segment in self.segments for _ in segment.tokens]

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments if not segment.is_masked)

    @property
    def num_turns(self) -> int:
        """Number of turns that were fed a result: the runs of masked tokens."""
        flags = [segment.is_masked for segment in self.segments]
        return sum(is_masked and not (place and flags[place - 1]) for place, is_masked in enumerate(flags))

    def masked(self, start: int, stop: int) -> list[range]:
        """Ranges of masked tokens between two positions, relative to `start`."""
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
        """Version of the oldest token; None without tokens."""
        return self.segments[0].version if self.segments else None

    def staleness(self, version: int) -> int:
        """Number of versions between the oldest token and `version`."""
        return version - self.segments[0].version if self.segments else 0

    def clear(self) -> int:
        """Discard the answer; returns its number of tokens."""
        discarded, self.held = self.num_tokens, 0
        self.segments.clear()
        return discarded

    def cut(self, start: int, again: int) -> float:
        """Drop the tokens from `start` on; returns the slot time of the first `again` dropped tokens."""
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
    """Samples that were loaded together."""

    id: int
    loaded_update: int  # updates started before it was loaded
    num_samples: int
    num_left: int  # not trained yet


@dataclass(slots=True)
class Group:
    """Siblings that must be trained together. Its id, seed and cohort are the first sample's."""

    samples: list[Sample] = field(default_factory=list)
    num_scored: int = 0

    @property
    def id(self) -> int:
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
        """Number of tokens of the longest answer."""
        return max(sample.num_tokens for sample in self.samples)

    def staleness(self, version: int) -> int:
        """Staleness of the oldest answer."""
        return max(sample.staleness(version) for sample in self.samples)

    @property
    def is_flat(self) -> bool:
        """Whether all answers got the same reward, so that comparing them teaches nothing."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return len(rewards) > 1 and is_flat(rewards)


Unit = Sample | Group
"""What is trained as a whole: a group of siblings if the algorithm compares them, else a single sample."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Batch:
    """The samples of one update, in the order in which mini-batches are cut."""

    update: int  # counts updates from 0
    version: int  # current when the batch was taken
    samples: tuple[Sample, ...]
    progress: float = 0.0  # share of the run's samples trained before this batch, for schedules


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal."""
    return max(rewards) - min(rewards) < SAME_REWARD


def sample_seed(run_seed: int, epoch: int, prompt_id: str, index: int) -> int:
    """A 63-bit seed that depends only on the sample's identity, never on when or where it runs."""
    text = f"{run_seed}/{epoch}/{index}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def restart_seed(seed: int, num_restarts: int) -> int:
    """The seed of a sample's n-th restart, if restarts draw fresh noise."""
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
