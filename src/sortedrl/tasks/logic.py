"""Knights and Knaves in English, for language models: puzzles of two to eight people, their solver and verifier.

`run/builders/task.py` makes the task, reward workers import `logic_reward`. Statements are trees in the form of
Logic-RL's Parquet files, so that rows of those files and generated rows are solved and scored in the same way:
("lying", 2) says that the third person is a knave, ("telling-truth", 2) a knight; "not", "and", "or", "->" and "<=>"
combine statements.

Guarantees: every generated puzzle has exactly one solution; `row(i)` depends on the seed and `i` only; a hash of its
text decides whether a prompt is held out, so no held-out puzzle is in training; an answer is right only if it names
every person once, with the right role, and says nothing else.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sortedrl.errors import DataError
from sortedrl.tasks.answers import completion_text, only_tagged
from sortedrl.tasks.base import RewardFunc, Row, Rows
from sortedrl.tasks.knights import HELDOUT_SEED, MAX_REDRAWS, check_people, draw_num_people, is_heldout
from sortedrl.tasks.wording import Wording

NAMES = (
    *("Alice", "Boris", "Clara", "David", "Elena", "Felix", "Grace", "Henry"),
    *("Irene", "Jacob", "Karin", "Lucas", "Maria", "Nolan", "Olive", "Peter"),
)
MAX_PEOPLE = 8
DEFAULT_PEOPLE: Mapping[int, float] = dict.fromkeys(range(3, 8), 1.0)
ROLES = ("knave", "knight")  # indexed by whether a person tells the truth
_FORMAT_REWARD = 0.1
INSTRUCTION = (
    "Think it through, then give the role of each person between answer tags, one a line, like this:\n"
    "<answer>\n(1) NAME is a knight\n(2) NAME is a knave\n</answer>"
)

Statement = tuple[Any, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class WordPuzzle:
    """`statements[p]` is what `names[p]` says."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]

    @property
    def text(self) -> str:
        people = f"{', '.join(self.names[:-1])} and {self.names[-1]}"
        said = " ".join(
            f'{name} says: "{_in_words(statement, self.names)}."'
            for name, statement in zip(self.names, self.statements, strict=True)
        )
        return (
            "On an island everyone is either a knight, who only tells the truth, or a knave, who only lies. "
            f"You meet {people}. {said} Who is a knight, and who is a knave?"
        )

    def write(self, solution: Sequence[bool]) -> str:
        lines = enumerate(zip(self.names, solution, strict=True), 1)
        return "\n".join(f"({number}) {name} is a {ROLES[is_knight]}" for number, (name, is_knight) in lines)


# ---- statements ------------------------------------------------------------------------------------------------------


def holds(statement: Statement, knights: Sequence[bool]) -> bool:
    """Whether a statement is true when these people are knights."""
    match statement:
        case ("telling-truth", int(person)):
            return knights[person]
        case ("lying", int(person)):
            return not knights[person]
        case ("not", part):
            return not holds(part, knights)
        case ("and", *parts):
            return all(holds(part, knights) for part in parts)
        case ("or", *parts):
            return any(holds(part, knights) for part in parts)
        case ("->", first, second):
            return not holds(first, knights) or holds(second, knights)
        case ("<=>", first, second):
            return holds(first, knights) == holds(second, knights)
        case _:
            raise DataError(
                f"not a statement of a knight or knave: {statement!r:.80}; correct or leave out that puzzle"
            )


