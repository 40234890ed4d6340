"""Ids of a model hub: a server on the loopback address stands for it, and no test uses another network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.errors import ConfigError, ModelError
from sortedrl.external.hub import commit_of, fetch, find_cached, is_repo_id, split_revision
from sortedrl.learner.model import check_model_folder, load_tokenizer
from sortedrl.run.builders.parts import own_tokenizer
from sortedrl.run.checkpoint_folder import load_state
from sortedrl.run.doctor import examine
from sortedrl.tasks.tiny import knights_tiny_path
from tests.support.hub_server import HubServer, connect, running_hub
from tests.support.tiny_models import save_classifier

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
NOWHERE = "http://127.0.0.1:9"  # a port that no server has
SECTIONS: dict[str, Any] = {
    "schedule": {"update_batch": 8},
    "engine": {"slots": 8, "max_new_tokens": 8},
    "learner": {"group_size": 4},
    "reward": {"grace_s": 60.0},
    "eval": {"prompts": 0},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with running_hub() as server:
        connect(monkeypatch, server, tmp_path / "home")
        monkeypatch.chdir(tmp_path)
        yield server


def other_weights(folder: Path) -> dict[str, bytes]:
    """The files of the tiny model with every weight doubled."""
    doubled = {name: 2 * tensor for name, tensor in load_file(knights_tiny_path() / "model.safetensors").items()}
    save_file(doubled, folder / "model.safetensors", metadata={"format": "pt"})
    files = {path.name: path.read_bytes() for path in knights_tiny_path().iterdir() if path.is_file()}
    return {**files, "model.safetensors": (folder / "model.safetensors").read_bytes()}


def test_an_id_becomes_a_folder_of_the_wanted_revision(hub: HubServer, tmp_path: Path) -> None:
    old = hub.add("me/tiny", knights_tiny_path())
    extra = {"pytorch_model.bin": b"pickle", "model.py": b"code", "onnx/model.safetensors": b"another copy"}
    new = hub.add("me/tiny", {**other_weights(tmp_path), **extra}, branch="next")
    commits: dict[str, str] = {}
    folder = check_model_folder(fetch("me/tiny", key="model.path", commits=commits))
    assert (commit_of(folder), commits) == (old, {"model.path": old})
    assert (folder / "model.safetensors").read_bytes() == (knights_tiny_path() / "model.safetensors").read_bytes()
    later = check_model_folder(fetch("me/tiny", key="model.path", revision="next"))
    assert commit_of(later) == new
    assert not any((later / name).exists() for name in extra)
    # A recorded commit wins over what the branch is now.
    assert fetch("me/tiny", key="model.path", revision="next", commits=commits) == folder
    assert hub.tokens == {"Bearer hf_for_tests"}
    hub.add("me/words", knights_tiny_path())
    assert not (fetch("me/words", key="model.tokenizer", has_weights=False) / "model.safetensors").exists()
    config = SortedConfig(model={"tokenizer": "me/words@main"})
    assert len(own_tokenizer(config, None, None)) == len(load_tokenizer(knights_tiny_path()))


def test_a_folder_of_that_name_wins(hub: HubServer, tmp_path: Path) -> None:
    hub.add("me/tiny", knights_tiny_path())
    (tmp_path / "me" / "tiny").mkdir(parents=True)
    assert fetch("me/tiny", key="model.path") == Path("me/tiny")
    assert hub.requests == []
    with pytest.raises(ModelError, match="is not on the hub, so it has no revision 'v1': remove the revision"):
        fetch("me/tiny", key="model.path", revision="v1")


@pytest.mark.parametrize("name", ["/abs/tiny", "./tiny", "../me/tiny", "a/b/c", "~/tiny", "me/tiny\n"])
def test_paths_are_no_ids(name: str) -> None:
    assert not is_repo_id(name)
    assert is_repo_id("gpt2")
    assert split_revision("me/tiny@v1") == ("me/tiny", "v1")


REFUSED = {
    "missing": (["model.path=me/none"], ["'me/none' is not a folder", "shows you no model", "hf download me/none"]),
    "private": (["model.path=me/private"], ["'me/private' is not a folder", "hf auth login"]),
    "gated": (["model.path=me/gated"], ["'me/gated' is gated", "/me/gated", "HF_TOKEN"]),
    "no revision": (
        ["model.path=me/tiny", "model.revision=v9"],
        ["'me/tiny' has no revision 'v9'", "a tag or a commit"],
    ),
    "pickles": (["model.path=me/pickles"], ["me/pickles has no safetensors weights", "(.bin) are never loaded"]),
    "adapters": (["model.path=me/adapter"], ["me/adapter holds adapters", "lora.path"]),
    "no adapters": (["lora.path=me/pickles"], ["me/pickles has no adapter_config.json", "that peft saved"]),
    "no reward model": (
        ["task.reward=me/none"],
        ["error: reward model 'me/none' is not a folder", "no model of that name"],
    ),
    "no tokenizer": (["model.tokenizer=me/none@v1"], ["model.tokenizer 'me/none'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fetched_is_one_line(case: str, hub: HubServer, call: Any) -> None:
    hub.add("me/tiny", knights_tiny_path())
    hub.add("me/gated", knights_tiny_path(), gated=True)
    hub.add("me/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    hub.add("me/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    overrides, parts = REFUSED[case]
    code, out, err = call("train", str(QUICKSTART), *overrides)
    assert (code, out) == (2, ""), err
    (line,) = err.strip().splitlines()
    assert all(part in line for part in parts), line


def test_a_hub_that_cannot_be_reached_is_one_line(hub: HubServer, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/tiny", knights_tiny_path())
    fetch("me/tiny", key="model.path")
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    assert commit_of(fetch("me/tiny", key="model.path"))  # the cache serves it
    code, _, err = call("train", str(QUICKSTART), "model=me/other")
    (line,) = err.strip().splitlines()
    assert code == 2
    assert "'me/other' is not a folder, it is not in the cache" in line
    assert NOWHERE in line
    assert "hf download me/other" in line


def test_offline_uses_the_cache_and_nothing_else(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sha = hub.add("me/tiny", knights_tiny_path())
    assert find_cached("me/tiny") is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the cache of the hub, and HF_HUB_OFFLINE is set: unset it, or run hf"):
        fetch("me/tiny", key="model.path")
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch("me/tiny", key="model.path")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert commit_of(fetch("me/tiny", key="model.path")) == sha
    assert find_cached("me/tiny") == fetch("me/tiny", key="model.path")
    assert hub.requests == []


def test_the_command_line_leaves_the_offline_switch_alone(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert call("--version")[0] == 0
    assert "HF_HUB_OFFLINE" not in os.environ


def test_doctor_downloads_nothing(hub: HubServer, tmp_path: Path) -> None:
    hub.add("me/tiny", knights_tiny_path())
    (tmp_path / "run.toml").write_text('[model]\npath = "me/tiny"\n')
    (finding,) = [each for each in examine(tmp_path / "run.toml") if each.name == "model"]
    assert finding.is_fine
    assert "hf download me/tiny" in finding.text
    assert hub.requests == []


def test_a_resumed_run_loads_the_commit_that_it_started_from(hub: HubServer, tmp_path: Path) -> None:
    first = hub.add("me/tiny", knights_tiny_path())

    def trainer(samples: int) -> SortedTrainer:
        run = {"dir": str(tmp_path), "samples": samples, "report": False}
        return SortedTrainer("me/tiny", args=SortedConfig(run=run, lora={"rank": 2}, **SECTIONS), quiet=True)

    trainer(8).train()
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert load_state(folder)["hub_commits"] == {"model.path": first}
    saved = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("me/tiny", first)

    second = hub.add("me/tiny", other_weights(tmp_path))
    assert trainer(16).train(resume=True).samples == 16  # other base weights would be refused
    newest = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    assert load_state(newest)["hub_commits"] == {"model.path": first}
    assert commit_of(fetch("me/tiny", key="model.path")) == second


def test_training_starts_from_saved_adapters_and_is_scored_by_a_reward_model(hub: HubServer, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from sortedrl.learner.model import load_model

    torch.manual_seed(0)
    model = peft.get_peft_model(load_model(knights_tiny_path())[0], peft.LoraConfig(r=3, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapters")
    sha = hub.add("me/adapters", tmp_path / "adapters")
    judge = hub.add("me/judge", save_classifier(tmp_path / "judge"), branch="v1")
    run = {"dir": str(tmp_path), "samples": 8, "report": False}
    # A learning rate too small to change a float32: what is saved is what it started from.
    config = SortedConfig(
        run=run,
        task={"reward": "me/judge@v1"},
        lora={"path": "me/adapters"},
        **{**SECTIONS, "learner": {"group_size": 4, "lr": 1e-30}},
    )
    SortedTrainer(args=config, quiet=True).train()
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert load_state(folder)["hub_commits"] == {"lora.path": sha, "reward model me/judge@v1": judge}
    before = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    after = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ConfigError, match=r"lora\.rank has no effect on the adapters of lora\.path"):
        SortedTrainer(args=SortedConfig(run=run, lora={"path": "me/adapters", "rank": 4}, **SECTIONS)).train()
