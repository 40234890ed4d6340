"""Weights that leave a run directory: the command `export`, and what the trainer saves, uploads and evaluates."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.errors import ConfigError, HubError
from sortedrl.run.model_card import RunFacts, model_card, public_config
from sortedrl.telemetry.summary import Summary
from tests.support.hub_server import HubServer, connect, running_hub

ROWS = [
    {"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?"},
    {"prompt": "Cid says Dan-knight . Dan says Cid-knave . ?"},
]


brief = lambda completions: [1 - len(text.split()) / 100 for text in completions]  # noqa: E731  (needs no process)


def config_of(folder: Path, name: str, **sections: Any) -> SortedConfig:
    return SortedConfig(
        run={"dir": str(folder), "name": name, "samples": 16, "report": False},
        schedule={"update_batch": 8},
        engine={"slots": 8, "max_new_tokens": 48},
        learner={"group_size": 4, "lr": 1e-2},
        reward={"grace_s": 60.0},
        eval={"prompts": 2},
        checkpoint={"every_updates": 1, "keep": 2},
        **sections,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `plain`, which trained all weights, and the run `lora`, whose trainer saved it twice."""
    folder = tmp_path_factory.mktemp("runs")
    for name, sections in (("plain", {}), ("lora", {"lora": {"rank": 2}})):
        args = config_of(folder, name, **sections)
        trainer = SortedTrainer(reward_funcs=brief, args=args, train_dataset=ROWS, quiet=True)
        trainer.train()
    trainer.save_model()
    trainer.save_model(folder / "merged", merge=True)
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    return model.state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_export_writes_the_last_checkpoint_or_another(runs: Path, call: Any, tmp_path: Path) -> None:
    checkpoints = runs / "plain" / "checkpoints"
    first, last = sorted(int(path.name) for path in checkpoints.iterdir())
    code, out, err = call("export", str(runs / "plain"), "--to", "out/last", "--json")
    assert code == 0, err
    done = json.loads(out)
    assert (done["path"], done["version"], done["weights"]) == ("out/last", last, "whole")
    assert done["files"] == sorted(path.name for path in (tmp_path / "out" / "last").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "train_config.toml"} <= set(
        done["files"]
    )
    assert not {"optimizer.safetensors", "learner_state.json", "ledger.sqlite", "manifest.json"} & set(done["files"])
    assert equal(loaded(tmp_path / "out" / "last"), loaded(checkpoints / str(last)))
    code, out, err = call("export", str(runs / "plain"), "--to", "first", "--version", str(first))
    assert (code, out) == (0, "")
    assert err.strip() == f"exported weights of version {first}: first"
    weights = loaded(tmp_path / "first")
    assert equal(weights, loaded(checkpoints / str(first)))
    assert not equal(weights, loaded(tmp_path / "out" / "last"))
    assert f"these weights are those after update {first}." in (tmp_path / "first" / "README.md").read_text()
    assert SortedConfig.load(tmp_path / "first" / "train_config.toml").learner.lr == 1e-2


def test_export_of_adapters_merged_and_alone(runs: Path, call: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    assert call("export", str(runs / "lora"), "--to", "merged")[0] == 0
    code, out, _ = call("export", str(runs / "lora"), "--to", "alone", "--adapter", "--json")
    assert code == 0
    files = json.loads(out)["files"]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert "model.safetensors" not in files
    assert "config.json" not in files
    assert "library_name: peft" in (tmp_path / "alone" / "README.md").read_text()
    from sortedrl.tasks.tiny import knights_tiny_path

    base = AutoModelForCausalLM.from_pretrained(knights_tiny_path())
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "alone")).merge_and_unload().state_dict()
    merged = loaded(tmp_path / "merged")
    assert all(torch.allclose(adapted[name], merged[name], atol=1e-6) for name in merged)
    # What the trainer saved of its model in memory: the adapters alone, and merged.
    by_trainer = runs / "lora" / "model"
    assert (by_trainer / "README.md").read_text() == (tmp_path / "alone" / "README.md").read_text()
    assert equal(
        load_file(by_trainer / "adapter_model.safetensors"), load_file(tmp_path / "alone" / "adapter_model.safetensors")
    )
    assert equal(loaded(runs / "merged"), merged)


