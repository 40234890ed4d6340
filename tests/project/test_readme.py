"""The README's example runs unchanged, and so do chat prompts, reward functions and callbacks written for TRL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.tasks.tiny import knights_tiny_path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(code.group(1), "README.md", "exec"), {"__name__": "readme"})
    assert 0 < float(capsys.readouterr().out) < 100
    assert (tmp_path / "runs" / "run" / "summary.json").is_file()


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 700


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_reward_function_of_trls_kind_runs_unchanged(is_chat: bool, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from sortedrl.run.checkpoint_folder import load_model

    steps: list[int] = []

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    def says_yes(completions: list[Any], ground_truth: list[str], **kwargs: Any) -> list[float]:
        """Reads text or chat completions, as TRL's own functions do, and the other arguments that TRL passes."""
        texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
        assert len(kwargs["completion_ids"]) == len(texts)
        assert kwargs["trainer_state"].global_step <= kwargs["trainer_state"].max_steps
        return [float(truth in text) for text, truth in zip(texts, ground_truth, strict=True)]

    model, tokenizer = load_model(knights_tiny_path())
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    text = "Ann says Bob-knave . Bob says Ann-knight . ?"
    prompt = [{"role": "user", "content": text}] if is_chat else text
    config = SortedConfig(
        run={"dir": str(tmp_path), "samples": 64, "report": False},
        schedule={"update_batch": 16},
        engine={"slots": 16, "max_new_tokens": 32},
        reward={"on_error": "stop", "grace_s": 60.0},
        learner={"group_size": 4},
        eval={"prompts": 0},
    )
    trainer = SortedTrainer(
        model=model,
        reward_funcs=says_yes,
        args=config,
        train_dataset=[{"prompt": prompt, "ground_truth": "yes"}] * 8,
        processing_class=tokenizer,
        callbacks=[Steps],
        quiet=True,
    )
    summary = trainer.train()
    assert summary.status == "complete"
    assert steps == list(range(1, summary.updates + 1))
