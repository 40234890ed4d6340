"""The figures of all fuzzing that found nothing, by commit, in a result file that the docs quote.

Each invocation with `--keep-figures` adds its own, unless it found something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks import record
from fuzz.finding import FindingKind

NAME = "fuzz"
COUNTED = (
    *("runs", "processes", "faults", "changed keys", "complete", "refused", "twins", "power losses", "findings"),
    "unfinished",  # ended when the time was over, so what would have been found in them is not known: a hang, for one
    *(f"found {kind}" for kind in FindingKind),
)


def read() -> dict[str, Any]:
    if (record.RESULTS / f"{NAME}.json").exists():
        return record.load(NAME)
    return {"total": {}, "by_commit": {}}


def add(counts: Mapping[str, int]) -> None:
    """Add the counts of one invocation to the file."""
    found, commit = read(), record.stamp()["commit"]
    by_commit = dict(found["by_commit"])
    by_commit[commit] = _ordered(Counter(by_commit.get(commit, {})) + Counter(counts))
    total: Counter[str] = Counter()
    for one in by_commit.values():
        total.update(one)
    record.save(NAME, {"total": _ordered(total), "by_commit": by_commit})


def _ordered(counts: Mapping[str, int]) -> dict[str, int]:
    rest = sorted(set(counts) - set(COUNTED))
    return {name: counts.get(name, 0) for name in (*COUNTED, *rest)}
