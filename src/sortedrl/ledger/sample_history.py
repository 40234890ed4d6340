"""The history of one sample, from its ledger rows: each step, the tokens that it gained or lost, and the answer.

`sortedrl ledger --sample` and the dashboard's sample page show it. It reports what the rows say and does not check
them: `verify.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from sortedrl.errors import LedgerError
from sortedrl.ledger.reader import STATE_AFTER, Ledger, StoredAnswer
from sortedrl.records import State

_ROWS = """
SELECT seq, step, attempt, value, NULL, NULL, NULL, NULL, NULL FROM steps WHERE sample = ?1
UNION ALL
SELECT seq, 'tokens', attempt, start, verified, version, num_tokens, tokens, logprobs FROM segments WHERE sample = ?1
UNION ALL SELECT seq, 'train', NULL, number, reward, version, staleness, NULL, NULL FROM trained WHERE sample = ?1
ORDER BY seq
"""
_CALLS = """
SELECT seq, attempt, tool, arguments, digest, num_chars, error, seconds, repeated FROM calls WHERE sample = ?1
"""


@dataclass(slots=True, kw_only=True)
class Moment:
    """One line of the history. Consecutive deliveries of tokens are one line, with the `seq` of the first."""

    seq: int
    step: str
    attempt: int
    version: int  # of the tokens in this line; without tokens, the version published last
    gained: int = 0
    kept: int = 0  # tokens that a replay verified
    thrown: int = 0
    held: int = 0  # tokens after this step
    note: str = ""
    num_rows: int = 1


@dataclass(slots=True, kw_only=True)
class SampleHistory:
    sample: int
    cohort: int
    prompt: str
    epoch: int
    index: int
    seed: int
    noise: str
    budget: int
    state: State = State.PENDING
    moments: list[Moment] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)  # the answer as (version, number of tokens)
    tokens: list[int] | None = None  # None if this copy of the ledger does not hold them
    logprobs: list[float] | None = None  # of the tokens, when they were sampled; None likewise
    is_fed: list[bool] = field(default_factory=list)  # for each token: it was put into the answer, not sampled


def read_history(ledger: Ledger, sample: int) -> SampleHistory:
    query = "SELECT cohort, prompt, epoch, idx, seed, budget, seq FROM samples WHERE id = ?"
    found = next(ledger.rows(query, sample), None)
    if found is None:
        first, last = next(ledger.rows("SELECT min(id), max(id) FROM samples"))
        known = "it has none yet" if first is None else f"it has samples {first} to {last}"
        raise LedgerError(f"{ledger.path} has no sample {sample}: {known}")
    cohort, prompt, epoch, index, seed, budget, loaded = found
    history = SampleHistory(
        sample=sample,
        cohort=cohort,
        prompt=prompt,
        epoch=epoch,
        index=index,
        seed=seed,
        noise=ledger.noise,
        budget=budget,
    )
    builder = _HistoryBuilder(ledger, history)
    builder.add(loaded, "load", 0, note=f"cohort {cohort}")
    calls = list(ledger.rows(_CALLS, sample)) if ledger.has_calls else []
    for row in ledger.rows(_ROWS, sample):
        while calls and calls[0][0] < row[0]:
            builder.add_call(*calls.pop(0))
        builder.add_row(*row)
    for call in calls:
        builder.add_call(*call)
    history.runs, history.tokens = builder.answer.runs, builder.tokens
    history.logprobs, history.is_fed = builder.logprobs, builder.is_fed
    return history


class _HistoryBuilder:
    """Turns the rows of one sample into moments, in order."""

    def __init__(self, ledger: Ledger, history: SampleHistory) -> None:
        self.ledger = ledger
        self.history = history
        self.answer = StoredAnswer()
        self.tokens: list[int] | None = []
        self.logprobs: list[float] | None = []
        self.is_fed: list[bool] = []
        self.attempt = 0

    def add_row(self, seq: int, step: str, attempt: int | None, value: Any, *more: Any) -> None:
        self.attempt = self.attempt if attempt is None else attempt
        match step:
            case "tokens":
                self._add_tokens(seq, value, *more)
            case "train":
                reward, version, staleness, *_ = more
                note = f"update {value}, staleness {staleness}, reward {_number(reward)}"
                self.add(seq, step, self.attempt, version=version, note=note)
                self.history.state = State.TRAINED
            case _:
                self._add_step(seq, step, value)

    def add_call(
        self,
        seq: int,
        attempt: int,
        tool: str,
        arguments: str,
        digest: str,
        num_chars: int,
        error: str,
        seconds: float,
        repeated: int,
    ) -> None:
        made = f"{tool}({arguments})"
        if repeated:
            self.add(seq, "repeat", attempt, note=made)
        else:
            found = error or f"{num_chars:,} characters, {digest[:12]}"
            self.add(seq, "tool", attempt, note=f"{made}: {found}, {seconds:.3g} s")

    def add(self, seq: int, step: str, attempt: int, **what: Any) -> None:
        what.setdefault("version", self.ledger.version_at(seq))
        self.history.moments.append(Moment(seq=seq, step=step, attempt=attempt, held=self.answer.num_tokens, **what))

    def _add_step(self, seq: int, step: str, value: Any) -> None:
        thrown = self.answer.num_tokens if step == "give-up" or (step == "requeue" and value == "fresh") else 0
        if thrown:
            self._put(0, [], [], 0, 0)
        self.add(seq, step, self.attempt, thrown=thrown, note=self._note(seq, step, value))
        self.history.state = STATE_AFTER.get(step, self.history.state)

    def _note(self, seq: int, step: str, value: Any) -> str:
        if step == "cut":
            lineage = max((cut.lineage for cut in self.ledger.cuts if cut.cut_seq < seq), default=0)
            return f"its process ended; lineage {lineage} resumed the run"
        if step == "score":
            return f"reward {_number(value)}"
        return "" if value is None else str(value)

    def _add_tokens(
        self,
        seq: int,
        start: int,
        verified: int,
        version: int,
        num_tokens: int,
        tokens: bytes | None,
        logprobs: bytes | None,
    ) -> None:
        thrown = max(self.answer.num_tokens - start - verified, 0)
        self._put(
            start,
            None if tokens is None else self._unpack(seq, tokens, num_tokens, "<i4"),
            None if logprobs is None else self._unpack(seq, logprobs, num_tokens, "<f4"),
            num_tokens,
            version,
            verified,
        )
        last, gained = self.history.moments[-1], num_tokens - verified
        is_more = (last.step, last.attempt, last.version) == ("tokens", self.attempt, version)
        if is_more and not verified and not thrown:
            last.gained, last.held, last.num_rows = last.gained + gained, self.answer.num_tokens, last.num_rows + 1
        else:
            self.add(seq, "tokens", self.attempt, version=version, gained=gained, kept=verified, thrown=thrown)

    def _put(
        self,
        start: int,
        tokens: list[int] | None,
        logprobs: list[float] | None,
        num_tokens: int,
        version: int,
        verified: int = 0,
    ) -> None:
        self.answer.put(start, num_tokens, version)
        self.tokens = _with(self.tokens, start, tokens)
        self.logprobs = _with(self.logprobs, start, logprobs)
        moments = self.history.moments
        is_feed = bool(moments) and moments[-1].step == "feed"
        kept = [] if is_feed else self.is_fed[start : start + verified]  # what a replay verifies stays as it is
        self.is_fed[start:] = [*kept, *[is_feed] * (num_tokens - len(kept))]

    def _unpack(self, seq: int, blob: bytes, num_tokens: int, kind: str) -> list[Any]:
        if len(blob) != 4 * num_tokens:
            raise LedgerError(
                f"{self.ledger.path}: row {seq} has {len(blob)} bytes for {num_tokens} tokens; it is damaged; "
                "`sortedrl ledger --verify` lists all faults"
            )
        return np.frombuffer(blob, kind).tolist()


def conversation(history: SampleHistory, decode: Callable[[list[int]], str]) -> list[tuple[str, str]]:
    """The answer as turns: ("model", text) for what the model wrote, ("tool", text) for what it was fed."""
    turns: list[tuple[str, str]] = []
    for is_fed, places in groupby(range(len(history.tokens or ())), key=lambda place: history.is_fed[place]):
        tokens = [(history.tokens or [])[place] for place in places]
        turns.append(("tool" if is_fed else "model", decode(tokens)))
    return turns


def _with(values: list[Any] | None, start: int, added: list[Any] | None) -> list[Any] | None:
    """Replace the values from `start` on; None if any are missing."""
    if values is None or added is None:
        return None
    values[start:] = added
    return values


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "none"
