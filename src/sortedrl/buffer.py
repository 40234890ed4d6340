"""The rollout buffer: every sample that is loaded and not yet trained, with its state and its tokens.

The controller reports what happened. Only the buffer changes samples, and it refuses any change that the table of
transitions in docs/reference/guarantees.md does not allow. It is pure: no clock, no I/O, no randomness, no torch.

Guarantees: a sample is in exactly one state; a trained sample never comes back; an event of an attempt that is over
changes nothing; tokens never exceed the sample's budget; tokens, log-probs and versions have the same length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sortedrl.lengths import LengthEstimator
from sortedrl.records import (
    IGNORED,
    CallRecord,
    Cohort,
    FinishReason,
    Group,
    Mode,
    Sample,
    Segment,
    State,
    Unit,
    sample_from_dict,
)

# Module names, because Python 3.11 looks up enum members ten times as slowly, and every sample needs some.
PENDING, RUNNING, CALLING, FINISHED, SCORED, TRAINED = State
FRESH, RESUME = Mode.FRESH, Mode.RESUME
_COUNTERS = ("version", "num_updates", "num_trained", "num_loaded", "next_cohort")  # saved by `state_dict`


class Buffer:
    """`grouped`: whether siblings are trained together (GRPO), or each sample alone."""

    def __init__(self, *, grouped: bool = False) -> None:
        self.grouped = grouped
        self.version = 0
        self.num_updates = 0  # batches taken
        self.is_updating = False  # a batch was taken, and its weights are not published yet
        self.num_trained = 0
        self.num_loaded = 0
        self.num_started = 0  # attempts started since the last batch was taken, without those that go on after a tool
        self.samples: dict[int, Sample] = {}  # in load order
        self.cohorts: dict[int, Cohort] = {}  # with samples left, oldest first
        self.pending: dict[int, Sample] = {}  # each sample is in exactly one of these five
        self.running: dict[int, Sample] = {}
        self.calling: dict[int, Sample] = {}
        self.finished: dict[int, Sample] = {}
        self.scored: dict[int, Sample] = {}
        held = (self.pending, self.running, self.calling, self.finished, self.scored)
        self.in_state: dict[State, dict[int, Sample]] = dict(zip(State, held, strict=False))  # in the order of states
        self.unstarted: dict[int, Sample] = {}  # pending samples that never ran, in load order
        self.waiting: dict[int, Sample] = {}  # pending samples that ran before, with or without tokens
        self.unverified: dict[int, Sample] = {}  # of these, complete answers that a replay must verify
        self.fed: dict[int, Sample] = {}  # of these, those that came back from their environment, first come first
        self.groups: dict[tuple[int, str], Group] = {}  # siblings, if they are trained together
        self._ready_groups: dict[tuple[int, str], Group] = {}
        # Groups (or single samples) that could be trained now, and how many samples they hold.
        self.ready: Mapping[Any, Unit] = self._ready_groups if grouped else self.scored
        self.num_ready = 0
        self.attempt_version: dict[int, int] = {}  # version of the weights with which a running attempt began
        self.lengths = LengthEstimator()
        self.next_cohort = 0

    # ---- queries of the schedule ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_in_work(self) -> int:
        """Samples that are not scored yet."""
        return len(self.pending) + len(self.running) + len(self.calling) + len(self.finished)

    def num_counted(self, flat_extra: int) -> int:
        """The number of ready samples that count towards the size of an update batch.

        Samples of groups with equal rewards do not count, but at most `flat_extra` of them are left out.
        """
        if not flat_extra:
            return self.num_ready
        num_flat = sum(len(group.samples) for group in self.ready.values() if group.is_flat)
        return self.num_ready - min(num_flat, flat_extra)

    @property
    def num_ready_soon(self) -> int:
        """Samples whose groups are complete but for scores."""
        if not self.grouped:
            return len(self.finished)
        groups = {sample.group: self.groups[sample.group] for sample in self.finished.values()}
        complete = (FINISHED, SCORED)
        return sum(len(group.samples) for group in groups.values() if all(s.state in complete for s in group.samples))

    @property
    def num_open(self) -> int:
        """Trajectories that are begun and not complete: in a slot, with their environment, or waiting with tokens."""
        waiting = sum(1 for s in self.waiting.values() if s.segments and s.finish_reason is None)
        return len(self.running) + len(self.calling) + waiting

    def group_of(self, sample: Sample) -> Unit:
        """The unit that is trained with a sample: the group of its siblings, or the sample alone."""
        return self.groups[sample.group] if self.grouped else sample

    def oldest_version(self, sample: Sample) -> int | None:
        """Version of the oldest token that the sample holds or that its running attempt may have written."""
        if sample.state != RUNNING:
            return sample.oldest_version
        begun = self.attempt_version[sample.id]
        held = sample.oldest_version if sample.mode == RESUME else None
        return begun if held is None else min(begun, held)

    def staleness(self, sample: Sample, version: int) -> int:
        oldest = self.oldest_version(sample)
        return 0 if oldest is None else version - oldest

    def expected_length(self, sample: Sample) -> float:
        """Estimate from finished siblings and earlier epochs, never below the length the sample has reached."""
        reached, finished = sample.known_length, self._finished_siblings(sample)
        return self.lengths.expected(sample.prompt.id, reached=reached, finished=finished)

    def expected_work(self, sample: Sample) -> float:
        """The expected length, plus the expected time in tools as tokens that a slot decodes in that time."""
        work, lengths = self.expected_length(sample), self.lengths
        if not (lengths.tool_s or sample.tool_s):
            return work
        siblings = self._complete_siblings(sample)
        return work + lengths.expected_tool_tokens(
            sample.prompt.id, reached_s=sample.tool_s, finished_s=[s.tool_s for s in siblings]
        )

    # ---- changes by the controller ----------------------------------------------------------------------------------

    def load(self, samples: Sequence[Sample]) -> Cohort:
        """Add a cohort of pending samples."""
        cohort = Cohort(
            id=self.next_cohort, loaded_update=self.num_updates, num_samples=len(samples), num_left=len(samples)
        )
        assert samples, "a cohort needs samples"
        by_id = {sample.id: sample for sample in samples}
        assert len(by_id) == len(samples), f"cohort {cohort.id} has a sample twice"
        assert self.samples.keys().isdisjoint(by_id), f"cohort {cohort.id} has samples that are loaded already"
        assert {sample.cohort for sample in samples} == {cohort.id}, f"samples of another cohort than {cohort.id}"
        for held in (self.samples, self.pending, self.unstarted):
            held.update(by_id)
        for sample in samples if self.grouped else ():
            self._join_group(sample)
        self.cohorts[cohort.id] = cohort
        self.next_cohort += 1
        self.num_loaded += len(samples)
        return cohort

    def start(self, sample: Sample) -> None:
        """PENDING -> RUNNING, as a new attempt."""
        number = sample.id
        found = self.pending.pop(number, None)
        assert found is sample, f"sample {number} cannot start while {sample.state}"
        sample.state, self.running[number] = RUNNING, sample
        if sample.attempt == 0:
            del self.unstarted[number]
            if self.grouped or sample.prompt.id in self.lengths.prompts:
                self.lengths.start(number, sample.prompt.id, self._finished_siblings(sample))
        else:
            del self.waiting[number]
            self.unverified.pop(number, None)
        is_next_turn = self.fed.pop(number, None) is not None
        sample.attempt += 1
        self.attempt_version[number] = self.version
        self.num_started += not is_next_turn

    def append(self, sample: Sample, segment: Segment, *, start: int, verified: int = 0) -> int:
        """Replace the answer from position `start` on by a segment; returns the number of discarded tokens.

        The first `verified` tokens repeat tokens of the answer that replay accepted. They keep the slot time of their
        first decoding, and injected tokens among them stay masked. If no token changes, a complete answer keeps its
        reward.
        """
        assert sample.state == RUNNING, f"sample {sample.id} gets tokens while {sample.state}"
        held, count, version = sample.num_tokens, len(segment.tokens), segment.version
        end = start + count
        assert count == len(segment.logprobs), f"sample {sample.id}: {count} tokens, {len(segment.logprobs)} log-probs"
        assert start + verified <= held, f"sample {sample.id}: tokens at {start + verified}, but it holds {held}"
        assert verified <= count, f"sample {sample.id}: {verified} of {count} tokens verified"
        assert end <= sample.budget, f"sample {sample.id} exceeds its budget of {sample.budget}"
        if count > verified or end < held:
            sample.finish_reason = sample.reward = None
        masked: list[range] = []
        if start < held:
            masked = sample.masked(start, start + verified)
            segment.slot_s += sample.cut(start, verified)
        last = sample.segments[-1] if sample.segments else None
        assert last is None or last.version <= version, f"sample {sample.id}: version {version} after {last.version}"
        for part in segment.parted(masked):
            if last is not None and (last.version, last.is_masked) == (version, part.is_masked):
                last.extend(part)
            elif count:
                sample.segments.append(part)
                last = part
        sample.mode, sample.held = RESUME, end
        if end > sample.known_length:
            sample.known_length = end
        return held - start - verified

    def extend(self, sample: Sample, segments: Sequence[Segment], *, start: int) -> None:
        """Append segments of one or several versions after the `start` tokens that the sample holds.

        The result is that of one `append` per segment. Only the last segment may grow later: others may be shared.
        """
        assert sample.state is RUNNING, f"sample {sample.id} gets tokens while {sample.state}"
        held = sample.segments
        end, version = (sample.num_tokens, held[-1].version) if held else (0, 0)
        assert start == end, f"sample {sample.id}: tokens at {start}, but it holds {end}"
        for segment in segments:
            tokens = segment.tokens
            assert tokens, f"sample {sample.id}: a segment of 0 tokens"
            assert len(tokens) == len(segment.logprobs), (
                f"sample {sample.id}: {len(tokens)} tokens, {len(segment.logprobs)} log-probs"
            )
            assert segment.version >= version, f"sample {sample.id}: version {segment.version} after {version}"
            version = segment.version
            end += len(tokens)
        assert end <= sample.budget, f"sample {sample.id} exceeds its budget of {sample.budget}"
        if held and segments and held[-1].version == segments[0].version and not held[-1].is_masked:
            held[-1].extend(segments[0])
            held.extend(segments[1:])
        else:
            held += segments
        if segments:
            sample.finish_reason = sample.reward = None
        sample.mode, sample.held = RESUME, end
        if end > sample.known_length:
            sample.known_length = end

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """RUNNING -> FINISHED; also CALLING -> FINISHED, if the trajectory ends with its last call."""
        number = sample.id
        found = (self.calling if sample.state is CALLING else self.running).pop(number, None)
        assert found is sample, f"sample {number} cannot finish while {sample.state}"
        sample.state, sample.finish_reason, self.finished[number] = FINISHED, reason, sample
        self.attempt_version.pop(number, None)

    def call(self, sample: Sample, num_calls: int) -> None:
        """FINISHED -> CALLING: the turn that ended calls tools."""
        assert sample.state is FINISHED, f"sample {sample.id} cannot call tools while {sample.state}"
        assert sample.finish_reason == FinishReason.STOP, f"sample {sample.id} calls tools after {sample.finish_reason}"
        self._move(sample, CALLING, self.finished, self.calling)
        sample.finish_reason = sample.reward = None

    def record_calls(self, sample: Sample, turn: int, calls: Sequence[CallRecord]) -> None:
        """Note the calls of a turn: how long they took; a durable buffer keeps more of them."""
        for call in calls:  # one by one, as the ledger adds them: another order may round differently
            if call.error != IGNORED:
                sample.tool_s_now += call.seconds
        sample.tool_s = max(sample.tool_s, sample.tool_s_now)

    def announce_calls(self, sample: Sample, turn: int, calls: Sequence[CallRecord]) -> None:
        """Note calls of kept turns that are about to be made again; only a durable buffer keeps them."""

    def interrupt(self, sample: Sample) -> None:
        """RUNNING -> PENDING; the tokens stay until `requeue` decides about them."""
        self.cut_off(sample)
        sample.num_interrupts += 1

    def fail(self, sample: Sample) -> None:
        """RUNNING -> PENDING after a failed attempt; the tokens stay."""
        self.cut_off(sample)
        sample.num_failures += 1

    def cut_off(self, sample: Sample) -> None:
        """RUNNING -> PENDING after the run itself ended: neither an interrupt nor a failure. The tokens stay."""
        self._move(sample, PENDING, self.running, self.pending)
        del self.attempt_version[sample.id]
        self._wait(sample)

    def give_up(self, sample: Sample) -> int:
        """RUNNING -> FINISHED with an empty answer, after too many failures; returns the number of discarded tokens."""
        assert sample.state is RUNNING, f"sample {sample.id} cannot be given up while {sample.state}"
        Buffer.finish(self, sample, FinishReason.FAILED)
        sample.num_failures += 1
        sample.reward = None
        return sample.clear()

    def feed(self, sample: Sample, tokens: Sequence[int]) -> None:
        """CALLING or FINISHED -> PENDING: a turn ended. Inject `tokens`, such as a tool's output; the answer continues.

        Injected tokens are masked and count against the budget. They must leave room for at least one more token.
        """
        end = sample.num_tokens + len(tokens)
        assert tokens, f"sample {sample.id} is fed nothing"
        assert sample.state in (CALLING, FINISHED), f"sample {sample.id} cannot be fed while {sample.state}"
        is_over = sample.state is not CALLING and sample.finish_reason != FinishReason.STOP
        assert not is_over, f"sample {sample.id} is fed after {sample.finish_reason}"
        assert end < sample.budget, f"sample {sample.id} is fed beyond its budget of {sample.budget}"
        self._move(sample, PENDING, self.calling if sample.state is CALLING else self.finished, self.pending)
        sample.finish_reason = sample.reward = None
        self._wait(sample)
        self.fed[sample.id] = sample
        fed: Any = tokens if isinstance(tokens, bytes) else list(tokens)  # a simulation's tokens are zero bytes
        sample.segments.append(Segment(self.version, fed, [0.0] * len(tokens), 0.0, True))
        sample.mode, sample.held = RESUME, end
        sample.known_length = max(sample.known_length, end)

    def score(self, sample_id: int, attempt: int, reward: float) -> Sample | None:
        """FINISHED -> SCORED; returns None if that answer is no longer there."""
        sample = self.finished.get(sample_id)
        if sample is None or sample.attempt != attempt:
            return None
        del self.finished[sample_id]
        if sample.reward is None:
            sample.reward_attempt = attempt
        sample.state, sample.reward, self.scored[sample_id] = SCORED, reward, sample
        if not self.grouped:  # a single sample is ready once it is scored
            self.num_ready += 1
            return sample
        group = self.groups[sample.group]
        group.num_scored += 1
        if group.num_scored == len(group.samples):
            self._ready_groups[sample.group] = group
            self.num_ready += group.num_scored
        return sample

    def requeue(self, sample: Sample, mode: Mode) -> int:
        """PENDING, FINISHED or SCORED -> PENDING, to continue as `mode`; returns the number of discarded tokens.

        A sample that is CALLING can only start over. A complete answer keeps its reward, in case a replay changes none
        of its tokens.
        """
        if sample.state is SCORED:
            self._unready(sample)
        if sample.state != PENDING:
            is_allowed = sample.state in (FINISHED, SCORED) or (sample.state is CALLING and mode == FRESH)
            assert is_allowed, f"sample {sample.id} cannot go back from {sample.state}"
            self._move(sample, PENDING, self.in_state[sample.state], self.pending)
        sample.mode = mode
        if mode == FRESH:
            sample.finish_reason = sample.reward = None
        self._wait(sample)
        if mode != FRESH:
            return 0
        self.fed.pop(sample.id, None)
        sample.num_restarts += 1
        sample.tool_s_now = 0.0
        return sample.clear()

    def take(self, samples: Iterable[Sample]) -> list[Sample]:
        """SCORED -> TRAINED: the samples leave the buffer for good, as one update batch."""
        batch, version = list(samples), self.version
        for sample in batch:
            number = sample.id
            found = self.scored.pop(number, None)
            assert found is sample, f"sample {number} cannot be trained while {sample.state}"
            sample.state, sample.trained_version = TRAINED, version
            del self.samples[number]
        self.lengths.learn([(sample.id, sample.prompt.id, sample.num_tokens) for sample in batch])
        self.lengths.learn_tool_time([(sample.prompt.id, sample.tool_s) for sample in batch if sample.tool_s])
        for cohort, count in Counter([sample.cohort for sample in batch]).items():
            self.cohorts[cohort].num_left -= count
            if self.cohorts[cohort].num_left == 0:
                del self.cohorts[cohort]
        if self.grouped:
            self._retire_groups(batch)
        else:
            self.num_ready -= len(batch)
        self.num_trained += len(batch)
        self.num_updates += 1
        self.is_updating = True
        self.num_started = 0
        return batch

    def publish(self, version: int) -> None:
        """Make `version` the current version of the weights."""
        assert version > self.version, f"version {version} is published after {self.version}"
        self.version = version
        self.is_updating = False

    # ---- saving and restoring ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole buffer as plain data. Restoring it makes running samples pending."""
        return {
            "grouped": self.grouped,
            **{name: getattr(self, name) for name in _COUNTERS},
            "cohorts": [asdict(cohort) for cohort in self.cohorts.values()],
            "trained_lengths": self.lengths.state_dict(),
            "samples": [asdict(sample) for sample in self.samples.values()],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Buffer:
        buffer = cls(grouped=state["grouped"])
        for name in _COUNTERS:
            setattr(buffer, name, state[name])
        buffer.cohorts = {cohort["id"]: Cohort(**cohort) for cohort in state["cohorts"]}
        buffer.lengths = LengthEstimator.from_state_dict(state["trained_lengths"])
        for record in state["samples"]:
            sample = sample_from_dict(record)
            if sample.state == RUNNING:
                sample.state = PENDING
            buffer.samples[sample.id] = sample
            buffer.in_state[sample.state][sample.id] = sample
            if sample.state == PENDING:
                if sample.attempt:
                    buffer._wait(sample)
                else:
                    buffer.unstarted[sample.id] = sample
            if buffer.grouped:
                buffer._join_group(sample).num_scored += sample.state is SCORED
        buffer.find_ready()
        return buffer

    def find_ready(self) -> None:
        """After restoring: find the groups and samples that are ready, in load order."""
        self._ready_groups.clear()
        self._ready_groups.update((key, group) for key, group in self.groups.items() if group.is_ready)
        self.num_ready = sum(len(unit.samples) for unit in self.ready.values())

    # ---- groups and states ------------------------------------------------------------------------------------------

    def _join_group(self, sample: Sample) -> Group:
        group = self.groups.setdefault(sample.group, Group())
        group.samples.append(sample)
        return group

    def _retire_groups(self, batch: Sequence[Sample]) -> None:
        """Drop the groups of a trained batch. Each group must be in the batch as a whole."""
        for key in dict.fromkeys(sample.group for sample in batch):
            group = self.groups.pop(key)
            assert all(sibling.state is TRAINED for sibling in group.samples), f"half of group {key} is trained"
            del self._ready_groups[key]
            self.num_ready -= len(group.samples)

    def _finished_siblings(self, sample: Sample) -> list[int]:
        """Lengths of the complete answers among a sample's siblings."""
        return [sibling.num_tokens for sibling in self._complete_siblings(sample)]

    def _complete_siblings(self, sample: Sample) -> list[Sample]:
        if not self.grouped:
            return []
        complete = (FINISHED, SCORED)
        return [s for s in self.groups[sample.group].samples if s.state in complete and s is not sample]

    def _unready(self, sample: Sample) -> None:
        """A scored sample is requeued: its group is no longer ready."""
        if not self.grouped:
            self.num_ready -= 1
            return
        if self._ready_groups.pop(sample.group, None) is not None:
            self.num_ready -= len(self.groups[sample.group].samples)
        self.groups[sample.group].num_scored -= 1

    def _wait(self, sample: Sample) -> None:
        """Note a pending sample that ran before."""
        self.waiting[sample.id] = sample
        if sample.finish_reason is None:
            self.unverified.pop(sample.id, None)
        else:
            self.unverified[sample.id] = sample

    def _move(self, sample: Sample, to: State, source: dict[int, Sample], target: dict[int, Sample]) -> None:
        """Move a sample from one state to another."""
        number = sample.id
        found = source.pop(number, None)
        assert found is sample, f"sample {number} cannot go from {sample.state} to {to}"
        sample.state = to
        target[number] = sample
