"""Audit a ledger with SQL of its own: what was loaded, sampled, scored and trained must fit together.

`judge` calls `audit` after every process. It shares no code with what writes and reads ledgers: it knows only the
tables.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

from fuzz.finding import Finding, FindingKind

JOURNAL = ("cohorts", "prompts", "samples", "steps", "segments", "updates", "trained", "versions", "calls")

# Each query must give no row.
EMPTY: dict[str, str] = {
    # `sample` is the primary key of `trained`, so a row of the data that is trained twice has two of them.
    "trained twice": """
        SELECT s.epoch, s.prompt, s.idx FROM trained AS t JOIN samples AS s ON s.id = t.sample
        GROUP BY s.epoch, s.prompt, s.idx HAVING count(*) > 1""",
    "loaded twice": "SELECT epoch, prompt, idx FROM samples GROUP BY epoch, prompt, idx HAVING count(*) > 1",
    "trained but never loaded": "SELECT sample FROM trained EXCEPT SELECT id FROM samples",
    "trained by an update that is not there": "SELECT number FROM trained EXCEPT SELECT number FROM updates",
    "an update with another number of samples": """
        SELECT u.number, u.num_samples, count(t.sample) AS found FROM updates AS u
        LEFT JOIN trained AS t ON t.number = u.number GROUP BY u.number HAVING found != u.num_samples""",
    "trained at another version than its update": """
        SELECT t.sample FROM trained AS t JOIN updates AS u ON u.number = t.number WHERE t.version != u.version""",
    "updates that are not numbered 0, 1, 2, ...": """
        SELECT number FROM updates WHERE number >= (SELECT count(*) FROM updates)""",
    "a batch taken at another version than its number": "SELECT number FROM updates WHERE version != number",
    "a cohort with another number of samples": """
        SELECT c.id FROM cohorts AS c LEFT JOIN samples AS s ON s.cohort = c.id
        GROUP BY c.id HAVING count(s.id) != c.num_samples""",
    "trained after something else than a score": """
        SELECT t.sample FROM trained AS t WHERE (
            SELECT step FROM steps WHERE sample = t.sample AND seq < t.seq ORDER BY seq DESC LIMIT 1) IS NOT 'score'""",
    "a step after training": """
        SELECT s.sample FROM steps AS s JOIN trained AS t ON t.sample = s.sample WHERE s.seq > t.seq""",
    "another reward than the last score": """
        SELECT t.sample FROM trained AS t WHERE t.reward IS NOT (
            SELECT value FROM steps WHERE sample = t.sample AND step = 'score' ORDER BY seq DESC LIMIT 1)""",
    "tokens while it did not run": """
        SELECT g.sample FROM segments AS g WHERE coalesce((
            SELECT step FROM steps WHERE sample = g.sample AND seq < g.seq ORDER BY seq DESC LIMIT 1), 'none')
            NOT IN ('start', 'feed')""",
    "fed by no tool": """
        SELECT f.sample FROM steps AS f WHERE f.step = 'feed' AND (
            SELECT step FROM steps WHERE sample = f.sample AND seq < f.seq ORDER BY seq DESC LIMIT 1) IS NOT 'call'""",
    "a turn with another number of calls": """
        SELECT f.sample FROM steps AS f JOIN steps AS c ON c.seq = (
            SELECT max(seq) FROM steps WHERE sample = f.sample AND step = 'call' AND seq < f.seq)
        WHERE f.step = 'feed' AND c.value != (
            SELECT count(*) FROM calls WHERE sample = f.sample AND repeated = 0 AND error != 'ignored'
            AND seq BETWEEN c.seq AND f.seq)""",
    "tokens past the budget": """
        SELECT g.sample FROM segments AS g JOIN samples AS s ON s.id = g.sample
        WHERE g.start + g.num_tokens > s.budget""",
    "tokens of a version that did not exist": """
        SELECT g.sample FROM segments AS g WHERE g.version > coalesce((
            SELECT version FROM versions WHERE seq < g.seq ORDER BY seq DESC LIMIT 1), 0)""",
}


_TWICE = ("trained twice", "loaded twice", "a step after training")


def audit(path: Path, *, is_complete: bool, num_samples: int | None = None) -> list[Finding]:
    """What is wrong with the ledger at `path`. `num_samples`: how many a run must have trained once it is complete."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        connection.execute("BEGIN")
        return _audit(connection, is_complete=is_complete, num_samples=num_samples)
    except sqlite3.DatabaseError as error:
        return [_broken(f"SQLite cannot read it: {error}")]
    finally:
        connection.close()


def _broken(text: str) -> Finding:
    return Finding(FindingKind.LEDGER, text)


