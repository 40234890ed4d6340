"""The embedded task with a tool: follow a chain of names through a book that only the tool can read.

The prompt names a person and a number of hops (`Ann three ?`). The book says whom each person points to. It is in no
prompt: the model must call `lookup` once for every hop, each time with the name that came back. Trajectories have as
many turns as hops, so their lengths differ. `run/builders/task.py` makes the task, `tools_model.py` gets demonstrations
from the teacher.

Guarantees: `row(i)` depends on the seed and `i` only; a hash of prompt and book decides whether a row is held out, so
no held-out row is in training under any seed; the verifier treats the answer as hostile text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.tasks.base import RewardFunc, Row, Rows
from sortedrl.tasks.knights import HELDOUT_SEED, NAMES, is_heldout

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
HOPS: Mapping[int, float] = {1: 1, 2: 2, 3: 2, 4: 2, 5: 1, 6: 1}  # weights
GIVE_UP = 0.4  # the teacher of `demonstrate` stops before a call with this probability


class Book:
    """The environment: a book that says whom each person points to."""

    environment_kind = "stateless"

    def __init__(self) -> None:
        self.book: dict[str, str] = {}

    def reset(self, book: dict[str, str], **row: object) -> None:
        self.book = book

    def lookup(self, who: str) -> str:
        """
        Looks up whom a person points to.

        Args:
            who: Name of the person.

        Returns:
            The name of the person that they point to.
        """
        return self.book[who]


def draw_row(rng: random.Random) -> Row:
    """A person, a number of hops, a book, and where the hops lead."""
    book = {name: rng.choice([other for other in NAMES if other != name]) for name in NAMES}
    hops = rng.choices(list(HOPS), list(HOPS.values()))[0]
    start = reached = rng.choice(NAMES)
    for _ in range(hops):
        reached = book[reached]
    return {"prompt": f"{start} {NUMBERS[hops]} ?", "book": book, "answer": reached, "hops": hops}


def teach(row: Row, rng: random.Random | None = None, *, give_up: float = 0.0) -> list[str]:
    """The turns that solve a row. Before each call the teacher may give up and answer with the name that it has."""
    name, turns = row["prompt"].split()[0], []
    for left in range(row["hops"], 0, -1):
        if turns and rng is not None and rng.random() < give_up:
            break
        turns.append(f'{NUMBERS[left]} <tool_call> {{"name": "lookup", "arguments": {{"who": "{name}"}}}} </tool_call>')
        name = row["book"][name]
    return [*turns, f"answer {name} done"]


def demonstrate(row: Row, rng: random.Random, end_of_turn: str) -> str:
    """The whole answer of a teacher that often gives up, with what the tool returns after each of its turns."""
    *turns, last = teach(row, rng, give_up=GIVE_UP)
    name, parts = row["prompt"].split()[0], []
    for turn in turns:
        name = row["book"][name]
        parts.append(f"{turn}{end_of_turn}\n<tool_response>\n{name}\n</tool_response>\n")
    return "".join([*parts, last])


def verify(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """Reward function: 1.0 if a completion ends with the right answer and holds no other, else 0.0."""
    return [float(_is_right(completion, wanted)) for completion, wanted in zip(completions, answer, strict=True)]


def _is_right(completion: str, answer: str) -> bool:
    words = completion.split()
    return words.count("answer") == 1 and words[-3:] == ["answer", answer, "done"]


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolsRows:
    """Training rows, generated without end."""

    seed: int | str

    @property
    def size(self) -> None:
        return None

    def row(self, index: int) -> Row:
        rng = random.Random(f"{self.seed}/{index}")
        while _is_heldout(row := draw_row(rng)):
            pass
        return row


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolsTask:
    """Held-out rows do not depend on the seed."""

    seed: int = 0
    name: str = "tools"
    group_column: str = "hops"
    reward_funcs: Sequence[RewardFunc] = (verify,)
    environment_factory: type[Book] = Book

    @property
    def train(self) -> Rows:
        return ToolsRows(seed=self.seed)

    def heldout(self, num: int) -> list[Row]:
        rng = random.Random(HELDOUT_SEED)
        rows: list[Row] = []
        while len(rows) < num:
            row = draw_row(rng)
            if _is_heldout(row):
                rows.append(row)
        return rows


def _is_heldout(row: Row) -> bool:
    return is_heldout(f"{row['prompt']} {sorted(row['book'].items())}")
