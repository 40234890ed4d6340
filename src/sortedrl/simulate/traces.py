"""Traces: the lengths of a workload's answers, read from a file or drawn from a distribution.

The simulator, the planner and the benchmarks call `load_trace` with the value of `--trace`. Guarantees: every length is
a whole number of tokens from 1 to the cap. Answers are in load order, with siblings next to each other. A trace that
cannot be used raises `DataError`, which names the position of the first mistake.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sortedrl.errors import DataError
from sortedrl.external.extras import extra_message
from sortedrl.simulate.trainer_logs import read_trainer_logs

DEFAULT_SAMPLES = 4096  # of a synthetic trace
MAX_SAMPLES = 10**8  # more would not fit in memory
MAX_LENGTH = 2**31  # tokens of an answer


@dataclass(slots=True, kw_only=True, frozen=True)
class Trace:
    """The lengths of answers to simulate.

    `lengths[i]` is the number of tokens of answer i, and `prompts[i]` is the number of its prompt. Siblings are next to
    each other.
    """

    lengths: Sequence[int]
    prompts: Sequence[int]
    cap: int  # token budget of an answer
    source: str
    note: str = ""  # for the user, about how the trace was read

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def has_siblings(self) -> bool:
        return self.prompts[-1] + 1 < len(self.prompts)


def load_trace(
    text: str | Path,
    *,
    samples: int | None = None,
    seed: int = 0,
    cap: int | None = None,
    column: str = "length",
    group_size: int = 1,
) -> Trace:
    """Read a file or a run directory, or draw from `lognormal(700, 1.1, 8192)` or `bimodal(200, 4000, 0.1)`.

    `samples` is the number of answers: the first ones of a longer file; a shorter file is repeated in another order.
    `group_size` is the number of siblings that train together; a flat list is cut into groups in file order.
    """
    if not str(text).strip():
        raise DataError(f"the trace is empty: give --trace a file, a run directory, or {_EXAMPLES['lognormal']}")
    if samples is not None and samples < 1:
        raise DataError(f"a trace needs at least one sample, not {samples}: raise --samples")
    if samples is not None and samples > MAX_SAMPLES:
        raise DataError(f"a trace has at most {MAX_SAMPLES:,} samples, not {samples}: lower --samples")
    if cap is not None and cap < 1:
        raise DataError(f"the cap must be at least 1 token, not {cap}: raise --cap")
    drawn = _draw(str(text), samples or DEFAULT_SAMPLES, seed, cap)
    note = ""
    if drawn is not None:
        lengths, cap = drawn
        groups: list[list[int]] = [lengths]
        is_flat = True
    else:
        groups, is_flat, note = _read(Path(text), column)
        cap = _check(groups, cap, str(text))
    groups = _regroup(groups, is_flat, group_size, str(text))
    groups = _cut_or_repeat(groups, samples, seed)
    return Trace(
        lengths=[length for group in groups for length in group],
        prompts=[number for number, group in enumerate(groups) for _ in group],
        cap=cap,
        source=str(text),
        note=note,
    )


# ---- synthetic ------------------------------------------------------------------------------------------------------


def _draw(text: str, samples: int, seed: int, cap: int | None) -> tuple[list[int], int] | None:
    """Lengths and cap, drawn from the distribution in the text; None if the text is not a distribution."""
    match = re.fullmatch(r"\s*(lognormal|bimodal)\s*\((.*)\)\s*", text)
    if match is None:
        return None
    kind, inside = match.groups()
    names = {"lognormal": ("median", "sigma", "cap"), "bimodal": ("short", "long", "share")}[kind]
    values = [re.sub(rf"^\s*{name}\s*[=\s]\s*", "", part) for name, part in zip(names, inside.split(","), strict=False)]
    usage = f"write {kind}({', '.join(names)}), for example {_EXAMPLES[kind]}"
    try:
        first, second, third = (float(value) for value in values)
        is_right = len(inside.split(",")) == 3 and first >= 1 and all(v <= MAX_LENGTH for v in (first, second, third))
    except ValueError:
        is_right, first, second, third = False, 0.0, 0.0, 0.0
    rng = np.random.default_rng(seed)
    if kind == "lognormal":
        if not is_right or second < 0 or third < 1:
            raise DataError(f"cannot draw {text!r}: {usage}")
        limit = int(third) if cap is None else min(int(third), cap)
        drawn = first * np.exp(second * rng.standard_normal(samples))
        return np.clip(np.rint(drawn), 1, limit).astype(np.int64).tolist(), limit
    if not is_right or second < 1 or not 0 <= third <= 1:
        raise DataError(f"cannot draw {text!r}: {usage}")
    limit = int(max(first, second)) if cap is None else cap
    drawn = np.where(rng.random(samples) < third, int(second), int(first))
    return np.minimum(drawn, limit).tolist(), limit


_EXAMPLES = {"lognormal": "lognormal(700, 1.1, 8192)", "bimodal": "bimodal(200, 4000, 0.1)"}
_ENCODING = "utf-8-sig"  # spreadsheets write a byte order mark, which must not become part of the first column's name


# ---- files ----------------------------------------------------------------------------------------------------------


def _read(path: Path, column: str) -> tuple[list[list[int]], bool, str]:
    """The lengths in groups, whether they are a flat list (one group, no siblings), and a note for the user."""
    if path.is_dir():
        path, folder = path / "events.jsonl", path
        logs = None if path.exists() else read_trainer_logs(folder)
        if logs is not None:
            groups, note = logs
            is_even = len({len(group) for group in groups}) == 1
            return (groups, False, note) if is_even else ([[n for group in groups for n in group]], True, note)
    readers: dict[str, Callable[[Path, str], tuple[list[list[Any]], bool, str]]] = {
        ".json": _read_json,
        ".jsonl": _read_events,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"the trace {str(path)!r} has an unknown format: name a .json, .csv, .parquet or events.jsonl file, a "
            f"run directory, or a distribution such as {_EXAMPLES['lognormal']}"
        )
    try:
        return reader(path, column)
    except OSError as error:
        raise DataError(f"cannot read the trace {path}: {error.strerror or error}; check its name") from None
    except UnicodeDecodeError:
        raise DataError(f"the trace {path} is not UTF-8 text: write it again as UTF-8") from None


def _read_json(path: Path, column: str) -> tuple[list[list[Any]], bool, str]:
    try:
        data = json.loads(path.read_text(encoding=_ENCODING))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"the trace {path} is not valid JSON: {error}; write a list of lengths") from None
    if not isinstance(data, list):
        raise DataError(f"the trace {path} must be a list of lengths, or of lists of siblings' lengths")
    return _siblings_or_numbers(path, data)


def _read_events(path: Path, column: str) -> tuple[list[list[Any]], bool, str]:
    """The lengths of a run's trained answers, in order of sample id, which is the load order."""
    lengths: dict[int, int] = {}
    updates, has_ended = 0, False
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                event = json.loads(line)
                if event["kind"] == "BatchTaken":
                    lengths.update(zip(event["samples"], event["lengths"], strict=True))
                    updates += 1
                has_ended = has_ended or event["kind"] == "RunEnded"
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"line {number} of {path} is incomplete, after {len(lengths)} answers of {updates} updates: "
                    f"wait until the run has ended, or use only the lines before it: head -n {number - 1}"
                ) from None
    if not lengths:
        raise DataError(f"{path} has no trained answer: use the events of a run with at least one update")
    note = "" if has_ended else f"{path} ends before its run has ended: {len(lengths)} answers were read"
    return [[lengths[sample] for sample in sorted(lengths)]], True, note


