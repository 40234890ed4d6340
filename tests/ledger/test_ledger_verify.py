"""Verification of a ledger file: good files pass, and each rule fails on a file that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sortedrl.errors import LedgerError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verdict import MAX_VIOLATIONS, proven_line
from sortedrl.ledger.verify import verify
from tests.support import ledgers
from tests.support.ledgers import GOOD, KNOBS, LINEAGES, Row, step, tokens, trained, update, version


def violations_of(path: Path) -> list[str]:
    with Ledger(path) as ledger:
        return [str(violation) for violation in verify(ledger).violations]


def test_a_good_file_is_proven(tmp_path: Path) -> None:
    with Ledger(ledgers.write_good(tmp_path / "ledger.sqlite")) as ledger:
        verdict = verify(ledger)
        assert verdict.num_violations == 0
        assert proven_line(ledger, verdict) == (
            "proven: 6 samples loaded = 4 trained once + 2 waiting; 52 rows without a gap, 2 lineages, every step "
            "allowed; 17 tokens within budgets and of versions in force; 2 updates with the records that the rows "
            "make; staleness at most 1; 2 cohorts, each within 2 updates; siblings together"
        )


def test_a_run_may_end_anywhere_but_inside_a_batch_or_a_cohort(tmp_path: Path) -> None:
    for count in [0, *range(7, 22), *range(24, 37), 39, 40, *range(43, len(GOOD) + 1)]:
        cuts = [lineage for lineage in LINEAGES if lineage[1] < max(count, 1)]
        assert violations_of(ledgers.write_ledger(tmp_path / f"{count}.sqlite", GOOD[:count], lineages=cuts)) == []


def test_a_lineage_that_was_cut_away_leaves_nothing_behind(tmp_path: Path) -> None:
    lineages = [(0, 0, 0), (1, 60, 3), (2, 48, 2), (3, 48, 2)]
    assert violations_of(ledgers.write_ledger(tmp_path / "l", GOOD, lineages=lineages)) == []


def test_tokens_of_trained_samples_may_be_left_out(tmp_path: Path) -> None:
    path = ledgers.write_good(tmp_path / "ledger.sqlite")
    with ledgers.writing(path) as connection:
        connection.execute("UPDATE segments SET tokens = NULL, logprobs = NULL WHERE sample < 4")
    with Ledger(path) as ledger:
        verdict = verify(ledger)
        assert verdict.num_violations == 0
        assert "; tokens of 7 rows left out, the others intact;" in proven_line(ledger, verdict)


TRAINED_WITHOUT_KEY = """
ALTER TABLE trained RENAME TO before;
CREATE TABLE trained (seq INTEGER, sample INTEGER, number INTEGER, version INTEGER, length INTEGER, reward REAL,
                      staleness INTEGER) STRICT;
