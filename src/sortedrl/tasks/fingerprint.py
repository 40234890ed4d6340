"""A fingerprint of the rows that a run trains on: a resumed run must find the rows that it was started with.

`run/builders/parts.py` takes it when a run starts, checkpoints hold it, and `check_same_rows` compares it on resume. A
row counts with its number, prompt and columns. Rows that the run cannot reach within `run.samples` do not count, but
the number of all rows does, because the order of the rows depends on it. Of a task that generates its rows, the first
row counts; its settings are in the configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sortedrl.errors import DataError
from sortedrl.tasks.base import PromptStream, Row

_MAX_MARKS = 4096  # rows that can be told apart; beyond them the fingerprint only tells that some row differs
_MARK_CHARS = 8


@dataclass(slots=True, kw_only=True, frozen=True)
class RowFingerprint:
    size: int | None  # rows of the dataset; None if the task generates them
    num_hashed: int  # rows that count, in the order of the first epoch
    digest: str  # over all of them
    marks: str  # of the first rows, _MARK_CHARS characters each

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint_rows(stream: PromptStream, num_rows: int) -> RowFingerprint:
    """The fingerprint of the first rows of a stream, at most one epoch of them."""
    size = stream.task.train.size
    num_rows = 1 if size is None else min(size, num_rows)
    total, marks = hashlib.blake2b(digest_size=16), []
    for number, row in stream.first_rows(num_rows):
        digest = _digest(number, row)
        total.update(digest.encode())
        if len(marks) < _MAX_MARKS:
            marks.append(digest[:_MARK_CHARS])
    return RowFingerprint(size=size, num_hashed=num_rows, digest=total.hexdigest(), marks="".join(marks))


def check_same_rows(saved: Mapping[str, Any], stream: PromptStream) -> None:
    """Raise DataError if a stream has other rows than when its fingerprint was saved."""
    before, name = RowFingerprint(**saved), stream.task.name
    remedy = "put the rows back as they were, or start a new run"
    size = stream.task.train.size
    if size != before.size:
        had, has = (
            "rows that the task generates" if count is None else f"{count:,} rows" for count in (before.size, size)
        )
        raise DataError(f"{name} had {had} when the run was saved and has {has} now: {remedy}")
    now = fingerprint_rows(stream, before.num_hashed)
    if now.digest == before.digest:
        return
    numbers = [number for number, _ in stream.first_rows(len(now.marks) // _MARK_CHARS)]
    pairs = zip(_split(before.marks), _split(now.marks), numbers, strict=True)
    changed = sorted(number for mark, other, number in pairs if mark != other)
    if size is None:
        raise DataError(
            f"{name} generates other rows than when the run was saved: use the version of the package that makes them "
            "with which the run was started, or start a new run"
        )
    if not changed:
        raise DataError(f"rows of {name} have changed since the run was saved: {remedy}")
    count = "1 row has" if len(changed) == 1 else f"{len(changed):,} rows have"
    raise DataError(f"row {name}/{changed[0]} is not the one of when the run was saved ({count} changed): {remedy}")


def _digest(number: int, row: Row) -> str:
    # Values that JSON cannot hold count by their type only: their text may hold an address in memory.
    text = json.dumps([number, row], default=_as_plain, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _as_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def _split(marks: str) -> list[str]:
    return [marks[start : start + _MARK_CHARS] for start in range(0, len(marks), _MARK_CHARS)]
