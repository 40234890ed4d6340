"""Rows from files: every format gives the same rows, and whatever is wrong is named with its place and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from sortedrl.errors import DataError
from sortedrl.tasks import files
from sortedrl.tasks.files import TableRows, read_rows, split_off
from tests.support.hub_server import connect, running_hub

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n} for n in range(5)]
COLUMNS = {"prompt": "question"}
WANTED = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "level": n} for n in range(5)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def jsonl(path: Path, rows: list) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def table(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def shards(folder: Path) -> Path:
    for number in range(2):
        table(folder / f"train-{number}-of-2.parquet", ROWS[3 * number : 3 * number + 3])
    return folder


def saved(path: Path, rows: list[dict]) -> Path:
    import datasets  # two seconds: not while tests are collected

    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: jsonl(folder / "a.jsonl", ROWS),
        lambda folder: write(folder / "a.json", json.dumps(ROWS)),
        lambda folder: table(folder / "a.parquet", ROWS),
        lambda folder: saved(folder / "saved", ROWS),
        lambda folder: jsonl(folder / "x" / "train.jsonl", ROWS).parent,
        lambda folder: shards(folder / "p"),
        lambda folder: write(folder / "bom.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, ROWS))),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, make) -> None:
    rows = read_rows(make(tmp_path), columns=COLUMNS, required=("prompt", "answer"))
    assert [rows[i] for i in range(len(rows))] == WANTED


def test_csv_gives_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'prompt,answer\n"1, 2\nor 3?",x\n\nb,2\n')
    rows = read_rows(path)
    assert [rows[0], rows[1]] == [{"prompt": "1, 2\nor 3?", "answer": "x"}, {"prompt": "b", "answer": "2"}]


def test_a_large_table_gives_the_same_rows_one_by_one() -> None:
    rows = TableRows(table=pyarrow.Table.from_pylist(ROWS))
    assert [rows[i] for i in range(len(rows))] == ROWS


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds a text of 100 kB once, and 200,000 rows name it: 20 GB, of which 128 MiB may be unpacked."""
    monkeypatch.setattr(files, "_largest_table", lambda: 1 << 27)
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200_000, pyarrow.int32()), ["a" * 100_000])
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": texts}), path, store_schema=False, write_statistics=False)
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"a\.parquet unpacks to more than 0\.1 GB, half of this machine's memory"):
        read_rows(path)


def test_values_of_a_dictionary_are_not_copied_for_all_rows(tmp_path: Path) -> None:
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 0], pyarrow.int32()), ["first", "second"])
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": texts}), path)
    rows = read_rows(path)
    assert isinstance(rows.rows, TableRows)
    assert [row["prompt"] for row in rows] == ["first", "second", "first"]


def test_a_file_has_no_split_but_that_of_its_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train-0.jsonl", ROWS)
    assert len(read_rows(path, columns=COLUMNS, split="train")) == len(ROWS)
    with pytest.raises(DataError, match="is one file and has no split 'test'; leave the split out, or give a folder"):
        read_rows(path, split="test")


def test_a_column_of_our_name_does_not_stand_in_for_the_one_asked_for(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "ours", "quiz": "theirs"}])
    assert read_rows(path, columns={"prompt": "quiz"})[0]["prompt"] == "theirs"
    with pytest.raises(DataError, match="has no column 'question'; it has: 'prompt', 'quiz'"):
        read_rows(path, columns={"prompt": "question"})