def test_export_refuses_in_one_line(runs: Path, call: Any, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    shutil.copytree(runs / "plain", tmp_path / "damaged")
    version = max(int(path.name) for path in (tmp_path / "damaged" / "checkpoints").iterdir())
    (tmp_path / "damaged" / "checkpoints" / str(version) / "config.json").write_text("{}")
    plain = str(runs / "plain")
    cases = {
        ("nowhere", "--to", "x"): ["nowhere is not the directory of a run", "config.toml"],
        ("empty", "--to", "x"): ["empty is not the directory of a run"],
        (plain,): ["--to"],
        (plain, "--to", "x", "--version", "99"): ["no checkpoint 99: it has 1, 2"],
        ("damaged", "--to", "x", "--version", str(version)): ["is damaged", "config.json", "export another version"],
        (plain, "--to", "x", "--adapter"): ["has no adapters: leave out --adapter"],
        (plain, "--to", "full"): ["full is not empty", "--overwrite"],
        (plain, "--to", "full", "--overwrite"): ["full holds no model, so it is not replaced"],
        (plain, "--to", "file"): ["file is a file"],
        (plain, "--to", plain, "--overwrite"): ["holds the run"],
        (plain, "--to", "file/x"): ["file/x cannot be written"],
    }
    for arguments, parts in cases.items():
        code, out, err = call("export", *arguments)
        assert (code, out) == (2, ""), err
        (line,) = err.strip().splitlines()
        assert all(part in line for part in parts), line
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_export_replaces_a_model_only_when_told(runs: Path, call: Any, tmp_path: Path) -> None:
    assert call("export", str(runs / "plain"), "--to", "out", "--version", "1")[0] == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert call("export", str(runs / "plain"), "--to", "out")[0] == 2
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert call("export", str(runs / "plain"), "--to", "out", "--overwrite")[0] == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before


# ---- the trainer ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with running_hub() as server:
        connect(monkeypatch, server, tmp_path / "home")
        yield server


class NotingCallback(TrainerCallback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.metrics.append(metrics)


def test_the_trainer_evaluates_saves_and_uploads(hub: HubServer, tmp_path: Path) -> None:
    rows = {"train_dataset": ROWS, "eval_dataset": ROWS}
    trainer = SortedTrainer("knights-tiny", brief, config_of(tmp_path, "given"), **rows, quiet=True)
    for method in (trainer.save_model, lambda: trainer.push_to_hub("me/trained")):
        with pytest.raises(ConfigError, match=r"nothing has been trained here: call train\(\) first"):
            method()
    before = trainer.evaluate()
    assert trainer.state.global_step == 0
    summary = trainer.train()
    assert before["eval_reward"] == summary.accuracy_before
    noted = NotingCallback()
    trainer.add_callback(noted)
    after = trainer.evaluate()
    assert after["eval_reward"] == summary.accuracy_after
    assert noted.metrics == [after]
    assert set(trainer.evaluate(ROWS[:1], metric_key_prefix="test")) == {
        "test_reward",
        "test_greedy_reward",
        "test_completions/mean_length",
    }
    assert (trainer.state.global_step, trainer.state.max_steps) == (summary.updates, 2)
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2]

    saved = trainer.save_model(tmp_path / "saved")
    last = tmp_path / "given" / "checkpoints" / str(summary.updates)
    assert equal(loaded(saved), loaded(last))
    done = trainer.push_to_hub("me/trained", commit_message="Trained")
    repo = hub.repos["models/me/trained"]
    assert done.oid == repo.branches["main"]
    files = repo.commits[done.oid]
    assert files["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "README.md", "train_config.toml"} <= set(files)
    card = files["README.md"].decode()
    assert summary.ledger is not None
    assert "16 samples loaded, 16 trained, 0 lost, 0 trained twice" in card
    assert f"{summary.accuracy_before:.3f} before, {summary.accuracy_after:.3f} after" in card
    assert "`sorted-replay`" in card
    assert "`knights-tiny`" in card
    assert "without the rows and reward functions: its Python program passed them" in card
    assert str(tmp_path) not in card + files["train_config.toml"].decode()


def test_the_state_of_a_resumed_run_is_not_counted_twice(tmp_path: Path) -> None:
    config = config_of(tmp_path, "again")
    trainer = SortedTrainer(args=config, quiet=True, callbacks=[NotingCallback()])
    trainer.train()
    longer = config.model_dump()
    longer["run"]["samples"] = 24
    trainer.config = SortedConfig(**longer)
    summary = trainer.train(resume=True)
    assert summary.samples == 24
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3]
    assert trainer.state.global_step == 3


def test_an_upload_that_fails_is_one_line(
    runs: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    from sortedrl.external.hub import upload

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("card")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="'me/x' cannot be uploaded while HF_HUB_OFFLINE is set: unset it"):
        upload(tmp_path / "model", "me/x", commit_message="m")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"could not be uploaded to http://127\.0\.0\.1:9 .*Connection refused"):
        upload(tmp_path / "model", "me/x", commit_message="m")


# ---- the card -------------------------------------------------------------------------------------------------------


def test_the_card_names_the_base_model_and_no_folder_of_this_machine() -> None:
    config = SortedConfig(model={"path": "/data/someone/models/mine"}, run={"dir": "/data/someone/runs"})
    facts = {"config": config, "version": 3, "summary": Summary(strategy="sorted-replay", updates=3)}
    card = model_card(RunFacts(base_model="/data/someone/models/mine", **facts), is_adapter=False)
    assert "`mine`" in card
    assert "base_model" not in card
    assert "someone" not in card + public_config(config, {})
    card = model_card(
        RunFacts(base_model="Qwen/Qwen3-0.6B", commits={"model.path": "a" * 40}, **facts), is_adapter=False
    )
    assert "base_model: Qwen/Qwen3-0.6B" in card
    assert f"(commit {'a' * 40})" in card
    card = model_card(RunFacts(base_model="smollm2-135m", **facts), is_adapter=False)
    assert "4-bit weights (GGUF, Q4_1) converted back to float32" in card
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card
    assert tomllib.loads(public_config(SortedConfig(), {"model.path": "a" * 40}))["model"]["revision"] == "a" * 40
    running = RunFacts(base_model="knights-tiny", config=config, version=3, summary=None)
    assert "The run has not ended" in model_card(running, is_adapter=False)
