"""Verify a ledger file: check every guarantee of docs/reference/guarantees.md from the rows of the file alone.

`sortedrl ledger --verify` calls it; `verdict.py` tells people what it found. `verify` reads the journal row by row and
applies its own rules: it knows the table of transitions, but shares no code with the buffer and the schedule that wrote
the rows. It holds one small record for each sample that is not trained; it checks tokens and does not keep them.

Guarantees: a file that passes has lost no sample and trained none twice; each broken rule is reported with its name and
the sample. After a violation the proof goes on as if the rule had been kept, so that one fault gives one line.
"""

from __future__ import annotations

import heapq
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sortedrl.errors import LedgerError
from sortedrl.ledger.reader import STATE_AFTER, Ledger, Lineage, StoredAnswer
from sortedrl.ledger.verdict import Verdict, cohort_updates, exact_batch
from sortedrl.records import IGNORED, State


def verify(ledger: Ledger) -> Verdict:
    """Check the whole file; raises `LedgerError` if SQLite itself finds it damaged."""
    found = [row[0] for row in ledger.rows("PRAGMA integrity_check(3)")]
    if found != ["ok"]:
        raise LedgerError(
            f"{ledger.path} is damaged: {'; '.join(found)}; resume the run from a checkpoint, which has a copy of it"
        )
    proof = _Proof(ledger)
    proof.follow()
    proof.conclude()
    return proof.verdict


# The states in which each step is allowed (docs/reference/guarantees.md).
_ALLOWED: Mapping[str, tuple[State, ...]] = {
    "start": (State.PENDING,),
    "finish": (State.RUNNING, State.CALLING),
    "interrupt": (State.RUNNING,),
    "fail": (State.RUNNING,),
    "give-up": (State.RUNNING,),
    "call": (State.FINISHED,),
    "feed": (State.FINISHED, State.CALLING),
    "score": (State.FINISHED,),
    "requeue": (State.PENDING, State.CALLING, State.FINISHED, State.SCORED),
    "cut": (State.RUNNING,),  # written by the process that resumes the run, before anything else
}
_REASONS = ("stop", "length")
_MODES = ("fresh", "resume", "replay")

# The journal. Each seq occurs once; in a broken file, rows with the same seq are checked in the order given here.
_JOURNAL: Mapping[str, str] = {
    "cohort": "SELECT seq, 0, id, loaded_update, num_samples FROM cohorts ORDER BY seq",
    "prompt": "SELECT seq, 1, id, tokens, content, columns, crc FROM prompts ORDER BY seq",
    "sample": "SELECT seq, 2, id, cohort, prompt, epoch, budget FROM samples ORDER BY seq",
    "step": "SELECT seq, 3, sample, attempt, step, value FROM steps ORDER BY seq",
    "segment": (
        "SELECT seq, 4, sample, attempt, start, verified, version, num_tokens, tokens, logprobs, crc "
        "FROM segments ORDER BY seq"
    ),
    "update": "SELECT seq, 5, number, version, num_samples FROM updates ORDER BY seq",
    "trained": "SELECT seq, 6, sample, number, version, length, reward, staleness FROM trained ORDER BY seq",
    "version": "SELECT seq, 7, version, lineage FROM versions ORDER BY seq",
    "call": "SELECT seq, 8, sample, attempt, idx, arguments, error, repeated FROM calls ORDER BY seq",
}
_STEP, _TRAINED = list(_JOURNAL).index("step"), list(_JOURNAL).index("trained")

# (rule, text before the second column, query that gives a sample and what is wrong with it)
_REFERENCE_FAULTS = (
    ("reference", "there is no prompt", "SELECT id, prompt FROM samples WHERE prompt NOT IN (SELECT id FROM prompts)"),
    ("reference", "there is no cohort", "SELECT id, cohort FROM samples WHERE cohort NOT IN (SELECT id FROM cohorts)"),
    (
        "reference",
        "there is no update",
        "SELECT sample, number FROM trained WHERE number NOT IN (SELECT number FROM updates)",
    ),
    (
        "exactly-once",
        "it has the same epoch, prompt and index as sample",
        "SELECT max(id), min(id) FROM samples GROUP BY epoch, prompt, idx HAVING count(*) > 1",
    ),
)


