"""The rollout buffer: the ledger of every sample that is loaded and not yet trained.

The controller tells it what happened; it alone changes samples, and refuses what the table of transitions in
docs/scheduling.md does not allow. Pure: no clock, no I/O, no randomness, no torch.

What it keeps true: a sample is in exactly one state; a trained one is gone for good; an event of an attempt that is
over changes nothing; tokens never exceed the sample's budget; tokens, log-probs and versions have one length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sortedrl.lengths import LengthEstimator
from sortedrl.records import FinishReason, Mode, Prompt, Sample, Segment, State, is_flat


@dataclass(slots=True, kw_only=True)
class Cohort:
    """Samples loaded together, and how many of them are still to be trained."""

    id: int
    loaded_update: int  # updates started before it was loaded
    num_samples: int
    num_left: int


@dataclass(slots=True, kw_only=True)
class Group:
    """Siblings that must be trained together; a group of one where the algorithm needs no siblings."""

    samples: list[Sample] = field(default_factory=list)
    num_scored: int = 0

    @property
    def is_ready(self) -> bool:
        return self.num_scored == len(self.samples)

    @property
    def known_length(self) -> int:
        return max(sample.known_length for sample in self.samples)

    @property
    def is_flat(self) -> bool:
        """Whether it is siblings that were all rewarded alike."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return len(rewards) > 1 and is_flat(rewards)


