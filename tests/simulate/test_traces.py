"""Traces: every format that can be read, and every mistake, whose error names its position and the remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sortedrl.errors import DataError
from sortedrl.simulate.traces import load_trace


def write(path: Path, data: object) -> str:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_a_list_of_numbers_is_one_prompt_each(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "t.json", [3, 1.0, 2]))
    assert (trace.lengths, trace.prompts, trace.cap) == ([3, 1, 2], [0, 1, 2], 3)
    assert not trace.has_siblings


def test_a_list_of_lists_has_siblings(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path / "t.json", [[3, 1], [2, 5]]), cap=8)
    assert (trace.lengths, trace.prompts, trace.cap) == ([3, 1, 2, 5], [0, 0, 1, 1], 8)
    assert trace.has_siblings


def test_groups_are_cut_from_siblings_or_from_neighbours(tmp_path: Path) -> None:
    nested = load_trace(write(tmp_path / "n.json", [[1, 2, 3, 4], [5, 6, 7, 8]]), group_size=2)
    assert nested.prompts == [0, 0, 1, 1, 2, 2, 3, 3]
    flat = load_trace(write(tmp_path / "f.json", [1, 2, 3, 4, 5]), group_size=2)
    assert (flat.lengths, flat.prompts) == ([1, 2, 3, 4], [0, 0, 1, 1])  # the fifth has no sibling


def test_fewer_samples_cut_and_more_go_round_in_another_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", list(range(1, 21)))
    assert load_trace(path, samples=3).lengths == [1, 2, 3]
    more = load_trace(path, samples=50, seed=1)
    first, second = more.lengths[:20], more.lengths[20:40]
    assert first == list(range(1, 21))
    assert sorted(second) == first
    assert second != first
    assert more.lengths == load_trace(path, samples=50, seed=1).lengths
    assert more.prompts == list(range(50))


def test_lognormal_has_its_median_sigma_and_cap() -> None:
    trace = load_trace("lognormal(700, 1.1, cap 8192)", samples=20_000, seed=3)
    lengths = np.array(trace.lengths)
    assert np.median(lengths) == pytest.approx(700, rel=0.03)
    assert np.log(lengths[lengths < 8192]).std() == pytest.approx(1.1, rel=0.05)
    # P(X > 8192) = P(Z > ln(8192 / 700) / 1.1 = 2.236) = 1.27 %
    assert (lengths == 8192).mean() == pytest.approx(0.0127, abs=0.003)
    assert trace.lengths == load_trace("lognormal(median=700, sigma=1.1, cap=8192)", samples=20_000, seed=3).lengths
    assert trace.lengths != load_trace("lognormal(700, 1.1, 8192)", samples=20_000, seed=4).lengths
    assert load_trace("lognormal(700, 1.1, 8192)").num_samples == 4096


def test_bimodal_has_its_share_of_long_ones() -> None:
    trace = load_trace("bimodal(200, 4000, 0.1)", samples=5000)
    assert set(trace.lengths) == {200, 4000}
    assert sum(length == 4000 for length in trace.lengths) / 5000 == pytest.approx(0.1, abs=0.015)


def test_events_give_lengths_in_load_order(tmp_path: Path) -> None:
    lines = [
        {"kind": "RunStarted"},
        {"kind": "BatchTaken", "samples": [2, 0], "lengths": [4, 9]},
        {"kind": "BatchTaken", "samples": [1], "lengths": [30]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write(tmp_path / "events.jsonl", text)
    trace = load_trace(tmp_path)  # a run directory
    assert trace.lengths == [9, 30, 4]
    assert "3 answers were read" in trace.note
    write(tmp_path / "events.jsonl", text + '{"kind": "RunEnded"}\n')
    assert load_trace(tmp_path / "events.jsonl").note == ""


def test_truncated_events_say_what_was_read(tmp_path: Path) -> None:
    whole = json.dumps({"kind": "BatchTaken", "samples": [0, 1], "lengths": [4, 9]})
    path = write(tmp_path / "events.jsonl", f'{whole}\n{{"kind": "Batch')
    with pytest.raises(DataError, match=r"line 2 of .* is incomplete, after 2 answers of 1 updates.*head -n 1"):
        load_trace(path)


def test_csv_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "id,tokens\na,12\nb,7\n")
    assert load_trace(path, column="tokens").lengths == [12, 7]
    with pytest.raises(DataError, match=r"no column 'length': name one of 'id', 'tokens' with --column"):
        load_trace(path)
    with pytest.raises(DataError, match=r"'a' at position 0: lengths must be whole numbers"):
        load_trace(path, column="id")


def test_csv_mistakes(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path / "mark.csv", "\ufefflength\n5\n\n7\n")).lengths == [5, 7]  # as spreadsheets write
    with pytest.raises(DataError, match=r"line 3 of .* has more fields than its header"):
        load_trace(write(tmp_path / "comma.csv", "length\n5\n1,200\n"))
    with pytest.raises(DataError, match="is empty: it needs a header"):
        load_trace(write(tmp_path / "nothing.csv", ""))
    with pytest.raises(DataError, match="is empty: it needs at least one length"):
        load_trace(write(tmp_path / "header.csv", "length\n"))
    with pytest.raises(DataError, match="'' at position 1"):
        load_trace(write(tmp_path / "hole.csv", "length,id\n5,a\n,b\n"))
    with pytest.raises(DataError, match="length -1 at position 1"):
        load_trace(write(tmp_path / "negative.csv", "length\n5\n-1\n"))


# Each table is read as CSV and, if pyarrow is installed, as Parquet: with the same trace or the same error.
TABLES = {
    "numbers": ({"length": [12, 7, 30], "id": ["a", "b", "c"]}, {}, [12, 7, 30]),
    "another column": ({"tokens": [12, 7]}, {"column": "tokens"}, [12, 7]),
    "floats": ({"length": [3.0, 4.0]}, {}, [3, 4]),
    "no such column": ({"tokens": [12, 7]}, {}, r"no column 'length': name one of 'tokens' with --column"),
    "half a token": ({"length": [1.5]}, {}, "1.5 at position 0: lengths must be whole numbers"),
    "no token": ({"length": [4, 0]}, {}, "length 0 at position 1"),
    "text": ({"length": ["five"]}, {}, "'five' at position 0"),
    "too large": ({"length": [4, 10**18]}, {}, "length 1e\\+18 at position 1: at most 2,147,483,648 is read"),
    "too long": ({"length": [4, 9]}, {"cap": 8}, "above the cap of 8: raise --cap"),
}


def check_table(path: Path, options: dict[str, Any], expected: list[int] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected) as caught:
            load_trace(path, **options)
        assert "\n" not in str(caught.value)
    else:
        assert load_trace(path, **options).lengths == expected


@pytest.mark.parametrize("name", TABLES)
def test_tables_as_csv(tmp_path: Path, name: str) -> None:
    columns, options, expected = TABLES[name]
    lines = [list(columns), *zip(*columns.values(), strict=True)]
    path = tmp_path / "t.csv"
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    check_table(path, options, expected)


@pytest.mark.parametrize("name", TABLES)
def test_tables_as_parquet(tmp_path: Path, name: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns, options, expected = TABLES[name]
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    check_table(tmp_path / "t.parquet", options, expected)


def test_parquet_siblings_and_broken_files(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"length": [[3, 1], [2, 5]]}), tmp_path / "t.parquet")
    trace = load_trace(tmp_path / "t.parquet", group_size=2)
    assert (trace.lengths, trace.prompts) == ([3, 1, 2, 5], [0, 0, 1, 1])
    parquet.write_table(pyarrow.table({"length": [3, None]}), tmp_path / "hole.parquet")
    check_table(tmp_path / "hole.parquet", {}, "None at position 1")
    parquet.write_table(pyarrow.table({"length": pyarrow.array([], pyarrow.int64())}), tmp_path / "empty.parquet")
    check_table(tmp_path / "empty.parquet", {}, "is empty")
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    check_table(tmp_path / "cut.parquet", {}, "cannot read .* as Parquet: .*save it as CSV")
    check_table(tmp_path / "none.parquet", {}, "No such file")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs the extra data: pip install 'sortedrl\[data\]'"):
        load_trace(write(tmp_path / "t.parquet", "PAR1"))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "is empty"),
        ([5, 0], {}, "length 0 at position 1"),
        ([5, -3], {}, "length -3 at position 1"),
        ([5, "x"], {}, "'x' at position 1"),
        ([5, None], {}, "None at position 1"),
        ([True], {}, "True at position 0"),
        ([1.5], {}, "1.5 at position 0"),
        ("[NaN]", {}, "nan at position 0"),
        ("[1, Infinity]", {}, "inf at position 1"),
        ([[1, 2], [3, 9]], {"cap": 8}, "length 9 at position 3, above the cap of 8: raise --cap"),
        ([[1], []], {}, "no length for prompt 1"),
        ([[1, 2], 3], {}, r"\[1, 2\] at position 0"),
        ({"a": 1}, {}, "must be a list"),
        ("[1, 2", {}, "not valid JSON"),
        ([[1, 2, 3]], {"group_size": 2}, "do not make groups of 2"),
        ([1], {"samples": 0}, "raise --samples"),
        ([1], {"cap": 0}, "raise --cap"),
        ([1, 2], {"group_size": 0}, "raise --group-size"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, data: object, options: dict[str, int], message: str) -> None:
    path = write(tmp_path / "t.json", data)
    with pytest.raises(DataError, match=message) as caught:
        load_trace(path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "lognormal(700, 1.1)",
        "lognormal(a, b, c)",
        "lognormal(0, 1, 9)",
        "lognormal(700, nan, 9)",
        "lognormal(700, 1.1, inf)",
        "bimodal(1, 2, 3)",
        "bimodal(1, inf, .5)",
    ],
)
def test_distributions_that_cannot_be_drawn(text: str) -> None:
    with pytest.raises(DataError, match="for example"):
        load_trace(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        load_trace(tmp_path / "none.json")
    with pytest.raises(DataError, match="has an unknown format"):
        load_trace("something")
    with pytest.raises(DataError, match="the trace is empty: give --trace"):
        load_trace(" ")
