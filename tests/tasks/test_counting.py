"""Counting in steps: questions whose answers have a tail, a strict reader of lists, and held-out questions."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from dataclasses import replace

import pytest

from benchmarks.tasks.adversarial import LOGIC, MATH, outputs
from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.run.builders.task import build_task
from sortedrl.run.sft_run import task_examples
from sortedrl.tasks.counting import Count, CountingTask, Questions, counting_reward, draw, read_numbers


@pytest.mark.parametrize(
    ("start", "stop", "step", "numbers"),
    [
        (12, 40, 7, [12, 19, 26, 33, 40]),
        (12, 39, 7, [12, 19, 26, 33]),  # 40 would be beyond 39
        (9, 2, 3, [9, 6, 3]),
        (5, 0, 5, [5, 0]),
        (4, 8, 2, [4, 6, 8]),
    ],
)
def test_counting_by_hand(start: int, stop: int, step: int, numbers: list[int]) -> None:
    count = Count(start=start, stop=stop, step=step)
    assert count.numbers == numbers
    assert count.prompt == f"Count from {start} to {stop} in steps of {step}."


def test_counting_by_one_needs_no_step() -> None:
    count = Count(start=12, stop=15, step=1)
    assert (count.prompt, count.numbers) == ("Count from 12 to 15.", [12, 13, 14, 15])
    drawn = [draw(random.Random(seed), Questions(max_step=1)) for seed in range(50)]
    assert all(each.numbers[-1] == each.stop for each in drawn)
    assert {each.start < each.stop for each in drawn} == {True, False}


def test_brief_questions() -> None:
    assert Count(start=12, stop=40, step=7, is_brief=True).prompt == "12 to 40 by 7:"
    assert Count(start=12, stop=9, step=1, is_brief=True).prompt == "12 to 9:"
    drawn = draw(random.Random(0), Questions(brief=True))
    assert drawn == replace(draw(random.Random(0), Questions()), is_brief=True)


def test_lists_may_be_longer_where_steps_are_smaller() -> None:
    questions = Questions(median=400, spread=0.5, most=495, max_step=2)
    drawn = [draw(random.Random(seed), questions) for seed in range(200)]
    assert max(len(count.numbers) for count in drawn) > 450
    assert all(min(count.numbers) >= 1 and max(count.numbers) <= 999 for count in drawn)


def test_drawn_questions_have_the_drawn_length_and_three_digits_at_most() -> None:
    questions = Questions()
    for seed in range(500):
        count = draw(random.Random(seed), questions)
        numbers = count.numbers
        assert len(numbers) == questions.draw_length(random.Random(seed))
        assert 1 <= min(numbers) <= max(numbers) <= 999
        assert 1 <= count.step <= 9
        assert {abs(one - other) for one, other in itertools.pairwise(numbers)} == {count.step}
        assert 0 <= count.stop <= 999 + count.step


def test_lengths_spread_more_than_tenfold() -> None:
    rng = random.Random(0)
    drawn = sorted(Questions().draw_length(rng) for _ in range(4000))
    assert (drawn[0], drawn[-1]) == (2, 110)
    assert 11 <= statistics.median(drawn) <= 13
    # Lognormal: the 90th percentile is the median x exp(0.9 x 1.2816) = 38, the 99th x exp(0.9 x 2.3263) = 97, of which
    # drawing again above 110 takes a little.
    assert 34 <= drawn[3600] <= 40
    assert 78 <= drawn[3960] <= 100
    means = [max(drawn_now) for drawn_now in zip(*[iter(random.Random(1).sample(drawn, 4000))] * 8, strict=True)]
    assert 0.55 < 1 - statistics.mean(drawn) / statistics.mean(means) < 0.7  # idle slots if eight answers are awaited


def test_rows_depend_on_seed_and_number_and_never_meet_held_out_ones() -> None:
    task, other = (CountingTask(seed=seed) for seed in (0, 1))
    rows = [task.train.row(index) for index in range(300)]
    assert rows[7] == CountingTask(seed=0).train.row(7)
    assert rows[:20] != [other.train.row(index) for index in range(20)]
    heldout = task.heldout(60)
    assert heldout == other.heldout(60)
    assert len({row["prompt"] for row in heldout}) == 60
    assert {row["prompt"] for row in heldout}.isdisjoint(row["prompt"] for row in rows)
    assert {row["size"] for row in rows} == {"short", "medium", "long"}
    assert rows[0]["prompt"].endswith("\nWrite only the numbers, separated by spaces.")


def test_few_possible_questions_give_fewer_held_out_ones() -> None:
    task = CountingTask(
        questions=Questions(median=2, spread=0, most=2)
    )  # 2 numbers: 99 starts x 44 steps and ends, twice
    heldout = task.heldout(30)
    assert len({row["prompt"] for row in heldout}) == 30
    assert {len(row["answer"].split()) for row in heldout} == {2}


ANSWER = "12 19 26 33"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (ANSWER, 1.0),
        (f" {ANSWER}\n", 1.0),
        ("12, 19, 26, 33", 1.0),
        ("12\n19\n26\n33", 1.0),
        ("12 19 26 34", 0.5 * 3 / 4),
        ("12 19 26", 0.5 * 3 / 4),
        ("12 19 26 33 40", 0.5 * 4 / 5),
        ("12 18 26 33", 0.5 * 1 / 4),
        ("12 019 26 33", 0.5 * 1 / 4),
        ("13 19 26 33", 0.0),
        ("-12 19 26 33", 0.0),
        (" ".join(["12 19 26 33"] * 50), 0.5 * 4 / 200),
        (f"{ANSWER}.", 0.0),
        (f"The numbers are {ANSWER}", 0.0),
        (f"{ANSWER} done", 0.0),
        (f"<answer>{ANSWER}</answer>", 0.0),
        (f"12 19 26 33, {ANSWER} and", 0.0),
        ("12,, 19, 26, 33", 0.0),
        (",12 19 26 33", 0.0),
        ("12 19 26 33,", 0.0),
        ("12 19 26 3٣", 0.0),  # an Arabic digit
        ("１２ 19 26 33", 0.0),
        ("12 19\u00a026 33", 0.0),
        ("12 19 26 33\u200b", 0.0),
        ("12 19 26 33.0", 0.0),
        ("12 19 26 3_3", 0.0),
        ("12 19 26 0x21", 0.0),
        ("__import__('os')", 0.0),
        ("", 0.0),
        (" ", 0.0),
        ("9" * 10**6, 0.0),
        (f"{ANSWER} " * 10**5, 0.0),
        (" " * 10**6, 0.0),
        (f"{ANSWER}{', ' * 999}", 0.0),
    ],
)
def test_right_wrong_malformed_and_hostile_answers(completion: str, reward: float) -> None:
    assert counting_reward(["p"], [completion], [ANSWER]) == [pytest.approx(reward)]
    chat = [{"role": "assistant", "content": completion}]
    assert counting_reward(["p"], [chat], [ANSWER]) == [pytest.approx(reward)]


def test_only_the_right_list_is_above_half() -> None:
    right = ANSWER.split()
    wrong = [right[:num] for num in range(4)] + [[*right, "40"], [*right[:3], "34"], right[::-1], right * 2]
    rewards = counting_reward(["p"] * len(wrong), [" ".join(each) for each in wrong], [ANSWER] * len(wrong))
    assert max(rewards) < 0.5
    assert rewards[:4] == sorted(rewards[:4])  # more right numbers never give less


def test_no_adversarial_output_is_rewarded() -> None:
    texts = [*outputs("logic", 2 * len(LOGIC), seed=1), *outputs("math", 2 * len(MATH), seed=1)]
    assert counting_reward(["p"] * len(texts), texts, [ANSWER] * len(texts)) == [0.0] * len(texts)


def test_the_longest_list_is_read() -> None:
    numbers = Count(start=999, stop=18, step=9).numbers
    assert len(numbers) == 110
    assert read_numbers("\n".join(map(str, numbers))) == [str(number) for number in numbers]


def test_the_configured_task_and_its_cold_start() -> None:
    task = build_task(SortedConfig.load("tail-smollm2"))
    assert isinstance(task, CountingTask)
    row = task.train.row(0)
    assert re.fullmatch(r"[0-9]+ to [0-9]+( by 2)?:", row["prompt"])
    for example in task_examples(task, 5):
        assert counting_reward([example["prompt"]], [example["completion"]], [example["answer"]]) == [1.0]
    short = build_task(SortedConfig(task={"name": "counting", "options": {"median": 3, "most": 4}}))
    assert max(len(short.train.row(index)["answer"].split()) for index in range(50)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 9}, "has no longest: set median, spread, most, max_step, brief"),
        ({"most": 331, "max_step": 3}, r"task\.options\.most is 331: set a whole number from 2 to 330"),
        ({"brief": 1}, r"task\.options\.brief is 1: set true or false"),
        ({"most": 111}, r"task\.options\.most is 111: set a whole number from 2 to 110"),
        ({"most": 9.5}, "set a whole number"),
        ({"max_step": 0}, r"task\.options\.max_step is 0: set a whole number from 1 to 9"),
        ({"max_step": True}, "is True: set a whole number"),
        ({"median": 1}, r"task\.options\.median is 1: set a number from 2 to 110"),
        ({"median": 20, "most": 10}, "from 2 to 10"),
        ({"median": "ten"}, "is 'ten': set a number"),
        ({"spread": True}, "is True: set a number"),
        ({"spread": -0.1}, "set a number from 0 to 3"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(SortedConfig(task={"name": "counting", "options": options}))


def test_files_have_no_effect_and_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.path has no effect on task\.name counting"):
        build_task(SortedConfig(task={"name": "counting", "path": "rows.jsonl"}))
