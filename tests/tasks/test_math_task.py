"""The math verifier: where an answer is found, what counts as equal, and that nothing fools or stops it."""

from __future__ import annotations

import pytest

from benchmarks.tasks.adversarial import MATH, MATH_REFERENCE, outputs
from benchmarks.tasks.verifiers import RESPONSES, SUITES, measure_math
from sortedrl.tasks import math as math_task
from sortedrl.tasks.files import read_rows
from sortedrl.tasks.math import extract_answer, is_equal, is_right, math_reward, reference_answer
from tests.support.shared_data import DATA, needs_data


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed 7.", "7"),
        (r"\boxed{1} and \boxed{2", None),
        ("<answer> 3 </answer>", "3"),
        (r"<answer>it is $\boxed{3}$</answer>", "3"),
        (r"\boxed{1} <answer>2</answer>", "2"),
        (r"<answer>2</answer> or \boxed{1}", "1"),
        (r"<think>\boxed{1}</think> none", None),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        ("<answer></answer>", None),
        ("<answer>4", None),
        ("The answer is 4.", None),
    ],
)
def test_answers_are_found(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1,000", "1000"),
        ("1{,}000", "1000.0"),
        ("$42$", "42"),
        ("-3.50", "-3.5"),
        ("4.5e33", r"4.5 \times 10^{33}"),
        ("x = 5", "5"),
        ("50%", r"50\%"),
        (r"18\text{ dollars}", "18"),
        (r"10^{-3}", "0.001"),
        ("(2, 1)", r"\left( 2,1 \right)"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("Evelyn", r"\text{Evelyn}"),
        ("52_8", "52_{8}"),
    ],
)
def test_answers_that_mean_the_same(given: str, reference: str) -> None:
    assert is_equal(given, reference)


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("0.33", r"\frac{1}{3}"),
        ("41", "42"),
        ("-42", "42"),
        ("(1, 2)", "(2, 1)"),
        ("42 or 41", "42"),
        ("x^2", "x^3"),
        ("52_9", "52_8"),
        ("", "42"),
        ("4２", "42"),
        ("٤٢", "42"),
        ("1000", "1,00"),
        (r"c^{2}\left(\gamma^{2}-11\right)", r"c^{2}\left(\gamma^{2}-1\right)"),
        (r"\frac{2}{0}", r"\frac{1}{0}"),
    ],
)
def test_answers_that_do_not(given: str, reference: str) -> None:
    assert not is_equal(given, reference)


def test_references_are_numbers_texts_and_solutions() -> None:
    assert reference_answer(27.0) == "27"
    assert reference_answer("a\n#### 1,234") == "1,234"
    assert reference_answer(r"we get \boxed{1.6} cm") == "1.6"
    chat = [[{"role": "assistant", "content": r"\boxed{3}"}]]
    assert math_reward([[{"role": "user", "content": "?"}]], chat, [3]) == [1.0]
    assert math_reward(["a", "b"], [r"\boxed{3}", "3"], ["#### 3", "#### 3"], idx=[0, 1]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "given", ["10**10**10", "9^{9^{9^9}}", "2^{100000}", "99999!", "(" * 50 + "1" + ")" * 50, "7" * 400]
)
def test_what_takes_long_is_not_computed(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_task, "_is_same_expression", lambda *texts: pytest.fail("computed"))
    assert not is_equal(given, "42")


def test_a_comparison_past_its_limit_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*texts: str) -> bool:
        while True:
            pass

    monkeypatch.setattr(math_task, "LIMIT_S", 0.05)
    monkeypatch.setattr(math_task, "_is_same_expression", hang)
    assert not is_equal("x", "y")


def test_no_adversarial_output_is_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_task, "LIMIT_S", 0.5)
    texts = outputs("math", len(MATH), seed=1)
    assert math_reward(["p"] * len(texts), texts, [MATH_REFERENCE] * len(texts)) == [0.0] * len(texts)


@needs_data
@pytest.mark.parametrize("suite", SUITES)
def test_references_of_the_suites_are_accepted_in_a_response(suite: str) -> None:
    rows = read_rows(DATA / "math" / f"{suite}.jsonl", columns={"answer": SUITES[suite]}, required=("answer",))
    answers = [rows[i]["answer"] for i in range(len(rows))]
    refused = [a for a in answers if not all(is_right(response % reference_answer(a), a) for response in RESPONSES)]
    assert len(refused) <= len(answers) / 100, refused


@needs_data
def test_perturbed_references_are_refused() -> None:
    for result in measure_math(DATA / "math", limit=30):
        assert len(result["perturbed_accepted"]) <= 1, result


@needs_data
@pytest.mark.slow
def test_all_perturbed_references_are_refused() -> None:
    for result in measure_math(DATA / "math"):
        assert len(result["perturbed_accepted"]) <= result["references"] / 100, result
