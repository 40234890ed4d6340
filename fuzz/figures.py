"""The figures of all fuzzing so far, kept in a file that the docs quote. Each invocation adds its own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_name("figures.json")
COUNTED = ("runs", "processes", "faults", "complete", "refused", "twins", "findings")


def read() -> Counter[str]:
    return Counter(json.loads(FILE.read_text())["total"]) if FILE.exists() else Counter()


def add(counts: Counter[str]) -> Counter[str]:
    """Add the counts of one invocation to the file; returns the totals."""
    total = read() + counts
    ordered = {name: total[name] for name in COUNTED}
    faults = {name: number for name, number in sorted(total.items()) if name.startswith("fault ")}
    FILE.write_text(json.dumps({"total": {**ordered, **faults}}, indent=1) + "\n")
    return total