def _read_csv(path: Path, column: str) -> tuple[list[list[Any]], bool, str]:
    lengths: list[Any] = []
    with path.open(encoding=_ENCODING, newline="") as file:
        rows = csv.DictReader(file)
        _need_column(path, column, rows.fieldnames or [])
        for row in rows:
            if None in row:
                raise DataError(f"line {rows.line_num} of {path} has more fields than its header: quote or remove them")
            lengths.append(_number(row[column]))
    return [lengths], True, ""


def _number(text: str | None) -> Any:
    try:
        return float(text or "")
    except ValueError:
        return text


def _read_parquet(path: Path, column: str) -> tuple[list[list[Any]], bool, str]:
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"{extra_message(f'reading {path}', 'data')}, or save the trace as CSV") from None
    try:
        _need_column(path, column, parquet.read_schema(path).names)
        values = parquet.read_table(path, columns=[column])[column].to_pylist()
    except ArrowException as error:
        reason = " ".join(str(error).split())  # Arrow's messages may have several lines
        raise DataError(f"cannot read {path} as Parquet: {reason}; write it again, or save it as CSV") from None
    return _siblings_or_numbers(path, values)


def _siblings_or_numbers(path: Path, values: list[Any]) -> tuple[list[list[Any]], bool, str]:
    """A list of lists has the siblings' lengths, one list per prompt; any other list is a flat list of lengths."""
    if not values or not all(isinstance(item, list) for item in values):
        return [values], True, ""
    empty = next((number for number, group in enumerate(values) if not group), None)
    if empty is not None:
        raise DataError(f"the trace {path} has no length for prompt {empty}: remove the prompt or give it a length")
    return values, False, ""


