"""The ledger file: its tables, how it is created, opened, checked and copied, and the meaning of SQLite's errors.

`store.py` writes through it; `reader.py` reads these tables. Guarantees: only a ledger of a known schema version that
passes a quick check is opened for writing; every SQLite error becomes an error of this package that names the remedy.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sortedrl.errors import DamagedLedgerError, LedgerError
from sortedrl.ledger.atomic_file import sync_name

SCHEMA_VERSION = 3
# 1: without the table of tool calls, which a writer adds; 2: repeated calls only while the environment works on a turn.
READABLE = ("1", "2", "3")
FIRST_NOISE = "gumbel-splitmix64-v1"  # drew the tokens of a ledger or checkpoint that names no noise scheme
APPLICATION_ID = 0x73726C67  # "srlg": tells a ledger from other programs' databases
MIN_SQLITE = (3, 37)  # the first with STRICT tables
PAGE_BYTES = 8192
WAL_PAGES = 4096  # copy the log into the file every 32 MB, so that each page is written about once
BUSY_S = 10.0
FOLD_S = 1.0  # how long a closing store waits for readers before it leaves the log as it is
QUICK_CHECK_BYTES = 64 * 1024**2  # every page of a file up to this size is checked, in well under a second

# `seq` numbers the rows of all journal tables together: 1, 2, 3, ... in the order of events. Returning to a checkpoint
# means deleting every row with a larger seq. Blobs are the last columns, so that reading the others does not load them.
SCHEMA = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,  -- schema_version; grouped ("0", "1"); knobs (JSON; null: unbounded); seq (of the last row);
    value TEXT NOT NULL    -- num_durable (commits made to survive a power loss); noise (scheme that drew all tokens);
                           -- forgotten_calls (tool calls whose rows a resume deleted or never got, at least so many);
                           -- forgotten_repeats (repeated calls whose rows a resume deleted)
) STRICT;
CREATE TABLE lineages (  -- a row each time that a process begins to write; not of the journal: cuts leave it alone
    lineage INTEGER PRIMARY KEY,
    cut_seq INTEGER NOT NULL,  -- the seq that it went on from: rows up to it are of earlier lineages
    version INTEGER NOT NULL  -- in force then
) STRICT;
CREATE TABLE cohorts (
    seq INTEGER PRIMARY KEY,
    id INTEGER NOT NULL UNIQUE,
    loaded_update INTEGER NOT NULL,
    num_samples INTEGER NOT NULL
) STRICT;
CREATE TABLE prompts (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    crc INTEGER NOT NULL,  -- crc32 over tokens, content and columns, in UTF-8
    tokens BLOB NOT NULL,  -- int32, little-endian
    content TEXT NOT NULL,  -- JSON
    columns TEXT NOT NULL  -- JSON
) STRICT;
CREATE TABLE samples (
    seq INTEGER NOT NULL,
    id INTEGER PRIMARY KEY,
    cohort INTEGER NOT NULL,
    prompt TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    budget INTEGER NOT NULL
) STRICT;
CREATE TABLE steps (
    seq INTEGER PRIMARY KEY,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,  -- the one that the step begins, ends or judges
    step TEXT NOT NULL,  -- start, finish, interrupt, fail, give-up, call, feed, score, requeue; cut: its process ended
    value ANY  -- of finish: the reason; of call: how many tool calls the turn has; of feed: how many tokens, which the
        -- next row holds; of score: the reward (null: not a number); of requeue: the mode
) STRICT;
CREATE TABLE segments (  -- a row for each delivery of tokens; the first `verified` repeat what stood there
    seq INTEGER PRIMARY KEY,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    start INTEGER NOT NULL,
    verified INTEGER NOT NULL,
    version INTEGER NOT NULL,
    slot_s REAL NOT NULL,
    num_tokens INTEGER NOT NULL,
    crc INTEGER NOT NULL,  -- crc32 over tokens, then logprobs
    tokens BLOB,  -- int32, little-endian; null: left out of a snapshot, since the sample is trained
    logprobs BLOB  -- float32, little-endian; null likewise
) STRICT;
CREATE TABLE updates (  -- a row for each batch taken
    seq INTEGER PRIMARY KEY,
    number INTEGER NOT NULL UNIQUE,  -- from 0
    version INTEGER NOT NULL,  -- in force then
    num_samples INTEGER NOT NULL
) STRICT;
CREATE TABLE trained (  -- its primary key makes training twice impossible
    seq INTEGER NOT NULL,
    sample INTEGER PRIMARY KEY,
    number INTEGER NOT NULL,  -- of the update
    version INTEGER NOT NULL,
    length INTEGER NOT NULL,
    reward REAL,
    staleness INTEGER NOT NULL
) STRICT;
CREATE TABLE versions (  -- weights published; (lineage, version) is never used again
    seq INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    lineage INTEGER NOT NULL,
    UNIQUE (lineage, version)
) STRICT;
CREATE INDEX steps_by_sample ON steps (sample);
CREATE INDEX segments_by_sample ON segments (sample);
CREATE INDEX samples_by_cohort ON samples (cohort);
"""
# Not of the journal, and not needed to restore a buffer. Ledgers of older versions get it when they are opened for
# writing; older versions of this package ignore it. So the schema version stays.
CHANGES = """
CREATE TABLE IF NOT EXISTS changes (  -- settings that differ from those of the checkpoint that a lineage went on from
    lineage INTEGER NOT NULL,
    key TEXT NOT NULL,
    old_value TEXT NOT NULL,  -- JSON
    new_value TEXT NOT NULL,  -- JSON
    PRIMARY KEY (lineage, key)
) STRICT;
"""
CALLS = """
CREATE TABLE IF NOT EXISTS calls (  -- a row for each tool call, when its turn has returned; of a repeated one: before
    seq INTEGER PRIMARY KEY,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL,  -- the one that wrote the call
    turn INTEGER NOT NULL,  -- turns with tools before it, from 0
    idx INTEGER NOT NULL,  -- among the calls of the turn, from 0; of a repeated call: -1
    tool TEXT NOT NULL,
    arguments TEXT NOT NULL,  -- JSON
    digest TEXT NOT NULL,  -- blake2b of 16 bytes over the text that was fed, in hex
    num_chars INTEGER NOT NULL,
    error TEXT NOT NULL,  -- empty, the kind of failure, or "ignored": its sample had started over
    seconds REAL NOT NULL,
    repeated INTEGER NOT NULL,  -- 1: a call of a kept turn, made again after this row to bring a state back
    state TEXT  -- JSON; of the last call of a turn: the environment's snapshot after it
) STRICT;
CREATE INDEX IF NOT EXISTS calls_by_sample ON calls (sample);
"""
SCHEMA += CHANGES + CALLS

