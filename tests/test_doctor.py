"""`doctor` finds what a run would trip over, and says what to do."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sortedrl.doctor import Finding, examine

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.toml"


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def test_this_machine_can_run_it() -> None:
    found = by_name(examine())
    assert {"python", "torch", "transformers", "devices", "engine local", "disk"} <= set(found)
    assert found["torch"].text == importlib.metadata.version("torch")
    assert "config" not in found
    assert all(finding.is_fine for finding in found.values() if finding.name != "disk")


def test_the_shipped_configuration_is_sound() -> None:
    assert all(finding.is_fine for finding in examine(QUICKSTART) if finding.name != "disk")


def test_a_sound_configuration_is_told_in_its_own_terms(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[schedule]\nupdate_batch = 16\nlookahead = 2\n[engine]\nslots = 8\n", encoding="utf-8")
    found = by_name(examine(path))
    assert found["config"].is_fine
    assert "sorted-replay, 8 slots, update batch 16, cohorts of 64" in found["config"].text
    assert "within 12 updates, staleness 0" in found["config"].text
    assert found["model"].is_fine
    assert "fits the engine" in found["model"].text


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
        ('[task]\nname = "chess"\n', "task", "'chess' is not known: the tasks are"),
        ("[task]\npeople = { 9 = 1.0 }\n", "task", "numbers of people from 2 to 5"),
        ('[model]\npath = "nowhere"\n', "model", "'nowhere' is no folder"),
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
    assert not found["disk"].is_fine
    assert "make room" in found["disk"].text
    assert found["torch"].is_fine
    assert found["disk"].as_dict() == {"name": "disk", "text": found["disk"].text, "is_fine": False}
