"""Suites: files in the usual layouts, columns under any of their names, and marks that a worker can give back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sortedrl.errors import ConfigError, DataError
from sortedrl.tasks.math import reference_answer
from sortedrl.tasks.suites import SUITES, find_suites, last_number, load_suite, read_mark, suite_mark
from tests.support.shared_data import DATA, needs_data


def write_jsonl(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def load(name: str, data: Path | None, *, limit: int | None = None, is_chat: bool = False) -> list[dict[str, Any]]:
    return load_suite(SUITES[name], data=data, limit=limit, is_chat=is_chat)


@pytest.mark.parametrize(
    "place",
    [
        "gsm8k.jsonl",
        "gsm8k/test.jsonl",
        "math/gsm8k.jsonl",
        "math/gsm8k/test.jsonl",
        "gsm8k/main/test-00000-of-1.jsonl",
    ],
)
def test_a_suite_is_found_in_the_usual_layouts(place: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / place, {"question": "1 + 1?", "answer": "so\n#### 2"})
    write_jsonl(tmp_path / "aime24.jsonl", {"problem": "x?", "answer": "3"})
    if place.startswith("gsm8k/"):
        write_jsonl(tmp_path / "gsm8k" / "train.jsonl", {"question": "no", "answer": "no"})
    (row,) = load("gsm8k", tmp_path)
    assert row["prompt"].startswith("1 + 1?\nPlease reason step by step")
    assert (row["answer"], row["suite"], row["verifier"]) == ("so\n#### 2", "gsm8k", "math")


def test_problems_are_put_as_chat_where_the_model_has_a_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "math500.jsonl", {"prompt": "2?\nput your answer within \\boxed{}.", "answer": "2"})
    (row,) = load("math500", tmp_path, is_chat=True)
    # It says itself how to answer.
    assert row["prompt"] == [{"role": "user", "content": "2?\nput your answer within \\boxed{}."}]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"problem": "p", "solution": "thus \\boxed{3}"}, "thus \\boxed{3}"),
        ({"problem": "p", "final_answer": ["4", "5"]}, "4"),
        ({"question": "p", "answer": 27.0}, 27.0),
        ({"question": "p", "answer": 0}, 0),
    ],
)
def test_columns_go_by_several_names(given: dict[str, Any], wanted: object, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "olympiad.jsonl", given)
    assert load("olympiad", tmp_path)[0]["answer"] == wanted


def test_the_limit_takes_the_first_problems(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "amc23.jsonl", *({"problem": f"p{n}", "answer": n} for n in range(5)))
    assert [row["answer"] for row in load("amc23", tmp_path, limit=2)] == [0, 1]
    assert len(load("amc23", tmp_path)) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "p", "answer": "3"}, "has no question: it has the columns text, answer; name one problem or"),
        ({"problem": "p", "key": "3"}, "has no answer: it has the columns problem, key; name one answer or"),
        ({"problem": "p", "answer": ""}, "row 0 has no answer"),
    ],
)
def test_rows_without_a_question_or_an_answer_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "aime25.jsonl", row)
    with pytest.raises(DataError, match=message):
        load("aime25", tmp_path)


def test_suites_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no suite aime24: put aime24 or aime_2024"):
        load("aime24", tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        load("aime24", tmp_path / "none")
    with pytest.raises(ConfigError, match="unknown suite 'gms8k': did you mean gsm8k"):
        find_suites("aime24,gms8k")
    with pytest.raises(ConfigError, match="name at least one suite"):
        find_suites(" , ")
    assert [suite.name for suite in find_suites("kk, aime24,kk")] == ["kk", "aime24"]


def test_suites_are_looked_for_where_data_usually_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "data" / "gsm8k.jsonl", {"question": "q", "answer": "near"})
    write_jsonl(tmp_path / "far" / "gsm8k.jsonl", {"question": "q", "answer": "far"})
    (tmp_path / "work").mkdir()
    monkeypatch.delenv("SORTEDRL_DATA", raising=False)
    for here in (tmp_path, tmp_path / "work"):
        monkeypatch.chdir(here)
        assert load("gsm8k", None)[0]["answer"] == "near"
    monkeypatch.setenv("SORTEDRL_DATA", str(tmp_path / "far"))
    assert load("gsm8k", None)[0]["answer"] == "far"


def test_a_suite_from_the_hub_without_a_connection_says_how_to_use_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SORTEDRL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"not in the cache of the hub.*hf download --repo-type dataset") as caught:
        load_suite(SUITES["gsm8k"], data=None, limit=1, is_chat=False)
    assert caught.value.__notes__ == ["or name the folder that has gsm8k.jsonl: --data DIR"]


# ---- marks -----------------------------------------------------------------------------------------------------------


def mark(completion: str, answer: object, verifier: str = "math") -> tuple[bool, str | None]:
    (found,) = suite_mark(["?"], [completion], [answer], [verifier])
    assert found == float(int(found)) < 2**53
    return read_mark(found)


def test_marks_tell_right_from_wrong_and_equal_answers_from_others() -> None:
    right, wrong = mark("it is \\boxed{18}", "#### 18"), mark("\\boxed{19}", "#### 18")
    assert (right[0], wrong[0]) == (True, False)
    assert right[1] is not None
    assert wrong[1] is not None
    assert right[1] != wrong[1]
    assert mark("so <answer> 18.0 </answer>", 18)[1] == right[1]  # the same number in another form
    assert mark("She makes $18 every day.", "18") == right  # without a box the last number counts
    assert mark("I do not know", "18") == (False, None)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("walks 1200 / 2 = 600 miles. She walks 1200 * 6 = ", None),  # cut off
        ("1200 * 6", None),
        ("in all **12**.", "12"),
        ("3 + 4 = 7", "7"),
        ("it is +5", "5"),
        ("first 3, then 1,234.50 in all.", "1,234.50"),
        ("it is -7.", "-7"),
        ("so 3/4 of it", "3/4"),
        ("in 2024, 5", "5"),
        ("none", None),
    ],
)
def test_the_last_number(text: str, wanted: str | None) -> None:
    assert last_number(text) == wanted


def test_marks_of_puzzles() -> None:
    answer = "(1) Zoey is a knight\n(2) Ann is a knave"
    right = mark(f"<think>hm</think><answer>{answer}</answer>", answer, "logic")
    assert right[0]
    assert mark("<answer>Ann is a knave, Zoey is a knight</answer>", answer, "logic") == right
    assert mark("<answer>(1) Zoey is a knave\n(2) Ann is a knave</answer>", answer, "logic")[0] is False
    assert mark("Zoey is a knight", answer, "logic") == (False, None)


@needs_data
@pytest.mark.parametrize(
    ("name", "size"), [("aime24", 30), ("amc23", 40), ("gsm8k", 1319), ("math500", 500), ("minerva", 272), ("kk", 300)]
)
def test_public_suites_load_whole_and_their_references_are_right(name: str, size: int) -> None:
    rows, verifier = load(name, DATA), SUITES[name].verifier
    assert len(rows) == size
    for row in rows:
        reference = row["answer"] if verifier == "logic" else f"\\boxed{{{reference_answer(row['answer'])}}}"
        assert mark(f"<answer>{reference}</answer>", row["answer"], verifier)[0], row
