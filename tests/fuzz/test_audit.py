"""The fuzzer's auditor: a sound ledger has no findings, and each kind of wrong row is found."""

from __future__ import annotations

import pytest

from fuzz.audit import audit
from fuzz.finding import Finding, FindingKind
from tests.support.ledgers import write_good, writing


def test_a_sound_ledger_has_no_findings(tmp_path):
    assert audit(write_good(tmp_path / "ledger.sqlite"), is_complete=False) == []


# What is changed in the sound ledger of tests/support/ledgers.py, and what the auditor must say.
WRONG = {
    "a sample trained twice by moving a row": ("UPDATE trained SET sample = 99 WHERE sample = 0", "never loaded"),
    "a row trained under two ids": ("UPDATE samples SET prompt = 'a' WHERE id IN (2, 3)", "trained twice"),
    "a row loaded under two ids": ("UPDATE samples SET epoch = 0 WHERE id = 4", "loaded twice"),
    "training without any step": ("DELETE FROM steps WHERE sample = 2", "something else than a score"),
    "a trained row lost": ("DELETE FROM trained WHERE sample = 1", "another number of samples"),
    "a row lost": ("DELETE FROM steps WHERE seq = 20", "rows 1 to 52"),
    "another reward": ("UPDATE trained SET reward = 0.75 WHERE sample = 2", "another reward"),
    "a wrong staleness": ("UPDATE trained SET staleness = 0 WHERE sample = 2", "laid out 3, 1"),
    "a wrong length": ("UPDATE trained SET length = 5 WHERE sample = 3", "laid out 4, 0"),
    "an answer past the bound": (
        """UPDATE meta SET value = '{"max_staleness": 0, "lookahead": null}' WHERE key = 'knobs'""", "0 is the bound"
    ),
    "a cohort that is late": ("UPDATE cohorts SET loaded_update = -2 WHERE id = 0", "past their 2 updates"),
    "tokens past the budget": ("UPDATE samples SET budget = 3 WHERE id = 3", "past the budget"),
    "tokens from the future": ("UPDATE segments SET version = 7 WHERE seq = 46", "did not exist"),
    "siblings apart": ("UPDATE samples SET prompt = 'b' WHERE id = 1", "siblings in different updates"),
    "training without a score": ("UPDATE steps SET step = 'finish' WHERE seq = 18", "something else than a score"),
    "a step after training": ("UPDATE steps SET sample = 0 WHERE seq = 51", "a step after training"),
    "a feed without a call": ("UPDATE steps SET step = 'feed' WHERE seq = 18", "fed by no tool"),
    "a call that left no row": (
        "UPDATE steps SET step = iif(seq = 17, 'call', 'feed'), value = 2 WHERE seq IN (17, 19)", "number of calls"
    ),
    "a batch of an old version": ("UPDATE updates SET version = 0 WHERE number = 1", "another version than its"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_row_is_found(tmp_path, name):
    statement, says = WRONG[name]
    path = write_good(tmp_path / "ledger.sqlite")
    with writing(path) as connection:
        connection.execute(statement)
    found = audit(path, is_complete=False)
    assert any(says in finding.text for finding in found), found


def test_a_complete_run_must_have_trained_everything(tmp_path):
    path = write_good(tmp_path / "ledger.sqlite")
    missing = Finding(FindingKind.LOST, "6 samples were loaded and 4 trained")
    assert audit(path, is_complete=True) == [missing]
    too_few = Finding(FindingKind.LOST, "4 samples were trained, and 8 were asked for")
    assert audit(path, is_complete=True, num_samples=8) == [missing, too_few]


def test_no_more_may_be_trained_than_was_asked_for(tmp_path):
    found = audit(write_good(tmp_path / "ledger.sqlite"), is_complete=False, num_samples=3)
    assert found == [Finding(FindingKind.LEDGER, "4 samples were trained, and only 3 were asked for")]


def test_siblings_are_those_of_one_epoch(tmp_path):
    path = write_good(tmp_path / "ledger.sqlite")
    with writing(path) as connection:  # another prompt's samples become those of prompt a in a later epoch
        connection.execute("UPDATE samples SET prompt = 'a', epoch = 2 WHERE id IN (2, 3)")
    assert audit(path, is_complete=False) == []


def test_damaged_pages_are_a_finding(tmp_path):
    path = write_good(tmp_path / "ledger.sqlite")
    with writing(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'samples_by_cohort'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size + 100 : page * size] = bytes(size - 100)
    path.write_bytes(data)
    assert audit(path, is_complete=False)[0].text.startswith("SQLite finds damage")


def test_a_file_that_is_no_database_is_a_finding(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"nothing" * 1000)
    assert audit(path, is_complete=False)[0].text.startswith("SQLite cannot read it")
