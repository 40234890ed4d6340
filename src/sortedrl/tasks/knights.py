"""Knights and Knaves: a puzzle generator, its solver and verifier, and teachers that write solution traces.

Each person makes one claim. Knights tell the truth and knaves lie; the answer says who is which. An answer tries
assignments one after the other and checks the claims of each until one is refuted, so answer lengths have a heavy tail.
`run/builders/task.py` makes the task, `tiny.py` gets demonstrations from the teachers.

Guarantees:
- every puzzle has exactly one solution;
- `row(i)` depends on the seed and `i` only;
- a hash of its text decides whether a prompt is held out, so no held-out puzzle is in training under any seed.

An assignment is an int: bit p is set if person p (in the order of claims) is a knave. Tries count up from 0 (all are
knights), so a trace has one try more than the number of its solution.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

from sortedrl.errors import ConfigError, DataError
from sortedrl.tasks.base import RewardFunc, Row, Rows

NAMES = ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay")
ROLES = ("knight", "knave")  # indexed by the person's bit
MAX_PEOPLE = 5
DEFAULT_PEOPLE: Mapping[int, float] = {2: 4, 3: 3, 4: 2, 5: 1}
HELDOUT_SHARE = 8  # one prompt in this many is held out
HELDOUT_SEED = "heldout"  # fixed, so that runs of different seeds are measured on the same puzzles
_COMPOUND_SHARE = 0.4  # share of claims about two people
MAX_TRACE_WORDS = 400  # longer traces might not fit the token limit and would dominate the demonstrations
MAX_REDRAWS = 2000  # after this many draws without a new held-out puzzle, one is repeated


@dataclass(slots=True, kw_only=True, frozen=True)
class Claim:
    """One literal, or `both` or `either` of two. A literal is (index of the person, is a knave)."""

    literals: tuple[tuple[int, bool], ...]
    operator: str = "both"  # has no effect with one literal

    def holds(self, assignment: int) -> bool:
        truths = [bool(assignment >> person & 1) == is_knave for person, is_knave in self.literals]
        return all(truths) if self.operator == "both" else any(truths)


@dataclass(slots=True, kw_only=True, frozen=True)
class Puzzle:
    """`claims[p]` is what `people[p]` says."""

    people: tuple[str, ...]
    claims: tuple[Claim, ...]

    @property
    def prompt(self) -> str:
        return " ".join([*(self._sentence(speaker) for speaker in range(len(self.people))), "?"])

    def literal_words(self, speaker: int) -> list[str]:
        return [f"{self.people[p]}-{ROLES[is_knave]}" for p, is_knave in self.claims[speaker].literals]

    def _sentence(self, speaker: int) -> str:
        claim = self.claims[speaker]
        operator = [claim.operator] if len(claim.literals) == 2 else []
        return " ".join([self.people[speaker], "says", *operator, *self.literal_words(speaker), "."])

    def write(self, assignment: int) -> str:
        """An assignment in the words of tries and answers."""
        return " ".join(f"{name}={ROLES[assignment >> p & 1]}" for p, name in enumerate(self.people))


def _knave_sets(num_people: int) -> tuple[int, ...]:
    """For each person, the set of assignments (as bits) in which that person is a knave."""
    every = range(1 << num_people)
    return tuple(sum(1 << a for a in every if a >> person & 1) for person in range(num_people))


_KNAVE_SETS = {num_people: _knave_sets(num_people) for num_people in range(1, len(NAMES) + 1)}


def solutions(puzzle: Puzzle) -> list[int]:
    """Every assignment of roles in which all knights tell the truth and all knaves lie.

    Bit p of an assignment is 1 if person p is a knave.
    """
    knaves = _KNAVE_SETS[len(puzzle.people)]  # a set of assignments is an int: bit a is 1 if it contains a
    every = (1 << (1 << len(puzzle.people))) - 1
    left = every
    for speaker, claim in enumerate(puzzle.claims):
        truths = [knaves[person] if is_knave else every ^ knaves[person] for person, is_knave in claim.literals]
        truth = reduce(and_ if claim.operator == "both" else or_, truths)
        left &= truth ^ knaves[speaker]
    return [assignment for assignment in range(1 << len(puzzle.people)) if left >> assignment & 1]


def parse(prompt: str) -> Puzzle:
    """Parse a prompt back into its puzzle."""
    try:
        sentences = [sentence.split() for sentence in prompt.removesuffix("?").split(".") if sentence.strip()]
        people = tuple(words[0] for words in sentences)
        puzzle = Puzzle(people=people, claims=tuple(_parse_claim(words[2:], people) for words in sentences))
    except (IndexError, ValueError):
        puzzle = None
    if puzzle is None or puzzle.prompt != prompt:
        raise DataError(f"not a Knights and Knaves prompt: {prompt!r}; write it as Puzzle.prompt does")
    return puzzle


def _parse_claim(words: Sequence[str], people: Sequence[str]) -> Claim:
    operator = words[0] if len(words) == 3 else "both"
    literals = [word.split("-") for word in (words[1:] if len(words) == 3 else words)]
    return Claim(literals=tuple((people.index(name), bool(ROLES.index(r))) for name, r in literals), operator=operator)


def draw(rng: random.Random, num_people: int) -> Puzzle:
    """Draw a puzzle, and draw again until it has exactly one solution and a trace that is not too long."""
    while True:
        people = tuple(rng.sample(NAMES, num_people))
        puzzle = Puzzle(people=people, claims=tuple(_draw_claim(rng, p, num_people) for p in range(num_people)))
        if len(solutions(puzzle)) == 1 and (num_people < MAX_PEOPLE or len(teach(puzzle).split()) <= MAX_TRACE_WORDS):
            return puzzle


def _draw_claim(rng: random.Random, speaker: int, num_people: int) -> Claim:
    if rng.random() < _COMPOUND_SHARE:
        about = rng.sample(range(num_people), 2)
    else:  # about another person: "I am a knight" says nothing, and "I am a knave" is impossible
        about = [(speaker + rng.randrange(1, num_people)) % num_people]
    literals = tuple((person, rng.random() < 0.5) for person in about)
    return Claim(literals=literals, operator=rng.choice(("both", "either")) if len(about) == 2 else "both")


def is_heldout(prompt: str) -> bool:
    """Whether a prompt is held out: a property of its text only."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little") % HELDOUT_SHARE == 0


