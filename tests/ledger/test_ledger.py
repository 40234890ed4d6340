"""Reading a ledger file: tables and JSON, reading while another process writes, and harmless output of model text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sortedrl.errors import ConfigError, LedgerError
from sortedrl.ledger.reader import Ledger, Lineage, StoredAnswer
from sortedrl.ledger.sample_history import Moment, read_history
from sortedrl.ledger.store import Store
from sortedrl.ledger.tables import ledger_command
from sortedrl.records import Prompt, Sample, State
from sortedrl.reward.worker import printable
from tests.support import ledgers
from tests.support.ledgers import GOOD, step, tokens


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ledgers.write_good(tmp_path / "ledger.sqlite")
    return tmp_path


def run_command(run: Path, *, is_terminal: bool = False, **asked: object) -> tuple[int, str]:
    """Exit code and output of the command."""
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=is_terminal, color_system="standard" if is_terminal else None)
    given = {"verify": False, "sample": None, "as_json": False, **asked}
    return ledger_command(run, console=console, **given), out.getvalue()


# ---- answers --------------------------------------------------------------------------------------------------------


def test_an_answer_is_cut_and_goes_on() -> None:
    answer = StoredAnswer()
    answer.put(0, 3, 0)
    answer.put(3, 2, 1)
    answer.put(5, 1, 1)
    assert (answer.runs, answer.num_tokens, answer.oldest_version) == ([(0, 3), (1, 3)], 6, 0)
    answer.put(4, 2, 2)  # in place of the last two
    assert (answer.runs, answer.num_tokens) == ([(0, 3), (1, 1), (2, 2)], 6)
    answer.put(0, 2, 3)
    assert (answer.runs, answer.num_tokens, answer.oldest_version) == ([(3, 2)], 2, 3)
    answer.cut(0)
    assert (answer.runs, answer.num_tokens, answer.oldest_version) == ([], 0, None)


# ---- where all samples are ------------------------------------------------------------------------------------------


def test_overview_counts_by_state_and_cohort(run: Path) -> None:
    with Ledger(run) as ledger:
        overview = ledger.overview()
    assert (overview.seq, overview.version, overview.num_updates, overview.num_loaded) == (52, 2, 2, 6)
    assert overview.by_state == {"pending": 0, "running": 1, "calling": 0, "finished": 0, "scored": 1, "trained": 4}
    (cohort,) = overview.cohorts
    assert (cohort.id, cohort.loaded_update, cohort.num_samples, overview.num_cohorts) == (1, 2, 2, 2)
    assert cohort.by_state == {"pending": 0, "running": 1, "calling": 0, "finished": 0, "scored": 1, "trained": 0}
    assert overview.oldest is not None
    assert (overview.oldest.sample, overview.oldest.since_update, overview.oldest.num_tokens) == (4, 2, 2)
    assert overview.staleness == {0: 3, 1: 1}
    assert overview.lineages[1] == Lineage(lineage=1, cut_seq=48, version=2)


def test_every_state_is_told_from_the_last_step(tmp_path: Path) -> None:
    rows = GOOD[:21]  # before the first batch: two scored, two sent back
    with Ledger(ledgers.write_ledger(tmp_path / "l", rows)) as ledger:
        states = [state for _, _, state in ledger.live()]
    assert states == [State.SCORED, State.SCORED, State.PENDING, State.PENDING]
    with Ledger(ledgers.write_ledger(tmp_path / "m", GOOD[:17])) as ledger:
        states = [state for _, _, state in ledger.live()]
    assert states == [State.FINISHED, State.FINISHED, State.RUNNING, State.RUNNING]
    rows = [*GOOD[:17], step(2, 1, "cut"), step(3, 1, "cut")]
    with Ledger(ledgers.write_ledger(tmp_path / "n", rows, lineages=[(0, 0, 0), (1, 17, 0)])) as ledger:
        states = [state for _, _, state in ledger.live()]
    assert states == [State.FINISHED, State.FINISHED, State.PENDING, State.PENDING]  # their process is gone


def test_the_oldest_waiting_holds_what_was_not_thrown_away(tmp_path: Path) -> None:
    for mode, num_tokens in (("replay", 2), ("fresh", 0)):
        rows = [*GOOD[:25], step(2, 1, "requeue", mode)]
        with Ledger(ledgers.write_ledger(tmp_path / mode, rows)) as ledger:
            oldest = ledger.overview().oldest
        assert oldest is not None
        assert (oldest.sample, oldest.since_update, oldest.num_tokens) == (2, 0, num_tokens)


def test_an_empty_ledger_is_shown(tmp_path: Path) -> None:
    ledgers.write_ledger(tmp_path / "ledger.sqlite", [])
    code, text = run_command(tmp_path)
    assert code == 0
    assert "0 of 0 samples trained in 0 updates, version 0" in text


def test_the_table_says_what_people_ask(run: Path) -> None:
    code, text = run_command(run)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0
    assert lines[0].endswith("ledger.sqlite: 4 of 6 samples trained in 2 updates, version 2")
    assert lines[1].endswith("gumbel-splitmix64-v1")  # of a ledger that names none
    assert lines[2:6] == [
        "cohort loaded at update pending running calling finished scored trained samples",
        "1 2 0 1 0 0 1 0 2",
        "1 consumed",
        "all 0 1 0 0 1 4 6",
    ]
    assert lines[6] == "oldest waiting: sample 4 of cohort 1, scored, 2 tokens, since update 2 (0 updates ago)"
    assert lines[8:] == [
        f"0 3 75.0% {'█' * 40}",
        f"1 1 25.0% {'█' * 14}",
        "resumed as lineage 1 from row 48, version 2",
    ]


def test_json_is_one_object(run: Path) -> None:
    code, text = run_command(run, as_json=True)
    record = json.loads(text)
    assert (code, text.count("\n")) == (0, 1)
    assert record["by_state"]["trained"] == 4
    assert record["oldest"] == {"sample": 4, "cohort": 1, "state": "scored", "since_update": 2, "num_tokens": 2}
    assert record["staleness"] == {"0": 3, "1": 1}


# ---- the life of one ------------------------------------------------------------------------------------------------


def test_the_life_of_a_replayed_sample(run: Path) -> None:
    with Ledger(run) as ledger:
        life = read_history(ledger, 3)
    assert (life.state, life.tokens, life.runs) == (State.TRAINED, [15, 16, 19, 20], [(1, 4)])
    steps = [(m.seq, m.step, m.attempt, m.version, m.gained, m.kept, m.thrown, m.held) for m in life.moments]
    assert steps == [
        (7, "load", 0, 0, 0, 0, 0, 0),
        (11, "start", 1, 0, 0, 0, 0, 0),
        (15, "tokens", 1, 0, 3, 0, 0, 3),
        (21, "fail", 1, 0, 0, 0, 0, 3),
        (27, "requeue", 1, 1, 0, 0, 0, 3),
        (29, "start", 2, 1, 0, 0, 0, 3),
        (31, "tokens", 2, 1, 2, 2, 1, 4),  # rows 31 and 32: two kept, one thrown away, one new, and one more
        (34, "finish", 2, 1, 0, 0, 0, 4),
        (36, "score", 2, 1, 0, 0, 0, 4),
        (39, "train", 2, 1, 0, 0, 0, 4),
    ]
    assert life.moments[-1].note == "update 1, staleness 0, reward 0.25"


def test_the_life_of_a_sample_whose_process_ended(run: Path) -> None:
    with Ledger(run) as ledger:
        life = read_history(ledger, 5)
    assert (life.state, life.tokens) == (State.RUNNING, [23, 24])
    note = "its process ended; lineage 1 resumed the run"
    assert life.moments[3] == Moment(seq=49, step="cut", attempt=1, version=2, held=1, note=note)


def test_a_restart_throws_all_away(tmp_path: Path) -> None:
    rows = [*GOOD[:26], step(3, 1, "requeue", "fresh"), step(3, 2, "start"), tokens(3, 2, 0, [7], version=1)]
    with Ledger(ledgers.write_ledger(tmp_path / "l", rows)) as ledger:
        life = read_history(ledger, 3)
    assert [(m.thrown, m.held) for m in life.moments[-3:]] == [(3, 0), (0, 0), (0, 1)]
    assert life.tokens == [7]


def test_a_life_without_tokens(run: Path) -> None:
    with ledgers.writing(run / "ledger.sqlite") as connection:
        connection.execute("UPDATE segments SET tokens = NULL, logprobs = NULL WHERE sample = 2")
    assert "has no tokens of this sample" in run_command(run, sample=2)[1]
    assert json.loads(run_command(run, sample=2, as_json=True)[1])["tokens"] is None


def test_a_sample_that_is_not_there(run: Path) -> None:
    with pytest.raises(LedgerError, match="has no sample 6: it has samples 0 to 5"):
        run_command(run, sample=6)
    with pytest.raises(ConfigError, match="give only one of them"):
        run_command(run, sample=1, verify=True)


def test_the_answer_is_coloured_by_version(run: Path) -> None:
    text = run_command(run, sample=2, is_terminal=True)[1]
    assert "\x1b[36m0 (tokens 0 to 1)  \x1b[0m\x1b[33m1 (tokens 2 to 2)  \x1b[0m" in text
    assert "\x1b[36m13 14 \x1b[0m\x1b[33m18 \x1b[0m" in text


def test_a_character_of_two_tokens_is_not_torn(run: Path) -> None:
    """Tokens 14 (version 0) and 18 (version 1) are the two bytes of one letter."""
    letters = {13: b"a", 14: "é".encode()[:1], 18: "é".encode()[1:]}

    def decode(given: list[int]) -> str:
        return b"".join(letters[token] for token in given).decode(errors="replace")

    text = run_command(run, sample=2, is_terminal=True, decode=decode)[1]
    assert text.endswith("\x1b[36ma\x1b[0m\x1b[33mé\x1b[0m\n")
    assert json.loads(run_command(run, sample=2, as_json=True, decode=decode)[1])["text"] == "aé"


HOSTILE = "[red]:smile:[/] \x1b]0;owned\x07 \x9b31m \u202egnp.exe \r\x00 end"


def test_control_characters_become_visible() -> None:
    assert printable(HOSTILE, keep="\n") == ("[red]:smile:[/] \\x1b]0;owned\\x07 \\x9b31m \\u202egnp.exe \\r\\x00 end")
    assert printable("two\nlines, naïve 漢字", keep="\n") == "two\nlines, naïve 漢字"


def test_text_of_models_and_data_reaches_no_terminal_raw(tmp_path: Path) -> None:
    ledgers.write_good(tmp_path / "ledger.sqlite")
    with ledgers.writing(tmp_path / "ledger.sqlite") as connection:
        connection.execute("UPDATE samples SET prompt = ? WHERE id = 2", (HOSTILE,))
        connection.execute("UPDATE steps SET value = ?, step = ? WHERE seq = 33", (HOSTILE, "[bold]\x1b[2J"))
    for asked in ({"sample": 2, "decode": lambda given: HOSTILE}, {"verify": True}, {"sample": 2, "as_json": True}):
        text = run_command(tmp_path, **asked)[1]
        assert not set(text) & set("\x1b\x07\x9b\u202e\r\x00"), asked
        assert "[red]" in text, asked
        assert "smile" in text, asked


# ---- exit codes and errors ------------------------------------------------------------------------------------------


def test_a_proof_ends_with_0_or_1(run: Path) -> None:
    code, text = run_command(run, verify=True)
    assert code == 0
    assert text.startswith("proven: 6 samples loaded = 4 trained once + 2 waiting;")
    assert text.count("\n") == 1
    with ledgers.writing(run / "ledger.sqlite") as connection:
        connection.execute("UPDATE trained SET length = 9 WHERE sample = 3")
    assert run_command(run, verify=True) == (1, "record: sample 3: trained with length 9, but its rows give 4\n")
    code, text = run_command(run, verify=True, as_json=True)
    record = json.loads(text)
    assert (code, record["proven"], record["num_violations"]) == (1, False, 1)
    text = "trained with length 9, but its rows give 4"
    assert record["violations"] == [{"rule": "record", "sample": 3, "text": text}]


def test_files_that_are_no_ledger_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no ledger at .*ledger\.sqlite: give a run directory"):
        run_command(tmp_path)
    path = tmp_path / "ledger.sqlite"
    path.write_text("this is no database, but it is long enough to be looked at" * 20)
    with pytest.raises(LedgerError, match="file is not a database"):
        run_command(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="is a database but no ledger"):
        run_command(tmp_path)


def test_a_file_cut_short_is_refused(run: Path) -> None:
    path = run / "ledger.sqlite"
    for part in (0.9, 0.5, 0.1):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
        with pytest.raises(LedgerError, match="damaged"):
            run_command(run, verify=True)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "UPDATE meta SET value = '4' WHERE key = 'schema_version'",
            "has schema version '4', this sortedrl reads 1 to 3",
        ),
        ("UPDATE meta SET value = '{' WHERE key = 'knobs'", "its schedule settings are damaged"),
        (
            "UPDATE meta SET value = '{\"lookahead\": \"x\"}' WHERE key = 'knobs'",
            "its schedule settings are damaged",
        ),
        ("DROP TABLE trained", "no such table: trained"),
        ("PRAGMA application_id = 5", "is a database but no ledger"),
    ],
)
def test_other_schemas_are_refused(run: Path, statement: str, message: str) -> None:
    with ledgers.writing(run / "ledger.sqlite") as connection:
        connection.execute(statement)
    with pytest.raises(LedgerError, match=message):
        run_command(run)


def test_a_path_is_a_path_whatever_its_letters(tmp_path: Path) -> None:
    folder = tmp_path / "a?mode=rwc#b %41 [c]"
    folder.mkdir()
    ledgers.write_good(folder / "ledger.sqlite")
    assert run_command(folder, verify=True)[0] == 0
    assert run_command(folder / "ledger.sqlite", verify=True)[0] == 0


# ---- copies without the write-ahead log -----------------------------------------------------------------------------


def test_a_closed_ledger_is_whole_without_its_log(tmp_path: Path) -> None:
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy" / "ledger.sqlite"
    copy.parent.mkdir()
    store = Store.create(path, grouped=False, knobs={})
    with closing(sqlite3.connect(path)) as other:  # such as a dashboard: SQLite keeps the log while it is open
        other.execute("SELECT count(*) FROM samples").fetchone()
        prompt = Prompt(id="p", tokens=[1], content="1")
        store.restore().load([Sample(id=0, prompt=prompt, index=0, epoch=0, cohort=0, seed=0, budget=4)])
        store.close()
        shutil.copyfile(path, copy)
    assert run_command(copy, verify=True)[1].startswith("proven: 1 sample loaded = 0 trained once + 1 waiting;")


def test_rows_that_a_copy_lacks_are_named(run: Path) -> None:
    counts = {"loaded": 2048, "trained": 2000, "lost": 0, "duplicated": 0}
    (run / "summary.json").write_text(json.dumps({"samples": 2000, "ledger": counts}))
    code, text = run_command(run, verify=True)
    missing = "the ledger has 6 samples but summary.json counts 2,048"
    assert (code, text) == (1, f"complete: {missing}: ledger.sqlite-wal was not copied along; copy it too\n")
    counts["loaded"] = 6
    (run / "summary.json").write_text(json.dumps({"samples": 2000, "ledger": counts}))
    (run / "ledger.sqlite-wal").write_bytes(b"no log")
    code, text = run_command(run, verify=True, as_json=True)
    missing = "the ledger has 4 trained samples but summary.json counts 2,000: restore it from a copy"
    assert (code, json.loads(text)["violations"]) == (1, [{"rule": "complete", "sample": None, "text": missing}])


@pytest.mark.parametrize(
    "summary", ['{"samples": 4, "ledger": {"loaded": 6, "trained": 4}}', '{"samples": 4, "ledger": null}', "[]", "{bro"]
)
def test_a_ledger_that_agrees_with_the_summary_is_proven(run: Path, summary: str) -> None:
    (run / "summary.json").write_text(summary)
    assert run_command(run, verify=True)[0] == 0


def test_an_empty_ledger_proves_nothing(tmp_path: Path) -> None:
    Store.create(tmp_path / "ledger.sqlite", grouped=False, knobs={}).close()
    code, text = run_command(tmp_path, verify=True)
    assert (code, text.split(":")[0]) == (0, "empty")
    assert "ledger.sqlite-wal" in text
    record = json.loads(run_command(tmp_path, verify=True, as_json=True)[1])
    assert (record["proven"], record["num_violations"]) == (False, 0)
    (tmp_path / "summary.json").write_text(json.dumps({"samples": 2048, "ledger": None}))
    code, text = run_command(tmp_path, verify=True)
    assert (code, text.count("\n")) == (1, 1)
    assert "the ledger has 0 trained samples but summary.json counts 2,048" in text


# ---- while a run writes, and after it was killed --------------------------------------------------------------------

WRITER = """
import sys; sys.path[:] = {path!r}
from pathlib import Path
from tests.support import ledgers
connection = ledgers.sqlite3.connect({file!r}, isolation_level=None)
for seq, row in enumerate(ledgers.GOOD[40:], start=41):
    connection.execute("BEGIN")
    ledgers.insert(connection, row[0], seq, row[1])
    connection.execute("UPDATE meta SET value = ? WHERE key = 'seq'", (str(seq),))
    if seq == 49:
        connection.execute("INSERT INTO lineages VALUES (1, 48, 2)")
    connection.execute("COMMIT")
