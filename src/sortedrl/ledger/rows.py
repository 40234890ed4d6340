"""Convert between ledger rows and records: pack tokens and prompts, and fill a buffer from the rows.

The store calls it. Guarantees: unpacking returns exactly what was packed, or raises; a restored sample passes through
the same methods of the buffer as when its rows were written.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import zlib
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sortedrl.buffer import Buffer
from sortedrl.errors import DataError
from sortedrl.ledger.schema import damaged
from sortedrl.lengths import LengthEstimator
from sortedrl.records import IGNORED, FinishReason, Mode, Prompt, Sample, Segment, State

# Null where a sample starts over.
TOOL_SECONDS = """
SELECT seq, sample, seconds FROM calls WHERE error != ?
UNION ALL SELECT seq, sample, NULL FROM steps
    WHERE step = 'requeue' AND value = 'fresh' AND sample IN (SELECT sample FROM calls)
ORDER BY seq
"""


class Packed(NamedTuple):
    """Tokens and log-probs as bytes, as the file holds them."""

    num_tokens: int
    crc: int
    tokens: bytes | None  # None in a copy, for a trained sample
    logprobs: bytes | None


class PromptRow(NamedTuple):
    crc: int
    tokens: bytes
    content: str
    columns: str


def pack(tokens: list[int], logprobs: list[float]) -> tuple[Packed, list[float]]:
    """Pack a delivery, and return its log-probs rounded to the row's precision (float32)."""
    given = struct.pack(f"={len(logprobs)}d", *logprobs)  # the fastest way to convert a list
    single = np.frombuffer(given, np.float64).astype("<f4")
    packed_tokens, packed_logprobs = struct.pack(f"<{len(tokens)}i", *tokens), single.tobytes()
    crc = zlib.crc32(packed_logprobs, zlib.crc32(packed_tokens))
    packed = Packed(num_tokens=len(tokens), crc=crc, tokens=packed_tokens, logprobs=packed_logprobs)
    is_exact = single.astype(np.float64).tobytes() == given  # true for engines that compute in float32
    return packed, logprobs if is_exact else single.tolist()


def unpack(packed: Packed) -> tuple[list[int], list[float]]:
    if packed.tokens is None or packed.logprobs is None:
        raise ValueError(
            "its tokens are missing: this ledger is a checkpoint's copy, which leaves out the tokens of trained samples"
        )
    crc = zlib.crc32(packed.logprobs, zlib.crc32(packed.tokens))
    if crc != packed.crc or len(packed.tokens) != 4 * packed.num_tokens:
        raise ValueError("its tokens do not match their checksum")
    return np.frombuffer(packed.tokens, "<i4").tolist(), np.frombuffer(packed.logprobs, "<f4").tolist()


def pack_prompt(prompt: Prompt) -> PromptRow:
    """Pack a prompt as JSON; numpy values become plain numbers. The error names a column that JSON cannot hold."""
    content = _to_json(prompt.content, f"the content of prompt {prompt.id!r}")
    columns = [
        f"{json.dumps(name)}: {_to_json(value, f'column {name!r} of prompt {prompt.id!r}')}"
        for name, value in prompt.columns.items()
    ]
    try:
        prompt.id.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"prompt id {prompt.id!r} is not valid text ({error.reason}): give it another id") from None
    row = PromptRow(
        crc=0,
        tokens=struct.pack(f"<{len(prompt.tokens)}i", *prompt.tokens),
        content=content,
        columns="{" + ", ".join(columns) + "}",
    )
    return row._replace(crc=_prompt_crc(row))


def unpack_prompt(prompt_id: str, row: PromptRow) -> Prompt:
    if _prompt_crc(row) != row.crc:
        raise ValueError(f"prompt {prompt_id!r} does not match its checksum")
    tokens = tuple(np.frombuffer(row.tokens, "<i4").tolist())
    return Prompt(id=prompt_id, tokens=tokens, content=json.loads(row.content), columns=json.loads(row.columns))


# ---- fill a buffer from rows ----------------------------------------------------------------------------------------


def fill(buffer: Buffer, path: Path, connection: sqlite3.Connection) -> None:
    """Bring an empty buffer to its state at the last row.

    Of trained samples it reads lengths and the seconds of tool calls, from which the estimates of lengths come.
    """
    try:
        live = _load_live(buffer, connection)
        for sample in live:
            _apply_rows(buffer, sample, connection)
        _set_counters(buffer, connection)
    except (AssertionError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise damaged(path, str(error)) from error


def _load_live(buffer: Buffer, connection: sqlite3.Connection) -> list[Sample]:
    """Load the samples that are not trained, cohort by cohort, and return them."""
    rows = connection.execute(
        "SELECT id, cohort, prompt, epoch, idx, seed, budget FROM samples"
        " WHERE id NOT IN (SELECT sample FROM trained) ORDER BY seq"
    ).fetchall()
    prompts: dict[str, Prompt] = {}
    for prompt_id in dict.fromkeys(row[2] for row in rows):
        query = "SELECT crc, tokens, content, columns FROM prompts WHERE id = ?"
        row = connection.execute(query, (prompt_id,)).fetchone()
        assert row is not None, f"there is no prompt {prompt_id!r}"
        prompts[prompt_id] = unpack_prompt(prompt_id, PromptRow(*row))
    live = [
        Sample(id=number, cohort=cohort, prompt=prompts[prompt], epoch=epoch, index=index, seed=seed, budget=budget)
        for number, cohort, prompt, epoch, index, seed, budget in rows
    ]
    for cohort_id, samples in groupby(live, key=lambda sample: sample.cohort):
        query = "SELECT loaded_update, num_samples FROM cohorts WHERE id = ?"
        row = connection.execute(query, (cohort_id,)).fetchone()
        assert row is not None, f"there is no cohort {cohort_id}"
        buffer.next_cohort, (buffer.num_updates, num_samples) = cohort_id, row
        Buffer.load(buffer, list(samples)).num_samples = num_samples
    return live


def _apply_rows(buffer: Buffer, sample: Sample, connection: sqlite3.Connection) -> None:
    """Apply a sample's rows in order. A sample that still runs at the end is cut off, and waits for another attempt."""
    steps = connection.execute("SELECT seq, attempt, step, value FROM steps WHERE sample = ?", (sample.id,))
    segments = connection.execute(
        "SELECT seq, attempt, start, verified, version, slot_s, num_tokens, crc, tokens, logprobs FROM segments"
        " WHERE sample = ?",
        (sample.id,),
    )
    rows: list[tuple[Any, ...]] = sorted([*steps, *segments])
    is_fed = False  # whether the next row feeds tokens
    for seq, attempt, *row in rows:
        try:
            if row[0] == "feed":
                is_fed = True
            elif len(row) == 2:
                _apply_step(buffer, sample, *row)
            elif is_fed:
                Buffer.feed(buffer, sample, unpack(Packed(*row[4:]))[0])
                sample.segments[-1].version = row[2]  # the buffer has the version of the last row
                is_fed = False
            else:
                _apply_segment(buffer, sample, *row)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"sample {sample.id}, row {seq}: {error}") from error
        if attempt != sample.attempt:
            raise ValueError(f"sample {sample.id}, row {seq}: attempt {attempt} follows {sample.attempt}")
    if sample.state == State.RUNNING:
        _apply_step(buffer, sample, "cut", None)