def check(puzzle: Puzzle, assignment: int, rng: random.Random | None = None, overlook: float = 0.0) -> list[str]:
    """The words that check the claims under an assignment, up to the first claim that contradicts it.

    They end with `bad` if there is such a claim. Each is overlooked with probability `overlook`.
    """
    words = []
    for p, claim in enumerate(puzzle.claims):
        is_knave = bool(assignment >> p & 1)
        words.append(f"{puzzle.people[p]}={ROLES[is_knave]}")
        if len(claim.literals) == 2:
            words.append(claim.operator)
        for (q, wanted), word in zip(claim.literals, puzzle.literal_words(p), strict=True):
            words += [word, "yes" if bool(assignment >> q & 1) == wanted else "no"]
        if claim.holds(assignment) == is_knave and (rng is None or rng.random() >= overlook):
            return [*words, "bad"]
    return words


def teach(puzzle: Puzzle, rng: random.Random | None = None, *, give_up: float = 0.0, overlook: float = 0.0) -> str:
    """Write a trace that tries assignments until one passes its check, or until it gives up.

    Without `rng`, or with both probabilities 0, the trace is always right. After each refuted try it may give up
    (probability `give_up`) and answer with that refuted guess. Refutations are overlooked with probability `overlook`.
    """
    words: list[str] = []
    for assignment in range(1 << len(puzzle.people)):
        checked = check(puzzle, assignment, rng, overlook)
        words += ["try", puzzle.write(assignment), *checked]
        if checked[-1] != "bad" or (rng is not None and rng.random() < give_up):
            return " ".join([*words, "answer", puzzle.write(assignment), "done"])
    raise AssertionError(f"puzzle without a solution: {puzzle.prompt}")


