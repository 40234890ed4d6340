"""The model's generation_config: end tokens are taken and recorded; sampling settings are not, and that is said."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.run.builders.generation import fill_from_model
from sortedrl.tasks.tiny import knights_tiny_path

TOKENIZER = SimpleNamespace(eos_token_id=1)


def model(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(generation_config=SimpleNamespace(**settings))


def test_end_tokens_are_taken_and_told() -> None:
    config, line = fill_from_model(SortedConfig(), model(eos_token_id=[5, 1]), TOKENIZER)
    assert config.engine.stop_tokens == (1, 5)
    assert line == "the model's generation_config: answers end at tokens 1, 5 (engine.stop_tokens)"
    config, line = fill_from_model(SortedConfig(), model(eos_token_id=1, temperature=1.0, top_k=0), TOKENIZER)
    assert (config.engine.stop_tokens, line) == ((1,), "")


def test_sampling_settings_are_left_out_and_named_where_the_configuration_is_silent() -> None:
    chat = model(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    config, line = fill_from_model(SortedConfig(engine={"top_k": 0}), chat, TOKENIZER)
    assert (config.engine.temperature, config.engine.top_p, config.engine.top_k) == (1.0, 1.0, 0)
    assert line == (
        "the model's generation_config: temperature 0.7, top_p 0.8, repetition_penalty 1.05 are not used: training "
        "samples from the whole distribution, unless engine says otherwise"
    )


def test_tokens_that_are_set_are_not_changed() -> None:
    given = SortedConfig(engine={"stop_tokens": [9]})
    assert fill_from_model(given, model(eos_token_id=5, temperature=0.7), TOKENIZER) == (given, "")


def test_a_resumed_run_ends_answers_at_the_recorded_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(knights_tiny_path(), folder)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "eos_token_id": [1, 7], "temperature": 0.7}))

    def train(samples: int, *, resume: bool = False) -> tuple[SortedTrainer, str]:
        config = SortedConfig(
            run={"dir": str(tmp_path), "samples": samples, "report": False},
            schedule={"update_batch": 16},
            engine={"slots": 16, "max_new_tokens": 16},
            learner={"group_size": 4},
            eval={"prompts": 0},
        )
        shown = io.StringIO()
        trainer = SortedTrainer(folder, args=config, console=Console(file=shown, width=400))
        assert trainer.train(resume=resume).status == "complete"
        return trainer, shown.getvalue()

    trainer, shown = train(16)
    assert shown.splitlines()[0] == (
        "the model's generation_config: answers end at tokens 1, 7 (engine.stop_tokens); temperature 0.7 is not used: "
        "training samples from the whole distribution, unless engine says otherwise"
    )
    saved = trainer.run_dir / "config.toml"
    assert SortedConfig.load(saved).engine.stop_tokens == (1, 7)
    for file in (path, trainer.run_dir / "checkpoints" / "1" / "generation_config.json"):
        assert json.loads(file.read_text())["eos_token_id"] == [1, 7]
    path.write_text(json.dumps(settings))
    resumed, shown = train(32, resume=True)
    assert resumed.config.engine.stop_tokens == (1, 7)
    assert "generation_config" not in shown
    assert SortedConfig.load(saved).engine.stop_tokens == (1, 7)
