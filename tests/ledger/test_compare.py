"""A ledger is compared with the copy in a checkpoint: one changed value in any table is found, later rows are not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from sortedrl.errors import DamagedLedgerError, LedgerError
from sortedrl.ledger.compare import is_as_copied
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.schema import JOURNAL
from sortedrl.ledger.store import Store
from sortedrl.records import CallRecord, FinishReason, Mode, Segment
from sortedrl.run.save_and_resume import _reopen_ledger
from tests.ledger.test_store import make_sample


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, int]:
    """A ledger with rows in every table, a copy of it from before its last rows, and the copy's last row number."""
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    Store.create(path, grouped=False, knobs={"lookahead": 0}).close()
    store, buffer = Store.reopen(path, 0, {"learner.lr": (1e-4, 1e-5)})
    buffer.load([make_sample(number) for number in range(3)])
    first, second, third = buffer.samples.values()
    for sample in (first, second, third):
        buffer.start(sample)
        buffer.append(sample, Segment(0, [1, 2, 3], [-0.1, -0.2, -0.3]), start=0)
    buffer.finish(first, FinishReason.STOP)
    buffer.score(first.id, first.attempt, 0.5)
    buffer.take([first])
    buffer.publish(1)
    buffer.finish(second, FinishReason.STOP)
    buffer.call(second, 1)
    call = CallRecord(tool="add", arguments="{}", digest="00", num_chars=1, error="", seconds=0.1)
    buffer.record_calls(second, 0, [call])
    seq = store.seq
    store.snapshot(copy)
    buffer.interrupt(third)
    buffer.requeue(third, Mode.REPLAY)
    store.close()
    return path, copy, seq


def edit(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute(statement).rowcount == 1
    connection.commit()
    connection.close()


def test_rows_after_the_copy_and_tokens_that_it_lacks_are_no_damage(files: tuple[Path, Path, int]) -> None:
    path, copy, seq = files
    tables = dict.fromkeys(JOURNAL, 0)
    connection = sqlite3.connect(copy)
    for table in tables:
        tables[table] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    assert connection.execute("SELECT count(*) FROM segments WHERE tokens IS NULL").fetchone()[0] == 1
    connection.close()
    assert min(tables.values()) > 0, f"a table of the copy is empty, so nothing of it is compared: {tables}"
    assert is_as_copied(path, copy, seq)
    store, buffer = Store.reopen(path, seq, copy=copy)
    assert len(buffer.samples) == 2
    store.close()
    assert is_as_copied(path, copy, seq), "a lineage more is no damage"


@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ("UPDATE samples SET budget = budget + 1 WHERE id = 2", "table samples .* at id 2"),
        ("UPDATE samples SET seq = seq + 4096 WHERE id = 1", "table samples .* at id 1"),
        ("UPDATE trained SET reward = -0.5", "table trained .* at sample 0"),
        ("UPDATE trained SET sample = 64", "table trained .* at sample 0"),
        ("UPDATE steps SET value = 0.25 WHERE step = 'score'", "table steps .* at seq"),
        ("UPDATE steps SET value = NULL WHERE step = 'score'", "table steps .* at seq"),
        ("UPDATE segments SET slot_s = 1.5 WHERE sample = 1", "table segments .* at seq"),
        ("UPDATE segments SET crc = crc + 1 WHERE sample = 0", "table segments .* at seq"),
        ("UPDATE prompts SET crc = crc + 1 WHERE id = (SELECT max(id) FROM prompts)", "table prompts .* at seq"),
        ("UPDATE cohorts SET loaded_update = 1", "table cohorts .* at seq"),
        ("UPDATE updates SET version = 3", "table updates .* at seq"),
        ("UPDATE versions SET lineage = 9", "table versions .* at seq"),
        ("UPDATE calls SET seconds = 9.0", "table calls .* at seq"),
        ("UPDATE lineages SET version = 7 WHERE lineage = 0", "table lineages lacks a row"),
        ("UPDATE changes SET new_value = '1e-3'", "table changes lacks a row"),
        ("UPDATE meta SET value = '1' WHERE key = 'grouped'", "its grouped differ"),
        ("UPDATE meta SET value = 'other' WHERE key = 'noise'", "its noise differ"),
        ("UPDATE meta SET value = '7' WHERE key = 'schema_version'", "its schema version 7 is not that of the copy"),
    ],
)
def test_one_changed_value_is_found(files: tuple[Path, Path, int], statement: str, place: str) -> None:
    path, copy, seq = files
    edit(path, statement)
    assert not is_as_copied(path, copy, seq)
    before = path.read_bytes()
    with pytest.raises(DamagedLedgerError, match=rf"is damaged \({place}"):
        Store.reopen(path, seq, copy=copy)
    assert path.read_bytes() == before, "a damaged ledger is left for inspection as it was"


def test_a_resume_takes_the_copy_of_a_ledger_whose_schema_version_is_unknown(files: tuple[Path, Path, int]) -> None:
    path, copy, seq = files
    edit(path, "UPDATE meta SET value = '7' WHERE key = 'schema_version'")
    store, buffer = _reopen_ledger(path, copy, seq, {})
    store.close()
    assert list(buffer.samples) == [1, 2]
    assert path.with_name("ledger.sqlite.damaged1").is_file()
    with Ledger(path) as ledger:
        assert ledger.meta["schema_version"] == "3"


def test_a_ledger_and_a_copy_of_a_later_version_are_left_to_that_version(files: tuple[Path, Path, int]) -> None:
    path, copy, seq = files
    for file in (path, copy):
        edit(file, "UPDATE meta SET value = '7' WHERE key = 'schema_version'")
    with pytest.raises(LedgerError, match="has schema version 7, this sortedrl knows 1 to 3") as caught:
        Store.reopen(path, seq, copy=copy)
    assert not isinstance(caught.value, DamagedLedgerError)


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_schema_version_that_is_older_than_that_of_the_copy_is_mended(
    files: tuple[Path, Path, int], version: str
) -> None:
    path, copy, seq = files
    edit(path, f"UPDATE meta SET value = '{version}' WHERE key = 'schema_version'")
    assert not is_as_copied(path, copy, seq), "a complete run with such a ledger is resumed"
    Store.reopen(path, seq, copy=copy)[0].close()
    assert is_as_copied(path, copy, seq)


def test_a_ledger_that_is_gone_or_no_database_is_not_as_copied(files: tuple[Path, Path, int]) -> None:
    path, copy, seq = files
    path.write_bytes(b"damaged")
    assert not is_as_copied(path, copy, seq)
    path.unlink()
    assert not is_as_copied(path, copy, seq)
    assert not path.exists()