def _apply_step(buffer: Buffer, sample: Sample, step: str, value: Any) -> None:
    match step:
        case "start":
            Buffer.start(buffer, sample)
        case "finish":
            Buffer.finish(buffer, sample, FinishReason(value))
        case "call":
            Buffer.call(buffer, sample, value)
        case "interrupt":
            Buffer.interrupt(buffer, sample)
        case "cut":
            buffer.cut_off(sample)
        case "fail":
            Buffer.fail(buffer, sample)
        case "give-up":
            Buffer.give_up(buffer, sample)
        case "score":
            reward = math.nan if value is None else value  # SQLite stores NaN as null
            assert Buffer.score(buffer, sample.id, sample.attempt, reward), f"scored while {sample.state}"
        case "requeue":
            Buffer.requeue(buffer, sample, Mode(value))
        case _:
            raise ValueError(f"unknown step {step!r}")


def _apply_segment(
    buffer: Buffer, sample: Sample, start: int, verified: int, version: int, slot_s: float, *packed: Any
) -> None:
    tokens, logprobs = unpack(Packed(*packed))
    Buffer.append(buffer, sample, Segment(version, tokens, logprobs, slot_s), start=start, verified=verified)


def _set_counters(buffer: Buffer, connection: sqlite3.Connection) -> None:
    """Set the counters that trained samples left behind, and put the samples of each state in load order."""
    buffer.version = last_version(connection)
    buffer.num_started = 0
    (buffer.num_updates,) = connection.execute("SELECT count(*) FROM updates").fetchone()
    (buffer.num_trained,) = connection.execute("SELECT count(*) FROM trained").fetchone()
    (buffer.num_loaded,) = connection.execute("SELECT count(*) FROM samples").fetchone()
    (buffer.next_cohort,) = connection.execute("SELECT count(*) FROM cohorts").fetchone()
    tool_s, tool_s_now = _tool_seconds(connection)
    for sample in buffer.samples.values():
        sample.tool_s, sample.tool_s_now = tool_s.get(sample.id, 0.0), tool_s_now.get(sample.id, 0.0)
    lengths = connection.execute(
        "SELECT prompt, sum(length), count(*) FROM trained JOIN samples ON samples.id = trained.sample GROUP BY prompt"
    )
    buffer.lengths = LengthEstimator.from_state_dict({prompt: [total, count] for prompt, total, count in lengths})
    if tool_s:
        trained = connection.execute(
            "SELECT id, prompt FROM trained JOIN samples ON samples.id = trained.sample ORDER BY trained.seq"
        )
        buffer.lengths.learn_tool_time([(prompt, tool_s[number]) for number, prompt in trained if tool_s.get(number)])
    for state, held in buffer.in_state.items():
        held.clear()
        held.update((s.id, s) for s in buffer.samples.values() if s.state == state)
    buffer.find_ready()


def _tool_seconds(connection: sqlite3.Connection) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds in tools, by sample: the most so far, and those since it started over last.

    They are added in the order of the calls, so that they equal the buffer's to the last bit.
    """
    most: dict[int, float] = {}
    now: dict[int, float] = {}
    for _, sample, seconds in connection.execute(TOOL_SECONDS, (IGNORED,)):
        now[sample] = 0.0 if seconds is None else now.get(sample, 0.0) + seconds
        most[sample] = max(most.get(sample, 0.0), now[sample])
    return most, now


def last_version(connection: sqlite3.Connection) -> int:
    """The version that was published last; 0 if none was."""
    row = connection.execute("SELECT version FROM versions ORDER BY seq DESC LIMIT 1").fetchone()
    return 0 if row is None else row[0]


# ---- text and checksums ---------------------------------------------------------------------------------------------


def _prompt_crc(row: PromptRow) -> int:
    return zlib.crc32(row.columns.encode(), zlib.crc32(row.content.encode(), zlib.crc32(row.tokens)))


def _to_json(value: object, what: str) -> str:
    try:
        return json.dumps(value, default=_as_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{what} cannot be stored in the ledger ({error}): use only text, numbers, lists and dicts"
        ) from error


def _as_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
