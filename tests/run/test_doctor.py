"""`sortedrl doctor` finds what would make a run fail, and names the remedy."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_names, shipped_path
from sortedrl.run.doctor import Finding, Target, examine, findings_table
from sortedrl.run.estimate import estimate_run

QUICKSTART = shipped_path("quickstart")


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def test_this_machine_can_run_it() -> None:
    found = by_name(examine())
    assert {"python", "torch", "transformers", "processors", "engine local", "disk"} <= set(found)
    assert found["torch"].text == importlib.metadata.version("torch")
    assert "config" not in found
    assert "large models of the Llama family" in found["engine local"].text
    assert all(finding.is_fine for finding in found.values() if finding.name != "disk")


def test_the_shipped_configuration_is_sound() -> None:
    assert all(finding.is_fine for finding in examine(QUICKSTART) if finding.name != "disk")


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_configuration_loads_and_has_an_estimate(name: str) -> None:
    config = SortedConfig.load(name)
    assert config.run.name == name  # so that recipes do not overwrite each other's runs
    if name.endswith("smollm2"):  # its folder may not be here: its shape is known by name
        assert estimate_run(config, Path("nowhere"), hardware="cpu", devices=1, from_run=None).fits


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs from one layer: those from three, which `doctor` makes, are measured in the slow tests."""
    monkeypatch.setattr("sortedrl.run.device_memory.DRY_LAYERS", 1)


def test_a_recipe_for_accelerators_fits_as_many_as_it_says(few_layers: None) -> None:
    found = by_name(examine(shipped_path("scale-8gpu"), Target(hardware="h100", devices=8)))
    assert all(finding.is_fine for finding in found.values() if finding.name != "disk")
    assert found["placement"].text == "4 engines and 4 ranks"
    assert "on each of 8 x h100: rank " in found["memory"].text
    for part in ("weights", "gradients", "optimizer", "activations", "gathers", "kv cache", "wire buffers"):
        assert f" {part} " in found["memory"].text
    assert "not on this machine" in found["model"].text


def test_a_model_that_is_too_large_is_refused_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.run.doctor.has_extra", lambda extra: False)  # what is missing here does not count
    found = by_name(examine(shipped_path("math-qwen2.5-32b"), Target(hardware="h100", devices=8)))
    assert [finding.name for finding in found.values() if not finding.is_fine] == ["placement", "memory"]
    assert "the extras" in found["task"].text
    text = found["memory"].text
    assert "of 67.1 GiB on each of 8 x h100, even placement.mode = " in text
    assert "this does not fit. What would: 16 x h100 with placement.mode = " in text
    assert "4 x 4 + 16 = 32 GPUs" in found["placement"].text


def test_8B_in_full_does_not_fit_a_card_of_24_GB(tmp_path: Path, few_layers: None) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "Llama-3.1-8B"\n[engine]\nkind = "vllm"\n[learner]\nrecompute = true\n')
    found = by_name(examine(path, Target(hardware="rtx4090")))
    assert [finding.name for finding in found.values() if not finding.is_fine] == ["memory"]
    # 8.03 billion parameters of 16 bytes, on one GPU.
    assert "optimizer 59.8 GiB" in found["memory"].text
    assert "on each of 1 x rtx4090: rank and engine" in found["memory"].text
    assert "What would: " in found["memory"].text


@pytest.mark.slow
def test_the_recipe_for_one_accelerator_fits_it() -> None:
    found = by_name(examine(shipped_path("scale-1gpu"), Target(hardware="h100")))
    assert found["memory"].is_fine, found["memory"].text