def _audit(connection: sqlite3.Connection, *, is_complete: bool, num_samples: int | None) -> list[Finding]:
    damage = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if damage != "ok":
        return [_broken(f"SQLite finds damage: {damage}")]
    wrong = []
    for name, query in EMPTY.items():
        if rows := connection.execute(query).fetchmany(3):
            wrong.append(Finding(FindingKind.TWICE if name in _TWICE else FindingKind.LEDGER, f"{name}: {rows}"))
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    union = " UNION ALL ".join(f"SELECT seq FROM {table}" for table in JOURNAL)  # noqa: S608
    first, last, count, distinct = connection.execute(
        f"SELECT min(seq), max(seq), count(*), count(DISTINCT seq) FROM ({union})"  # noqa: S608
    ).fetchone()
    if count and (first, last, distinct) != (1, count, count):
        wrong.append(_broken(f"rows {first} to {last} are {count}, {distinct} of them different"))
    if int(meta["seq"]) != count:
        wrong.append(_broken(f"meta counts {meta['seq']} rows, there are {count}"))
    knobs = json.loads(meta["knobs"])
    wrong += map(_broken, _cohorts_in_time(connection, knobs))
    wrong += map(_broken, _answers(connection, knobs))
    wrong += map(_broken, _whole_groups(connection) if meta["grouped"] == "1" else ())
    loaded, trained = (connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("samples", "trained"))  # noqa: S608
    if is_complete and loaded != trained:
        wrong.append(Finding(FindingKind.LOST, f"{loaded} samples were loaded and {trained} trained"))
    if is_complete and num_samples is not None and trained < num_samples:
        wrong.append(Finding(FindingKind.LOST, f"{trained} samples were trained, and {num_samples} were asked for"))
    if num_samples is not None and trained > num_samples:
        wrong.append(_broken(f"{trained} samples were trained, and only {num_samples} were asked for"))
    return wrong


def _cohorts_in_time(connection: sqlite3.Connection, knobs: dict[str, Any]) -> list[str]:
    if knobs.get("lookahead") is None:
        return []
    updates = knobs["cohort_batches"] * (1 + knobs["lookahead"])
    late = connection.execute(
        """SELECT c.id, c.loaded_update, max(t.number) AS last FROM cohorts AS c JOIN samples AS s ON s.cohort = c.id
        JOIN trained AS t ON t.sample = s.id GROUP BY c.id HAVING last >= c.loaded_update + ?""",
        (updates,),
    ).fetchall()
    return [f"cohorts past their {updates} updates: {late[:3]}"] if late else []


def _whole_groups(connection: sqlite3.Connection) -> list[str]:
    parted = connection.execute(
        """SELECT s.cohort, s.prompt, s.epoch FROM samples AS s LEFT JOIN trained AS t ON t.sample = s.id
        GROUP BY s.cohort, s.prompt, s.epoch HAVING count(DISTINCT coalesce(t.number, -1)) > 1"""
    ).fetchall()
    return [f"siblings in different updates: {parted[:3]}"] if parted else []


def _answers(connection: sqlite3.Connection, knobs: dict[str, Any]) -> list[str]:
    """Lay out the version of every token of every trained answer, and compare length and staleness."""
    trained = {row[0]: row[1:] for row in connection.execute("SELECT sample, version, length, staleness FROM trained")}
    events: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for seq, sample, start, version, count in connection.execute(
        "SELECT seq, sample, start, version, num_tokens FROM segments"
    ):
        events[sample].append((seq, "tokens", start, version, count))
    for seq, sample, step, value in connection.execute(
        "SELECT seq, sample, step, value FROM steps WHERE step IN ('requeue', 'give-up')"
    ):
        if step == "give-up" or value == "fresh":
            events[sample].append((seq, "clear"))
    wrong, bound = [], knobs.get("max_staleness")
    for sample, (version, length, staleness) in trained.items():
        versions: list[int] = []
        for _, kind, *rest in sorted(events[sample]):
            if kind == "clear":
                versions = []
                continue
            start, of, count = rest
            if start > len(versions):
                wrong.append(f"sample {sample} has tokens at {start} after {len(versions)}")
            versions = versions[:start] + [of] * count
        oldest = version - min(versions, default=version)
        if (len(versions), oldest) != (length, staleness):
            wrong.append(
                f"sample {sample}: {length} tokens at staleness {staleness}, laid out {len(versions)}, {oldest}"
            )
        if bound is not None and oldest > bound:
            wrong.append(f"sample {sample} was trained at staleness {oldest}, and {bound} is the bound")
    return wrong[:5]
