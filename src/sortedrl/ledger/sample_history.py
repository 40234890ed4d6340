"""The life of one sample as its ledger tells it: every step, what each attempt gained and lost, and the answer.

`sortedrl ledger --sample` shows it. Reads through `ledger.py`, and tells what is there without judging it:
`verify.py` judges.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

from sortedrl.errors import LedgerError
from sortedrl.ledger.reader import STATE_AFTER, Answer, Ledger
from sortedrl.records import State


@dataclass(slots=True, kw_only=True)
class Moment:
    """One line of a life; deliveries of tokens that follow each other are one, and `seq` is that of the first."""

    seq: int
    step: str
    attempt: int
    version: int  # of the tokens where there are any, otherwise the one in force
    gained: int = 0
    kept: int = 0  # tokens that a replay found right
    thrown: int = 0
    held: int = 0  # after it
    note: str = ""
    num_rows: int = 1


@dataclass(slots=True, kw_only=True)
class Life:
    sample: int
    cohort: int
    prompt: str
    epoch: int
    index: int
    seed: int
    budget: int
    state: State = State.PENDING
    moments: list[Moment] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)  # of the answer: (version, how many tokens)
    tokens: list[int] | None = None  # None where the file leaves them out


def life_of(ledger: Ledger, sample: int) -> Life:
    """Everything about one sample."""
    query = "SELECT cohort, prompt, epoch, idx, seed, budget, seq FROM samples WHERE id = ?"
    found = next(ledger.rows(query, sample), None)
    if found is None:
        first, last = next(ledger.rows("SELECT min(id), max(id) FROM samples"))
        known = "it has none yet" if first is None else f"it has samples {first} to {last}"
        raise LedgerError(f"{ledger.path} has no sample {sample}: {known}")
    cohort, prompt, epoch, index, seed, budget, loaded = found
    life = Life(sample=sample, cohort=cohort, prompt=prompt, epoch=epoch, index=index, seed=seed, budget=budget)
    teller = _Teller(ledger, life)
    teller.tell(loaded, "load", 0, note=f"cohort {cohort}")
    for row in ledger.rows(_ROWS, sample):
        teller.row(*row)
    life.runs, life.tokens = teller.answer.runs, teller.tokens
    return life


_ROWS = """
SELECT seq, step, attempt, value, NULL, NULL, NULL, NULL FROM steps WHERE sample = ?1
UNION ALL SELECT seq, 'tokens', attempt, start, verified, version, num_tokens, tokens FROM segments WHERE sample = ?1
UNION ALL SELECT seq, 'train', NULL, number, reward, version, staleness, NULL FROM trained WHERE sample = ?1
ORDER BY seq
"""


class _Teller:
    """Follows one sample from row to row."""

    def __init__(self, ledger: Ledger, life: Life) -> None:
        self.ledger = ledger
        self.life = life
        self.answer = Answer()
        self.tokens: list[int] | None = []
        self.attempt = 0

    def row(self, seq: int, step: str, attempt: int | None, value: Any, *more: Any) -> None:
        self.attempt = self.attempt if attempt is None else attempt
        match step:
            case "tokens":
                self._deliver(seq, value, *more)
            case "train":
                reward, version, staleness, _ = more
                note = f"update {value}, staleness {staleness}, reward {_figure(reward)}"
                self.tell(seq, step, self.attempt, version=version, note=note)
                self.life.state = State.TRAINED
            case _:
                self._step(seq, step, value)

    def tell(self, seq: int, step: str, attempt: int, **what: Any) -> None:
        what.setdefault("version", self.ledger.version_at(seq))
        self.life.moments.append(Moment(seq=seq, step=step, attempt=attempt, held=self.answer.num_tokens, **what))

    def _step(self, seq: int, step: str, value: Any) -> None:
        thrown = self.answer.num_tokens if step == "give-up" or (step == "requeue" and value == "fresh") else 0
        if thrown:
            self._put(0, [], 0, 0)
        self.tell(seq, step, self.attempt, thrown=thrown, note=self._note(seq, step, value))
        self.life.state = STATE_AFTER.get(step, self.life.state)

    def _note(self, seq: int, step: str, value: Any) -> str:
        if step == "cut":
            lineage = max((cut.lineage for cut in self.ledger.cuts if cut.cut_seq < seq), default=0)
            return f"its process ended; lineage {lineage} goes on"
        if step == "score":
            return f"reward {_figure(value)}"
        return "" if value is None else str(value)

    def _deliver(self, seq: int, start: int, verified: int, version: int, num_tokens: int, blob: bytes | None) -> None:
        thrown = max(self.answer.num_tokens - start - verified, 0)
        self._put(start, None if blob is None else self._unpacked(seq, blob, num_tokens), num_tokens, version)
        last, gained = self.life.moments[-1], num_tokens - verified
        is_more = (last.step, last.attempt, last.version) == ("tokens", self.attempt, version)
        if is_more and not verified and not thrown:
            last.gained, last.held, last.num_rows = last.gained + gained, self.answer.num_tokens, last.num_rows + 1
        else:
            self.tell(seq, "tokens", self.attempt, version=version, gained=gained, kept=verified, thrown=thrown)

    def _put(self, start: int, tokens: list[int] | None, num_tokens: int, version: int) -> None:
        self.answer.put(start, num_tokens, version)
        if tokens is None or self.tokens is None:
            self.tokens = None
        else:
            self.tokens[start:] = tokens

    def _unpacked(self, seq: int, blob: bytes, num_tokens: int) -> list[int]:
        if len(blob) != 4 * num_tokens:
            raise LedgerError(
                f"{self.ledger.path}: row {seq} has {len(blob)} bytes for {num_tokens} tokens; it is damaged, "
                "--verify says what else is"
            )
        tokens = array("i", blob)
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens.tolist()


def _figure(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "none"
