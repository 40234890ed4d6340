"""The store: an SQLite file with every change of the rollout buffer, from which a run can be resumed.

`Store` writes rows and reads them back. `DurableBuffer` is a buffer that writes a row for each change; the controller
uses it as any other buffer. Rows are collected and committed together. A commit survives a killed process; a durable
commit, which checkpoints ask for, also survives a power loss.

Guarantees: every change is a row, in order, numbered by one counter; the buffer and the file hold the same values to
the last bit, so a resumed run continues as if it had not stopped; an operation is committed as a whole or not at all;
no sample is trained twice; one process writes at a time.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from sortedrl.buffer import Buffer
from sortedrl.engine.base import OWN_NOISE
from sortedrl.errors import DamagedLedgerError, DataError, LedgerError
from sortedrl.ledger import schema
from sortedrl.ledger.compare import check_against_copy
from sortedrl.ledger.rows import Packed, PromptRow, fill, last_version, pack, pack_prompt, unpack_prompt
from sortedrl.ledger.schema import INSERT, JOURNAL, closed_on_error, named_errors
from sortedrl.records import IGNORED, CallRecord, Cohort, FinishReason, Mode, Prompt, Sample, Segment

COMMIT_ROWS = 20_000
COMMIT_BYTES = 8 * 1024**2
COMMIT_S = 1.0  # the next change after this time commits all pending rows
RUNNING = """
SELECT last.sample, last.attempt FROM samples
JOIN steps AS last ON last.seq = (SELECT max(seq) FROM steps WHERE sample = samples.id)
WHERE samples.id NOT IN (SELECT sample FROM trained) AND last.step = 'start' ORDER BY last.seq
"""
# Calls that happened, or may have happened, and whose results a cut at row ?1 drops: those with a row after it, and
# those of the turns that were under way when the file ends.
FORGOTTEN_CALLS = """
SELECT (SELECT count(*) FROM calls WHERE seq > ?1 AND repeated = 0) + (
    SELECT coalesce(sum(open.value), 0) FROM steps AS open WHERE open.step = 'call'
    AND NOT EXISTS (SELECT 1 FROM steps AS later WHERE later.sample = open.sample AND later.seq > open.seq)
    AND NOT EXISTS (SELECT 1 FROM calls WHERE calls.sample = open.sample AND calls.seq > open.seq AND repeated = 0)
)
"""
LIVE_CALLS = """
WITH written AS (
    SELECT sample, max(seq) AS seq FROM segments WHERE num_tokens > verified
    AND sample IN (SELECT sample FROM calls) AND sample NOT IN (SELECT sample FROM trained) GROUP BY sample
)
SELECT calls.sample, turn, idx, error, state, calls.seq > coalesce(written.seq, 0)
FROM calls LEFT JOIN written ON written.sample = calls.sample
WHERE repeated = 0 AND error != ? AND calls.sample NOT IN (SELECT sample FROM trained) ORDER BY calls.seq
"""
FORGOTTEN_REPEATS = "SELECT count(*) FROM calls WHERE seq > ?1 AND repeated = 1"
COUNT_FORGOTTEN = "INSERT INTO meta VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = value + ?2"


class Store:
    """A ledger file that this process writes. `create`, `open` and `reopen` make one."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        meta = schema.read_meta(path, connection)
        self.path = path
        self.grouped = meta["grouped"] == "1"
        self.knobs: dict[str, Any] = json.loads(meta["knobs"])
        self.noise: str = meta.get("noise", schema.FIRST_NOISE)  # the scheme that drew the tokens
        self.lineage: int | None = None  # of this process; None until `begin_lineage`
        self.seconds = 0.0  # time spent in this store so far
        self._connection = connection
        self._seq = int(meta["seq"])
        self._pending: dict[str, list[tuple[Any, ...]]] = {table: [] for table in JOURNAL}
        self._num_pending = self._num_bytes = 0
        self._committed_at = perf_counter()
        self._prompts = self._read_prompts()

    @classmethod
    def create(cls, path: str | Path, *, grouped: bool, knobs: Mapping[str, Any], noise: str = OWN_NOISE) -> Store:
        """Create a ledger without rows, and begin lineage 0. `noise`: the scheme of the engine's sampling noise."""
        path, began = Path(path), perf_counter()
        meta = {"grouped": str(int(grouped)), "knobs": json.dumps(dict(knobs)), "noise": noise}
        connection = schema.create_file(path, meta)
        with named_errors(path), closed_on_error(connection):
            schema.use_wal(path, connection)
            store = cls(path, connection)
            store.begin_lineage()
        store.seconds = perf_counter() - began
        return store

    @classmethod
    def open(cls, path: str | Path, *, copy: Path | None = None) -> Store:
        """Open an existing ledger. Before the first change, call `truncate` if needed, then `begin_lineage`.

        `copy`: as for `schema.open_file`.
        """
        path, began = Path(path), perf_counter()
        connection = schema.open_file(path, copy=copy)
        with named_errors(path), closed_on_error(connection):
            store = cls(path, connection)
        store.seconds = perf_counter() - began
        return store

    @classmethod
    def reopen(
        cls,
        path: str | Path,
        seq: int,
        changes: Mapping[str, tuple[Any, Any]] | None = None,
        *,
        copy: Path | None = None,
    ) -> tuple[Store, DurableBuffer]:
        """Open a ledger, delete the rows after `seq`, and begin a lineage; returns the store and the restored buffer.

        `changes`: as for `begin_lineage`. `copy`: a copy that a checkpoint made at row `seq`, with which the ledger is
        compared. A damaged ledger raises `DamagedLedgerError` before the lineage begins, and the file is closed again.
        """
        store = cls.open(path, copy=copy)
        try:
            if copy is not None:
                with store._timed():
                    check_against_copy(store._connection, store.path, copy, seq)
            store.truncate(seq)
            buffer = store.restore()  # before `begin_lineage`: reading the samples is what finds damage in them
            store.begin_lineage(changes)
        except BaseException:
            store.close(commit=False)
            raise
        return store, buffer

    @property
    def seq(self) -> int:
        """Number of the last row, committed or not. Between two calls of the buffer, `truncate` can return to it."""
        return self._seq

    @property
    def num_updates(self) -> int:
        """Number of update batches in the file."""
        return self._connection.execute("SELECT count(*) FROM updates").fetchone()[0]

    def seq_of_update(self, number: int) -> int | None:
        """Number of the last row of an update batch, to which `truncate` can return; None if the file lacks it."""
        return self._connection.execute("SELECT max(seq) FROM trained WHERE number = ?", (number,)).fetchone()[0]

    def trained_prompts(self) -> dict[str, int]:
        """The prompts of trained samples in the file, each with its last sample."""
        query = "SELECT prompt, max(id) FROM samples JOIN trained ON trained.sample = samples.id GROUP BY prompt"
        return dict(self._connection.execute(query))

    def commit(self, durable: bool = False) -> None:
        """Write the pending rows as one transaction. If it fails, they stay pending and can be committed again."""
        if not self._num_pending and not durable:
            return
        assert self.lineage is not None, "call begin_lineage before the first commit"
        with self._timed(), self._transaction(durable=durable) as connection:
            self._check_single_writer()
            for table, rows in self._pending.items():
                if rows:
                    connection.executemany(INSERT[table], rows)
            self._write_seq(self._seq)
        for rows in self._pending.values():
            rows.clear()
        self._num_pending = self._num_bytes = 0
        self._committed_at = perf_counter()

    def begin_lineage(self, changes: Mapping[str, tuple[Any, Any]] | None = None) -> int:
        """Let this process write after the last row, under a new lineage number, which it returns.

        Attempts that an earlier process left running have ended: each gets a `cut` row. `changes` are the settings that
        this process changes, by key: the value before and the value now.
        """
        assert not self._num_pending, "commit the pending rows before a lineage begins"
        with self._timed(), self._transaction(durable=True) as connection:
            (last,) = connection.execute("SELECT max(lineage) FROM lineages").fetchone()
            lineage = 0 if last is None else last + 1
            begun = (lineage, self._seq, last_version(connection))
            connection.execute("INSERT INTO lineages VALUES (?, ?, ?)", begun)
            connection.executemany(
                "INSERT INTO changes VALUES (?, ?, ?, ?)",
                [(lineage, key, json.dumps(old), json.dumps(new)) for key, (old, new) in (changes or {}).items()],
            )
            running = connection.execute(RUNNING).fetchall()
            cuts = [(seq, *attempt, "cut", None) for seq, attempt in enumerate(running, start=self._seq + 1)]
            connection.executemany(INSERT["steps"], cuts)
            self._write_seq(self._seq + len(cuts))
        self._seq += len(cuts)
        self.lineage = lineage
        return lineage

    def truncate(self, seq: int) -> None:
        """Delete every row after number `seq`. Buffers restored before are void: call `restore` for a new one.

        The tool calls that are made again because of it are counted in the file.
        """
        self.commit()
        if not 0 <= seq <= self._seq:
            raise DamagedLedgerError(
                f"ledger {self.path} ends with row {self._seq}, but the checkpoint was made at row {seq}: replace it "
                "with the copy in the checkpoint"
            )
        with self._timed():
            with self._transaction() as connection:
                for key, query in (("forgotten_calls", FORGOTTEN_CALLS), ("forgotten_repeats", FORGOTTEN_REPEATS)):
                    (forgotten,) = connection.execute(query, (seq,)).fetchone()
                    connection.execute(COUNT_FORGOTTEN, (key, str(forgotten)))
                for table in JOURNAL:
                    connection.execute(f"DELETE FROM {table} WHERE seq > ?", (seq,))  # noqa: S608
                self._write_seq(seq)
            self._seq = seq
            self._prompts = self._read_prompts()

    def restore(self) -> DurableBuffer:
        """The buffer as of the last row, with running samples as pending. Reads no tokens of trained samples."""
        self.commit()
        buffer = DurableBuffer(self)
        with self._timed():
            fill(buffer, self.path, self._connection)
        return buffer

    def snapshot(self, path: str | Path) -> None:
        """Copy the ledger to `path`: all rows, but without the tokens of trained samples.

        The caller syncs the copy to disk, and deletes it if this call fails.
        """
        self.commit()
        began = perf_counter()
        try:
            schema.copy_file(self._connection, Path(path), run=self.path.parent)
        finally:
            self.seconds += perf_counter() - began

    def close(self, *, commit: bool = True) -> None:
        """Commit the pending rows, unless `commit` is false, and close the file: a copy of it alone is complete."""
        try:
            if commit:
                self.commit()
        finally:
            schema.fold_log(self._connection)
            self._connection.close()

    # ---- rows from the buffer ---------------------------------------------------------------------------------------

    def add_step(self, sample: Sample, step: str, value: object = None) -> None:
        began = perf_counter()
        self._add("steps", sample.id, sample.attempt, step, value)
        self._commit_if_due(began)

    def add_segment(
        self, sample: Sample, packed: Packed, *, start: int, verified: int, version: int, slot_s: float
    ) -> None:
        began = perf_counter()
        self._add("segments", sample.id, sample.attempt, start, verified, version, slot_s, *packed)
        self._num_bytes += 8 * packed.num_tokens
        self._commit_if_due(began)

    def add_feed(self, sample: Sample, packed: Packed, *, start: int, version: int) -> None:
        """Add two rows: the feed step, and the tokens that were fed."""
        began = perf_counter()
        self._add("steps", sample.id, sample.attempt, "feed", packed.num_tokens)
        self._add("segments", sample.id, sample.attempt, start, 0, version, 0.0, *packed)
        self._num_bytes += 8 * packed.num_tokens
        self._commit_if_due(began)

    def add_calls(self, sample: Sample, turn: int, calls: Sequence[CallRecord]) -> None:
        """Add a row for each call of a turn."""
        began, place = perf_counter(), 0
        for call in calls:
            index = -1 if call.is_repeated else place
            place += not call.is_repeated
            made = (call.tool, call.arguments, call.digest, call.num_chars, call.error, call.seconds)
            self._add("calls", sample.id, sample.attempt, turn, index, *made, int(call.is_repeated), call.state)
            self._num_bytes += len(call.arguments) + len(call.state or "")
        self._commit_if_due(began)

    def live_calls(self) -> list[tuple[int, int, int, str, str | None, int]]:
        """Sample, turn, index, error and state of the calls of samples that are not trained, in order.

        The last number tells whether the sample got no new token after the call.
        """
        self.commit()
        return self._connection.execute(LIVE_CALLS, (IGNORED,)).fetchall()

    def add_cohort(self, cohort: Cohort, samples: Sequence[Sample], prompts: Mapping[str, PromptRow]) -> None:
        """`prompts`: the rows that `pack_prompts` returned, which the file lacks."""
        began = perf_counter()
        self._add("cohorts", cohort.id, cohort.loaded_update, cohort.num_samples)
        for prompt_id, row in prompts.items():
            self._add("prompts", prompt_id, *row)
            self._prompts[prompt_id] = row.crc
            self._num_bytes += len(row.tokens) + len(row.content) + len(row.columns)
        for s in samples:
            self._add("samples", s.id, s.cohort, s.prompt.id, s.epoch, s.index, s.seed, s.budget)
        self._commit_if_due(began)

    def add_batch(self, number: int, version: int, batch: Sequence[Sample]) -> None:
        """Add an update batch and commit at once: after a crash, the file shows that the update had begun."""
        began = perf_counter()
        self._add("updates", number, version, len(batch))
        for s in batch:
            self._add("trained", s.id, number, version, s.num_tokens, s.reward, s.staleness(version))
        self.seconds += perf_counter() - began
        self.commit()

    def add_version(self, version: int) -> None:
        began = perf_counter()
        self._add("versions", version, self.lineage)
        self._commit_if_due(began)

    def pack_tokens(self, tokens: list[int], logprobs: list[float]) -> tuple[Packed, list[float]]:
        began = perf_counter()
        packed = pack(tokens, logprobs)
        self.seconds += perf_counter() - began
        return packed

    def pack_prompts(self, samples: Iterable[Sample]) -> tuple[dict[str, PromptRow], dict[int, Prompt]]:
        """Rows for the prompts that the file lacks; and each prompt as the file returns it, by `id()` of the given."""
        began = perf_counter()
        rows: dict[str, PromptRow] = {}
        kept: dict[int, Prompt] = {}
        for prompt in {id(sample.prompt): sample.prompt for sample in samples}.values():
            row = pack_prompt(prompt)
            known = rows[prompt.id].crc if prompt.id in rows else self._prompts.get(prompt.id)
            if known is None:
                rows[prompt.id] = row
            elif known != row.crc:
                raise DataError(f"two different prompts have the id {prompt.id!r}: give each prompt a unique id")
            kept[id(prompt)] = unpack_prompt(prompt.id, row)
        self.seconds += perf_counter() - began
        return rows, kept

    # ---- pending rows and transactions ------------------------------------------------------------------------------

    def _add(self, table: str, *row: object) -> None:
        assert self.lineage is not None, "call begin_lineage before the first change"
        self._seq += 1
        self._num_pending += 1
        self._pending[table].append((self._seq, *row))

    def _commit_if_due(self, began: float) -> None:
        """Commit if enough is pending. Called only after a complete operation."""
        now = perf_counter()
        self.seconds += now - began
        is_large = self._num_pending >= COMMIT_ROWS or self._num_bytes >= COMMIT_BYTES
        if is_large or now - self._committed_at >= COMMIT_S:
            self.commit()

    def _check_single_writer(self) -> None:
        (last,) = self._connection.execute("SELECT max(lineage) FROM lineages").fetchone()
        if last != self.lineage:
            raise LedgerError(
                f"another process writes ledger {self.path} (it has lineage {last}, this process {self.lineage}): stop "
                "one of the two"
            )

    def _write_seq(self, seq: int) -> None:
        self._connection.execute("UPDATE meta SET value = ? WHERE key = 'seq'", (str(seq),))

    def _read_prompts(self) -> dict[str, int]:
        return dict(self._connection.execute("SELECT id, crc FROM prompts"))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = perf_counter()
        try:
            with named_errors(self.path):
                yield
        finally:
            self.seconds += perf_counter() - began

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            if durable:  # SQLite syncs only commits that change something
                connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'num_durable'")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


