"""A reward model scores answers as one plain forward pass over prompt and answer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

from sortedrl import SortedTrainer
from sortedrl.errors import ConfigError, ModelError
from sortedrl.reward.pool import RewardPool
from sortedrl.run.builders.task import load_rewards
from sortedrl.tasks import reward_model
from sortedrl.tasks.reward_model import RewardModel
from sortedrl.tasks.tiny import knights_tiny_path
from tests.support.tiny_models import save_classifier

PROMPTS = ["Ann says Bob-knave . ?", "Cid says Dan-knight . Dan says Cid-knave . ?", "Ann says Bob-knight . ?"]
ANSWERS = [" answer Ann-knave Bob-knight", " answer Cid-knave", " answer Bob-knave Ann-knight answer Ann-knave"]


def plain_scores(folder: Path, texts: list[str]) -> list[float]:
    """One forward pass per text, without padding: the score is that of the last token."""
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for text in texts:
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            hidden = model.model(tokens).last_hidden_state[0, -1]
        scores.append(model.score(hidden).item())
    return scores


def test_scores_are_those_of_a_plain_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_classifier(tmp_path / "judge")
    (function,) = load_rewards(str(folder))
    assert isinstance(function, RewardModel)
    function.load()
    wanted = plain_scores(folder, [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)])
    assert len(set(wanted)) == 3
    assert function(PROMPTS, ANSWERS) == pytest.approx(wanted, abs=1e-5)
    monkeypatch.setattr(reward_model, "_BATCH_TOKENS", 1)  # one text per pass
    assert function(PROMPTS, ANSWERS) == pytest.approx(wanted, abs=1e-5)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    replies = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    templated = plain_scores(folder, [f"{p} . {a} . " for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    assert function(chats, replies) == pytest.approx(templated, abs=1e-5)


def test_the_pool_calls_it_next_to_a_function(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "judge")
    judge = RewardModel(name=str(folder))
    judge.load()
    with RewardPool([judge, lambda completions: [10.0] * len(completions)], timeout_s=60, workers=1) as pool:
        for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            pool.submit((number, 0), prompt, answer, {})
        rewards: dict[int, float] = {}
        while pool.num_waiting:
            rewards |= {score.key[0]: score.reward for score in pool.poll(1.0)}
        assert not pool.errors
    wanted = plain_scores(folder, [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)])
    assert [rewards[number] for number in range(3)] == pytest.approx([10 + score for score in wanted], abs=1e-5)


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no reward model, because score\.weight is missing"):
        RewardModel(name=str(knights_tiny_path())).load()
    with pytest.raises(ModelError, match="has another shape: give a sequence classifier with one label"):
        RewardModel(name=str(save_classifier(tmp_path / "three", num_labels=3))).load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        RewardModel(name=str(tmp_path / "empty")).load()


def test_names_that_are_no_models_stay_functions() -> None:
    assert [isinstance(each, RewardModel) for each in load_rewards("logic,me/judge@v1,json:dumps")] == [
        False,
        True,
        False,
    ]
    with pytest.raises(ConfigError, match="or a reward model as owner/name"):
        load_rewards("judge")


def test_the_trainer_takes_names_and_refuses_objects(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": PROMPTS[0]}]
    trainer = SortedTrainer(reward_funcs="me/judge", train_dataset=rows)
    assert trainer.task is not None
    assert [func.name for func in trainer.task.reward_funcs if isinstance(func, RewardModel)] == ["me/judge"]
    model = LlamaForSequenceClassification.from_pretrained(save_classifier(tmp_path / "judge"))
    with pytest.raises(ConfigError, match="holds a model object: pass the folder or the hub id"):
        SortedTrainer(reward_funcs=[model], train_dataset=rows)
