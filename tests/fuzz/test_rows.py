"""Files of rows for the fuzzer: sound ones can be read, damaged ones differ, bombs are small."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import rows
from sortedrl.errors import DataError
from sortedrl.tasks.files import read_rows


@pytest.mark.parametrize("name", rows.SOUND)
def test_a_sound_file_is_read_and_a_damaged_one_differs(name: str, tmp_path: Path) -> None:
    for number, made in enumerate((name, f"flipped-{name}", f"cut-{name}")):
        rows.write(tmp_path, made, seed=number)
    sound = (tmp_path / name).read_bytes()
    flipped, cut = ((tmp_path / f"{how}-{name}").read_bytes() for how in ("flipped", "cut"))
    assert len(read_rows(tmp_path / name)) == 24
    assert 1 <= sum((a ^ b).bit_count() for a, b in zip(sound, flipped, strict=True)) <= 3
    assert sound.startswith(cut)
    assert len(cut) < len(sound)


@pytest.mark.parametrize("name", ["nested.json", "mixed.jsonl", "zeros.jsonl"])
def test_an_odd_file_is_refused(name: str, tmp_path: Path) -> None:
    rows.write(tmp_path, name, seed=0)
    with pytest.raises(DataError, match=name):
        read_rows(tmp_path / name)


def test_a_bomb_is_small(tmp_path: Path) -> None:
    rows.write(tmp_path, "bomb-dictionary.parquet", seed=0)
    assert (tmp_path / "bomb-dictionary.parquet").stat().st_size < 100_000
