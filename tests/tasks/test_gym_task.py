"""reasoning-gym's generators: rows that can be made again, their own scores, answers that no scorer may evaluate."""

from __future__ import annotations

import pytest

from benchmarks.tasks.adversarial import GYM, outputs
from benchmarks.tasks.verifiers import measure_gym
from sortedrl.errors import ConfigError
from sortedrl.tasks.gym import FORMULAS, LISTS, GymTask, generator_names, gym_reward, is_harmless, score

# One is made of others, which have to be named; these tell no answer, so that there is none to score.
WITHOUT_ANSWER = {"boxnet", "composite", "rush_hour"}
# Their items take seconds, or their word lists do.
SLOW = {"arc_agi", "figlet_font", "futoshiki", "group_anagrams", "intermediate_integration", "knight_swap", "rearc"}


def test_rows_depend_on_seed_and_number_and_never_meet_held_out_ones() -> None:
    task = GymTask(generator="leg_counting", seed=3, options={"max_animals": 4})
    rows = [task.train.row(i) for i in range(130)]
    assert rows[100] == GymTask(generator="leg_counting", seed=3, options={"max_animals": 4}).train.row(100)
    assert rows[0]["prompt"] != GymTask(generator="leg_counting", seed=4).train.row(0)["prompt"]
    heldout = task.heldout(20)
    assert len({row["prompt"] for row in heldout}) == 20
    assert {row["prompt"] for row in heldout}.isdisjoint(row["prompt"] for row in rows)
    assert heldout == GymTask(generator="leg_counting", seed=5, options={"max_animals": 4}).heldout(20)


def test_answers_are_scored_by_the_generator() -> None:
    row = GymTask(generator="leg_counting").train.row(0)
    assert "<answer>" in row["prompt"]
    right = f"<think>so</think><answer>{row['answer']}</answer>"
    texts = [right, "<answer>-1</answer>", row["answer"], f"<answer>{row['answer']}"]
    assert gym_reward(["p"] * 4, texts, [row["gym"]] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert gym_reward([[]], [[{"role": "assistant", "content": right}]], [row["gym"]]) == [1.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("leg_countin", {}, "no generator 'leg_countin'; did you mean reasoning_gym:leg_counting?"),
        ("leg_counting", {"max_animal": 3}, "no option 'max_animal'; did you mean max_animals?"),
        ("leg_counting", {"seed": 3}, "has no option 'seed'"),
        ("leg_counting", {"max_animals": 0}, "reasoning-gym cannot make leg_counting"),
        ("composite", {}, "Must specify at least one dataset"),
    ],
)
def test_bad_names_and_options_are_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        GymTask(generator=name, options=options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "answer", "is_fine"),
    [
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", True),
        ("n_queens", "__import__('os')", False),
        ("spiral_matrix", "[x() for x in y]", False),
        ("spiral_matrix", "1 2 3", True),
        ("countdown", "(3 + 4) * 2 / 7", True),
        ("countdown", "exec(chr(49))", False),
        ("countdown", "x.__class__", False),
        ("puzzle24", "9**9**9**9", False),
        ("simple_integration", "x**3/3 + sin(2*x) + C", True),
        ("simple_integration", "-10*(x + 1)**(3/2)/3 + C", True),
        ("polynomial_multiplication", "x**2*y**3 + 2*x*y(x)", True),
        ("puzzle24", "(9**99)**99", False),
        ("polynomial_multiplication", "Symbol(x)", False),
        ("leg_counting", "exec('anything')", True),
    ],
)
def test_only_plain_answers_reach_scorers_that_evaluate(name: str, answer: str, is_fine: bool) -> None:
    assert is_harmless(name, answer) is is_fine


@pytest.mark.parametrize("name", sorted((LISTS | FORMULAS) - SLOW))
def test_scorers_that_evaluate_reward_no_adversarial_output(name: str) -> None:
    origin = {"name": name, "seed": "test/0", "item": 0, "options": {}}
    assert max(score(text, origin) for text in outputs("gym", 3 * len(GYM), seed=1)) == 0.0


def test_generators_make_prompts_and_score_their_own_answers() -> None:
    names = [name for name in generator_names() if name not in SLOW]
    failed = {result["generator"]: result["reason"] for result in measure_gym(names[::3]) if result["score"] != 1.0}
    assert failed.keys() <= WITHOUT_ANSWER, failed


@pytest.mark.slow
def test_all_generators_make_prompts_and_score_their_own_answers() -> None:
    names = generator_names()
    assert len(names) > 100
    assert {result["generator"] for result in measure_gym(names) if result["score"] != 1.0} == WITHOUT_ANSWER
