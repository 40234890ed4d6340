"""Knights and Knaves: puzzles made on demand, their solver, their verifier, and teachers that write traces.

Some people each make one claim; knights tell the truth, knaves lie; say who is who. An answer tries assignments one
after the other and checks the claims of each until one is refuted, so answer lengths have a heavy tail by nature.
`build/parts.py` makes the task, `tiny.py` draws demonstrations from the teachers. Standard library only.

What this module keeps true:
- every puzzle has exactly one solution;
- `row(i)` depends on the seed and `i` alone;
- a prompt is held out or not by a hash of its text, so training and held-out puzzles never meet, whatever the seeds.

An assignment is an int: bit p is set when person p (in order of speech) is a knave. Tries count up from 0, all
knights, so the first person flips fastest and a puzzle takes one try more than its solution's number.
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
COMPOUND_SHARE = 0.4  # of the claims is about two people
MAX_TRACE_WORDS = 400  # a longer patient trace might not fit a model's token budget, and would drown the short ones
MAX_REDRAWS = 2000  # draws without an unseen held-out puzzle after which one is repeated


@dataclass(slots=True, kw_only=True, frozen=True)
class Claim:
    """One literal, or `both` or `either` of two. A literal is (person's place in the puzzle, is a knave)."""

    literals: tuple[tuple[int, bool], ...]
    operator: str = "both"  # of no effect with one literal

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
        """An assignment in words, as tries and answers state it."""
        return " ".join(f"{name}={ROLES[assignment >> p & 1]}" for p, name in enumerate(self.people))


def _knave_sets(num_people: int) -> tuple[int, ...]:
    """For each person, the set of assignments in which that person is a knave: bit a stands for assignment a."""
    every = range(1 << num_people)
    return tuple(sum(1 << a for a in every if a >> person & 1) for person in range(num_people))


KNAVE_SETS = {num_people: _knave_sets(num_people) for num_people in range(1, len(NAMES) + 1)}


def solutions(puzzle: Puzzle) -> list[int]:
    """Every assignment under which exactly the knights tell the truth, all of them tried at once as sets."""
    knaves = KNAVE_SETS[len(puzzle.people)]
    every = (1 << (1 << len(puzzle.people))) - 1
    left = every
    for speaker, claim in enumerate(puzzle.claims):
        truths = [knaves[person] if is_knave else every ^ knaves[person] for person, is_knave in claim.literals]
        truth = reduce(and_ if claim.operator == "both" else or_, truths)
        left &= truth ^ knaves[speaker]
    return [assignment for assignment in range(1 << len(puzzle.people)) if left >> assignment & 1]


def parse(prompt: str) -> Puzzle:
    """The puzzle that a prompt states."""
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
    """A puzzle with exactly one solution that a patient trace reaches in good time, by rejection."""
    while True:
        people = tuple(rng.sample(NAMES, num_people))
        puzzle = Puzzle(people=people, claims=tuple(_draw_claim(rng, p, num_people) for p in range(num_people)))
        if len(solutions(puzzle)) == 1 and (num_people < MAX_PEOPLE or len(teach(puzzle).split()) <= MAX_TRACE_WORDS):
            return puzzle


def _draw_claim(rng: random.Random, speaker: int, num_people: int) -> Claim:
    if rng.random() < COMPOUND_SHARE:
        about = rng.sample(range(num_people), 2)
    else:  # about someone else: "I am a knight" says nothing and nobody can say "I am a knave"
        about = [(speaker + rng.randrange(1, num_people)) % num_people]
    literals = tuple((person, rng.random() < 0.5) for person in about)
    return Claim(literals=literals, operator=rng.choice(("both", "either")) if len(about) == 2 else "both")


def is_heldout(prompt: str) -> bool:
    """On which side of the split a prompt is: a property of its text alone."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little") % HELDOUT_SHARE == 0


def check(puzzle: Puzzle, assignment: int, rng: random.Random | None = None, overlook: float = 0.0) -> list[str]:
    """The claims under an assignment, literal by literal, up to the first that its speaker cannot have made.

    Ends with `bad` exactly when there is one, unless it is overlooked: each with that probability.
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
    """A trace: tries until one passes its check or, after each refuted try with probability `give_up`, no further.

    The patient and careful teacher (without `rng`, or with both probabilities 0) is always right. The impatient one
    answers with a guess that it has just refuted, the careless one overlooks refutations.
    """
    words: list[str] = []
    for assignment in range(1 << len(puzzle.people)):
        checked = check(puzzle, assignment, rng, overlook)
        words += ["try", puzzle.write(assignment), *checked]
        if checked[-1] != "bad" or (rng is not None and rng.random() < give_up):
            return " ".join([*words, "answer", puzzle.write(assignment), "done"])
    raise AssertionError(f"puzzle without a solution: {puzzle.prompt}")


def verify(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float]:
    """1.0 for a completion that ends with its only answer, complete, in order and right; else 0.0.

    What comes before the word `answer` is the model's own affair. The word `done` closes an answer, so that one cut off
    by the token budget can be told in text.
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
    """Training puzzles without end."""

    seed: int | str
    people: Mapping[int, float]

    @property
    def size(self) -> None:
        return None

    def row(self, index: int) -> Row:
        return _row(self.puzzle(index))

    def puzzle(self, index: int) -> Puzzle:
        rng = random.Random(f"{self.seed}/{index}")
        num_people = _draw_num_people(rng, self.people)
        while is_heldout((puzzle := draw(rng, num_people)).prompt):
            pass
        return puzzle


@dataclass(slots=True, kw_only=True, frozen=True)
class KnightsTask:
    """The embedded default. `people` weighs the numbers of people; held-out puzzles do not depend on the seed."""

    seed: int = 0
    people: Mapping[int, float] = field(default_factory=lambda: dict(DEFAULT_PEOPLE))
    name: str = "knights"
    group_column: str = "people"
    reward_funcs: Sequence[RewardFunc] = (verify,)

    def __post_init__(self) -> None:
        wrong = [num for num, weight in self.people.items() if not 2 <= num <= MAX_PEOPLE or weight < 0]
        if wrong or sum(self.people.values()) <= 0:
            raise ConfigError(
                f"task.people is {dict(self.people)}; give numbers of people from 2 to {MAX_PEOPLE} with weights "
                "of at least 0, one of them above 0"
            )

    @property
    def train(self) -> Rows:
        return KnightsRows(seed=self.seed, people=self.people)

    def heldout(self, num: int) -> list[Row]:
        """Distinct puzzles, as long as unseen ones of two people (506 are held out, 3,814 are not) turn up."""
        rng = random.Random(HELDOUT_SEED)
        seen: set[str] = set()
        rows = []
        for _ in range(num):
            puzzle = _draw_heldout(rng, _draw_num_people(rng, self.people), seen)
            seen.add(puzzle.prompt)
            rows.append(_row(puzzle))
        return rows


def _draw_num_people(rng: random.Random, people: Mapping[int, float]) -> int:
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
