"""Read a ledger file: the state of every sample of a run, how long samples wait, and how often the run was resumed.

`sortedrl ledger` shows the overview; `sample_history.py` and `verify.py` read through `Ledger`. `store.py` writes the
file and `schema.py` defines its tables.

Guarantees: the file is opened read-only and never changed; all reads see one moment, because they share a transaction,
also while a run writes or after a killed run left its write-ahead log; every SQLite error becomes a `LedgerError`.
"""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sortedrl.errors import LedgerError
from sortedrl.ledger.schema import APPLICATION_ID, BUSY_S, FIRST_NOISE, JOURNAL, READABLE, SCHEMA_VERSION
from sortedrl.records import State

FILE_NAME = "ledger.sqlite"

# The state of a sample after each step.
STATE_AFTER: Mapping[str, State] = {
    "start": State.RUNNING,
    "finish": State.FINISHED,
    "interrupt": State.PENDING,
    "fail": State.PENDING,
    "give-up": State.FINISHED,
    "call": State.CALLING,
    "feed": State.PENDING,
    "score": State.SCORED,
    "requeue": State.PENDING,
    "cut": State.PENDING,
}

# The rows that put tokens into a sample, or take all of them away.
_HOLDINGS = """
SELECT seq, start, num_tokens, version FROM segments WHERE sample = ?1
UNION ALL SELECT seq, 0, 0, 0 FROM steps
    WHERE sample = ?1 AND (step = 'give-up' OR step = 'requeue' AND value = 'fresh')
ORDER BY seq
"""


@dataclass(slots=True, kw_only=True, frozen=True)
class SettingChange:
    """A setting that a process changed when it resumed the run. Values are JSON."""

    key: str
    old_value: str
    new_value: str

    def __str__(self) -> str:
        return f"{self.key} {self.old_value} -> {self.new_value}"


@dataclass(slots=True, kw_only=True, frozen=True)
class Lineage:
    """The rows that one process wrote: it continued after row `cut_seq`, with the weights of `version`."""

    lineage: int
    cut_seq: int
    version: int
    changes: tuple[SettingChange, ...] = ()


@dataclass(slots=True, kw_only=True)
class CohortCounts:
    id: int
    loaded_update: int  # updates taken before it was loaded
    num_samples: int
    by_state: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))


@dataclass(slots=True, kw_only=True, frozen=True)
class Waiting:
    """The oldest sample that is not trained."""

    sample: int
    cohort: int
    state: State
    since_update: int
    num_tokens: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Overview:
    """Counts of all samples by state, and of the run's updates and resumes."""

    seq: int  # the last row
    version: int
    num_updates: int
    num_loaded: int
    num_cohorts: int
    by_state: Mapping[State, int]
    cohorts: list[CohortCounts]  # those with samples left
    oldest: Waiting | None
    staleness: Mapping[int, int]  # number of trained samples by staleness
    lineages: list[Lineage]


class StoredAnswer:
    """The tokens that a sample holds, as runs of one version each: (version, length)."""

    __slots__ = ("num_tokens", "runs")

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        self.num_tokens = 0

    def put(self, start: int, num_tokens: int, version: int) -> None:
        """Put tokens at `start`; they replace all tokens from there on."""
        self.cut(start)
        self.num_tokens += num_tokens
        if num_tokens and self.runs and self.runs[-1][0] == version:
            num_tokens += self.runs.pop()[1]
        if num_tokens:
            self.runs.append((version, num_tokens))

    def cut(self, length: int) -> None:
        """Keep at most the first `length` tokens."""
        while self.num_tokens > length:
            version, last = self.runs.pop()
            self.num_tokens -= last
            if self.num_tokens < length:
                self.runs.append((version, length - self.num_tokens))
                self.num_tokens = length

    @property
    def oldest_version(self) -> int | None:
        return min((version for version, _ in self.runs), default=None)


