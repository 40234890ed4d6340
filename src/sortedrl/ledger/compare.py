"""Compare a ledger with the copy of it in a checkpoint: numbers in it have no checksum, and the copy's file has one.

`save_and_resume.py` compares before a run goes on, and `saved_run.py` before a run is said to be complete. A difference
means that the ledger is damaged, because rows are written once and the checkpoint's manifest vouches for the copy.
Trainers of others have no copy in their checkpoints: their adapters check the rules of the ledger instead.

Guarantee: a ledger that passes has every row that the checkpoint had, with equal values, except for tokens and
log-probs, which rows have checksums of. Values are equal as SQLite compares numbers: 1 is 1.0, and 0.0 is -0.0.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from sortedrl.errors import DamagedLedgerError, LedgerError, RunDirError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.schema import JOURNAL, QUICK_CHECK_BYTES, READABLE, damaged, named_errors
from sortedrl.ledger.verify import verify

_KEYS = {"samples": "id", "trained": "sample"}  # the primary keys of the other tables are `seq`
_BLOBS = {"segments": ("tokens", "logprobs")}  # a copy lacks those of trained samples
_FIXED = ("grouped", "knobs", "noise")  # entries of `meta` that never change
# Knobs that `verify` takes its bounds from. It proves all lineages with those of the first, so they never change.
_BOUNDS = ("update_batch", "cohort_batches", "lookahead", "max_staleness", "exact_batch")
# Rules that a sound file breaks too, if versions of this package that took other knobs on a resume have written it.
_SCHEDULE_RULES = ("starvation", "staleness", "exact-batch")


def check_against_copy(connection: sqlite3.Connection, path: Path, copy: Path, seq: int) -> None:
    """Raise `DamagedLedgerError` unless the rows of the ledger `path` up to number `seq` are those of `copy`."""
    with named_errors(path):
        connection.execute("ATTACH DATABASE ? AS copy", (f"{copy.absolute().as_uri()}?mode=ro&immutable=1",))
        try:
            tables = {name for (name,) in connection.execute("SELECT name FROM copy.sqlite_master")}
            for table in JOURNAL:
                if table in tables and (key := _other_row(connection, table, seq)) is not None:
                    raise damaged(
                        path, f"table {table} differs from the copy {copy} at {_KEYS.get(table, 'seq')} {key}"
                    )
            for table in ("lineages", "changes"):  # a resume adds rows to them
                query = f"SELECT * FROM copy.{table} EXCEPT SELECT * FROM main.{table}"  # noqa: S608
                if table in tables and connection.execute(query).fetchone():
                    raise damaged(path, f"table {table} lacks a row of the copy {copy}")
            entries = [dict(connection.execute(f"SELECT key, value FROM {of}.meta")) for of in ("main", "copy")]  # noqa: S608
            ours, theirs = (meta.get("schema_version", "") for meta in entries)
            if theirs in READABLE and (ours not in READABLE or ours < theirs):  # a writer makes it newer, never older
                raise damaged(path, f"its schema version {ours} is not that of the copy {copy}, {theirs}")
            for name in _FIXED:
                if entries[0].get(name) != entries[1].get(name):
                    raise damaged(path, f"its {name} differ from those of the copy {copy}")
        finally:
            connection.execute("DETACH DATABASE copy")


def is_as_copied(path: Path, copy: Path, seq: int) -> bool:
    """Whether the ledger `path` can be read and has the rows of `copy` up to number `seq`; changes nothing."""
    if not path.is_file():
        return False
    log = path.with_name(path.name + "-wal")
    # Without a log, SQLite need not leave files of its own beside the ledger.
    how = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
    try:
        with named_errors(path), closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as connection:
            check_against_copy(connection, path, copy, seq)
    except LedgerError:
        return False
    return True


def check_bounds(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `RunDirError` if the bounds of the schedule are no longer those that a ledger was begun with.

    `saved`, `now`: the knobs of the ledger, and of the process that is to continue it.
    """
    for name in _BOUNDS:
        if name in saved and saved[name] != now[name]:
            before, after = ("none" if knobs[name] is None else knobs[name] for knobs in (saved, now))
            raise RunDirError(
                f"{path} was begun with {name} {before}, and this process has {after}: set it back, or start a new run"
            )


def check_rules(path: Path) -> None:
    """Raise `DamagedLedgerError` if a ledger breaks a rule: for trainers whose checkpoints have no copy of it.

    The bounds of the schedule are left out: what passes them is stale or late, and not damaged. A file of more than
    64 MB is left to `sortedrl ledger --verify`.
    """
    if path.stat().st_size > QUICK_CHECK_BYTES:
        return
    with Ledger(path) as ledger:
        violations = [found for found in verify(ledger).violations if found.rule not in _SCHEDULE_RULES]
    if violations:
        raise DamagedLedgerError(
            f"ledger {path} is damaged ({violations[0]}): restore it from a backup, or start a new run"
        )


def _other_row(connection: sqlite3.Connection, table: str, seq: int) -> int | None:
    """The key of the first row up to `seq` that only one of the two files has, or has otherwise; None without one."""
    key = _KEYS.get(table, "seq")
    names = [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]
    compared = [name for name in names if name not in _BLOBS.get(table, ())]
    ours, theirs = (", ".join(f"{of}.{name}" for name in compared) for of in ("ours", "theirs"))
    # Both ways, so that a row that one file lacks is found whichever it is.
    found = [
        connection.execute(
            f"SELECT ours.{key} FROM {one}.{table} AS ours LEFT JOIN {other}.{table} AS theirs USING ({key}) "  # noqa: S608
            f"WHERE ours.seq <= ?1 AND ({ours}) IS NOT ({theirs}) ORDER BY ours.{key} LIMIT 1",
            (seq,),
        ).fetchone()
        for one, other in (("main", "copy"), ("copy", "main"))
    ]
    return min((row[0] for row in found if row), default=None)