def verify(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """Reward function: 1.0 if a completion ends with one answer that is complete, in order and right, else 0.0.

    The text before the word `answer` is not checked. The word `done` must close the answer, so that an answer cut off
    by the token limit is never right.
    """
    return [float(_is_right(completion, wanted)) for completion, wanted in zip(completions, answer, strict=True)]


def _is_right(completion: str, answer: str) -> bool:
    words = completion.split()
    if words.count("answer") != 1:
        return False
    return words[words.index("answer") + 1 :] == [*answer.split(), "done"]


def _row(puzzle: Puzzle) -> Row:
    (solution,) = solutions(puzzle)
    return {"prompt": puzzle.prompt, "answer": puzzle.write(solution), "people": len(puzzle.people)}


@dataclass(slots=True, kw_only=True, frozen=True)
class KnightsRows:
    """Training puzzles, generated without end."""

    seed: int | str
    people: Mapping[int, float]

    @property
    def size(self) -> None:
        return None

    def row(self, index: int) -> Row:
        return _row(self.puzzle(index))

    def puzzle(self, index: int) -> Puzzle:
        rng = random.Random(f"{self.seed}/{index}")
        num_people = draw_num_people(rng, self.people)
        while is_heldout((puzzle := draw(rng, num_people)).prompt):
            pass
        return puzzle


@dataclass(slots=True, kw_only=True, frozen=True)
class KnightsTask:
    """The default task. `people` weights the numbers of people. Held-out puzzles do not depend on the seed."""

    seed: int = 0
    people: Mapping[int, float] = field(default_factory=lambda: dict(DEFAULT_PEOPLE))
    name: str = "knights"
    group_column: str = "people"
    reward_funcs: Sequence[RewardFunc] = (verify,)

    def __post_init__(self) -> None:
        check_people(self.people, MAX_PEOPLE)

    @property
    def train(self) -> Rows:
        return KnightsRows(seed=self.seed, people=self.people)

    def heldout(self, num: int) -> list[Row]:
        """Return distinct puzzles, except that those with two people may repeat: only 506 of 4,320 are held out."""
        rng = random.Random(HELDOUT_SEED)
        seen: set[str] = set()
        rows = []
        for _ in range(num):
            puzzle = _draw_heldout(rng, draw_num_people(rng, self.people), seen)
            seen.add(puzzle.prompt)
            rows.append(_row(puzzle))
        return rows


def check_people(people: Mapping[int, float], most: int) -> None:
    """Raise ConfigError unless `people` maps numbers of people, from 2 to `most`, to usable weights."""
    wrong = [num for num, weight in people.items() if not 2 <= num <= most or weight < 0]
    if wrong or sum(people.values()) <= 0:
        raise ConfigError(
            f"task.people is {dict(people)}; map numbers of people from 2 to {most} to weights of at least 0, one of "
            "them above 0"
        )


def draw_num_people(rng: random.Random, people: Mapping[int, float]) -> int:
    nums = sorted(people)
    return rng.choices(nums, [people[num] for num in nums])[0]


def _draw_heldout(rng: random.Random, num_people: int, seen: set[str]) -> Puzzle:
    puzzle = None
    for _ in range(MAX_REDRAWS):
        candidate = draw(rng, num_people)
        if is_heldout(candidate.prompt):
            puzzle = candidate
            if puzzle.prompt not in seen:
                return puzzle
    assert puzzle is not None, f"no held-out puzzle of {num_people} people in {MAX_REDRAWS} draws"
    return puzzle
