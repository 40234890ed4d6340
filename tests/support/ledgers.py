"""Ledger files written row by row in plain SQL, for tests of the code that reads them."""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sortedrl.ledger.schema import APPLICATION_ID, SCHEMA

Row = tuple[str, dict[str, object]]

KNOBS = {"update_batch": 2, "cohort_batches": 2, "lookahead": 0, "max_staleness": 1}


def cohort(number: int, loaded_update: int, num_samples: int) -> Row:
    return "cohorts", {"id": number, "loaded_update": loaded_update, "num_samples": num_samples}


def prompt(name: str) -> Row:
    tokens, content, columns = struct.pack("<2i", 1, 2), '"What?"', "{}"
    crc = zlib.crc32(tokens + content.encode() + columns.encode())
    return "prompts", {"id": name, "tokens": tokens, "content": content, "columns": columns, "crc": crc}


def sample(number: int, *, cohort: int, prompt: str, index: int = 0, epoch: int = 0, budget: int = 4) -> Row:
    place = {"cohort": cohort, "prompt": prompt, "epoch": epoch, "idx": index}
    return "samples", {"id": number, **place, "seed": 100 + number, "budget": budget}


def step(number: int, attempt: int, name: str, value: object = None) -> Row:
    return "steps", {"sample": number, "attempt": attempt, "step": name, "value": value}


def tokens(number: int, attempt: int, start: int, given: list[int], *, version: int, verified: int = 0) -> Row:
    packed = struct.pack(f"<{len(given)}i", *given)
    logprobs = struct.pack(f"<{len(given)}f", *(-0.5 for _ in given))
    place = {"sample": number, "attempt": attempt, "start": start, "verified": verified, "version": version}
    blobs = {"tokens": packed, "logprobs": logprobs, "crc": zlib.crc32(packed + logprobs)}
    return "segments", {**place, "slot_s": 0.1, "num_tokens": len(given), **blobs}


def update(number: int, version: int, num_samples: int) -> Row:
    return "updates", {"number": number, "version": version, "num_samples": num_samples}


def trained(sample: int, number: int, version: int, length: int, reward: float | None, staleness: int) -> Row:
    record = {"sample": sample, "number": number, "version": version, "length": length}
    return "trained", {**record, "reward": reward, "staleness": staleness}


def version(number: int, lineage: int = 0) -> Row:
    return "versions", {"version": number, "lineage": lineage}


# Two cohorts. In the first, both samples of prompt a are trained by update 0. Sample 2 is resumed (staleness 1 when it
# is trained) and sample 3 is replayed, which keeps two of its three tokens. In the second cohort, sample 5 was running
# when the process ended.
GOOD: list[Row] = [
    cohort(0, 0, 4),  # 1
    prompt("a"),
    prompt("b"),
    sample(0, cohort=0, prompt="a"),  # 4
    sample(1, cohort=0, prompt="a", index=1),
    sample(2, cohort=0, prompt="b"),
    sample(3, cohort=0, prompt="b", index=1),
    step(0, 1, "start"),  # 8
    step(1, 1, "start"),
    step(2, 1, "start"),
    step(3, 1, "start"),
    tokens(0, 1, 0, [10, 11], version=0),  # 12
    tokens(1, 1, 0, [12], version=0),
    tokens(2, 1, 0, [13, 14], version=0),
    tokens(3, 1, 0, [15, 16, 17], version=0),
    step(0, 1, "finish", "stop"),  # 16
    step(1, 1, "finish", "stop"),
    step(0, 1, "score", 1.0),
    step(1, 1, "score", 0.0),
    step(2, 1, "interrupt"),  # 20
    step(3, 1, "fail"),
    update(0, 0, 2),
    trained(0, 0, 0, 2, 1.0, 0),
    trained(1, 0, 0, 1, 0.0, 0),  # 24
    version(1),
    step(2, 1, "requeue", "resume"),
    step(3, 1, "requeue", "replay"),
    step(2, 2, "start"),  # 28
    step(3, 2, "start"),
    tokens(2, 2, 2, [18], version=1),
    tokens(3, 2, 0, [15, 16, 19], version=1, verified=2),
    tokens(3, 2, 3, [20], version=1),  # 32
    step(2, 2, "finish", "stop"),
    step(3, 2, "finish", "length"),
    step(2, 2, "score", 0.5),
    step(3, 2, "score", 0.25),  # 36
    update(1, 1, 2),
    trained(2, 1, 1, 3, 0.5, 1),
    trained(3, 1, 1, 4, 0.25, 0),
    version(2),  # 40
    cohort(1, 2, 2),
    sample(4, cohort=1, prompt="a", epoch=1),
    sample(5, cohort=1, prompt="a", epoch=1, index=1),
    step(4, 1, "start"),  # 44
    step(5, 1, "start"),
    tokens(4, 1, 0, [21, 22], version=2),
    tokens(5, 1, 0, [23], version=2),
    step(4, 1, "finish", "stop"),  # 48; here the process ended
    step(5, 1, "cut"),
    step(4, 1, "score", 0.0),
    step(5, 2, "start"),
    tokens(5, 2, 1, [24], version=2),
]
# The same, but sample 0 ends its first turn after two tokens, is fed one token, which the engine did not sample, and
# then writes one more.
TOOL_OUTPUT = 30
WITH_TOOL: list[Row] = [
    *GOOD[:15],
    step(0, 1, "finish", "stop"),
    step(0, 1, "feed", 1),
    tokens(0, 1, 2, [TOOL_OUTPUT], version=0),
    step(0, 2, "start"),
    tokens(0, 2, 3, [31], version=0),
    step(0, 2, "finish", "stop"),
    *GOOD[16:],
]
CUT_SEQ = 48
LINEAGES = [(0, 0, 0), (1, CUT_SEQ, 2)]  # lineage, cut_seq, version


def write_ledger(
    path: Path,
    rows: list[Row],
    *,
    lineages: list[tuple[int, int, int]] | None = None,
    grouped: bool = True,
    knobs: Mapping[str, object] = KNOBS,
) -> Path:
    """Write a ledger in which the row with seq i + 1 is `rows[i]`."""
    with writing(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.executescript(SCHEMA)
        meta = {"schema_version": "1", "grouped": str(int(grouped)), "knobs": json.dumps(dict(knobs))}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", {**meta, "seq": str(len(rows))}.items())
        connection.executemany("INSERT INTO lineages VALUES (?, ?, ?)", lineages or [(0, 0, 0)])
        for seq, (table, record) in enumerate(rows, start=1):
            insert(connection, table, seq, record)
    return path


def insert(connection: sqlite3.Connection, table: str, seq: int, record: Mapping[str, object]) -> None:
    names = ", ".join(["seq", *record])
    marks = ", ".join("?" * (len(record) + 1))
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", (seq, *record.values()))


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    with connection:
        yield connection
    connection.close()


def write_good(path: Path) -> Path:
    return write_ledger(path, GOOD, lineages=LINEAGES)
