"""What the verification of a ledger file found, and the lines that tell it to people.

`verify.py` fills in a `Verdict`; `sortedrl ledger --verify` (`tables.py`) compares it with the run's summary and prints
its line.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sortedrl.ledger.reader import Ledger

log = logging.getLogger(__name__)

MAX_VIOLATIONS = 1000  # kept with their text; further ones are only counted


@dataclass(slots=True, kw_only=True, frozen=True)
class Violation:
    rule: str
    sample: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" if self.sample is None else f"{self.rule}: sample {self.sample}: {self.text}"


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The violations found, and counts of what was checked."""

    violations: list[Violation] = field(default_factory=list)
    num_violations: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, sample: int | None, text: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(rule=rule, sample=sample, text=text))


def compare_with_summary(ledger: Ledger, verdict: Verdict) -> None:
    """Add a violation if the ledger has fewer samples than the summary.json next to it counts.

    The rows of a file that was copied without its write-ahead log are consistent, but they are not all rows.
    """
    path = ledger.path.with_name("summary.json")
    if not path.is_file():
        return
    loaded, trained = _recorded_counts(path)
    if verdict.counts["samples"] < loaded:
        have, counted = _plural(verdict.counts["samples"], "sample"), loaded
    elif verdict.counts["trained"] < trained:
        have, counted = _plural(verdict.counts["trained"], "trained sample"), trained
    else:
        return
    log_file = ledger.path.with_name(ledger.path.name + "-wal")
    has_log = log_file.is_file() and log_file.stat().st_size > 0  # SQLite creates an empty one to read
    remedy = "restore it from a copy" if has_log else f"{log_file.name} was not copied along; copy it too"
    verdict.add("complete", None, f"the ledger has {have} but {path.name} counts {counted:,}: {remedy}")


def _recorded_counts(path: Path) -> tuple[int, int]:
    """Samples loaded and samples trained as a summary counts them; 0 for what it does not say."""
    try:
        record = json.loads(path.read_bytes())
        counts = record.get("ledger") or {}
        loaded, trained = counts.get("loaded", 0), record.get("samples", 0)
        if isinstance(loaded, int) and isinstance(trained, int):
            return loaded, trained
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    log.warning("%s cannot be read, so the ledger was not compared with it", path)
    return 0, 0


def empty_line(ledger: Ledger) -> str:
    """One line about a ledger without samples, of which there is nothing to prove."""
    return (
        f"empty: {ledger.path} has no samples, so there is nothing to prove; if the run has loaded any, copy "
        f"{ledger.path.name}-wal along with it"
    )


def proven_line(ledger: Ledger, verdict: Verdict) -> str:
    """One line that says what was proven about a file without violations."""
    count, staleness, waits = verdict.counts, ledger.knobs.get("max_staleness"), cohort_updates(ledger)
    said = [
        f"{_plural(count['samples'], 'sample')} loaded = {count['trained']:,} trained once + {count['live']:,} waiting",
        f"{_plural(count['rows'], 'row')} without a gap, {_plural(count['lineages'], 'lineage')}, every step allowed",
        f"{_plural(count['tokens'], 'token')} within budgets and of versions in force",
        f"{_plural(count['updates'], 'update')} with the records that the rows make",
    ]
    num_repeated = count["repeated_calls"] + count["forgotten_repeats"]
    if count["calls"] or num_repeated:
        again = f", {num_repeated:,} of kept turns made again" if num_repeated else ""
        lost = f", {count['forgotten_calls']:,} forgotten by resumes" if count["forgotten_calls"] else ""
        said.append(f"{_plural(count['calls'], 'tool call')} recorded{again}{lost}")
    if count["blank"]:
        said.append(f"tokens of {_plural(count['blank'], 'row')} left out, the others intact")
    if staleness is not None:
        said.append(f"staleness at most {staleness}")
    if waits is not None:
        said.append(f"{_plural(count['cohorts'], 'cohort')}, each within {_plural(waits, 'update')}")
    if (size := exact_batch(ledger)) is not None:
        said.append(f"{_plural(size, 'sample')} in each update")
    if ledger.grouped:
        said.append("siblings together")
    return "proven: " + "; ".join(said)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def cohort_updates(ledger: Ledger) -> int | None:
    """The number of updates within which a cohort must be consumed; None without a bound."""
    batches, lookahead = ledger.knobs.get("cohort_batches"), ledger.knobs.get("lookahead")
    return None if batches is None or lookahead is None else batches * (1 + lookahead)


def exact_batch(ledger: Ledger) -> int | None:
    """The number of samples that each update must have; None if the schedule does not fix it, or it was changed."""
    is_changed = any(change.key == "schedule.update_batch" for made in ledger.changes.values() for change in made)
    size = ledger.knobs.get("update_batch") if ledger.knobs.get("exact_batch") else None
    return size if isinstance(size, int) and not is_changed else None