def test_traps_of_a_placement_are_found(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "Llama-3.1-8B"\n[engine]\nkind = "vllm"\n[learner]\nranks = 2\nrank_gpus = 1\n')
    found = by_name(examine(path, Target(hardware="h100", devices=8)))
    assert "takes GPU 0, which Ray gives to a rank too" in found["placement"].text
    assert not found["memory"].is_fine


def test_a_sound_configuration_is_told_in_its_own_terms(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[schedule]\nupdate_batch = 16\nlookahead = 2\n[engine]\nslots = 8\n", encoding="utf-8")
    found = by_name(examine(path))
    assert found["config"].is_fine
    assert "sorted-replay, 8 slots, update batch 16, cohorts of 64" in found["config"].text
    assert "within 12 updates, staleness 0" in found["config"].text
    assert found["model"].is_fine
    assert "fits the engine" in found["model"].text
    assert found["memory"].is_fine
    assert "kv cache" in found["memory"].text
    assert "for 512 updates and 2 evaluations, by a roofline of this machine" in found["time"].text
    assert "answers take 32 tokens" in found["time"].text


def test_time_is_a_range_for_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.run.estimate.judge_memory", lambda *asked: (True, True, "", ""))
    estimate = estimate_run(
        SortedConfig.load("kk-llama3-8b"), Path("nowhere"), hardware="h100", devices=8, from_run=None
    )
    assert (estimate.shortest.length, estimate.longest.length) == (512, 8192)  # a sixteenth of the budget, and all
    low, high = estimate.seconds
    assert low == pytest.approx(estimate.shortest.total_s / 2 + 3)
    assert high == pytest.approx(estimate.longest.total_s * 3 + 30)
    assert 3 < low < high
    # 131,072 samples in batches of 1,024; evaluated before, after, and every 16,384 samples in between.
    assert " for 128 updates and 9 evaluations, by the roofline of 8 x h100: " in estimate.time_text


def test_what_is_not_here_is_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("sortedrl.run.doctor.vllm_version", lambda: None)
    monkeypatch.setattr("sortedrl.run.doctor.has_extra", lambda extra: extra not in ("ray", "wandb"))
    found = by_name(examine())
    for name in ("accelerator", "engine vllm", "extras"):
        assert (found[name].is_fine, found[name].is_here) == (True, False)
    assert "without ray, wandb" in found["extras"].text
    marks = dict(zip(found, findings_table(list(found.values())).columns[0].cells, strict=True))
    assert (marks["accelerator"], marks["torch"]) == ("[yellow]-[/]", "[green]ok[/]")


def test_ranks_are_told_with_what_they_talk_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[learner]\nranks = 2\n")
    found = {finding.name: finding for finding in examine(path)}
    assert found["ranks"].is_fine
    assert found["ranks"].text == "2, over gloo"
    assert "each of 2 ranks" in found["memory"].text
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    found = {finding.name: finding for finding in examine(path)}
    assert not found["ranks"].is_fine
    assert "this torch has no gloo" in found["ranks"].text


def test_bounds_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[schedule]\nstrategy = "april"\n', encoding="utf-8")
    text = by_name(examine(path))["config"].text
    assert "consumed within no bound, staleness unbounded" in text


@pytest.mark.parametrize(
    ("toml", "name", "message"),
    [
        ("[run\n", "config", "not valid TOML"),
        ("[engine]\nslots = 0\n", "config", "engine.slots"),
        ("[shedule]\n", "config", "did you mean schedule?"),
        ('[schedule]\nstrategy = "async"\nmax_staleness = 0\n', "config", "cannot be kept"),
        ('[task]\nname = "chess"\n', "config", "unknown task 'chess': choose from knights"),
        ("[task]\npeople = { 9 = 1.0 }\n", "task", "numbers of people from 2 to 5"),
        ('[model]\npath = "nowhere"\n', "model", "'nowhere' is not a folder"),
        ("[engine]\nmax_new_tokens = 5000\n", "model", "lower the token budget"),
    ],
)
def test_a_broken_configuration_is_named(toml: str, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml, encoding="utf-8")
    finding = by_name(examine(path))[name]
    assert not finding.is_fine
    assert message in finding.text


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    finding = by_name(examine(tmp_path / "none.toml"))["config"]
    assert not finding.is_fine
    assert "none.toml" in finding.text


def missing(name: str) -> Callable[[str], str]:
    real = importlib.metadata.version

    def version(asked: str) -> str:
        if asked == name:
            raise importlib.metadata.PackageNotFoundError(asked)
        return real(asked)

    return version


def test_a_missing_package_and_a_full_disk_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(importlib.metadata, "version", missing("safetensors"))
    found = by_name(examine())
    assert (found["safetensors"].is_fine, found["safetensors"].text) == (False, "missing: pip install safetensors")
    assert asdict(found["disk"]) == {"name": "disk", "text": found["disk"].text, "is_fine": False, "is_here": True}
    assert "free some space" in found["disk"].text
    assert found["torch"].is_fine
