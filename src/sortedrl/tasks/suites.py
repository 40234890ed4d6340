"""Test suites by name: where their problems are, how a prompt is worded, and how an answer is marked.

`run/suite_eval.py` loads them for `sortedrl eval`. Problems come from local files in the usual layouts
(DIR/gsm8k.jsonl, DIR/gsm8k/test.parquet, DIR/math/gsm8k.jsonl, DIR/kk/3ppl/test.parquet, ...) or from the Hugging Face
hub. Reward workers import `suite_mark`, so that text of a model is parsed only there, under a time limit.

Guarantees: problems come in the order of their files, so that `limit` always takes the same ones; every row has the
columns prompt, answer, suite and verifier, whatever the file calls them.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sortedrl.errors import ConfigError, DataError
from sortedrl.tasks import knights, logic
from sortedrl.tasks.answers import completion_text, only_tagged
from sortedrl.tasks.base import Row
from sortedrl.tasks.files import SUFFIXES, read_rows
from sortedrl.tasks.wording import Wording

MATH_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_QUESTIONS = ("problem", "question", "quiz", "prompt")  # names of the column in files, best first
_ANSWERS = ("answer", "final_answer", "expected_answer", "solution_text_format", "solution")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_OPERATOR = r"(?:[+/^×÷]|\*(?!\*)|\\(?:times|cdot|div))"  # two stars mark bold text
_OPERAND_BEFORE, _GOES_ON = re.compile(rf"[\d)}}\]]\s*{_OPERATOR}\s*$"), re.compile(rf"\s*(?:=|{_OPERATOR})")
_DATA_VARIABLE = "SORTEDRL_DATA"
_DATA_PLACES = ("data", "../data", "../shared/data")  # searched before the hub
_FINGERPRINT_BYTES = 6  # a float holds twice a 48-bit number plus one exactly


@dataclass(slots=True, kw_only=True, frozen=True)
class Suite:
    """`stems` are names of its files and folders; `hub` is its dataset (`name:configuration`) on the hub."""

    name: str
    stems: tuple[str, ...]
    hub: str = ""
    split: str = "test"
    verifier: str = "math"
    instruction: str = MATH_INSTRUCTION


SUITES = {
    suite.name: suite
    for suite in (
        Suite(name="aime24", stems=("aime24", "aime_2024", "aime2024"), hub="HuggingFaceH4/aime_2024", split="train"),
        Suite(name="aime25", stems=("aime25", "aime_2025", "aime2025"), hub="math-ai/aime25"),
        Suite(name="math500", stems=("math500", "MATH-500", "math_500", "math-500"), hub="HuggingFaceH4/MATH-500"),
        Suite(name="minerva", stems=("minerva", "minerva_math", "minervamath"), hub="math-ai/minervamath"),
        Suite(name="amc23", stems=("amc23", "amc_2023", "amc2023"), hub="math-ai/amc23"),
        Suite(name="gsm8k", stems=("gsm8k",), hub="openai/gsm8k:main"),
        Suite(name="olympiad", stems=("olympiad", "olympiadbench", "olympiad_bench"), hub="math-ai/olympiadbench"),
        Suite(
            name="kk",
            stems=("kk", "knights-and-knaves"),
            hub="K-and-K/knights-and-knaves:test",
            split="3ppl",
            verifier="logic",
            instruction=logic.INSTRUCTION,
        ),
        # The puzzles of the embedded model; they are generated, so there are no files.
        Suite(name="knights", stems=(), verifier="knights"),
    )
}


def find_suites(names: str) -> list[Suite]:
    """Find suites by their names, separated by commas."""
    found: list[Suite] = []
    for name in [part.strip() for part in names.split(",") if part.strip()]:
        if name not in SUITES:
            near = difflib.get_close_matches(name, SUITES, n=1, cutoff=0.5)
            hint = f": did you mean {near[0]}?" if near else ":"
            raise ConfigError(f"unknown suite {name!r}{hint} The suites are {', '.join(SUITES)}")
        if SUITES[name] not in found:
            found.append(SUITES[name])
    if not found:
        raise ConfigError(f"name at least one suite: {', '.join(SUITES)}")
    return found


def load_suite(suite: Suite, *, data: Path | None, limit: int | None, is_chat: bool) -> list[Row]:
    """Load the first `limit` problems, or all, as chat messages if `is_chat`."""
    if suite.verifier == "knights":
        rows = knights.KnightsTask().heldout(limit or 256)
        return [{**row, "suite": suite.name, "verifier": suite.verifier} for row in rows]
    if suite.verifier == "math":
        _math_verifier()  # if its package is missing, fail before anything is generated
    source = _find_anywhere(suite) if data is None else _find_files(suite, data)
    if source is None and data is not None:
        stems = " or ".join(suite.stems)
        raise DataError(
            f"{data} has no suite {suite.name}: put {stems} there, ending in one of {', '.join(SUFFIXES)}, or a folder "
            f"of that name with a file test{SUFFIXES[0]}"
        )
    try:
        rows = read_rows(source or suite.hub, split=suite.split if source is None else _split_of(source), required=())
    except DataError as error:
        if source is None:
            error.add_note(f"or name the folder that has {suite.stems[0]}{SUFFIXES[0]}: --data DIR")
        raise
    num = len(rows) if limit is None else min(limit, len(rows))
    wording = Wording(instruction=suite.instruction, is_chat=is_chat)
    return [wording.apply(_row(suite, rows[index], f"{rows.name}, row {index}")) for index in range(num)]


def _find_anywhere(suite: Suite) -> Path | None:
    """Search the folder that SORTEDRL_DATA names, or else the usual folders."""
    named = os.environ.get(_DATA_VARIABLE)
    places = (Path(named),) if named else tuple(map(Path, _DATA_PLACES))
    return next((path for place in places if place.is_dir() and (path := _find_files(suite, place))), None)


def _find_files(suite: Suite, data: Path) -> Path | None:
    """Find the file or folder of a suite by its names, in `data` or one level below."""
    if data.is_file():
        return data
    if not data.is_dir():
        raise DataError(f"there is no folder {data}: name one that has the files of the suites")
    for folder in (data, *sorted(entry for entry in data.iterdir() if entry.is_dir())):
        for path in _candidates(folder, suite.stems):
            if path.is_file() or (path.is_dir() and any(inner.suffix in SUFFIXES for inner in path.rglob("*"))):
                return path
    return None


def _candidates(folder: Path, stems: Sequence[str]) -> Iterator[Path]:
    for stem in stems:
        yield from (folder / f"{stem}{suffix}" for suffix in SUFFIXES)
        yield folder / stem


def _split_of(source: Path) -> str | None:
    """Return `test` if the folder has a data file whose name or subfolder begins with `test`, otherwise None."""
    if not source.is_dir():
        return None
    parts = [part for path in source.rglob("*") if path.suffix in SUFFIXES for part in path.relative_to(source).parts]
    return "test" if any(part.startswith("test") for part in parts) else None


def _row(suite: Suite, row: Row, where: str) -> Row:
    question = next((row[name] for name in _QUESTIONS if isinstance(row.get(name), str)), None)
    answer = next((row[name] for name in _answers(suite) if row.get(name) not in (None, "", [])), None)
    for what, value, names in (("question", question, _QUESTIONS), ("answer", answer, _answers(suite))):
        if value is None:
            raise DataError(
                f"{where} has no {what}: it has the columns {', '.join(row)}; name one {' or '.join(names)}"
            )
    if isinstance(answer, list):  # some datasets list alternatives
        answer = answer[0]
    return {"prompt": question, "answer": answer, "suite": suite.name, "verifier": suite.verifier}


def _answers(suite: Suite) -> tuple[str, ...]:
    return _ANSWERS if suite.verifier == "math" else ("solution_text_format",)


# ---- marks -----------------------------------------------------------------------------------------------------------


def suite_mark(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], verifier: Sequence[str], **columns: Any
) -> list[float]:
    """Mark each answer by a number, since workers return numbers: odd if it is right, even if it is wrong.

    Half of the number is a fingerprint of the final answer, 0 if there is none. Equal answers have equal fingerprints.
    """
    rows = zip(prompts, completions, answer, verifier, strict=True)
    return [_mark(prompt, completion_text(given), wanted, kind) for prompt, given, wanted, kind in rows]


def read_mark(mark: float) -> tuple[bool, str | None]:
    """Decode a mark: whether the answer is right, and its vote for majority voting."""
    fingerprint, is_right = divmod(int(mark), 2)
    return bool(is_right), f"{fingerprint:x}" if fingerprint else None


def _mark(prompt: Any, completion: str, wanted: Any, verifier: str) -> float:
    match verifier:
        case "math":
            math = _math_verifier()
            given = math.extract_answer(completion) or last_number(completion)
            is_right = given is not None and math.is_equal(given, math.reference_answer(wanted))
            vote = None if given is None else math.canonical(given)
        case "logic":
            is_right = logic.is_right(completion, str(wanted))
            roles = logic.read_roles(only_tagged(completion) or "")
            vote = None if roles is None else repr(sorted(roles.items()))
        case _:
            is_right = knights.verify([prompt], [completion], [wanted])[0] == 1.0
            said = completion.partition(" answer ")[2]
            vote = said or None
    return float(2 * (0 if vote is None else _fingerprint(vote)) + is_right)


def _math_verifier() -> ModuleType:
    """Import the math verifier, which needs an optional package, only when a suite uses it."""
    from sortedrl.tasks import math

    return math


def last_number(text: str) -> str | None:
    """The last number of a response without box or tags, which training would not accept but a test does.

    There is none if the response ends in an unfinished calculation, such as "7 * 6 =".
    """
    found = [*NUMBER.finditer(text)]
    if not found:
        return None
    before, after = text[max(found[-1].start() - 40, 0) : found[-1].start()], text[found[-1].end() :]
    return None if _OPERAND_BEFORE.search(before) or _GOES_ON.match(after) else found[-1][0]


def _fingerprint(vote: str) -> int:
    return int.from_bytes(hashlib.blake2b(vote.encode(), digest_size=_FINGERPRINT_BYTES).digest(), "little") or 1