class Ledger:
    """A ledger file open for reading, used in a `with` statement. `path`: a run directory, or the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path / FILE_NAME if path.is_dir() else path
        if not self.path.is_file():
            raise LedgerError(f"no ledger at {self.path}: give a run directory that has a {FILE_NAME}")
        with self.reading():
            self.connection = _connect(self.path)
        try:
            self._read_frame()
        except BaseException:
            self.connection.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise LedgerError(
                f"cannot read {self.path}: {error}; if it is a ledger, it is damaged: use the copy in a checkpoint"
            ) from error

    def rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        with self.reading():
            yield from self.connection.execute(query, values)

    def one(self, query: str, *values: object) -> Any:
        """The first value of a query's first row."""
        return next(self.rows(query, *values))[0]

    @property
    def grouped(self) -> bool:
        return self.meta.get("grouped") == "1"

    @property
    def noise(self) -> str:
        """The scheme of the sampling noise that drew all tokens."""
        return self.meta.get("noise", FIRST_NOISE)

    @property
    def has_calls(self) -> bool:
        """Whether the file has a table of tool calls; older ones have none."""
        return self.meta.get("schema_version") != "1"

    @property
    def seq(self) -> int:
        """Number of the last row."""
        tables = [table for table in JOURNAL if table != "calls" or self.has_calls]
        return max(self.one(f"SELECT coalesce(max(seq), 0) FROM {table}") for table in tables)  # noqa: S608  # ours

    @property
    def first_version(self) -> int:
        return self.lineages[0].version if self.lineages else 0

    @property
    def cuts(self) -> list[Lineage]:
        """The lineages that left rows in the file, in the order of rows.

        A lineage is left out if a later one deleted all its rows by continuing from an earlier row.
        """
        kept: list[Lineage] = []
        for lineage in reversed(self.lineages):
            if not kept or lineage.cut_seq <= kept[-1].cut_seq:
                kept.append(lineage)
        return kept[::-1]

    def version_at(self, seq: int) -> int:
        """The version published last before row `seq` was written."""
        count = bisect_right(self._published, (seq, float("inf")))
        return self._published[count - 1][1] if count else self.first_version

    def overview(self) -> Overview:
        query = "SELECT id, loaded_update, num_samples FROM cohorts ORDER BY id"
        cohorts = {id: CohortCounts(id=id, loaded_update=at, num_samples=n) for id, at, n in self.rows(query)}
        lost = CohortCounts(id=-1, loaded_update=0, num_samples=0)  # samples whose cohort is missing, in a broken file
        query = "SELECT cohort, count(*) FROM trained JOIN samples ON id = sample GROUP BY cohort"
        for cohort, count in self.rows(query):
            cohorts.get(cohort, lost).by_state[State.TRAINED] += count
        oldest: tuple[int, int, int, State] | None = None
        for sample, cohort, state in self.live():
            counts = cohorts.get(cohort, lost)
            counts.by_state[state] += 1
            this = (counts.loaded_update, sample, cohort, state)
            oldest = this if oldest is None else min(oldest, this)
        by_state = {state: sum(c.by_state[state] for c in (*cohorts.values(), lost)) for state in State}
        seq = self.seq
        return Overview(
            seq=seq,
            version=self.version_at(seq),
            num_updates=self.one("SELECT count(*) FROM updates"),
            num_loaded=self.one("SELECT count(*) FROM samples"),
            num_cohorts=len(cohorts),
            by_state=by_state,
            cohorts=[c for c in cohorts.values() if c.by_state[State.TRAINED] < c.num_samples],
            oldest=None if oldest is None else self._waiting(*oldest),
            staleness=dict(self.rows("SELECT staleness, count(*) FROM trained GROUP BY staleness ORDER BY staleness")),
            lineages=self.lineages,
        )

    def live(self) -> Iterator[tuple[int, int, State]]:
        """Id, cohort and state of every sample that is not trained."""
        query = (
            "SELECT id, cohort, step FROM samples LEFT JOIN steps "
            "ON steps.seq = (SELECT max(seq) FROM steps WHERE sample = samples.id) "
            "WHERE id NOT IN (SELECT sample FROM trained) ORDER BY id"
        )
        for sample, cohort, step in self.rows(query):
            yield sample, cohort, STATE_AFTER.get(step, State.PENDING)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _read_frame(self) -> None:
        """Check the file and read its settings, lineages and published versions."""
        with self.reading():
            self.connection.execute("BEGIN")  # all later reads see this moment
            application = self.connection.execute("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION_ID:
            raise LedgerError(f"{self.path} is a database but no ledger: give a run directory")
        self.meta: dict[str, str] = dict(self.rows("SELECT key, value FROM meta"))
        found = self.meta.get("schema_version")
        if found not in READABLE:
            raise LedgerError(
                f"{self.path} has schema version {found!r}, this sortedrl reads 1 to {SCHEMA_VERSION}: use the version "
                "that wrote it"
            )
        self.knobs = _knobs(self.path, self.meta.get("knobs", "{}"))
        self.changes = self._read_changes()
        query = "SELECT lineage, cut_seq, version FROM lineages ORDER BY lineage"
        self.lineages = [
            Lineage(lineage=number, cut_seq=at, version=version, changes=tuple(self.changes.get(number, ())))
            for number, at, version in self.rows(query)
        ]
        self._published: list[tuple[int, int]] = list(self.rows("SELECT seq, version FROM versions ORDER BY seq"))

    def _read_changes(self) -> dict[int, list[SettingChange]]:
        """Changed settings by lineage. A ledger of an older version has no table of them."""
        changes: dict[int, list[SettingChange]] = {}
        if self.one("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'changes'"):
            query = "SELECT lineage, key, old_value, new_value FROM changes ORDER BY lineage, key"
            for number, key, old, new in self.rows(query):
                changes.setdefault(number, []).append(SettingChange(key=key, old_value=old, new_value=new))
        return changes

    def _waiting(self, since: int, sample: int, cohort: int, state: State) -> Waiting:
        answer = StoredAnswer()
        for _, start, num_tokens, version in self.rows(_HOLDINGS, sample):
            answer.put(start, num_tokens, version)
        return Waiting(sample=sample, cohort=cohort, state=state, since_update=since, num_tokens=answer.num_tokens)


def _connect(path: Path) -> sqlite3.Connection:
    """Open read-only, with the write-ahead log of a running or killed process if there is one."""
    uri = path.absolute().as_uri()
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
        return connection
    except sqlite3.Error as error:
        connection.close()
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    # SQLite cannot create the index of the log here. A file without a log needs none, and is opened as immutable.
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        raise LedgerError(
            f"{path} cannot be read in a read-only folder, because {log.name} belongs to it: copy both to "
            "a writable folder"
        )
    return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)


def _knobs(path: Path, text: str) -> Mapping[str, Any]:
    """Parse the schedule's settings; each bound must be a number, or null for no bound."""
    try:
        knobs = json.loads(text)
    except ValueError:
        knobs = None
    bounds = ("cohort_batches", "lookahead", "max_staleness")
    if not isinstance(knobs, dict) or not all(isinstance(knobs.get(name), int | None) for name in bounds):
        raise LedgerError(f"{path}: its schedule settings are damaged: use the copy in a checkpoint")
    return knobs