def _need_column(path: Path, column: str, names: Sequence[str]) -> None:
    if not names:
        raise DataError(f"the trace {path} is empty: it needs a header with the column {column!r} and lengths below")
    if column not in names:
        raise DataError(f"{path} has no column {column!r}: name one of {', '.join(map(repr, names))} with --column")


# ---- checks and shape -----------------------------------------------------------------------------------------------


def _check(groups: list[list[Any]], cap: int | None, source: str) -> int:
    """Reject values that are not lengths, convert floats to int in place, and return the cap."""
    longest, position = 0, 0
    for group in groups:
        for index, value in enumerate(group):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value != value or value in (float("inf"), float("-inf")) or value != int(value):
                raise DataError(f"{source} has {value!r} at position {position}: lengths must be whole numbers")
            if value > MAX_LENGTH:
                raise DataError(
                    f"{source} has length {value:.3g} at position {position}: at most {MAX_LENGTH:,} is read"
                )
            if value < 1:
                raise DataError(
                    f"{source} has length {value:g} at position {position}: an answer needs at least one token"
                )
            if cap is not None and value > cap:
                raise DataError(
                    f"the trace {source} has length {value:g} at position {position}, above the cap of {cap}: raise "
                    "--cap, or cut the trace"
                )
            group[index] = int(value)
            longest, position = max(longest, group[index]), position + 1
    if position == 0:
        raise DataError(f"the trace {source} is empty: it needs at least one length")
    return longest if cap is None else cap


def _regroup(groups: list[list[int]], is_flat: bool, size: int, source: str) -> list[list[int]]:
    """Groups of `size` siblings that train together; a prompt with more siblings gives several groups."""
    if size < 1:
        raise DataError(f"the group size must be at least 1, not {size}: raise --group-size")
    if size == 1:
        return [[length] for length in groups[0]] if is_flat else groups
    if is_flat:
        groups = [groups[0][: len(groups[0]) // size * size]]  # drop an incomplete last group
    for number, group in enumerate(groups):
        if len(group) % size or not group:
            raise DataError(
                f"the trace {source} has {len(group)} answers to prompt {number}, which do not make groups of {size}: "
                "choose a --group-size that divides the number of answers"
            )
    return [group[first : first + size] for group in groups for first in range(0, len(group), size)]


def _cut_or_repeat(groups: list[list[int]], samples: int | None, seed: int) -> list[list[int]]:
    """Take prompts until there are `samples` answers, and cut the last one; each further pass has another order."""
    if samples is None:
        return groups
    result: list[list[int]] = []
    have, epoch = 0, 0
    while have < samples:
        order = range(len(groups)) if epoch == 0 else np.random.default_rng((seed, epoch)).permutation(len(groups))
        for number in order:
            group = groups[int(number)][: samples - have]
            result.append(group)
            have += len(group)
            if have == samples:
                break
        epoch += 1
    return result
