"""`sortedrl eval`: the embedded model on its own puzzles, against the verifier and a plain `generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.errors import ModelError
from sortedrl.run.builders.parts import load_model
from sortedrl.run.scores import pass_at
from sortedrl.run.suite_eval import SuiteEvalResult, SuiteEvalSettings, evaluate_suites, find_model
from sortedrl.tasks.knights import KnightsTask, verify
from sortedrl.tasks.tiny import knights_tiny_path

NUM, BUDGET = 24, 80


def settings(**changes: Any) -> SuiteEvalSettings:
    given = {"model": "knights-tiny", "suites": "knights", "limit": NUM, "max_tokens": BUDGET, "slots": 4}
    return SuiteEvalSettings(**{**given, **changes})


@pytest.fixture(scope="module")
def greedy() -> Iterator[SuiteEvalResult]:
    heard: list[tuple[int, int, float]] = []
    found = evaluate_suites(settings(), lambda *told: heard.append(told))
    assert heard[0] == (0, NUM, 0.0)
    assert heard[-1] == (NUM, NUM, found.suites["knights"].mean_at_k)
    return found


def test_greedy_answers_are_those_of_generate(greedy: SuiteEvalResult) -> None:
    model, tokenizer = load_model(knights_tiny_path())
    texts, lengths, rewards = [], [], []
    for row in KnightsTask().heldout(NUM):
        prompt = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=BUDGET)
        answer = output[0, prompt.shape[1] :]
        texts.append(tokenizer.decode(answer, skip_special_tokens=True))
        lengths.append(len(answer))
        rewards += verify([row["prompt"]], texts[-1:], [row["answer"]])
    assert [one.text for one in greedy.answers] == texts
    assert [one.length for one in greedy.answers] == lengths
    assert [float(one.is_right) for one in greedy.answers] == rewards
    found = greedy.suites["knights"]
    assert found.mean_at_k == found.pass_at_k == pytest.approx(sum(rewards) / NUM)
    assert found.truncation_rate == pytest.approx(sum(one.finish == "length" for one in greedy.answers) / NUM)
    assert 0 < sum(rewards) < NUM, "all alike: the test shows little"


def test_figures_come_from_the_answers_that_are_written_down(tmp_path: Path) -> None:
    found = evaluate_suites(settings(samples=4, limit=6, temperature=1.0, seed=3))
    found.write_answers(tmp_path / "answers.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(line["problem"], line["sample"]) for line in lines] == [(n, k) for n in range(6) for k in range(4)]
    right = [sum(line["is_right"] for line in lines if line["problem"] == n) for n in range(6)]
    figures = found.as_dict()["suites"]["knights"]
    assert (figures["num_problems"], figures["num_samples"], figures["k"]) == (6, 24, 4)
    assert figures["mean_at_k"] == pytest.approx(sum(right) / 24)
    assert figures["pass_at"]["2"] == pytest.approx(sum(pass_at(4, num, 2) for num in right) / 6)
    assert figures["pass_at_k"] == pytest.approx(sum(num > 0 for num in right) / 6)
    assert len({line["text"] for line in lines if line["problem"] == 0}) > 1  # siblings have noise of their own


def test_answers_do_not_depend_on_slots(greedy: SuiteEvalResult) -> None:
    other = evaluate_suites(settings(slots=7))
    assert [one.text for one in other.answers] == [one.text for one in greedy.answers]


def test_the_table_names_k_and_errors(greedy: SuiteEvalResult) -> None:
    table = greedy.table()
    assert [column.header for column in table.columns][:5] == ["suite", "problems", "mean@1", "pass@1", "maj@1"]
    assert "±" in next(iter(table.columns[2].cells))
    told = greedy.as_dict()
    assert told["temperature"] == 0.0
    assert told["generated_tokens"] == sum(one.length for one in greedy.answers)
    assert 0 < told["busy_share"] <= 1


def test_a_prompt_and_an_answer_have_to_fit_the_model() -> None:
    with pytest.raises(ModelError, match=r"1024 positions of the model in .*: lower --max-tokens"):
        evaluate_suites(settings(max_tokens=1024))


def test_the_model_may_be_that_of_a_run(tmp_path: Path) -> None:
    assert find_model("knights-tiny") == knights_tiny_path()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ModelError, match="has no whole checkpoint"):
        find_model(str(tmp_path))
    with pytest.raises(ModelError, match="is not a folder"):
        find_model(str(tmp_path / "none"))
