"""What the proof of a ledger file comes to: the rules that it breaks, or what it was shown to keep.

`verify.py` fills it in, `command.py` shows it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sortedrl.ledger.reader import Ledger

MAX_VIOLATIONS = 1000  # that are kept with their words; the others are counted


@dataclass(slots=True, kw_only=True, frozen=True)
class Violation:
    rule: str
    sample: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" if self.sample is None else f"{self.rule}: sample {self.sample}: {self.text}"


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What was found, and how much was looked at."""

    violations: list[Violation] = field(default_factory=list)
    num_violations: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, sample: int | None, text: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(rule=rule, sample=sample, text=text))


def proven_line(ledger: Ledger, verdict: Verdict) -> str:
    """What a file that passed has been shown to keep, in one line."""
    count, staleness, waits = verdict.counts, ledger.knobs.get("max_staleness"), cohort_updates(ledger)
    said = [
        f"{_many(count['samples'], 'sample')} loaded = {count['trained']:,} trained once + {count['live']:,} waiting",
        f"{_many(count['rows'], 'row')} without a gap, {_many(count['lineages'], 'lineage')}, every step allowed",
        f"{_many(count['tokens'], 'token')} within budgets and of versions in force",
        f"{_many(count['updates'], 'update')} with the records that the rows make",
    ]
    if count["blank"]:
        said.append(f"tokens of {_many(count['blank'], 'row')} left out, the others intact")
    if staleness is not None:
        said.append(f"staleness at most {staleness}")
    if waits is not None:
        said.append(f"{_many(count['cohorts'], 'cohort')}, each within {_many(waits, 'update')}")
    if ledger.grouped:
        said.append("siblings together")
    return "proven: " + "; ".join(said)


def cohort_updates(ledger: Ledger) -> int | None:
    """Updates within which a cohort is to be consumed, None without a bound."""
    batches, lookahead = ledger.knobs.get("cohort_batches"), ledger.knobs.get("lookahead")
    return None if batches is None or lookahead is None else batches * (1 + lookahead)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