connection.execute("BEGIN")
connection.execute("DELETE FROM trained")  # never committed
print("written", flush=True)
sys.stdin.read()
"""


@contextmanager
def writer(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has written the rest of the good ledger, and holds the file in the middle of a transaction."""
    ledgers.write_ledger(file, GOOD[:40])
    code = WRITER.format(path=sys.path, file=str(file))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_ledger_is_read_while_it_is_written(tmp_path: Path) -> None:
    with writer(tmp_path / "ledger.sqlite"):
        assert (tmp_path / "ledger.sqlite-wal").stat().st_size
        code, text = run_command(tmp_path, verify=True)
        assert code == 0, text
        assert "52 rows" in text


def test_a_reader_sees_one_moment(tmp_path: Path) -> None:
    path = ledgers.write_good(tmp_path / "ledger.sqlite")
    with Ledger(path) as ledger:
        with ledgers.writing(path) as connection:  # a writer need not wait for it
            connection.execute("DELETE FROM trained")
        assert ledger.overview().by_state[State.TRAINED] == 4
    with Ledger(path) as ledger:
        assert ledger.overview().by_state[State.TRAINED] == 0


def killed(file: Path) -> None:
    with writer(file) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert file.with_name(file.name + "-wal").stat().st_size


def test_a_ledger_is_read_after_its_process_was_killed(tmp_path: Path) -> None:
    killed(tmp_path / "ledger.sqlite")
    before = (tmp_path / "ledger.sqlite").read_bytes(), (tmp_path / "ledger.sqlite-wal").read_bytes()
    for _ in range(2):
        code, text = run_command(tmp_path, verify=True)
        assert code == 0, text
        assert "52 rows" in text
    assert ((tmp_path / "ledger.sqlite").read_bytes(), (tmp_path / "ledger.sqlite-wal").read_bytes()) == before


def test_a_copy_with_its_log_alone_is_read(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    killed(tmp_path / "killed" / "ledger.sqlite")
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        shutil.copy(tmp_path / "killed" / name, tmp_path / name)
    assert "52 rows" in run_command(tmp_path, verify=True)[1]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Mount the folder read-only, which also stops the superuser from writing."""
    mounts = [["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder]]
    if shutil.which("mount") is None or subprocess.run(mounts[0], capture_output=True).returncode:
        pytest.skip("mounting a folder read-only needs the superuser")
    try:
        if subprocess.run(mounts[1], capture_output=True).returncode:
            pytest.skip("this kernel cannot mount a folder read-only")
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_ledger_is_read_where_nothing_may_be_written(run: Path) -> None:
    with read_only(run):
        assert run_command(run, verify=True)[0] == 0


def test_a_log_is_never_passed_over(tmp_path: Path) -> None:
    """Where SQLite cannot make an index of the log, the rows in the log would silently be missing."""
    killed(tmp_path / "ledger.sqlite")
    (tmp_path / "ledger.sqlite-shm").unlink()
    with read_only(tmp_path), pytest.raises(LedgerError, match=r"ledger\.sqlite-wal belongs to it: copy both"):
        run_command(tmp_path, verify=True)
