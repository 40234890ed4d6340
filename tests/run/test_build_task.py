"""From the [task] section to a task: rows, wording, held-out rows, rewards, and messages that say what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sortedrl.cli import app
from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError, DataError
from sortedrl.learner.model import load_tokenizer
from sortedrl.run.builders.parts import check_prompts
from sortedrl.run.builders.task import build_task, load_rewards, needed_columns
from sortedrl.tasks.base import Task
from sortedrl.tasks.logic import logic_reward
from sortedrl.tasks.math import math_reward
from sortedrl.tasks.tiny import knights_tiny_path


def task_of(**section: object) -> Task:
    return build_task(SortedConfig(task=section))


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_math_rows_are_worded_and_some_held_out(sums: Path) -> None:
    task = task_of(name="math", path=str(sums), columns={"prompt": "question"})
    assert task.train.row(0)["prompt"].endswith(
        "?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert (task.train.size, len(task.heldout(100))) == (38, 2)
    assert list(task.reward_funcs) == [math_reward]
    train = {task.train.row(i)["prompt"] for i in range(38)}
    assert train.isdisjoint(row["prompt"] for row in task.heldout(100))


def test_templates_and_chats(sums: Path) -> None:
    common = {"name": "math", "path": str(sums), "columns": {"prompt": "question"}, "eval_share": 0}
    plain = task_of(**common, template="Q: {prompt}\nA:")
    assert plain.train.row(3)["prompt"] == "Q: What is 3 + 1?\nA:"
    chat = task_of(**common, template="{prompt}", system="Be brief.").train.row(3)["prompt"]
    assert chat == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 1?"}]
    assert [message["role"] for message in task_of(**common, chat=True).train.row(3)["prompt"]] == ["user"]
    assert task_of(**common).heldout(9) == []


def test_held_out_rows_of_their_own(sums: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "2 + 2?", "answer": 4}\n')
    task = task_of(name="math", path=str(sums), eval_path=str(other), columns={"prompt": "question"})
    assert (task.train.size, [row["answer"] for row in task.heldout(9)]) == (40, [4])


def brief(prompts: list, completions: list, level: list, **columns: object) -> list[float]:
    return [1.0 - len(text) / 100 for text in completions]


def test_a_dataset_takes_any_reward(sums: Path) -> None:
    task = task_of(name="dataset", path=str(sums), columns={"prompt": "question"}, reward="math, logic")
    assert list(task.reward_funcs) == [math_reward, logic_reward]
    assert needed_columns(brief) == ["level"]
    with pytest.raises(
        DataError, match=r"no column 'level'; it has: 'question', 'answer'; name .*task\.columns\.level"
    ):
        task_of(name="dataset", path=str(sums), columns={"prompt": "question"}, reward=f"{__name__}:brief")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "mth"}, "task.name: unknown task 'mth': did you mean math?"),
        (
            {"name": "poems"},
            "choose from knights, logic, counting, tools, math, dataset, reasoning_gym:NAME, or write your own as",
        ),
        ({"name": "reasoning_gym"}, "unknown task 'reasoning_gym': did you mean reasoning_gym:NAME?"),
        ({"name": "math"}, "task.name math needs task.path"),
        ({"name": "dataset", "path": "x.jsonl"}, "needs task.reward"),
        (
            {"name": "dataset", "path": "x.jsonl", "reward": "brief"},
            "write module:function, one of math, logic, or a reward model",
        ),
        ({"name": "dataset", "path": "x.jsonl", "reward": "json:dumbs"}, "json has no dumbs: did you mean dumps?"),
        ({"name": "dataset", "path": "x.jsonl", "reward": "no_such:f"}, "there is no module no_such in "),
        ({"name": "dataset", "path": "x.jsonl", "reward": "json:__name__"}, "is not a function"),
        ({"name": "knights", "path": "x.jsonl"}, "task.path has no effect on task.name knights"),
        ({"name": "logic", "options": {"a": 1}}, "task.options has no effect on task.name logic"),
        ({"name": "logic", "people": {"two": 1}}, "task.people must map numbers"),
        ({"name": "logic", "template": "Hi"}, "task.template does not contain {prompt}"),
    ],
)
def test_what_is_wrong_is_said(section: dict, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        task_of(**section)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_reward_module_that_fails_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_rewards.py").write_text("import no_such_package\n")
    (tmp_path / "some_rewards.py").write_text("from json import dumps\ndef accuracy(): ...\ndef brevity(): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for reward, message in (
        ("needy_rewards:f", "needy_rewards needs no_such_package, which is not installed"),
        ("some_rewards:acuracy", "some_rewards has no acuracy: did you mean accuracy?"),
        ("some_rewards:f1", "some_rewards has no f1: it has accuracy, brevity"),
        ("some_reward:accuracy", "there is no module some_reward in "),
        ("some_rewards.more:accuracy", "there is no module some_rewards.more in "),
    ):
        with pytest.raises(ConfigError) as raised:
            load_rewards(reward, str(tmp_path))
        assert message in str(raised.value)
    (found,) = load_rewards("some_rewards:brevity", str(tmp_path))
    assert found.__name__ == "brevity"


def test_a_bad_row_is_found_before_training_and_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "puzzles.jsonl"
    rows = [{"prompt": f"Ann says Bob-knave . Bob says Ann-knight . {'. ' * n}?", "answer": "x"} for n in range(30)]
    rows[17]["prompt"] = "Ann says Bob-knave . " * 200
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SortedConfig(task={"name": "math", "path": str(path), "template": "{prompt}", "eval_share": 0.2})
    with pytest.raises(DataError, match=r"row math/17 has \d+ tokens, more than the limit"):
        check_prompts(config, build_task(config), load_tokenizer(knights_tiny_path()))


def test_a_run_on_a_file_with_a_reward_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short_reward.py").write_text(
        "def short(prompts, completions, **columns):\n    return [1 / (1 + len(text)) for text in completions]\n"
    )
    rows = [{"q": f"Ann says Bob-knave . Bob says Ann-knight . {'. ' * n}?"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        '[run]\nsamples = 16\nreport = false\n[task]\nname = "dataset"\npath = "rows.jsonl"\n'
        'reward = "short_reward:short"\n'
        'columns = { prompt = "q" }\n[schedule]\nupdate_batch = 8\n[engine]\nslots = 8\nmax_new_tokens = 8\n'
        "[learner]\ngroup_size = 2\n[eval]\nprompts = 1\n[checkpoint]\nsave = false\n"
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "run.toml", "--json"])
    assert done.exit_code == 0, done.output
    (summary,) = json.loads(done.stdout)["runs"]
    assert summary["samples"] == 16
    assert 0 < summary["heldout_reward_before"] < 0.5
    assert summary["accuracy_before"] == 0.0, "rewards of one half and less make no right answer"