# The tables numbered by seq, with their number of columns.
JOURNAL = {
    "cohorts": 4,
    "prompts": 6,
    "samples": 8,
    "steps": 5,
    "segments": 11,
    "updates": 4,
    "trained": 7,
    "versions": 3,
    "calls": 13,
}
INSERT = {table: f"INSERT INTO {table} VALUES ({', '.join('?' * width)})" for table, width in JOURNAL.items()}  # noqa: S608

_COPY_SEGMENTS = """
INSERT INTO copy.segments
SELECT
    s.seq, s.sample, s.attempt, s.start, s.verified, s.version, s.slot_s, s.num_tokens, s.crc,
    iif(t.seq IS NULL, s.tokens, NULL), iif(t.seq IS NULL, s.logprobs, NULL)
FROM main.segments AS s LEFT JOIN main.trained AS t ON t.sample = s.sample
ORDER BY s.seq
"""


def create_file(path: Path, meta: Mapping[str, str], *, run: Path | None = None) -> sqlite3.Connection:
    """Create a ledger file without rows; refuses an existing file. `run`: as for `named_errors`."""
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        raise LedgerError(
            f"this Python has SQLite {sqlite3.sqlite_version}, but a ledger needs 3.37 or later: use a newer Python"
        )
    if path.exists():
        raise LedgerError(f"ledger {path} exists already: resume it, or choose another folder with run.dir=PATH")
    rows = {"schema_version": str(SCHEMA_VERSION), "seq": "0", "num_durable": "0", **meta}
    with named_errors(path, run):
        connection = _connect(path, "rwc")
        with closed_on_error(connection):
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.executescript(f"BEGIN; PRAGMA application_id = {APPLICATION_ID}; {SCHEMA}")
            connection.executemany("INSERT INTO meta VALUES (?, ?)", rows.items())
            connection.execute("COMMIT")
    sync_name(path)
    return connection


