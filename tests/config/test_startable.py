"""What a run depends on is saved as it is; a configuration that holds a secret or a redaction mark does not start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.redact import REDACTED
from sortedrl.run.doctor import examine
from sortedrl.tasks.knights import KnightsTask
from sortedrl.trainer import SortedTrainer

SECRET = "hf_abcdefgh"
LONG_SECRET = "sk-0123456789abcdef"
TEMPLATE = "Use key=value form, token = abc. {prompt}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("OTHER_API_KEY", LONG_SECRET)
    monkeypatch.setenv("SHORT_KEY", "short")
    monkeypatch.setenv("TOKEN_MODE", "sequence")
    monkeypatch.setenv("HARMLESS", "harmless-value")


def small_config(folder: Path, **task: Any) -> SortedConfig:
    """A run of one update on prompts with a template."""
    rows = KnightsTask(seed=0).train
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(rows.row(index)) + "\n" for index in range(8))
    return SortedConfig(
        run={"name": "worded", "dir": str(folder), "samples": 4, "report": False},
        task={
            "name": "dataset",
            "path": str(folder / "rows.jsonl"),
            "eval_share": 0.0,
            "reward": "sortedrl.tasks.knights:verify",
            **task,
        },
        schedule={"update_batch": 4, "strategy": "sync"},
        engine={"slots": 4, "max_new_tokens": 4},
        learner={"group_size": 4},
        eval={"prompts": 0},
    )


def test_a_saved_configuration_keeps_text_that_looks_like_a_secret(tmp_path: Path) -> None:
    config = SortedConfig(
        task={"template": TEMPLATE, "columns": {"answer_token": "a"}},
        engine={"address": "http://ann:pw@host:8000", "stop": ["password: x"]},
    )
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    assert SortedConfig.load(tmp_path / "config.toml") == SortedConfig(**config.resolved())
    assert SortedConfig.load(tmp_path / "config.toml").task == config.task


def test_a_run_resumes_with_the_prompts_that_it_was_started_with(call: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path, template=TEMPLATE)
    SortedTrainer(args=config, quiet=True).train()
    (checkpoint,) = (config.run_dir / "checkpoints").iterdir()
    state = json.loads((checkpoint / "learner_state.json").read_text())
    assert state["extra"]["config"]["task"]["template"] == TEMPLATE
    code, _, err = call("train", "--resume", str(config.run_dir), "--json")
    assert code == 0, err
    shutil.rmtree(config.run_dir / "checkpoints")  # as if the run was killed before its first checkpoint
    (config.run_dir / "events.jsonl").unlink()
    (config.run_dir / "summary.json").unlink()
    code, _, err = call("train", "--resume", str(config.run_dir), "--json")
    assert code == 0, err
    assert SortedConfig.load(config.run_dir / "config.toml").task.template == TEMPLATE


@pytest.mark.parametrize(
    ("task", "key", "variable"),
    [
        ({"system": SECRET}, "task.system", "HF_TOKEN"),
        ({"columns": {"prompt": SECRET}}, "task.columns", "HF_TOKEN"),
        ({"options": {"word": ["a", SECRET]}}, "task.options", "HF_TOKEN"),
        ({"template": f"Use {LONG_SECRET}. {{prompt}}"}, "task.template", "OTHER_API_KEY"),
    ],
)
def test_a_configuration_that_holds_a_secret_does_not_start(
    task: dict[str, Any], key: str, variable: str, call: Any, tmp_path: Path
) -> None:
    config = small_config(tmp_path, **task).moved(tmp_path / "runs", "worded")
    (tmp_path / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    for command in ("train", "sft"):
        code, out, err = call(command, "run.toml", "--json")
        assert (code, out) == (2, "")
        assert err == (
            f"error: {key} holds the value of the environment variable {variable}, which looks like a secret, and a "
            f"run saves its configuration in clear: remove it from the configuration, or unset {variable}\n"
        )
    assert not (tmp_path / "runs").exists()
    finding = next(finding for finding in examine(tmp_path / "run.toml") if finding.name == "config")
    assert not finding.is_fine
    assert variable in finding.text


def test_paths_short_values_defaults_and_fixed_choices_start(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"task": {"path": SECRET, "eval_path": SECRET}, "model": {"path": SECRET}, "sft": {"path": SECRET}}
    SortedConfig(run={"dir": SECRET}, **paths, engine={"address": SECRET, "cluster": SECRET}).check_startable()
    SortedConfig(task={"system": "short"}, learner={"ratio": "sequence"}).check_startable()
    SortedConfig(task={"system": f"harmless-value, not {SECRET} as a whole"}).check_startable()
    monkeypatch.setenv("PROJECT_KEY", "sortedrl")
    SortedConfig().check_startable()


def test_a_configuration_with_a_redaction_mark_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task\.template holds <redacted>: .* set task\.template to the text"):
        SortedTrainer(args=small_config(tmp_path, template=f"key={REDACTED} {{prompt}}")).train()
    with pytest.raises(ConfigError, match=r"engine\.address holds <redacted>"):
        SortedConfig(engine={"address": f"http://ann:{REDACTED}@host"}).check_startable()


def test_a_run_whose_saved_configuration_was_redacted_resumes_with_the_text_given_again(
    call: Any, tmp_path: Path
) -> None:
    """Versions before wrote redacted configurations."""
    config = small_config(tmp_path, template="Use key=value form. {prompt}")
    SortedTrainer(args=config, quiet=True).train()
    shutil.rmtree(config.run_dir / "checkpoints")
    (config.run_dir / "events.jsonl").unlink()
    (config.run_dir / "summary.json").unlink()
    saved = config.run_dir / "config.toml"
    redacted = saved.read_text().replace("key=value", f"key={REDACTED}")
    assert REDACTED in redacted
    saved.write_text(redacted)
    code, _, err = call("train", "--resume", str(config.run_dir), "--json")
    assert code == 2
    assert "task.template holds <redacted>" in err
    code, _, err = call("train", "--resume", str(config.run_dir), "task.template=Key {prompt}", "--json")
    assert code == 2
    assert "task.template was" in err
    code, _, err = call("train", "--resume", str(config.run_dir), f"task.template={config.task.template}", "--json")
    assert code == 0, err
    assert "key=value" in saved.read_text()