@dataclass(slots=True, kw_only=True)
class _Track:
    """A sample that is not trained."""

    cohort: int
    group: object
    budget: int
    state: State = State.PENDING
    attempt: int = 0
    begun: int = 0  # version when the attempt began
    answer: StoredAnswer = field(default_factory=StoredAnswer)
    reward: float | None = None
    is_given_up: bool = False
    is_replay: bool = False  # its tokens are to be verified by the next delivery
    is_blank: bool = False  # some of its rows have no tokens in this copy
    fed_ends: list[int] = field(default_factory=list)  # where each of the fed turns that it keeps ends
    ends_in_tools: bool = False  # its last turn called tools, and their results were not fed
    num_fed: object = None  # number of tokens that the next row feeds; None if it feeds none
    num_calls: object = None  # tool calls of the turn that its environment works on; None in other states
    num_recorded: int = 0  # those of them that have a row


@dataclass(slots=True, kw_only=True)
class _Cohort:
    loaded_update: int
    num_samples: int
    num_seen: int = 0
    num_left: int = 0


@dataclass(slots=True, kw_only=True)
class _Update:
    number: int
    num_samples: int
    num_taken: int = 0
    groups: set[object] = field(default_factory=set)


class _Proof:
    """Follows the journal from the first row to the last, with one `_check_*` method for each table."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.verdict = Verdict()
        self.seq = 0
        self.version = ledger.first_version
        self.lineage = 0
        self.is_beginning = False  # a lineage has begun, and only the cut rows of its running attempts may come now
        self.num_updates = 0
        self.samples: dict[int, _Track] = {}
        self.cohorts: dict[int, _Cohort] = {}
        self.groups: Counter[object] = Counter()  # untrained samples by group
        self.update: _Update | None = None
        self.max_staleness: int | None = ledger.knobs.get("max_staleness")
        self.cohort_updates = cohort_updates(ledger)

    def follow(self) -> None:
        checks: list[Callable[..., None]] = [getattr(self, f"_check_{name}") for name in _JOURNAL]
        cuts = self.ledger.cuts
        tables = [query for name, query in _JOURNAL.items() if name != "call" or self.ledger.has_calls]
        for row in heapq.merge(*map(self.ledger.rows, tables)):
            seq, kind = row[0], row[1]
            if self.update is not None and kind != _TRAINED:
                self._end_update()
            while cuts and cuts[0].cut_seq < seq:
                self._begin_lineage(cuts.pop(0))
            if self.is_beginning and not (kind == _STEP and row[4] == "cut"):
                self._end_beginning()
            if seq != self.seq + 1:
                missing = f"rows {self.seq + 1} to {seq - 1} are missing"
                self.broken("journal", None, missing if seq > self.seq else f"row {seq} is there twice")
            self.seq = seq
            checks[kind](*row[2:])
        if self.update is not None:
            self._end_update()
        for lineage in cuts:
            self._begin_lineage(lineage)
        if self.is_beginning:
            self._end_beginning()

    def broken(self, rule: str, sample: int | None, text: str) -> None:
        self.verdict.add(rule, sample, text)

    def conclude(self) -> None:
        """Check what only the whole file shows."""
        for rule, words, query in _REFERENCE_FAULTS:
            for sample, what in self.ledger.rows(query):
                self.broken(rule, sample, f"{words} {what!r}")
        self._conclude_counts()
        self._conclude_batches()
        for number, cohort in self.cohorts.items():
            if cohort.num_seen != cohort.num_samples:
                said = f"cohort {number} records {cohort.num_samples} samples"
                self.broken("cohort", None, f"{said}, but {cohort.num_seen} are in it")
            is_over = self.cohort_updates is not None and self.num_updates >= cohort.loaded_update + self.cohort_updates
            if is_over and cohort.num_left:
                left = next(sample for sample, track in self.samples.items() if track.cohort == number)
                self.broken("starvation", left, f"not trained, although all updates of its cohort {number} are over")
        for sample, track in self.samples.items():
            if track.is_blank:
                self.broken("integrity", sample, "its tokens are missing although it is not trained")

    def _conclude_counts(self) -> None:
        counts, ledger = self.verdict.counts, self.ledger
        counts.update(live=len(self.samples), rows=self.seq, cohorts=len(self.cohorts), updates=self.num_updates)
        counts.update(lineages=len(ledger.lineages), versions=self.version)
        for key in ("forgotten_calls", "forgotten_repeats"):
            counts[key] += int(ledger.meta.get(key, 0))
        loaded, trained = ledger.one("SELECT count(*) FROM samples"), ledger.one("SELECT count(*) FROM trained")
        if loaded != trained + len(self.samples):
            self.broken("exactly-once", None, f"{loaded} loaded, but {trained} trained and {len(self.samples)} waiting")
        if ledger.meta.get("seq") not in (None, str(self.seq)):
            self.broken("journal", None, f"the last row is {self.seq}, but {ledger.meta['seq']} were written")
        numbers = [lineage.lineage for lineage in ledger.lineages]
        if numbers != list(range(len(numbers))):
            self.broken("lineage", None, f"lineages are numbered {numbers}")
        for number in ledger.changes.keys() - set(numbers):
            keys = ", ".join(change.key for change in ledger.changes[number])
            self.broken("lineage", None, f"lineage {number} changed {keys}, but there is no such lineage")

    def _conclude_batches(self) -> None:
        """With `exact_batch`, only the last batch of a run may be smaller than the others."""
        size = exact_batch(self.ledger)
        if size is None:
            return
        for number, count in self.ledger.rows("SELECT number, num_samples FROM updates ORDER BY number"):
            is_last = number == self.num_updates - 1 and not self.samples
            if count != size and not (is_last and count < size):
                self.broken("exact-batch", None, f"update {number} has {count} samples, not {size}")

    # ---- one check for each table -----------------------------------------------------------------------------------

    def _check_cohort(self, cohort: int, loaded_update: int, num_samples: int) -> None:
        if cohort != len(self.cohorts):
            self.broken("cohort", None, f"cohort {cohort} is loaded where {len(self.cohorts)} is next")
        if loaded_update != self.num_updates:
            said = f"cohort {cohort} records that it was loaded after {loaded_update} updates, but there were"
            self.broken("cohort", None, f"{said} {self.num_updates}")
        self.cohorts[cohort] = _Cohort(loaded_update=self.num_updates, num_samples=num_samples)

    def _check_prompt(self, prompt: str, tokens: bytes, content: str, columns: str, crc: int) -> None:
        self.verdict.counts["prompts"] += 1
        if zlib.crc32(columns.encode(), zlib.crc32(content.encode(), zlib.crc32(tokens))) != crc:
            self.broken("integrity", None, f"prompt {prompt!r} does not match its checksum")

    def _check_sample(self, sample: int, cohort: int, prompt: str, epoch: int, budget: int) -> None:
        self.verdict.counts["samples"] += 1
        group = (epoch, prompt) if self.ledger.grouped else None
        self.samples[sample] = _Track(cohort=cohort, group=group, budget=budget)
        self.groups[group] += 1
        if cohort in self.cohorts:
            self.cohorts[cohort].num_seen += 1
            self.cohorts[cohort].num_left += 1
        elif self.ledger.one("SELECT count(*) FROM cohorts WHERE id = ?", cohort):
            self.broken("cohort", sample, f"it is loaded before its cohort {cohort}")

    def _check_step(self, sample: int, attempt: int, step: str, value: Any) -> None:
        self.verdict.counts["steps"] += 1
        track = self.samples.get(sample)
        if track is None:
            self._unexpected(sample, f"step {step}")
            return
        if step not in _ALLOWED:
            self.broken("transition", sample, f"unknown step {step!r} in row {self.seq}")
            return
        if track.state not in _ALLOWED[step]:
            self.broken("transition", sample, f"{step} in row {self.seq} while it is {track.state}")
        if step == "cut" and not self.is_beginning:
            self.broken("lineage", sample, f"cut in row {self.seq}, but no lineage begins there")
        expected = track.attempt + 1 if step == "start" else track.attempt
        if attempt != expected:
            self.broken("attempt", sample, f"{step} in row {self.seq} is of attempt {attempt}, not {expected}")
        if step == "start":
            track.begun, track.is_given_up = self.version, False
        elif step == "score":
            self._score(sample, track, value)
        elif step == "finish" and value not in _REASONS:
            self.broken("transition", sample, f"it finishes in row {self.seq} for the reason {value!r}")
        elif step == "requeue":
            self._requeue(sample, track, value)
        elif step == "call":
            track.num_calls, track.num_recorded = value, 0
        elif step == "feed":
            track.num_fed = value
        elif step == "give-up":
            track.answer.cut(0)
            track.fed_ends.clear()
            track.is_given_up, track.ends_in_tools = True, False
        if track.state == State.CALLING:
            track.ends_in_tools = step == "finish"
            self._end_calls(sample, track, step)
        track.attempt = attempt
        track.state = STATE_AFTER[step]

    def _check_segment(
        self,
        sample: int,
        attempt: int,
        start: int,
        verified: int,
        version: int,
        num_tokens: int,
        tokens: bytes | None,
        logprobs: bytes | None,
        crc: int,
    ) -> None:
        counts = self.verdict.counts
        counts["segments"] += 1
        counts["tokens"] += num_tokens
        track = self.samples.get(sample)
        if track is None:
            self._unexpected(sample, "tokens")
            return
        if tokens is None or logprobs is None:
            track.is_blank = True
            counts["blank"] += 1
        elif fault := _tokens_fault(num_tokens, tokens, logprobs, crc):
            self.broken("integrity", sample, f"row {self.seq} {fault}")
        held = track.answer.num_tokens
        fed, track.num_fed = track.num_fed, None
        if fed is not None and (fed, start) != (num_tokens, held):
            self.broken("segments", sample, f"row {self.seq} feeds {num_tokens} tokens at {start}, not {fed} at {held}")
        elif fed is None and track.state != State.RUNNING:
            self.broken("transition", sample, f"tokens in row {self.seq} while it is {track.state}")
        if attempt != track.attempt:
            self.broken("attempt", sample, f"tokens in row {self.seq} are of attempt {attempt}, not {track.attempt}")
        if start < 0 or verified < 0 or start + verified > held or verified > num_tokens:
            at = f"{num_tokens} tokens at {start}, {verified} of them verified"
            self.broken("segments", sample, f"row {self.seq} puts {at}, where it holds {held}")
        elif start < held and num_tokens and not track.is_replay:
            self.broken("segments", sample, f"row {self.seq} overwrites from {start} on, but it is not being replayed")
        elif verified and tokens and not _repeats(self.ledger, sample, self.seq, start, tokens[: 4 * verified]):
            self.broken("segments", sample, f"the {verified} verified tokens of row {self.seq} are not those it held")
        if start + num_tokens > track.budget:
            self.broken("budget", sample, f"{start + num_tokens} tokens in row {self.seq}, of {track.budget} allowed")
        if not track.begun <= version <= self.version:
            in_force = f"{track.begun} to {self.version} were in force in that attempt"
            self.broken("version", sample, f"tokens in row {self.seq} are of version {version}, but {in_force}")
        track.answer.put(start, num_tokens, version)
        track.ends_in_tools &= num_tokens == verified
        if track.fed_ends:
            track.fed_ends = [end for end in track.fed_ends if end <= start + verified]
        if fed is not None:
            track.fed_ends.append(start + num_tokens)
        track.is_replay = False

    def _check_update(self, number: int, version: int, num_samples: int) -> None:
        if number != self.num_updates:
            self.broken("update", None, f"update {number} is taken where {self.num_updates} is next")
        if version != self.version:
            self.broken("update", None, f"update {number} records version {version}, but {self.version} was in force")
        self.num_updates = number + 1
        self.update = _Update(number=number, num_samples=num_samples)

    def _check_trained(
        self, sample: int, number: int, version: int, length: int, reward: float | None, staleness: int
    ) -> None:
        self.verdict.counts["trained"] += 1
        if self.update is None or self.update.number != number:
            self.broken("update", sample, f"it is trained in row {self.seq} by update {number}, not the current one")
        track = self.samples.pop(sample, None)
        if track is None:
            self._unexpected(sample, f"trained by update {number}")
            return
        if track.state != State.SCORED:
            self.broken("transition", sample, f"it is trained in row {self.seq} while it is {track.state}")
        oldest = track.answer.oldest_version
        actual = 0 if oldest is None else self.version - oldest
        facts = {
            "version": (version, self.version),
            "length": (length, track.answer.num_tokens),
            "reward": (reward, track.reward),
            "staleness": (staleness, actual),
        }
        for name, (said, actual_value) in facts.items():
            if said != actual_value:
                self.broken("record", sample, f"trained with {name} {said}, but its rows give {actual_value}")
        if self.max_staleness is not None and actual > self.max_staleness:
            self.broken("staleness", sample, f"trained {actual} versions old, of {self.max_staleness} allowed")
        self._consume(sample, track, number)

    def _check_version(self, version: int, lineage: int) -> None:
        if version != self.version + 1:
            self.broken("version", None, f"version {version} is published after {self.version}")
        if lineage != self.lineage:
            said = f"version {version} records lineage {lineage}, but row {self.seq}"
            self.broken("lineage", None, f"{said} was written by lineage {self.lineage}")
        self.version = version

    def _check_call(self, sample: int, attempt: int, index: int, arguments: str, error: str, repeated: int) -> None:
        self.verdict.counts["repeated_calls" if repeated else "calls"] += 1
        track = self.samples.get(sample)
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            self.broken("call", sample, f"the arguments in row {self.seq} are not JSON")
        if error == IGNORED:
            return  # the sample had started over, and may be in any state
        if track is None:
            self._unexpected(sample, "a tool call")
        elif track.state != State.CALLING and not repeated:
            self.broken("call", sample, f"a tool call in row {self.seq} while it is {track.state}")
        elif track.state != State.CALLING and not (track.fed_ends or track.ends_in_tools):  # it may be for a reward
            self.broken("call", sample, f"a repeated call in row {self.seq}, but it keeps no turn with tools")
        elif attempt != track.attempt:
            self.broken("attempt", sample, f"a call in row {self.seq} is of attempt {attempt}, not {track.attempt}")
        elif not repeated:
            if index != track.num_recorded:
                self.broken("call", sample, f"call {index} in row {self.seq}, where {track.num_recorded} is next")
            track.num_recorded += 1

    # ---- parts of the checks ----------------------------------------------------------------------------------------

    def _score(self, sample: int, track: _Track, reward: Any) -> None:
        is_number = reward is None or isinstance(reward, int | float)
        if not is_number:
            self.broken("record", sample, f"its score in row {self.seq} is {reward!r}")
        if track.is_given_up and reward != 0:
            self.broken("record", sample, f"it was given up, and scored {reward!r} in row {self.seq}")
        track.reward = reward if is_number else None

    def _end_calls(self, sample: int, track: _Track, step: str) -> None:
        """A turn with tools is over: unless its sample starts over, each of its calls must have a row."""
        if step in ("feed", "finish") and track.num_recorded != track.num_calls:
            said = f"{step} in row {self.seq} after {track.num_recorded} recorded calls"
            self.broken("call", sample, f"{said}, but its turn has {track.num_calls}")
        track.num_calls, track.num_recorded = None, 0

    def _requeue(self, sample: int, track: _Track, mode: Any) -> None:
        if mode not in _MODES:
            self.broken("transition", sample, f"unknown requeue mode {mode!r} in row {self.seq}")
        elif track.state == State.PENDING and track.answer.num_tokens == 0:
            self.broken("transition", sample, f"requeue in row {self.seq} while it is pending and holds nothing")
        elif track.state == State.CALLING and mode != "fresh":
            self.broken("transition", sample, f"row {self.seq} requeues it as {mode} while its environment works")
        elif track.state in (State.FINISHED, State.SCORED) and mode == "resume":
            self.broken("transition", sample, f"row {self.seq} resumes it although it is {track.state}")
        if mode == "fresh":
            track.answer.cut(0)
            track.fed_ends.clear()
            track.ends_in_tools = False
        track.is_replay, track.reward = mode == "replay", None

    def _consume(self, sample: int, track: _Track, number: int) -> None:
        """Count a trained sample in its update, and take it out of its group and cohort."""
        self.groups[track.group] -= 1
        if self.update is not None:
            self.update.num_taken += 1
            self.update.groups.add(track.group)
        cohort = self.cohorts.get(track.cohort)
        if cohort is None:
            return
        cohort.num_left -= 1
        if self.cohort_updates is not None and number >= cohort.loaded_update + self.cohort_updates:
            last = cohort.loaded_update + self.cohort_updates - 1
            self.broken("starvation", sample, f"trained by update {number}, but {last} is the last of its cohort")

    def _end_update(self) -> None:
        update, self.update = self.update, None
        assert update is not None, "no update is open"
        if update.num_taken != update.num_samples:
            said = f"update {update.number} records {update.num_samples} samples"
            self.broken("update", None, f"{said}, but {update.num_taken} are trained by it")
        if self.ledger.grouped:
            for group in update.groups:
                if self.groups[group]:
                    left = next(sample for sample, track in self.samples.items() if track.group == group)
                    text = f"it is left behind, its siblings were trained by update {update.number}"
                    self.broken("siblings", left, text)
                else:
                    del self.groups[group]

    def _begin_lineage(self, lineage: Lineage) -> None:
        """Another process resumes the run."""
        if lineage.version != self.version:
            said = f"lineage {lineage.lineage} went on from version {lineage.version}, but row {lineage.cut_seq}"
            self.broken("lineage", None, f"{said} is of version {self.version}")
        self.lineage = lineage.lineage
        self.is_beginning = True

    def _end_beginning(self) -> None:
        """The first row of a lineage that is no cut: by now it must have cut every running attempt."""
        self.is_beginning = False
        for sample, track in self.samples.items():
            if track.state == State.RUNNING:
                text = f"it was running when lineage {self.lineage} began, which wrote no cut for it"
                self.broken("lineage", sample, text)
                track.state = State.PENDING

    def _unexpected(self, sample: int, what: str) -> None:
        """A row of a sample that is trained already or was never loaded."""
        is_known = self.ledger.one("SELECT count(*) FROM samples WHERE id = ? AND seq <= ?", sample, self.seq)
        rule, why = ("exactly-once", "trained before") if is_known else ("reference", "never loaded")
        self.broken(rule, sample, f"{what} in row {self.seq}, although it was {why}")


def _tokens_fault(num_tokens: int, tokens: bytes, logprobs: bytes, crc: int) -> str | None:
    """What is wrong with the tokens of a row, or None; the text continues `row N`."""
    if len(tokens) != 4 * num_tokens or len(logprobs) != 4 * num_tokens:
        return f"has {len(tokens)} and {len(logprobs)} bytes for {num_tokens} tokens and their log-probs"
    if zlib.crc32(logprobs, zlib.crc32(tokens)) != crc:
        return "has tokens or log-probs that do not match their checksum"
    return None


# The deliveries to a sample before a row; a step that drops all its tokens counts as an empty delivery at 0.
_BEFORE = """
SELECT seq, start, tokens FROM segments WHERE sample = ?1 AND seq < ?2
UNION ALL SELECT seq, 0, x'' FROM steps
    WHERE sample = ?1 AND seq < ?2 AND (step = 'give-up' OR step = 'requeue' AND value = 'fresh')
ORDER BY seq
"""


def _repeats(ledger: Ledger, sample: int, seq: int, start: int, tokens: bytes) -> bool:
    """Whether the tokens of row `seq` equal those that the sample held before, from `start` on."""
    held = bytearray()
    for _, at, given in ledger.rows(_BEFORE, sample, seq):
        if given is None:
            return True  # this copy has no tokens to compare with
        held[4 * at :] = given
    return held[4 * start : 4 * start + len(tokens)] == tokens
