"""Files with training rows for the fuzzer: sound ones, damaged ones, and small ones that unpack to gigabytes.

`write` makes the file that a scenario's `task.path` names. The processes of such scenarios get a limit of memory
(`MEMORY_BYTES`), so that a file that is unpacked as a whole takes no other program's memory.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from pathlib import Path
from typing import Any

MEMORY_BYTES = 3 << 29  # more than a process has at its start
SOUND = ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet")
BOMBS = ("bomb-plain.parquet", "bomb-dictionary.parquet", "bomb-nested.parquet", "bomb-zeros.parquet")
ODD = ("nested.json", "long.jsonl", "mixed.jsonl", "zeros.jsonl")
FILES = (*SOUND, *(f"{how}-{name}" for how in ("flipped", "cut") for name in SOUND), *BOMBS, *ODD)
_NUM_ROWS = 24
_BOMB_ROWS, _BOMB_TEXT = 20_000, 1 << 20  # 20 GB


def write(folder: Path, name: str, seed: int) -> None:
    """Make the file; the same seed gives the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    path, rng = folder / name, random.Random(seed)
    if name in BOMBS:
        _write_bomb(path)
    elif name in ODD:
        path.write_text(_odd_text(name))
    else:
        _write_rows(path)
        if name not in SOUND:
            path.write_bytes(damaged(path.read_bytes(), name.partition("-")[0].replace("ped", ""), rng))


def is_sound(folder: Path, name: str) -> bool:
    """Whether a file holds what it should: a cut at its end changes nothing."""
    if name in (*BOMBS, *ODD):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        _write_rows(Path(scratch) / name)
        return (Path(scratch) / name).read_bytes() == (folder / name).read_bytes()


def damaged(data: bytes, how: str, rng: random.Random) -> bytes:
    """`cut` at a random place, or `flip` three bits."""
    if how == "cut":
        return data[: rng.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(3 if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _rows() -> list[dict[str, Any]]:
    from sortedrl.tasks.knights import DEFAULT_PEOPLE, KnightsRows

    source = KnightsRows(seed=0, people=dict(DEFAULT_PEOPLE))
    return [{"prompt": source.row(number)["prompt"], "answer": "x"} for number in range(_NUM_ROWS)]


def _write_rows(path: Path) -> None:
    rows = _rows()
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["prompt", "answer"])
                writer.writeheader()
                writer.writerows(rows)
        case _:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _write_bomb(path: Path) -> None:
    """Rows with one long text, of which the file holds a single copy."""
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * _BOMB_ROWS, pyarrow.int32()), ["a" * _BOMB_TEXT])
    if path.stem == "bomb-zeros":  # a few pages that compress well
        zeros = pyarrow.table({"prompt": ["\0" * (64 << 20)] * 8})
        parquet.write_table(zeros, path, use_dictionary=False, compression="zstd", write_statistics=False)
        return
    if path.stem == "bomb-nested":
        texts = pyarrow.StructArray.from_arrays([texts], ["content"])
    table = pyarrow.table({"prompt": texts})
    parquet.write_table(table, path, store_schema=path.stem != "bomb-plain", write_statistics=False)


def _odd_text(name: str) -> str:
    match name:
        case "nested.json":
            return "[" * 200_000
        case "long.jsonl":
            return json.dumps({"prompt": "Ann " * 2_000_000}) + "\n"
        case "mixed.jsonl":
            return '{"prompt": "Ann"}\n{"prompt": 7}\n{"prompt": null}\n[]\n'
        case _:
            return "\0" * 10_000_000
