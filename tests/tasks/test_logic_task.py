"""Knights and Knaves in words: puzzles with one solution, a strict reader of answers, Logic-RL's files as they are."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.tasks.adversarial import LOGIC, LOGIC_REFERENCE, outputs
from sortedrl.errors import ConfigError, DataError
from sortedrl.tasks.files import read_rows
from sortedrl.tasks.logic import (
    LogicTask,
    WordPuzzle,
    draw,
    holds,
    is_right,
    logic_reward,
    logic_rl_row,
    parse_statements,
    read_roles,
    solutions,
)
from tests.support.shared_data import DATA, needs_data

KNIGHT, KNAVE = "telling-truth", "lying"


def test_statements_mean_what_they_say() -> None:
    first, second = (KNIGHT, 0), (KNAVE, 1)
    worlds = list(itertools.product((True, False), repeat=2))
    tables = {
        ("not", first): [False, False, True, True],
        ("and", first, second): [False, True, False, False],
        ("or", first, second): [True, True, False, True],
        ("->", first, second): [False, True, True, True],
        ("<=>", first, second): [False, True, True, False],
    }
    assert {s: [holds(s, world) for world in worlds] for s in tables} == tables


def test_a_puzzle_by_hand() -> None:
    # Ann: "Bob is a knave." Bob: "We are both knights." If Bob were a knight, so were Ann, who calls him a knave.
    puzzle = WordPuzzle(names=("Ann", "Bob"), statements=((KNAVE, 1), ("and", (KNIGHT, 0), (KNIGHT, 1))))
    assert solutions(puzzle.statements) == [(True, False)]
    assert puzzle.write((True, False)) == "(1) Ann is a knight\n(2) Bob is a knave"
    assert 'Ann says: "Bob is a knave." Bob says: "Ann is a knight and Bob is a knight."' in puzzle.text


@pytest.mark.parametrize("num_people", range(2, 9))
def test_puzzles_have_one_solution(num_people: int) -> None:
    rng = random.Random(num_people)
    for _ in range(2 if num_people == 8 else 10):
        puzzle = draw(rng, num_people)
        assert len(set(puzzle.names)) == num_people
        ((*solution,),) = solutions(puzzle.statements)
        assert all(holds(s, solution) == solution[p] for p, s in enumerate(puzzle.statements))


def test_rows_depend_on_seed_and_number_and_never_meet_held_out_ones() -> None:
    task, other = (LogicTask(seed=seed, people={2: 1, 3: 1}) for seed in (0, 1))
    rows = [task.train.row(i) for i in range(200)]
    assert rows[7] == LogicTask(seed=0, people={2: 1, 3: 1}).train.row(7)
    assert rows[:20] != [other.train.row(i) for i in range(20)]
    heldout = task.heldout(50)
    assert heldout == other.heldout(50)
    assert len({row["prompt"] for row in heldout}) == 50
    assert {row["prompt"] for row in heldout}.isdisjoint(row["prompt"] for row in rows)
    assert {row["people"] for row in rows} == {2, 3}
    with pytest.raises(ConfigError, match="from 2 to 8"):
        LogicTask(people={9: 1})


ANSWER = "(1) Zoey is a knight\n(2) Ethan is a knave\n(3) Noah is a knight"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (f"<answer>{ANSWER}</answer>", 1.0),
        (f"<think>so</think>\n<answer> {ANSWER} </answer>\n", 1.0),
        (f"Let me see. <answer>\n{ANSWER}.\n</answer>", 1.0),
        ("<answer>Noah is a knight, Zoey is a knight, and Ethan is a knave.</answer>", 1.0),
        ("<answer>(1) Zoey is a knight (2) Ethan is a knave (3) Noah is a knight</answer>", 1.0),
        (f"<answer>{ANSWER.replace('knave', 'knight')}</answer>", 0.1),
        (f"<answer>{ANSWER}</answer><answer>{ANSWER}</answer>", 0.0),
        (f"<answer>{ANSWER}</answer></answer>", 0.0),
        (f"<answer>{ANSWER}", 0.0),
        (f"<answer>{ANSWER}</answer> I am sure.", 0.0),
        (f"<answer>I say: {ANSWER}</answer>", 0.0),
        (f"<answer>{ANSWER} for sure</answer>", 0.0),
        ("<answer>(1) Zoey is a knight\n(2) Ethan is a knave</answer>", 0.0),
        (f"<answer>{ANSWER}\n(4) Mia is a knight</answer>", 0.0),
        (f"<answer>{ANSWER.replace('Noah', 'Mia')}</answer>", 0.0),
        (f"<answer>{ANSWER.replace('Noah', 'Zoey')}</answer>", 0.0),
        (f"<answer>{ANSWER.replace('(3)', '(4)')}</answer>", 0.0),
        (f"<answer>{ANSWER.replace('(3) ', '')}</answer>", 0.0),
        (f"<answer>{ANSWER.replace('Zoey', 'zoey')}</answer>", 0.0),
        (f"<think>so <answer>{ANSWER}</answer>", 0.0),
        (f"<think><answer>{ANSWER}</answer></think>", 0.0),
        (f"so</think><answer>{ANSWER}</answer>", 0.0),
        ("<answer></answer>", 0.0),
        (ANSWER, 0.0),
    ],
)
def test_format_then_answer(completion: str, reward: float) -> None:
    assert logic_reward(["p"], [completion], [ANSWER]) == [reward]
    assert is_right(completion, ANSWER) == (reward == 1.0)


def test_thinking_may_begin_in_the_prompt() -> None:
    completion = f"so</think><answer>{ANSWER}</answer>"
    prompts = ["<|im_start|>assistant\n<think>", "<|im_start|>assistant\n"]
    assert logic_reward(prompts, [completion] * 2, [ANSWER] * 2) == [1.0, 0.0]
    twice = f"<think>{completion}"
    assert logic_reward(prompts, [twice] * 2, [ANSWER] * 2) == [0.0, 1.0]


def test_no_adversarial_output_is_rewarded() -> None:
    texts = outputs("logic", 5 * len(LOGIC), seed=1)
    assert logic_reward(["p"] * len(texts), texts, [LOGIC_REFERENCE] * len(texts)) == [0.0] * len(texts)


@pytest.mark.parametrize(
    "text", ["", "(", "1", "(('lying', 5),)", "(('maybe', 0),)", "__import__('os')", "(('lying', 'a'),)"]
)
def test_statements_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="correct or"):
        parse_statements(text)


@needs_data
@pytest.mark.parametrize("people", [3, 4, 5])
def test_every_row_of_logic_rl_is_solved_and_scored(people: int) -> None:
    for split, count in (("train", 900), ("test", 100)):
        rows = read_rows(DATA / "kk" / f"{people}ppl", split=split)
        assert len(rows) == count
        for index in range(count):
            source = rows[index]
            assert solutions(parse_statements(source["statements"])) == [tuple(source["solution"])]
            row = logic_rl_row(source)
            assert isinstance(row["prompt"], str)
            answers = [row["answer"], *flips(row["answer"])]
            completions = [f"so </think>\n<answer> {answer} </answer>" for answer in answers]
            rewards = logic_reward([row["prompt"]] * (people + 1), completions, [row["answer"]] * (people + 1))
            assert rewards == [1.0] + [0.1] * people
            assert read_roles(source["solution_text"]) == read_roles(row["answer"])


def flips(answer: str) -> list[str]:
    """The answer with one role turned, for each of them."""
    lines = answer.split("\n")
    turned = [f"{line[:-5]}knight" if line.endswith("knave") else f"{line[:-6]}knave" for line in lines]
    return ["\n".join([*lines[:n], turned[n], *lines[n + 1 :]]) for n in range(len(lines))]
