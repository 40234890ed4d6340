"""What the fuzzer found: a kind, which the figures count, and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    LOST = "lost"  # a sample that was loaded is never trained
    TWICE = "twice"  # a sample is trained twice
    WRONG_RESUME = "wrong resume"  # refused, or other weights than without the fault
    TRACEBACK = "traceback"
    LEFTOVER = "leftover"  # a process, shared memory, a temporary file
    LEDGER = "ledger"  # any other rule of the ledger is broken
    END = "end"  # another exit code than the fault explains, no line of error or several, no end at all


@dataclass(slots=True, frozen=True)
class Finding:
    kind: FindingKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