class DurableBuffer(Buffer):
    """A buffer that writes each change to a store. `Store.restore` makes it, also from an empty ledger.

    It holds log-probs with the file's precision (float32) and prompts as JSON returns them, so that decisions and
    training do not depend on whether the run was resumed in between.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(grouped=store.grouped)
        self.store = store

    def load(self, samples: Sequence[Sample]) -> Cohort:
        rows, prompts = self.store.pack_prompts(samples)
        for sample in samples:
            assert -(2**63) <= sample.seed < 2**63, f"sample {sample.id} has a seed of more than 64 bits"
            sample.prompt = prompts[id(sample.prompt)]
        cohort = super().load(samples)
        self.store.add_cohort(cohort, samples, rows)
        return cohort

    def start(self, sample: Sample) -> None:
        super().start(sample)
        self.store.add_step(sample, "start")

    def append(self, sample: Sample, segment: Segment, *, start: int, verified: int = 0) -> int:
        packed, logprobs = self.store.pack_tokens(segment.tokens, segment.logprobs)
        # The row has the slot time of this delivery alone: the buffer adds that of verified tokens to its own copy.
        version, slot_s = segment.version, float(segment.slot_s)
        kept = Segment(version, segment.tokens, logprobs, slot_s)
        discarded = super().append(sample, kept, start=start, verified=verified)
        self.store.add_segment(sample, packed, start=start, verified=verified, version=version, slot_s=slot_s)
        return discarded

    def extend(self, sample: Sample, segments: Sequence[Segment], *, start: int) -> None:
        for segment in segments:
            self.append(sample, segment, start=start)
            start += len(segment.tokens)

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        super().finish(sample, reason)
        self.store.add_step(sample, "finish", reason.value)

    def interrupt(self, sample: Sample) -> None:
        super().interrupt(sample)
        self.store.add_step(sample, "interrupt")

    def fail(self, sample: Sample) -> None:
        super().fail(sample)
        self.store.add_step(sample, "fail")

    def give_up(self, sample: Sample) -> int:
        discarded = super().give_up(sample)
        self.store.add_step(sample, "give-up")
        return discarded

    def feed(self, sample: Sample, tokens: Sequence[int]) -> None:
        start = sample.num_tokens
        packed, _ = self.store.pack_tokens(list(tokens), [0.0] * len(tokens))
        super().feed(sample, tokens)
        self.store.add_feed(sample, packed, start=start, version=self.version)

    def call(self, sample: Sample, num_calls: int) -> None:
        super().call(sample, num_calls)
        self.store.add_step(sample, "call", num_calls)

    def record_calls(self, sample: Sample, turn: int, calls: Sequence[CallRecord]) -> None:
        super().record_calls(sample, turn, calls)
        self.store.add_calls(sample, turn, calls)

    def announce_calls(self, sample: Sample, turn: int, calls: Sequence[CallRecord]) -> None:
        self.store.add_calls(sample, turn, calls)
        self.store.commit()  # before the calls are made, so that a kill leaves none uncounted

    def score(self, sample_id: int, attempt: int, reward: float) -> Sample | None:
        reward = float(reward)
        sample = super().score(sample_id, attempt, reward)
        if sample is not None:
            self.store.add_step(sample, "score", reward)
        return sample

    def requeue(self, sample: Sample, mode: Mode) -> int:
        discarded = super().requeue(sample, mode)
        self.store.add_step(sample, "requeue", mode.value)
        return discarded

    def take(self, samples: Iterable[Sample]) -> list[Sample]:
        batch = super().take(samples)
        self.store.add_batch(self.num_updates - 1, self.version, batch)
        return batch

    def publish(self, version: int) -> None:
        super().publish(version)
        self.store.add_version(version)
