"""Reads rows from JSONL, JSON, CSV and Parquet files, folders of them, saved datasets, and the Hugging Face hub.

`run/builders/task.py`, `run/sft_run.py` and the suites read rows here. JSON and CSV need no package, Parquet and
datasets need the extra `data`.

Guarantees: rows come in the order of the files, and files in the order of their names; required columns are in every
row, each with one type; nothing that is read is executed; a mistake in a file is a DataError that names the file, the
line or row, and the column.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from sortedrl.errors import DataError
from sortedrl.external.extras import extra_message
from sortedrl.external.hub import Commits, dataset_commit, explain, is_commit, is_offline, is_unreachable
from sortedrl.tasks.base import Row, RowSequence

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_SMALL_TABLE = 1 << 28  # bytes; a larger one stays on disk and yields rows one by one, ten times as slowly
_USUAL_TABLE = 1 << 33  # bytes; the most that is unpacked where the machine's memory is unknown
_PIECE_ROWS = 1024  # that are unpacked at once
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")  # the name of a dataset, and its configuration after a colon
KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", NoneType: "nothing"}


@dataclass(slots=True, kw_only=True, frozen=True)
class FileRows:
    """Rows with their columns renamed. Each row is made when it is read."""

    name: str
    rows: RowSequence
    columns: Mapping[str, str] = field(default_factory=dict)  # our name -> name in the file; dots: nested columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Row:
        row = dict(self.rows[index])
        if not self.columns:
            return row
        found = {ours: _look_up(row, theirs) for ours, theirs in self.columns.items()}
        named = {*self.columns, *self.columns.values()}  # a column of our name is not the one that was asked for
        rest = {name: value for name, value in row.items() if name not in named}
        return rest | {name: value for name, value in found.items() if value is not _MISSING}


@dataclass(slots=True, kw_only=True, frozen=True)
class TableRows:
    """The rows of an Arrow table, converted one at a time."""

    table: Any

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int, /) -> Row:
        return self.table.slice(index, 1).to_pylist()[0]


@dataclass(slots=True, kw_only=True, frozen=True)
class ChosenRows:
    """A selection of rows, in a given order."""

    rows: RowSequence
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Any:
        return self.rows[self.indices[index]]


_MISSING = object()


def read_rows(
    source: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    revision: str = "",
    required: Iterable[str] = ("prompt",),
    commits: Commits | None = None,
) -> FileRows:
    """Read the rows of a file, a folder or a dataset on the hub, and check the `required` columns in every row.

    `split` selects the files of a folder whose names begin with it, or the split of a dataset. Default: `train` if
    there is one. `revision` is that of a dataset on the hub; a commit in `commits` replaces it, otherwise the commit
    that was read is noted there.
    """
    found = _read(str(source), split or None, revision, {} if commits is None else commits)
    rows = FileRows(name=str(source), rows=found, columns=dict(columns or {}))
    if len(rows) == 0:
        raise DataError(f"{source} has no rows; give it at least one")
    _check_columns(rows, {*required, *rows.columns})
    return rows


def _check_columns(rows: FileRows, required: Iterable[str]) -> None:
    """Raise DataError if a row lacks one of these columns, or a column has several types."""
    for column in sorted(required):
        kinds: dict[str, int] = {}
        for index in range(len(rows)):
            row = rows[index]
            if column not in row:
                raise DataError(_missing(rows, column, index, row))
            kind = KINDS.get(type(row[column]), "an object")
            if kind == "nothing":
                raise DataError(
                    f"row {index} of {rows.name} has nothing in column {column!r}; fill it or leave out the row"
                )
            kinds.setdefault(kind, index)
            if len(kinds) > 1:
                both = " and ".join(f"{kind} in row {first}" for kind, first in kinds.items())
                raise DataError(f"column {column!r} of {rows.name} is {both}; make it one type")


def split_off(rows: RowSequence, share: float) -> tuple[list[int], list[int]]:
    """Hold out a share of the distinct prompts, chosen by hash: the numbers of training rows and of held-out rows.

    Rows with the same prompt stay together. Which prompts are held out does not depend on the order of rows.
    """
    digests = [
        hashlib.blake2b(json.dumps(rows[i]["prompt"]).encode(), digest_size=8).digest() for i in range(len(rows))
    ]
    distinct = sorted(set(digests))
    num_heldout = min(max(round(share * len(distinct)), 1), len(distinct) - 1) if share else 0
    heldout = set(distinct[:num_heldout])
    train, held = ([i for i, digest in enumerate(digests) if (digest in heldout) == side] for side in (False, True))
    return train, held


# ---- where rows come from --------------------------------------------------------------------------------------------


def _read(source: str, split: str | None, revision: str, commits: Commits) -> RowSequence:
    path = Path(source).expanduser()
    if revision and path.exists():
        raise DataError(f"{source} is not on the hub, so it has no revision {revision!r}: remove the revision")
    if path.is_dir():
        return _read_folder(path, split)
    if path.is_file():
        if split and not _is_of(path, path.parent, split):
            raise DataError(f"{path} is one file and has no split {split!r}; leave the split out, or give a folder")
        return _read_files([path])
    looks_local = path.suffix in SUFFIXES or source.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(source)
    if looks_local or (path.parent.is_dir() and path.parent != Path()):
        raise DataError(f"there is no file or folder {source}{_nearest_path(path)}")
    return _read_hub(source, split, revision, commits)


def _nearest_path(path: Path) -> str:
    there = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else "; check the path"


def _read_folder(folder: Path, split: str | None) -> RowSequence:
    if (folder / "dataset_dict.json").is_file():
        parts = _checked(folder / "dataset_dict.json", lambda text: list(json.loads(text)["splits"]))
        return _read_saved(folder / _choose_split(folder, parts, split))
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _read_saved(folder)
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and not _is_hidden(path, folder))
    if not files:
        raise DataError(f"the folder {folder} has no file ending in {', '.join(SUFFIXES)}; give it one")
    chosen = [path for path in files if _is_of(path, folder, split or "train")]
    if split and not chosen:
        names = ", ".join(str(path.relative_to(folder)) for path in files[:8])
        raise DataError(f"the folder {folder} has no file of split {split!r}; it has {names}")
    return _read_files(chosen or files)


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _is_of(path: Path, folder: Path, split: str) -> bool:
    """`train.parquet`, `train-00000-of-00004.parquet`, `train/0.parquet` are of the split `train`."""
    return any(re.match(rf"{re.escape(split)}([-_.]|$)", part) for part in path.relative_to(folder).parts)


def _choose_split(folder: Path, parts: Sequence[str], split: str | None) -> str:
    wanted = split or ("train" if "train" in parts else "")
    if wanted not in parts:
        raise DataError(f"{folder} has the splits {', '.join(parts)}; name one of them, not {split or 'none'}")
    return wanted


def _read_saved(folder: Path) -> RowSequence:
    datasets = _import_datasets(str(folder))
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # Arrow, the file system and datasets raise errors of many kinds
        raise DataError(f"the dataset in {folder} cannot be read ({_brief(error)}); save it again") from error


def _read_hub(name: str, split: str | None, revision: str, commits: Commits) -> RowSequence:
    datasets = _import_datasets(name)
    path, _, configuration = name.partition(":")
    key = f"dataset {path}"
    wanted = commits.get(key) or revision
    is_checked = True
    try:
        wanted = dataset_commit(path, revision=wanted)
    except Exception as error:  # no connection, no such name, no access, and others
        is_checked = False
        if not is_unreachable(error) or not _is_cached(datasets, path):  # datasets would retry for half a minute
            raise DataError(explain(error, path, key="dataset", revision=wanted, kind="dataset")) from error
        if not is_offline():
            log.warning("the hub cannot be reached: HF_HUB_OFFLINE=1 would use the cached dataset %s at once", path)
    try:
        rows = datasets.load_dataset(path, configuration or None, split=split or "train", revision=wanted or None)
    except Exception as error:  # no such configuration, no such split, no connection, and others
        raise DataError(
            f"dataset {name!r} could not be loaded from the hub or its cache ({_brief(error)}); correct the name or "
            "the split, or download it where there is a connection (hf download --repo-type dataset "
            f"{path} --local-dir DIR) and give the path of DIR"
        ) from error
    commits[key] = wanted if is_checked else _check_cached(rows, path, wanted)
    return rows


def _is_cached(datasets: Any, path: str) -> bool:
    """Whether the cache of datasets has tables of this dataset."""
    return (Path(datasets.config.HF_DATASETS_CACHE) / path.replace("/", "___")).is_dir()


def _check_cached(rows: Any, path: str, wanted: str) -> str:
    """The commit of rows from the cache; raises if it is not the wanted one, because datasets ignores that offline."""
    commit = next((part for file in rows.cache_files for part in Path(file["filename"]).parts if is_commit(part)), "")
    if wanted and wanted != commit:
        raise DataError(
            f"the cache has commit {commit or 'unknown'} of dataset {path!r}, and without a connection revision "
            f"{wanted!r} cannot be read: connect, or set task.revision to that commit"
        )
    return commit


def _import_datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(extra_message(f"reading {what}", "data")) from None
    return datasets


# ---- formats ---------------------------------------------------------------------------------------------------------


def _read_files(paths: Sequence[Path]) -> RowSequence:
    if all(path.suffix == ".parquet" for path in paths):
        return _read_parquet(paths)
    return [row for path in paths for row in _rows_of(path)]


def _rows_of(path: Path) -> Iterable[Row]:
    match path.suffix:
        case ".jsonl" | ".ndjson":
            return _read_jsonl(path)
        case ".json":
            return _read_json(path)
        case ".csv":
            return _read_csv(path)
        case ".parquet":
            table = _read_parquet([path])
            return (table[index] for index in range(len(table)))
        case other:
            raise DataError(f"{path} ends in {other!r}; rows are read from {', '.join(SUFFIXES)}")


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _json_row(line, f"line {number} of {path}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _json_row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON ({_brief(error)}); correct or remove it") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is {KINDS.get(type(row), 'something else')}, not an object with columns; correct it")
    return row


def _read_json(path: Path) -> list[Row]:
    rows = _checked(path, json.loads)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{path} must hold a list of objects with columns; if it has one object per line, name it .jsonl"
        )
    return rows


def _read_csv(path: Path) -> list[Row]:
    return _checked(path, lambda text: list(_csv_rows(text, path)))


def _csv_rows(text: str, path: Path) -> Iterator[Row]:
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    names = next(reader, [])
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(names):
            raise DataError(
                f"line {reader.line_num} of {path} has {len(cells)} cells, the header {len(names)}; correct it"
            )
        yield dict(zip(names, cells, strict=True))


def _checked(path: Path, read: Any) -> Any:
    try:
        return read(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as {path.suffix} ({_brief(error)}); correct or remove it") from None


def _read_parquet(paths: Sequence[Path]) -> RowSequence:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(extra_message(f"reading {paths[0]}", "data")) from None
    place = paths[0] if len(paths) == 1 else paths[0].parent
    try:
        table = _unpack(paths, place, _largest_table())
        # A value that a dictionary holds once would be copied for each of its rows.
        is_small = table.nbytes < _SMALL_TABLE and "dictionary<" not in str(table.schema)
        return table.to_pylist() if is_small else TableRows(table=table)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise DataError(f"{place} cannot be read as Parquet ({_brief(error)}); correct or remove it") from None


def _unpack(paths: Sequence[Path], place: Path, limit: int) -> Any:
    """The rows of all files as one table. They are read in pieces, because a small file can unpack to any size."""
    import pyarrow
    from pyarrow import parquet

    tables, num_bytes = [], 0
    for path in paths:
        batches = []
        with parquet.ParquetFile(path, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=_PIECE_ROWS):
                num_bytes += batch.nbytes
                if num_bytes > limit:
                    raise DataError(
                        f"{place} unpacks to more than {limit / 2**30:.1f} GB, half of this machine's memory; train on "
                        "fewer rows or columns, or save it with datasets (save_to_disk), whose rows stay on disk"
                    )
                batches.append(batch)
            tables.append(pyarrow.Table.from_batches(batches, file.schema_arrow))
    return pyarrow.concat_tables(tables)


def _largest_table() -> int:
    """Half of the machine's memory, in bytes."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):  # Windows
        return _USUAL_TABLE
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# ---- columns and messages --------------------------------------------------------------------------------------------


def _look_up(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head)
    return _look_up(inner, rest) if dot and isinstance(inner, Mapping) else _MISSING


def _missing(rows: FileRows, column: str, index: int, row: Row) -> str:
    wanted = rows.columns.get(column, column)
    there = list(rows.rows[index])
    where = rows.name if index == 0 else f"row {index} of {rows.name}"
    near = difflib.get_close_matches(wanted, there, n=1)
    hint = f"did you mean {near[0]!r}? Then set" if near else "name the right one with"
    advice = f"; {hint} task.columns.{column}={near[0] if near else 'NAME'}"
    return f"{where} has no column {wanted!r}; it has: {', '.join(map(repr, there)) or 'none'}{advice}"


def _brief(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