class Buffer:
    """`grouped`: whether the siblings of a prompt are trained together (GRPO), or each sample by itself."""

    def __init__(self, *, grouped: bool = False) -> None:
        self.grouped = grouped
        self.version = 0
        self.num_updates = 0  # batches taken
        self.num_trained = 0
        self.num_loaded = 0
        self.num_started = 0  # attempts started since the last batch was taken
        self.samples: dict[int, Sample] = {}  # in load order
        self.cohorts: dict[int, Cohort] = {}  # those with samples left, oldest first
        self.in_state: dict[State, dict[int, Sample]] = {state: {} for state in State if state != State.TRAINED}
        self.unstarted: dict[int, Sample] = {}  # the pending ones that never ran, in load order
        self.waiting: dict[int, Sample] = {}  # the pending ones that have run before, with or without tokens
        self.groups: dict[object, Group] = {}
        self.ready: dict[object, Group] = {}  # those whose samples could all be trained now
        self.num_ready = 0  # samples in them
        self.attempt_version: dict[int, int] = {}  # of the weights with which a running attempt began
        self.lengths = LengthEstimator()
        self.next_cohort = 0

    # ---- what the schedule asks -------------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        return len(self.in_state[State.PENDING])

    @property
    def num_running(self) -> int:
        return len(self.in_state[State.RUNNING])

    @property
    def num_in_work(self) -> int:
        """Samples that are on their way to being ready."""
        return self.num_pending + self.num_running + len(self.in_state[State.FINISHED])

    def num_counted(self, flat_extra: int) -> int:
        """Ready samples that make an update: up to `flat_extra` of groups without signal come on top."""
        if not flat_extra:
            return self.num_ready
        num_flat = sum(len(group.samples) for group in self.ready.values() if group.is_flat)
        return self.num_ready - min(num_flat, flat_extra)

    @property
    def num_ready_soon(self) -> int:
        """Samples whose groups lack nothing but scores."""
        if not self.grouped:
            return len(self.in_state[State.FINISHED])
        groups = {self._group_key(sample): self.group_of(sample) for sample in self.in_state[State.FINISHED].values()}
        complete = (State.FINISHED, State.SCORED)
        return sum(len(group.samples) for group in groups.values() if all(s.state in complete for s in group.samples))

    def group_of(self, sample: Sample) -> Group:
        return self.groups[self._group_key(sample)]

    def oldest_version(self, sample: Sample) -> int | None:
        """Version of the oldest token that the sample holds, or that its running attempt may have written."""
        if sample.state != State.RUNNING:
            return sample.oldest_version
        begun = self.attempt_version[sample.id]
        held = sample.oldest_version if sample.mode == Mode.RESUME else None
        return begun if held is None else min(begun, held)

    def staleness(self, sample: Sample, version: int) -> int:
        oldest = self.oldest_version(sample)
        return 0 if oldest is None else version - oldest

    def expected_length(self, sample: Sample) -> float:
        """A guess from finished siblings and earlier epochs, never below what the sample is known to reach."""
        reached, finished = sample.known_length, self._finished_siblings(sample)
        return self.lengths.expected(sample.prompt.id, reached=reached, finished=finished)

    def counts(self) -> Counter[str]:
        """Samples by state, the trained ones included."""
        counts = Counter({state.value: len(held) for state, held in self.in_state.items()})
        counts[State.TRAINED.value] = self.num_trained
        return counts

    # ---- what the controller tells ----------------------------------------------------------------------------------

    def load(self, samples: Sequence[Sample]) -> Cohort:
        """Add a cohort of pending samples."""
        cohort = Cohort(
            id=self.next_cohort, loaded_update=self.num_updates, num_samples=len(samples), num_left=len(samples)
        )
        assert samples, "a cohort needs samples"
        for sample in samples:
            assert sample.id not in self.samples, f"sample {sample.id} is loaded already"
            assert sample.cohort == cohort.id, f"sample {sample.id} belongs to cohort {sample.cohort}, not {cohort.id}"
            self.samples[sample.id] = sample
            self.in_state[State.PENDING][sample.id] = sample
            self.unstarted[sample.id] = sample
            self.groups.setdefault(self._group_key(sample), Group()).samples.append(sample)
        self.cohorts[cohort.id] = cohort
        self.next_cohort += 1
        self.num_loaded += len(samples)
        return cohort

    def start(self, sample: Sample) -> None:
        """PENDING -> RUNNING, as a new attempt."""
        self._move(sample, State.RUNNING, State.PENDING)
        if sample.attempt == 0:
            self.lengths.start(sample.id, sample.prompt.id, self._finished_siblings(sample))
        (self.waiting if sample.attempt else self.unstarted).pop(sample.id)
        sample.attempt += 1
        self.attempt_version[sample.id] = self.version
        self.num_started += 1

    def find(self, sample_id: int, attempt: int) -> Sample | None:
        """The running sample that an event speaks of, or None if that attempt is over."""
        sample = self.in_state[State.RUNNING].get(sample_id)
        return sample if sample is not None and sample.attempt == attempt else None

    def append(
        self,
        sample: Sample,
        *,
        start: int,
        tokens: list[int],
        logprobs: list[float],
        version: int,
        slot_s: float,
        verified: int = 0,
    ) -> int:
        """Put tokens at position `start`, in place of what is there; returns how many tokens that threw away.

        The first `verified` of them repeat what is there: they were decoded once, and keep the slot time it took.
        """
        assert sample.state == State.RUNNING, f"sample {sample.id} gets tokens while {sample.state}"
        held, count = sample.num_tokens, len(tokens)
        end = start + count
        assert count == len(logprobs), f"sample {sample.id}: {count} tokens, {len(logprobs)} log-probs"
        assert start + verified <= held, f"sample {sample.id}: tokens at {start + verified}, but it holds {held}"
        assert verified <= count, f"sample {sample.id}: {verified} of {count} tokens verified"
        assert end <= sample.budget, f"sample {sample.id} exceeds its budget of {sample.budget}"
        if start < held:
            slot_s += _cut(sample, start, verified)
        last = sample.segments[-1] if sample.segments else None
        assert last is None or last.version <= version, f"sample {sample.id}: version {version} after {last.version}"
        if last is not None and last.version == version:
            last.tokens.extend(tokens)
            last.logprobs.extend(logprobs)
            last.slot_s += slot_s
        elif count:
            sample.segments.append(Segment(version=version, tokens=tokens, logprobs=logprobs, slot_s=slot_s))
        sample.mode = Mode.RESUME
        if end > sample.known_length:
            sample.known_length = end
        return held - start - verified

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """RUNNING -> FINISHED."""
        self._move(sample, State.FINISHED, State.RUNNING)
        sample.finish_reason = reason

    def interrupt(self, sample: Sample) -> None:
        """RUNNING -> PENDING; tokens are kept until `requeue` decides."""
        self._move(sample, State.PENDING, State.RUNNING)
        sample.num_interrupts += 1

    def fail(self, sample: Sample) -> None:
        """RUNNING -> PENDING after a failed attempt; tokens are kept."""
        self._move(sample, State.PENDING, State.RUNNING)
        sample.num_failures += 1

    def give_up(self, sample: Sample) -> int:
        """RUNNING -> FINISHED with an empty answer, after too many failures; returns discarded tokens."""
        self._move(sample, State.FINISHED, State.RUNNING)
        sample.num_failures += 1
        sample.finish_reason = FinishReason.FAILED
        discarded = sample.num_tokens
        sample.segments.clear()
        return discarded

    def score(self, sample_id: int, attempt: int, reward: float) -> Sample | None:
        """FINISHED -> SCORED; None if the answer that was scored is gone."""
        sample = self.in_state[State.FINISHED].get(sample_id)
        if sample is None or sample.attempt != attempt:
            return None
        self._move(sample, State.SCORED, State.FINISHED)
        sample.reward = reward
        group = self.group_of(sample)
        group.num_scored += 1
        if group.is_ready:
            self.ready[self._group_key(sample)] = group
            self.num_ready += len(group.samples)
        return sample

    def requeue(self, sample: Sample, mode: Mode) -> int:
        """PENDING, FINISHED or SCORED -> PENDING, to be taken up again as `mode`; returns discarded tokens."""
        if sample.state == State.SCORED:
            self._unready(sample)
            self.group_of(sample).num_scored -= 1
        if sample.state != State.PENDING:
            self._move(sample, State.PENDING, State.FINISHED, State.SCORED)
        sample.mode, sample.reward, sample.finish_reason = mode, None, None
        if mode != Mode.FRESH:
            return 0
        discarded = sample.num_tokens
        sample.segments.clear()
        sample.num_restarts += 1
        return discarded

    def take(self, samples: Iterable[Sample]) -> list[Sample]:
        """SCORED -> TRAINED: the samples leave the buffer for good, as one update batch."""
        batch = list(samples)
        taken = {sample.id for sample in batch}
        for sample in batch:
            self._move(sample, State.TRAINED, State.SCORED)
            self._unready(sample)
            key = self._group_key(sample)
            group = self.groups.pop(key, None)
            assert group is None or all(s.id in taken for s in group.samples), f"half of group {key} is trained"
            sample.trained_version = self.version
            del self.samples[sample.id]
            self.lengths.learn(sample.id, sample.prompt.id, sample.num_tokens)
            cohort = self.cohorts[sample.cohort]
            cohort.num_left -= 1
            if cohort.num_left == 0:
                del self.cohorts[cohort.id]
        self.num_trained += len(batch)
        self.num_updates += 1
        self.num_started = 0
        return batch

    def publish(self, version: int) -> None:
        """Weights of this version are in force."""
        assert version > self.version, f"version {version} is published after {self.version}"
        self.version = version

    # ---- durable form -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain data; running samples count as interrupted."""
        return {
            "grouped": self.grouped,
            "version": self.version,
            "num_updates": self.num_updates,
            "num_trained": self.num_trained,
            "num_loaded": self.num_loaded,
            "next_cohort": self.next_cohort,
            "cohorts": [asdict(cohort) for cohort in self.cohorts.values()],
            "trained_lengths": self.lengths.state_dict(),
            "samples": [asdict(sample) for sample in self.samples.values()],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Buffer:
        buffer = cls(grouped=state["grouped"])
        buffer.version = state["version"]
        buffer.num_updates = state["num_updates"]
        buffer.num_trained = state["num_trained"]
        buffer.num_loaded = state["num_loaded"]
        buffer.next_cohort = state["next_cohort"]
        buffer.cohorts = {cohort["id"]: Cohort(**cohort) for cohort in state["cohorts"]}
        buffer.lengths = LengthEstimator.from_state_dict(state["trained_lengths"])
        for record in state["samples"]:
            sample = _sample_from(record)
            if sample.state == State.RUNNING:
                sample.state = State.PENDING
            buffer.samples[sample.id] = sample
            buffer.in_state[sample.state][sample.id] = sample
            if sample.state == State.PENDING:
                (buffer.waiting if sample.attempt else buffer.unstarted)[sample.id] = sample
            group = buffer.groups.setdefault(buffer._group_key(sample), Group())
            group.samples.append(sample)
            group.num_scored += sample.state == State.SCORED
        buffer.ready = {key: group for key, group in buffer.groups.items() if group.is_ready}
        buffer.num_ready = sum(len(group.samples) for group in buffer.ready.values())
        return buffer

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _group_key(self, sample: Sample) -> object:
        return sample.group if self.grouped else sample.id

    def _finished_siblings(self, sample: Sample) -> list[int]:
        """Lengths of the answers in its group that are complete."""
        if not self.grouped:
            return []
        complete = (State.FINISHED, State.SCORED)
        return [s.num_tokens for s in self.group_of(sample).samples if s.state in complete and s is not sample]

    def _unready(self, sample: Sample) -> None:
        group = self.ready.pop(self._group_key(sample), None)
        self.num_ready -= len(group.samples) if group is not None else 0

    def _move(self, sample: Sample, to: State, *allowed: State) -> None:
        assert sample.state in allowed, f"sample {sample.id} cannot go from {sample.state} to {to}"
        assert sample.id in self.samples, f"sample {sample.id} is not in the buffer"
        del self.in_state[sample.state][sample.id]
        if sample.state == State.RUNNING:
            del self.attempt_version[sample.id]
        sample.state = to
        if to != State.TRAINED:
            self.in_state[to][sample.id] = sample
        if to == State.PENDING:
            self.waiting[sample.id] = sample


def _cut(sample: Sample, start: int, verified: int) -> float:
    """Cut the sample at `start`; returns the slot time of the first `verified` tokens behind the cut."""
    kept_slot_s, position = 0.0, 0
    segments: list[Segment] = []
    for segment in sample.segments:
        length = len(segment.tokens)
        keep = min(max(start - position, 0), length)
        again = min(max(start + verified - position, 0), length) - keep
        kept_slot_s += segment.slot_s * again / length
        if keep:
            segment.slot_s *= keep / length
            del segment.tokens[keep:], segment.logprobs[keep:]
            segments.append(segment)
        position += length
    sample.segments = segments
    return kept_slot_s


def _sample_from(record: dict[str, Any]) -> Sample:
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