def open_file(path: Path, *, copy: Path | None = None) -> sqlite3.Connection:
    """Open a ledger file for writing, after quick checks that it is whole and writable.

    `copy`: a copy of it; if the copy can be read and the file has an unknown schema version, the file is damaged.
    """
    if not path.is_file():
        raise DamagedLedgerError(f"there is no ledger {path}: give the directory of a run, or put a copy there")
    with named_errors(path):
        connection = _connect(path, "rw")
        with closed_on_error(connection):
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION_ID:
                raise damaged(path, "it is a database but no ledger")
            version = read_meta(path, connection)["schema_version"]
            if version not in READABLE:
                if copy is not None and _has_known_version(copy):
                    raise damaged(path, f"its schema version {version} is not that of the copy {copy}")
                raise LedgerError(
                    f"ledger {path} has schema version {version}, this sortedrl knows 1 to {SCHEMA_VERSION}: use the "
                    "version that wrote it"
                )
            use_wal(path, connection)
            connection.execute("BEGIN IMMEDIATE")  # fail now, not hours later, if the file is locked or read-only
            connection.execute("ROLLBACK")
            if version != str(SCHEMA_VERSION):
                upgrade(connection)
            _check_whole(path, connection)
            connection.execute(CHANGES)
    return connection


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring a file of an older schema version to this one. Rows stay as they are."""
    connection.executescript(
        f"BEGIN IMMEDIATE; {CALLS} UPDATE meta SET value = '{SCHEMA_VERSION}' WHERE key = 'schema_version'; COMMIT"  # noqa: S608  # ours
    )


def copy_file(connection: sqlite3.Connection, path: Path, *, run: Path) -> None:
    """Copy all rows to a new ledger file, without the blobs of trained samples."""
    create_file(path, {}, run=run).close()
    with named_errors(path, run):
        connection.execute("ATTACH DATABASE ? AS copy", (str(path.absolute()),))
        try:
            connection.execute("PRAGMA copy.journal_mode = OFF")
            connection.execute("PRAGMA copy.synchronous = OFF")
            connection.execute("BEGIN")
            connection.execute("DELETE FROM copy.meta")
            for table in ("meta", "lineages", "changes", *JOURNAL):
                if table != "segments":
                    connection.execute(f"INSERT INTO copy.{table} SELECT * FROM main.{table}")  # noqa: S608
            connection.execute(_COPY_SEGMENTS)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            connection.execute("DETACH DATABASE copy")


def use_wal(path: Path, connection: sqlite3.Connection) -> None:
    """Write through a write-ahead log: a killed process leaves no partial commit, and readers do not wait."""
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise LedgerError(f"the file system of {path} cannot hold a ledger: choose a local disk with run.dir=PATH")
    connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {2 * WAL_PAGES * PAGE_BYTES}")
    connection.execute("PRAGMA synchronous = NORMAL")


def fold_log(connection: sqlite3.Connection) -> None:
    """Copy the write-ahead log into the file and empty it.

    SQLite does this by itself only for the last connection that closes, and a dashboard may keep the file open. A
    reader in the middle of a query may prevent it: then the log stays, and nothing is lost.
    """
    with suppress(sqlite3.Error):
        connection.execute(f"PRAGMA busy_timeout = {round(1000 * FOLD_S)}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def read_meta(path: Path, connection: sqlite3.Connection) -> dict[str, str]:
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    missing = {"schema_version", "seq", "grouped", "knobs", "num_durable"} - set(meta)
    if "schema_version" in missing or (missing and meta["schema_version"] in READABLE):
        raise damaged(path, f"its meta table lacks {min(missing)}")
    return meta


def damaged(path: Path, what: str) -> DamagedLedgerError:
    return DamagedLedgerError(f"ledger {path} is damaged ({what}): replace it with the copy in a checkpoint")


@contextmanager
def named_errors(path: Path, run: Path | None = None) -> Iterator[None]:
    """Turn SQLite's errors into ours; `run`: the run directory, if it is not the file's folder."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise AssertionError(f"ledger {path} refuses a row: {error}") from error
    except sqlite3.Error as error:
        raise _named(error, path, run or path.parent) from error
    except UnicodeEncodeError as error:  # the row is at fault, not the file
        raise LedgerError(f"ledger {path} cannot hold a text: {error}; take such characters out of the data") from error
    except ValueError as error:  # undecodable text, or a malformed number
        raise damaged(path, str(error)) from error


@contextmanager
def closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _named(error: sqlite3.Error, path: Path, run: Path) -> LedgerError:
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:  # without the extended part, which tells the failed call
        case sqlite3.SQLITE_FULL:
            free = shutil.disk_usage(path.parent).free / 1e6
            return LedgerError(
                f"the disk of {path} is full ({free:.1f} MB free): free some space and run `sortedrl train --resume "
                f"{run}`"
            )
        case sqlite3.SQLITE_IOERR:
            free = shutil.disk_usage(path.parent).free / 1e6
            return LedgerError(
                f"the disk of {path} fails ({error}; {free:.1f} MB free): repair it and run `sortedrl train --resume "
                f"{run}`"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED | sqlite3.SQLITE_PROTOCOL:
            return LedgerError(f"ledger {path} is in use ({error}): stop the other process that writes it")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return LedgerError(
                f"ledger {path} cannot be written ({error}): make the file and its folder writable, or choose another "
                "folder with run.dir=PATH"
            )
        case sqlite3.SQLITE_NOTADB:
            return damaged(path, "it does not have the header of a ledger")
        case _:
            return damaged(path, str(error))


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def _has_known_version(path: Path) -> bool:
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    with suppress(sqlite3.Error, LedgerError), closing(sqlite3.connect(uri, uri=True)) as connection:
        return read_meta(path, connection)["schema_version"] in READABLE
    return False


def _check_whole(path: Path, connection: sqlite3.Connection) -> None:
    """Check all pages of a small file, and of any file that no row is missing. Blobs are checked when they are read."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    if num_pages * PAGE_BYTES <= QUICK_CHECK_BYTES:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise damaged(path, found)
    seq = read_meta(path, connection)["seq"]
    num_rows = sum(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in JOURNAL)  # noqa: S608
    if seq != str(num_rows):
        raise damaged(path, f"its last row is number {seq}, but it has {num_rows} rows")