def solutions(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """Every assignment of roles under which exactly the knights tell the truth."""
    num = len(statements)
    worlds = (tuple(bool(bits >> person & 1) for person in range(num)) for bits in range(1 << num))
    return [world for world in worlds if all(holds(s, world) == world[p] for p, s in enumerate(statements))]


def parse_statements(text: str) -> tuple[Statement, ...]:
    """Parse the statements of a Logic-RL row, which are a Python literal."""
    try:
        statements = ast.literal_eval(text)
        solutions(statements)  # fails for unknown statements and for persons that do not exist
    except (ValueError, SyntaxError, TypeError, IndexError, RecursionError, MemoryError) as error:
        raise DataError(f"not the statements of a puzzle: {text!r:.80}; correct or leave out that row") from error
    return statements


def _in_words(statement: Statement, names: Sequence[str]) -> str:
    match statement:
        case ("telling-truth", person):
            return f"{names[person]} is a knight"
        case ("lying", person):
            return f"{names[person]} is a knave"
        case ("not", (kind, person)):
            return f"{names[person]} is not a {'knight' if kind == 'telling-truth' else 'knave'}"
        case ("and" | "or" as word, *parts):
            return f" {word} ".join(_in_words(part, names) for part in parts)
        case ("->", first, second):
            return f"if {_in_words(first, names)}, then {_in_words(second, names)}"
        case ("<=>", first, second):
            return f"{_in_words(first, names)} if and only if {_in_words(second, names)}"
        case _:
            raise AssertionError(f"the statement {statement!r} has no English wording: add a case to _in_words")


def draw(rng: random.Random, num_people: int) -> WordPuzzle:
    """Draw a puzzle, and draw again until it has exactly one solution."""
    while True:
        statements = tuple(_draw_statement(rng, speaker, num_people) for speaker in range(num_people))
        if len(solutions(statements)) == 1:
            return WordPuzzle(names=tuple(rng.sample(NAMES, num_people)), statements=statements)


def _draw_statement(rng: random.Random, speaker: int, num_people: int) -> Statement:
    def literal(person: int) -> Statement:
        return (rng.choice(("telling-truth", "lying")), person)

    kind = rng.choice(("literal", "not", "and", "or", "->", "<=>"))
    other = (speaker + rng.randrange(1, num_people)) % num_people
    if kind == "literal":
        return literal(other)
    if kind == "not":
        return ("not", literal(other))
    first, second = rng.sample(range(num_people), 2)
    return (kind, literal(first), literal(second))


# ---- the verifier ----------------------------------------------------------------------------------------------------

_ITEM = re.compile(r"(?:\((\d{1,2})\)\s*)?([^\W\d_]+) is a (knight|knave)")
_BETWEEN = re.compile(r"[ \t]*(?:[.,;]?[ \t]*\n\s*|[,;.][ \t]*(?:and )?|and (?=[^\W\d_])|(?=\(\d))")


def logic_reward(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Reward function: 1.0 for a right answer, 0.1 for a wrong one that is well formed, 0.0 for a malformed one."""
    return [
        _score(completion_text(completion), wanted, prompt)
        for prompt, completion, wanted in zip(prompts, completions, answer, strict=True)
    ]


def is_right(completion: str, answer: str, prompt: str = "") -> bool:
    return _score(completion, answer, prompt) == 1.0


def _score(completion: str, answer: str, prompt: object) -> float:
    wanted = read_roles(answer)
    assert wanted is not None, f"the reference has no roles: {answer!r:.80}"
    starts_thinking = isinstance(prompt, str) and prompt.rstrip().endswith("<think>")
    content = only_tagged(f"<think>{completion}" if starts_thinking else completion)
    given = None if content is None or not _is_thought_closed(completion, starts_thinking) else read_roles(content)
    if given is None or given.keys() != wanted.keys():
        return 0.0
    return 1.0 if given == wanted else _FORMAT_REWARD


def _is_thought_closed(completion: str, has_begun: bool) -> bool:
    """Whether there is no thinking, or one block of it that ends before the answer begins."""
    begun, ended = completion.count("<think>") + has_begun, completion.count("</think>")
    if begun == ended == 0:
        return True
    starts_first = has_begun or completion.lstrip().startswith("<think>")
    return begun == ended == 1 and starts_first and completion.find("</think>") < completion.find("<answer>")


def read_roles(text: str) -> dict[str, str] | None:
    """The role of each person, or None unless the text is a list of roles, each person once, numbered or not."""
    text = text.strip()
    text = text.removesuffix(".")
    roles: dict[str, str] = {}
    numbers: list[int | None] = []
    place = 0
    while item := _ITEM.match(text, place):
        if item[2] in roles or len(roles) == MAX_PEOPLE:
            return None
        roles[item[2]] = item[3]
        numbers.append(int(item[1]) if item[1] else None)
        place = item.end()
        between = _BETWEEN.match(text, place)
        if between is None:
            break
        place = between.end()
    is_counted = numbers in ([None] * len(roles), list(range(1, len(roles) + 1)))
    return roles if roles and place == len(text) and is_counted else None


# ---- the task --------------------------------------------------------------------------------------------------------


def _puzzle_row(puzzle: WordPuzzle) -> Row:
    (solution,) = solutions(puzzle.statements)
    return {"prompt": puzzle.text, "answer": puzzle.write(solution), "people": len(puzzle.names)}


def logic_rl_row(row: Mapping[str, Any]) -> Row:
    """Convert a row of Logic-RL's files. Its prompt already has the model's chat marks, so it is used as text.

    With `task.columns.prompt=quiz` the prompt is the puzzle only, and gets this package's wording.
    """
    prompt = row["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and "<|im_start|>" in str(prompt[0].get("content")):
        prompt = prompt[0]["content"]
    return {"prompt": prompt, "answer": row["solution_text_format"], "people": len(row["names"])}


@dataclass(slots=True, kw_only=True, frozen=True)
class LogicRlRows:
    """Rows of Logic-RL's files with the columns that this package uses."""

    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Row:
        return logic_rl_row(self.rows[index])


@dataclass(slots=True, kw_only=True, frozen=True)
class LogicRows:
    """Training puzzles, generated without end."""

    seed: int | str
    people: Mapping[int, float]
    wording: Wording

    @property
    def size(self) -> None:
        return None

    def row(self, index: int) -> Row:
        rng = random.Random(f"logic/{self.seed}/{index}")
        num_people = draw_num_people(rng, self.people)
        while is_heldout((puzzle := draw(rng, num_people)).text):
            pass
        return self.wording.apply(_puzzle_row(puzzle))


@dataclass(slots=True, kw_only=True, frozen=True)
class LogicTask:
    """Generated puzzles. `people` weights the numbers of people. Held-out puzzles do not depend on the seed."""

    seed: int = 0
    people: Mapping[int, float] = field(default_factory=lambda: dict(DEFAULT_PEOPLE))
    wording: Wording = field(default_factory=lambda: Wording(instruction=INSTRUCTION))
    name: str = "logic"
    group_column: str = "people"
    reward_funcs: Sequence[RewardFunc] = (logic_reward,)

    def __post_init__(self) -> None:
        check_people(self.people, MAX_PEOPLE)

    @property
    def train(self) -> Rows:
        return LogicRows(seed=self.seed, people=self.people, wording=self.wording)

    def heldout(self, num: int) -> list[Row]:
        """Return distinct puzzles, fewer than `num` if no new ones can be found."""
        rng = random.Random(f"logic/{HELDOUT_SEED}")
        seen: set[str] = set()
        rows: list[Row] = []
        for _ in range(num * MAX_REDRAWS):
            if len(rows) == num:
                break
            puzzle = draw(rng, draw_num_people(rng, self.people))
            if is_heldout(puzzle.text) and puzzle.text not in seen:
                seen.add(puzzle.text)
                rows.append(self.wording.apply(_puzzle_row(puzzle)))
        return rows
