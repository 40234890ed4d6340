"""transformers' callbacks on a run: when they are called, what they see, and what they can request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.errors import ConfigError
from sortedrl.run.callbacks import TrainingProgress
from sortedrl.run.checkpoint_folder import Checkpoints
from sortedrl.telemetry import events
from sortedrl.telemetry.event_file import read_events

ROWS = [
    {"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?"},
    {"prompt": "Cid says Dan-knight . Dan says Cid-knave . ?"},
    {"prompt": "Eve says Fay-knave . Fay says Eve-knave . ?"},
    {"prompt": "Bob says either Ann-knave Bob-knight . Ann says Bob-knight . ?"},
]


def make_config(folder: Path, **sections: dict[str, Any]) -> SortedConfig:
    return SortedConfig(
        run={"dir": str(folder), "samples": 64, "report": False},
        schedule={"update_batch": 16},
        engine={"slots": 16, "max_new_tokens": 24},
        reward={"grace_s": 60.0},
        learner={"lr": 1e-3, "group_size": 4},
        eval={"prompts": 0, **sections.pop("eval", {})},
        checkpoint={"every_updates": 2, **sections.pop("checkpoint", {})},
        **sections,
    )


class RecordingCallback(TrainerCallback):
    """Records every call; `ask` may then change the control, or raise."""

    def __init__(self, ask: Any = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.ask = ask

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.calls.append((name, state.global_step))
            if name == "on_log":
                self.logs.append(kwargs["logs"])
                assert state.log_history[-1] == {**kwargs["logs"], "step": state.global_step}
            if self.ask is not None:
                return self.ask(name, args, state, control, kwargs)
            return None

        return note

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def trainer_with(callback: Any, config: SortedConfig) -> SortedTrainer:
    rows = {"train_dataset": ROWS, "eval_dataset": ROWS}

    def brief(completions: list[str]) -> list[float]:  # called in a thread: a process would import transformers again
        return [1 - len(text.split()) / 100 for text in completions]

    return SortedTrainer(reward_funcs=brief, args=config, callbacks=[callback], quiet=True, **rows)


def batches(trainer: SortedTrainer) -> list[events.BatchTaken]:
    return [event for event in read_events(trainer.run_dir / "events.jsonl") if isinstance(event, events.BatchTaken)]


def test_a_callback_sees_every_update(tmp_path: Path) -> None:
    witness = RecordingCallback()
    trainer = trainer_with(witness, make_config(tmp_path, eval={"prompts": 2}))
    assert witness.names() == ["on_init_end"]
    summary = trainer.train()
    steps = summary.updates
    names = witness.names()
    assert names[:5] == ["on_init_end", "on_train_begin", "on_epoch_begin", "on_log", "on_evaluate"]
    assert names[-2:] == ["on_epoch_end", "on_train_end"]
    assert [call for call in witness.calls if call[0] == "on_step_begin"] == [
        ("on_step_begin", n) for n in range(steps)
    ]
    assert [call for call in witness.calls if call[0] == "on_step_end"] == [
        ("on_step_end", n + 1) for n in range(steps)
    ]
    assert names.count("on_evaluate") == 2
    assert names.count("on_save") == len({2, 4, steps} & set(range(steps + 1)))
    of_updates = [logs for logs in witness.logs if "loss" in logs]
    for logs, batch in zip(of_updates, batches(trainer), strict=True):
        assert logs["reward"] == pytest.approx(sum(batch.rewards) / len(batch.rewards))
        assert logs["completions/max_length"] == max(batch.lengths)
        assert logs["learning_rate"] > 0
    # 64 samples are four passes over 4 prompts of 4 answers each.
    assert of_updates[-1]["epoch"] == 4.0
    assert of_updates[-1]["num_tokens"] == summary.trained_tokens
    assert witness.logs[0]["eval_reward"] == summary.accuracy_before
    assert names.count("on_epoch_begin") == names.count("on_epoch_end")


def test_callbacks_get_what_transformers_gives_them(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def ask(name: str, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> None:
        seen[name] = (kwargs["model"], kwargs["processing_class"], kwargs["optimizer"], state.max_steps)
        assert args.output_dir == str(tmp_path / "run")
        assert args.to_dict()["num_generations"] == 4

    trainer_with(RecordingCallback(ask), make_config(tmp_path)).train()
    assert seen["on_init_end"][0] is None
    model, tokenizer, optimizer, max_steps = seen["on_step_end"]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.eos_token_id is not None
    assert optimizer.param_groups
    assert max_steps == 4


def test_a_callback_can_stop_the_run_which_goes_on_later(tmp_path: Path) -> None:
    def ask(name: str, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> Any:
        if name == "on_step_end" and state.global_step == 1:
            control.should_training_stop = True
        return control

    config = make_config(tmp_path)
    stopped = trainer_with(RecordingCallback(ask), config).train()
    assert (stopped.status, stopped.updates) == ("stopped", 1)
    witness = RecordingCallback()
    resumed = trainer_with(witness, config)
    summary = resumed.train(resume=True)
    assert summary.status == "complete"
    assert witness.calls[1] == ("on_train_begin", 1)
    assert [step for name, step in witness.calls if name == "on_step_end"] == list(range(2, summary.updates + 1))
    history = [entry["step"] for entry in resumed.callbacks.state.log_history]
    assert history == list(range(1, summary.updates + 1))


def test_a_callback_can_ask_for_evaluation_and_checkpoint(tmp_path: Path) -> None:
    def ask(name: str, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> None:
        if name == "on_step_end" and state.global_step == 1:
            control.should_evaluate = control.should_save = True

    witness = RecordingCallback(ask)
    config = make_config(tmp_path, eval={"prompts": 2}, checkpoint={"every_updates": 0, "keep": 9})
    trainer = trainer_with(witness, config)
    summary = trainer.train()
    assert [step for name, step in witness.calls if name == "on_evaluate"] == [0, 1, summary.updates]
    assert Checkpoints(trainer.run_dir / "checkpoints").versions() == [1, summary.updates]


def test_what_a_callback_raises_ends_the_run_once_it_is_saved(tmp_path: Path) -> None:
    def ask(name: str, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> None:
        if name == "on_log" and state.global_step == 1:
            raise KeyError("of mine")

    witness = RecordingCallback(ask)
    config = make_config(tmp_path, checkpoint={"every_updates": 0})
    trainer = trainer_with(witness, config)
    with pytest.raises(KeyError, match="of mine"):
        trainer.train()
    assert witness.calls[-1] == ("on_log", 1)
    assert Checkpoints(trainer.run_dir / "checkpoints").versions() == [1]
    assert trainer_with(RecordingCallback(), config).train(resume=True).status == "complete"


def test_transformers_own_early_stopping_works(tmp_path: Path) -> None:
    """Patience of one and a threshold that nothing exceeds: the second evaluation after the first ends the run."""
    config = make_config(tmp_path, eval={"prompts": 2, "every_samples": 16})
    callback = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    trainer = trainer_with(callback, config)
    assert trainer.train().updates == 1
    assert trainer.callbacks.state.best_metric is not None


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a transformers\.TrainerCallback"):
        trainer_with(print, make_config(tmp_path))


def test_progress_counts_epochs_and_steps() -> None:
    progress = TrainingProgress(total_samples=100, update_batch=16, epoch_samples=40)
    assert progress.max_steps == 7
    progress.num_samples = 60
    assert progress.epoch == 1.5
    progress.epoch_samples = None
    assert progress.epoch == 0.6


def test_the_module_loads_no_transformers() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import sortedrl.run.callbacks, sortedrl.trainer; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "transformers" not in done.stdout.split()
