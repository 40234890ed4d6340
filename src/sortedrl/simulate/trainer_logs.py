"""Lengths of answers from the logs of other trainers, so that `plan` and `simulate` can say what scheduling would give.

TRL writes `completions/completions_00010.parquet` with `log_completions=True`, verl a JSON Lines file per step with
`trainer.rollout_data_dir`. Both hold texts, so a token is taken for `CHARS_PER_TOKEN` characters; the note says so. The
shape of the distribution, which is what schedules depend on, hardly changes with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from sortedrl.errors import DataError
from sortedrl.external.extras import extra_message

CHARS_PER_TOKEN = 4


def read_trainer_logs(folder: Path) -> tuple[list[list[int]], str] | None:
    """The lengths in a folder of TRL's or verl's logs, siblings together, and a note; None if there are no logs."""
    tables = sorted(folder.glob("completions_*.parquet")) or sorted(folder.glob("completions/completions_*.parquet"))
    if tables:
        return _lengths("TRL", (pair for path in tables for pair in _read_trl(path)))
    dumps = sorted((path for path in folder.glob("*.jsonl") if path.stem.isdigit()), key=lambda path: int(path.stem))
    return _lengths("verl", (pair for path in dumps for pair in _read_verl(path))) if dumps else None


def _lengths(trainer: str, answers: Iterable[tuple[str, str]]) -> tuple[list[list[int]], str]:
    groups = [
        [max(1, math.ceil(len(answer) / CHARS_PER_TOKEN)) for _, answer in siblings]
        for _, siblings in groupby(answers, key=lambda pair: pair[0])
    ]
    count = f"{sum(map(len, groups)):,} answers to {len(groups):,} prompts"
    return groups, f"{count} from {trainer}'s logs; their tokens are estimated from text"


def _read_trl(path: Path) -> Iterator[tuple[str, str]]:
    """Prompt and answer of each row."""
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"{extra_message(f'reading {path}', 'data')}") from None
    try:
        table = parquet.read_table(path, columns=["prompt", "completion"]).to_pydict()
    except (ArrowException, KeyError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not TRL's table of completions: {reason}; name another folder") from None
    for prompt, completion in zip(table["prompt"], table["completion"], strict=True):
        yield _text(prompt), _text(completion)


def _read_verl(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                yield str(entry["input"]), str(entry["output"])
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"line {number} of {path} is no rollout of verl, which has input and output: name another folder"
                ) from None


def _text(value: Any) -> str:
    """A text, or the texts of a list of messages."""
    if isinstance(value, str):
        return value
    return "".join(str(message.get("content") or "") for message in value or ())