def test_splits_are_found_by_file_and_by_folder(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", ROWS[:2])
    jsonl(tmp_path / "test" / "a.jsonl", ROWS[2:3])
    jsonl(tmp_path / "trained.jsonl", ROWS)
    assert [len(read_rows(tmp_path, columns=COLUMNS, split=split)) for split in (None, "train", "test")] == [2, 2, 1]
    with pytest.raises(DataError, match=r"no file of split 'dev'; it has test/a\.jsonl, train\.jsonl"):
        read_rows(tmp_path, split="dev")
    import datasets

    parts = {"train": datasets.Dataset.from_list(ROWS[:1]), "dev": datasets.Dataset.from_list(ROWS[1:])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "dict")
    assert len(read_rows(tmp_path / "dict", columns=COLUMNS, split="dev")) == 4
    with pytest.raises(DataError, match="has the splits train, dev; name one of them, not test"):
        read_rows(tmp_path / "dict", split="test")


def test_a_column_can_be_inside_another_and_a_prompt_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = table(tmp_path / "a.parquet", [{"prompt": chat, "reward_model": {"ground_truth": "7", "style": "rule"}}])
    rows = read_rows(path, columns={"answer": "reward_model.ground_truth"}, required=("prompt", "answer"))
    assert (rows[0]["prompt"], rows[0]["answer"]) == (chat, "7")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"line 2 of .*a\.jsonl is not valid JSON .*correct or remove it"),
        ("a.jsonl", '{"prompt": "a"}\n[1]\n', r"line 2 of .*is a list, not an object with columns"),
        ("a.jsonl", "\n\n", r"a\.jsonl has no rows; give it at least one"),
        ("a.jsonl", "", r"a\.jsonl has no rows"),
        ("a.jsonl", "[" * 100_000, r"line 1 of .*not valid JSON \(RecursionError"),
        ("a.jsonl", '{"promt": "a", "x": 1}\n', r"no column 'prompt'; it has: 'promt', 'x'; did you mean 'promt'\?"),
        ("a.jsonl", '{"prompt": "a"}\n{"x": 1}\n', r"row 1 of .*a\.jsonl has no column 'prompt'; it has: 'x'"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": 1}\n',
            r"'prompt' of .* is text in row 0 and a number in row 1; make it",
        ),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": null}\n', r"row 1 of .* has nothing in column 'prompt'"),
        ("a.json", '{"prompt": "a"}', r"a\.json must hold a list of objects"),
        ("a.json", "[", r"a\.json cannot be read as \.json"),
        ("a.csv", "prompt,answer\na,b,c\n", r"line 2 of .*a\.csv has 3 cells, the header 2"),
        ("a.csv", 'prompt\n"a\n', r"a\.csv cannot be read as \.csv"),
        ("a.parquet", "PAR1", r"a\.parquet cannot be read as Parquet"),
        ("a.txt", "x", r"a\.txt ends in '\.txt'; rows are read from \.jsonl"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        read_rows(write(tmp_path / name, text))
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 2 of .*UnicodeDecodeError"):
        read_rows(tmp_path / "a.jsonl")


def test_missing_files_and_names_of_the_hub_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(DataError, match=r"there is no file or folder .*trian\.jsonl; did you mean .*train\.jsonl\?"):
        read_rows(tmp_path / "trian.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no file ending in \.jsonl"):
        read_rows(tmp_path / "empty")
    with pytest.raises(
        DataError, match=r"'nobody/none' is no file .*HF_HUB_OFFLINE is set.*hf download .* nobody/none"
    ):
        read_rows("nobody/none:main")


def test_held_out_rows_are_a_share_of_the_prompts_whatever_their_order() -> None:
    rows = [{"prompt": f"p{n % 40}"} for n in range(100)]
    train, held = split_off(rows, 0.25)
    assert sorted(train + held) == list(range(100))
    prompts = {rows[i]["prompt"] for i in held}
    assert len(prompts) == 10
    assert prompts.isdisjoint(rows[i]["prompt"] for i in train)
    turned = rows[::-1]
    assert {turned[i]["prompt"] for i in split_off(turned, 0.25)[1]} == prompts
    assert split_off(rows, 0.0) == (list(range(100)), [])
    assert split_off(rows[:1], 0.5) == ([0], [])


# ---- the hub ---------------------------------------------------------------------------------------------------------


def test_rows_of_the_hub_by_revision_online_and_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    def files(rows: list[dict]) -> dict[str, bytes]:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        return {"train.jsonl": text.encode(), "test.jsonl": json.dumps(ROWS[-1]).encode()}

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    with running_hub() as hub:
        connect(monkeypatch, hub, tmp_path / "home")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        old = hub.add("me/rows", files(ROWS[:2]), kind="datasets")
        new = hub.add("me/rows", files(ROWS[:3]), kind="datasets")
        commits: dict[str, str] = {}
        first = read_rows("me/rows", columns=COLUMNS, revision=old, commits=commits)
        assert ([first[i] for i in range(len(first))], commits) == (WANTED[:2], {"dataset me/rows": old})
        assert len(read_rows("me/rows", columns=COLUMNS, commits=commits)) == 2  # the recorded commit, not the branch
        assert len(read_rows("me/rows", columns=COLUMNS, split="test")) == 1
        with pytest.raises(DataError, match=r"dataset 'me/rows' has no revision 'v9' on the hub"):
            read_rows("me/rows", revision="v9")
        with pytest.raises(
            DataError, match=r"dataset 'me/none' is no file or folder, and the hub shows you no dataset"
        ):
            read_rows("me/none")
        hub.requests.clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        cached: dict[str, str] = {}
        assert len(read_rows("me/rows", columns=COLUMNS, commits=cached)) == 3
        assert cached == {"dataset me/rows": new}
        with pytest.raises(DataError, match=rf"the cache has commit {new} .*set task\.revision to that commit"):
            read_rows("me/rows", columns=COLUMNS, revision=old)
        with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
            read_rows("me/none")
        assert hub.requests == []