INSERT INTO trained SELECT seq, sample, number, version, length, reward, staleness FROM before;
DROP TABLE before;
UPDATE meta SET value = 53 WHERE key = 'seq';
INSERT INTO trained VALUES (53, 0, 0, 0, 2, 1.0, 0);
"""

# Row numbers are those of ledgers.GOOD. Each statement breaks one rule; the list has all expected violations.
MUTATIONS: Mapping[str, tuple[str, list[str]]] = {
    "row missing": (
        "DELETE FROM segments WHERE seq = 52",
        ["journal: the last row is 51, but 52 were written"],
    ),
    "gap": (
        "UPDATE segments SET seq = 54 WHERE seq = 52; UPDATE meta SET value = 54 WHERE key = 'seq'",
        ["journal: rows 52 to 53 are missing"],
    ),
    "number twice": (
        "UPDATE segments SET seq = 51 WHERE seq = 52; UPDATE meta SET value = 51 WHERE key = 'seq'",
        ["journal: row 51 is there twice"],
    ),
    "tokens flipped": (
        "UPDATE segments SET tokens = x'0b0000000b000000' WHERE seq = 12",
        ["integrity: sample 0: row 12 has tokens or log-probs that do not match their checksum"],
    ),
    "log-probs flipped": (
        "UPDATE segments SET logprobs = x'0000000000000000' WHERE seq = 12",
        ["integrity: sample 0: row 12 has tokens or log-probs that do not match their checksum"],
    ),
    "tokens cut short": (
        "UPDATE segments SET tokens = x'0b000000' WHERE seq = 12",
        ["integrity: sample 0: row 12 has 4 and 8 bytes for 2 tokens and their log-probs"],
    ),
    "tokens of a waiting sample left out": (
        "UPDATE segments SET tokens = NULL, logprobs = NULL WHERE seq = 46",
        ["integrity: sample 4: its tokens are missing although it is not trained"],
    ),
    "prompt changed": (
        "UPDATE prompts SET content = '\"Why?\"' WHERE id = 'a'",
        ["integrity: prompt 'a' does not match its checksum"],
    ),
    "no such prompt": (
        "UPDATE samples SET prompt = 'c' WHERE cohort = 1",
        ["reference: sample 4: there is no prompt 'c'", "reference: sample 5: there is no prompt 'c'"],
    ),
    "no such cohort": (
        "UPDATE samples SET cohort = 7 WHERE id = 5",
        ["reference: sample 5: there is no cohort 7", "cohort: cohort 1 records 2 samples, but 1 are in it"],
    ),
    "loaded before its cohort": (
        "UPDATE samples SET cohort = 1 WHERE id = 3",
        [
            "cohort: sample 3: it is loaded before its cohort 1",
            "cohort: cohort 0 records 4 samples, but 3 are in it",
        ],
    ),
    "steps of nobody": (
        "UPDATE steps SET sample = 9 WHERE seq = 50",
        ["reference: sample 9: step score in row 50, although it was never loaded"],
    ),
    "tokens of nobody": (
        "UPDATE segments SET sample = 9 WHERE seq = 52",
        ["reference: sample 9: tokens in row 52, although it was never loaded"],
    ),
    "nobody trained": (
        "UPDATE trained SET sample = 9 WHERE sample = 3",
        [
            "reference: sample 9: trained by update 1 in row 39, although it was never loaded",
            "update: update 1 records 2 samples, but 1 are trained by it",
            "siblings: sample 3: it is left behind, its siblings were trained by update 1",
            "exactly-once: 6 loaded, but 4 trained and 3 waiting",
            "starvation: sample 3: not trained, although all updates of its cohort 0 are over",
        ],
    ),
    "step after training": (
        "UPDATE steps SET sample = 0 WHERE seq = 50",
        ["exactly-once: sample 0: step score in row 50, although it was trained before"],
    ),
    "trained twice": (
        TRAINED_WITHOUT_KEY,
        [
            "update: sample 0: it is trained in row 53 by update 0, not the current one",
            "exactly-once: sample 0: trained by update 0 in row 53, although it was trained before",
            "exactly-once: 6 loaded, but 5 trained and 2 waiting",
        ],
    ),
    "unknown step": (
        "UPDATE steps SET step = 'skip' WHERE seq = 50",
        ["transition: sample 4: unknown step 'skip' in row 50"],
    ),
    "scored while it runs": (
        "UPDATE steps SET step = 'score', value = 0.5 WHERE seq = 20",
        [
            "transition: sample 2: score in row 20 while it is running",
            "transition: sample 2: row 26 resumes it although it is scored",
        ],
    ),
    "started while it runs": (
        "UPDATE steps SET step = 'start', attempt = 2 WHERE seq = 21",
        [
            "transition: sample 3: start in row 21 while it is running",
            "transition: sample 3: requeue in row 27 while it is running",
            "attempt: sample 3: requeue in row 27 is of attempt 1, not 2",
        ],
    ),
    "ended by nobody": (
        "DELETE FROM lineages WHERE lineage = 1",
        ["lineage: sample 5: cut in row 49, but no lineage begins there"],
    ),
    "never ended": (
        "UPDATE steps SET step = 'interrupt' WHERE seq = 49",
        [
            "lineage: sample 5: it was running when lineage 1 began, which wrote no cut for it",
            "transition: sample 5: interrupt in row 49 while it is pending",
        ],
    ),
    "tokens while it waits": (
        "UPDATE segments SET seq = 45 WHERE seq = 47; UPDATE steps SET seq = 47 WHERE seq = 45",
        [
            "transition: sample 5: tokens in row 45 while it is pending",
            "attempt: sample 5: tokens in row 45 are of attempt 1, not 0",
        ],
    ),
    "trained while it waits": (
        "UPDATE steps SET step = 'requeue', value = 'replay' WHERE seq = 35",
        [
            "transition: sample 2: it is trained in row 38 while it is pending",
            "record: sample 2: trained with reward 0.5, but its rows give None",
        ],
    ),
    "unknown reason": (
        "UPDATE steps SET value = 'tired' WHERE seq = 33",
        ["transition: sample 2: it finishes in row 33 for the reason 'tired'"],
    ),
    "unknown mode": (
        "UPDATE steps SET value = 'later' WHERE seq = 26",
        ["transition: sample 2: unknown requeue mode 'later' in row 26"],
    ),
    "attempt left out": (
        "UPDATE steps SET attempt = 3 WHERE seq = 51; UPDATE segments SET attempt = 3 WHERE seq = 52",
        ["attempt: sample 5: start in row 51 is of attempt 3, not 2"],
    ),
    "step of an old attempt": (
        "UPDATE steps SET attempt = 1 WHERE seq = 36",
        ["attempt: sample 3: score in row 36 is of attempt 1, not 2"],
    ),
    "tokens of an old attempt": (
        "UPDATE segments SET attempt = 1 WHERE seq = 52",
        ["attempt: sample 5: tokens in row 52 are of attempt 1, not 2"],
    ),
    "past the budget": (
        "UPDATE samples SET budget = 3 WHERE id = 3",
        ["budget: sample 3: 4 tokens in row 32, of 3 allowed"],
    ),
    "a hole": (
        "UPDATE segments SET start = 3 WHERE seq = 52",
        ["segments: sample 5: row 52 puts 1 tokens at 3, 0 of them verified, where it holds 1"],
    ),
    "more verified than there is": (
        "UPDATE segments SET verified = 4 WHERE seq = 31",
        ["segments: sample 3: row 31 puts 3 tokens at 0, 4 of them verified, where it holds 3"],
    ),
    "verified tokens that were not there": (
        "UPDATE segments SET verified = 3 WHERE seq = 31",
        ["segments: sample 3: the 3 verified tokens of row 31 are not those it held"],
    ),
    "overwritten without a replay": (
        "UPDATE segments SET start = 0 WHERE seq = 52",
        ["segments: sample 5: row 52 overwrites from 0 on, but it is not being replayed"],
    ),
    "one sample under two numbers": (
        "UPDATE samples SET idx = 0 WHERE id = 5",
        ["exactly-once: sample 5: it has the same epoch, prompt and index as sample 4"],
    ),
    "tokens of a version to come": (
        "UPDATE segments SET version = 3 WHERE seq = 52",
        ["version: sample 5: tokens in row 52 are of version 3, but 2 to 2 were in force in that attempt"],
    ),
    "tokens of a version gone by": (
        "UPDATE segments SET version = 0 WHERE seq = 30",
        ["version: sample 2: tokens in row 30 are of version 0, but 1 to 1 were in force in that attempt"],
    ),
    "cohort left out": (
        "UPDATE cohorts SET id = 2 WHERE id = 1; UPDATE samples SET cohort = 2 WHERE cohort = 1",
        ["cohort: cohort 2 is loaded where 1 is next"],
    ),
    "cohort loaded at another time": (
        "UPDATE cohorts SET loaded_update = 1 WHERE id = 1",
        ["cohort: cohort 1 records that it was loaded after 1 updates, but there were 2"],
    ),
    "cohort of another size": (
        "UPDATE cohorts SET num_samples = 3 WHERE id = 1",
        ["cohort: cohort 1 records 3 samples, but 2 are in it"],
    ),
    "siblings torn apart": (
        "UPDATE samples SET prompt = 'a', idx = 2 WHERE id = 2",
        ["siblings: sample 2: it is left behind, its siblings were trained by update 0"],
    ),
    "length": (
        "UPDATE trained SET length = 9 WHERE sample = 3",
        ["record: sample 3: trained with length 9, but its rows give 4"],
    ),
    "reward": (
        "UPDATE trained SET reward = 0.75 WHERE sample = 3",
        ["record: sample 3: trained with reward 0.75, but its rows give 0.25"],
    ),
    "staleness": (
        "UPDATE trained SET staleness = 0 WHERE sample = 2",
        ["record: sample 2: trained with staleness 0, but its rows give 1"],
    ),
    "version of a trained sample": (
        "UPDATE trained SET version = 0 WHERE sample = 2",
        ["record: sample 2: trained with version 0, but its rows give 1"],
    ),
    "score that is no number": (
        "UPDATE steps SET value = 'good' WHERE seq = 50",
        ["record: sample 4: its score in row 50 is 'good'"],
    ),
    "update of another version": (
        "UPDATE updates SET version = 0 WHERE number = 1",
        ["update: update 1 records version 0, but 1 was in force"],
    ),
    "update of another size": (
        "UPDATE updates SET num_samples = 3 WHERE number = 1",
        ["update: update 1 records 3 samples, but 2 are trained by it"],
    ),
    "trained by an earlier update": (
        "UPDATE trained SET number = 0 WHERE sample = 3",
        ["update: sample 3: it is trained in row 39 by update 0, not the current one"],
    ),
    "trained by no update": (
        "UPDATE trained SET number = 7 WHERE sample = 3",
        [
            "update: sample 3: it is trained in row 39 by update 7, not the current one",
            "starvation: sample 3: trained by update 7, but 1 is the last of its cohort",
            "reference: sample 3: there is no update 7",
        ],
    ),
    "version of another lineage": (
        "UPDATE versions SET lineage = 1 WHERE version = 2",
        ["lineage: version 2 records lineage 1, but row 40 was written by lineage 0"],
    ),
    "lineage of another version": (
        "UPDATE lineages SET version = 1 WHERE lineage = 1",
        ["lineage: lineage 1 went on from version 1, but row 48 is of version 2"],
    ),
    "change of a lineage that is not there": (
        "INSERT INTO changes VALUES (7, 'learner.lr', '1', '2')",
        ["lineage: lineage 7 changed learner.lr, but there is no such lineage"],
    ),
    "lineage left out": (
        "UPDATE lineages SET lineage = 3 WHERE lineage = 1",
        ["lineage: lineages are numbered [0, 3]"],
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_named(name: str, tmp_path: Path) -> None:
    statement, expected = MUTATIONS[name]
    path = ledgers.write_good(tmp_path / "ledger.sqlite")
    with ledgers.writing(path) as connection:
        connection.executescript(statement)
    assert violations_of(path) == expected


GIVEN_UP = [*GOOD[:33], step(3, 2, "give-up"), GOOD[34], step(3, 2, "score", 0.0), update(1, 1, 2), GOOD[37]]

# Other files: rows, changed knobs, and the expected violations.
FILES: Mapping[str, tuple[list[Row], Mapping[str, object], list[str]]] = {
    "given up": ([*GIVEN_UP, trained(3, 1, 1, 0, 0.0, 0)], {}, []),
    "given up, with tokens": (
        [*GIVEN_UP, trained(3, 1, 1, 4, 0.0, 0)],
        {},
        ["record: sample 3: trained with length 4, but its rows give 0"],
    ),
    "given up, with a reward": (
        [*GIVEN_UP[:35], step(3, 2, "score", 1.0)],
        {},
        ["record: sample 3: it was given up, and scored 1.0 in row 36"],
    ),
    "restarted": ([*GOOD[:26], step(3, 1, "requeue", "fresh"), step(3, 2, "start")], {}, []),
    "restarted, but goes on": (
        [*GOOD[:26], step(3, 1, "requeue", "fresh"), step(3, 2, "start"), tokens(3, 2, 3, [9], version=1)],
        {},
        ["segments: sample 3: row 29 puts 1 tokens at 3, 0 of them verified, where it holds 0"],
    ),
    "sent back without work": (
        [*GOOD[:43], step(4, 0, "requeue", "fresh")],
        {},
        ["transition: sample 4: requeue in row 44 while it is pending and holds nothing"],
    ),
    "too stale": (GOOD[:43], {"max_staleness": 0}, ["staleness: sample 2: trained 1 versions old, of 0 allowed"]),
    "no bound on staleness": (GOOD[:43], {"max_staleness": None}, []),
    "too late": (
        GOOD[:43],
        {"cohort_batches": 1},
        [
            "starvation: sample 2: trained by update 1, but 0 is the last of its cohort",
            "starvation: sample 3: trained by update 1, but 0 is the last of its cohort",
        ],
    ),
    "late, but in time with lookahead": (GOOD[:43], {"cohort_batches": 1, "lookahead": 1}, []),
    "too late already": (
        GOOD[:25],
        {"cohort_batches": 1},
        ["starvation: sample 2: not trained, although all updates of its cohort 0 are over"],
    ),
    "no bound on waiting": (GOOD[:25], {"cohort_batches": 1, "lookahead": None}, []),
    "update left out": (
        [*GOOD[:36], update(5, 1, 2), trained(2, 5, 1, 3, 0.5, 1), trained(3, 5, 1, 4, 0.25, 0)],
        {"lookahead": None},
        ["update: update 5 is taken where 1 is next"],
    ),
    "version left out": ([*GOOD[:39], version(3)], {}, ["version: version 3 is published after 1"]),
    "version twice": (
        [*GOOD[:39], version(1, lineage=1)],
        {},
        [
            "version: version 1 is published after 1",
            "lineage: version 1 records lineage 1, but row 40 was written by lineage 0",
        ],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    rows, knobs, expected = FILES[name]
    path = ledgers.write_ledger(tmp_path / "ledger.sqlite", rows, knobs={**KNOBS, **knobs})
    assert violations_of(path) == expected


def test_siblings_may_part_where_they_are_no_group(tmp_path: Path) -> None:
    path = ledgers.write_ledger(tmp_path / "ledger.sqlite", GOOD, lineages=LINEAGES, grouped=False)
    with ledgers.writing(path) as connection:
        connection.execute("UPDATE samples SET prompt = 'a', idx = 2 WHERE id = 2")
    assert violations_of(path) == []


def test_many_violations_are_counted_not_kept(tmp_path: Path) -> None:
    rows = GOOD[:7] + [step(0, 1, "finish", "stop")] * (MAX_VIOLATIONS + 5)
    with Ledger(ledgers.write_ledger(tmp_path / "ledger.sqlite", rows)) as ledger:
        verdict = verify(ledger)
    assert len(verdict.violations) == MAX_VIOLATIONS
    assert verdict.num_violations > MAX_VIOLATIONS + 5


def test_no_page_can_be_lost_unnoticed(tmp_path: Path) -> None:
    """Overwrite one page at a time; SQLite or a rule must report it."""
    good = ledgers.write_good(tmp_path / "ledger.sqlite").read_bytes()
    size = int.from_bytes(good[16:18], "big")
    for begin in range(0, len(good), size):
        path = tmp_path / f"{begin}.sqlite"
        path.write_bytes(good[:begin] + b"\xa5" * size + good[begin + size :])
        with pytest.raises(LedgerError, match=path.name):
            violations_of(path)


# Values that no rule checks: (table, column) and rows.
FREE = {
    ("samples", "epoch"): {6, 7, 42, 43},  # siblings that happen to be trained together
    ("samples", "idx"): {5, 7, 43},  # those of the last siblings
    ("samples", "seed"): {4, 5, 6, 7, 42, 43},
    ("samples", "budget"): {4, 5, 6, 7, 42, 43},
    ("segments", "slot_s"): {12, 13, 14, 15, 30, 31, 32, 46, 47, 52},
    ("steps", "sample"): {26},  # of two that may both be told to go on
    ("steps", "value"): {50},  # the score of a sample that is not trained yet
}


def test_hardly_a_number_can_be_changed_unnoticed(tmp_path: Path) -> None:
    """Raise one number of one row at a time by one."""
    good = ledgers.write_good(tmp_path / "good.sqlite").read_bytes()
    unnoticed: dict[tuple[str, str], set[int]] = {}
    for seq, (table, record) in enumerate(GOOD, start=1):
        for column in ["seq", *(name for name, value in record.items() if isinstance(value, int | float))]:
            path = tmp_path / f"{seq}-{column}.sqlite"
            path.write_bytes(good)
            try:
                with ledgers.writing(path) as connection:
                    connection.execute(f"UPDATE {table} SET {column} = {column} + 1 WHERE seq = {seq}")
            except ledgers.sqlite3.IntegrityError:
                continue  # the table itself refuses
            if not violations_of(path):
                unnoticed.setdefault((table, column), set()).add(seq)
    assert unnoticed == FREE
