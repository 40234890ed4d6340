"""The pages "write your own": their code is saved under the file names that it gives, and a run trains with it."""

from __future__ import annotations

import csv
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from sortedrl.cli import app
from sortedrl.config import SortedConfig
from sortedrl.config.plug_points import POINTS
from sortedrl.external.plugins import import_object
from sortedrl.testing import Outcome, check_engine
from tests.conformance.cases import MAX_LENGTH, SLOTS, model_case
from tests.support.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"```\w+\n# (\S+)\n(.*?)```", re.DOTALL)
KEY = re.compile(r'`(\w+\.\w+ = "[^"]+")`')  # a key of TOML in a sentence
MOST_LINES = 60
# As small as a run with two updates can be; on top of what the page sets.
SMALL: dict[str, dict[str, Any]] = {
    "run": {"samples": 16, "report": False},
    "schedule": {"update_batch": 8},
    "engine": {"slots": 8, "max_new_tokens": 8},
    "learner": {"group_size": 2},
    "eval": {"prompts": 0},
    "checkpoint": {"save": False},
}


def page_of(key: str) -> str:
    (point,) = (point for point in POINTS if point.key == key)
    return (ROOT / point.page).read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def save_files(page: str) -> list[str]:
    """Save the page's files in the current folder; its keys in sentences make a run.toml too. Returns the names."""
    files = dict(FILE.findall(page))
    files.setdefault("run.toml", "\n".join(KEY.findall(page)))
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    return list(files)


def train() -> dict[str, Any]:
    """Train with the page's run.toml, made small, by the command; returns the summary."""
    tree = tomllib.loads(Path("run.toml").read_text(encoding="utf-8"))
    for section, values in SMALL.items():
        tree[section] = {**values, **tree.get(section, {})}
    Path("run.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    done = CliRunner().invoke(app, ["train", "run.toml", "--json"])
    assert done.exit_code == 0, done.output
    (summary,) = json.loads(done.stdout)["runs"]
    return summary


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.noun)
def test_every_page_is_short_and_names_all_that_it_needs(point: Any) -> None:
    page = page_of(point.key)
    assert len(page.splitlines()) < MOST_LINES
    assert f"SortedTrainer({point.argument}=" in page
    assert "reference/plug_points.md" in page


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.noun)
def test_a_run_trains_with_the_code_of_the_page(point: Any, here: Path) -> None:
    save_files(page_of(point.key))
    summary = train()
    assert (summary["status"], summary["samples"]) == ("complete", 16)
    section, key = point.key.split(".")
    saved = tomllib.loads((here / "runs" / "run" / "config.toml").read_text())[section][key]
    assert re.fullmatch(r"my_\w+:\w+", saved), "the configuration keeps the text as it was written"
    if point.noun == "tracker":
        rows = list(csv.reader((here / "runs" / "run" / "scalars.csv").open()))
        assert [int(step) for step, tag, _ in rows if tag == "batch/reward"] == [8, 16]


@pytest.mark.slow
def test_the_engine_of_the_page_keeps_its_promises(here: Path) -> None:
    save_files(page_of("engine.kind"))
    model = tiny_model("qwen3").float()
    engine = import_object("engine.kind", "my_engine:PlainEngine")(
        model, slots=SLOTS, max_length=MAX_LENGTH, decode=None
    )
    results = check_engine(model_case(engine, model, decode=None))
    assert [str(result) for result in results if result.outcome is Outcome.FAILED] == []
    assert sum(result.outcome is Outcome.PASSED for result in results) >= 14


def test_the_algorithm_of_the_page_clips_weights_and_not_gains(here: Path) -> None:
    import torch

    save_files(page_of("learner.algorithm"))
    config = SortedConfig.load("run.toml")
    loss = import_object("", "my_algorithm:clipped_weight")
    objective = type("Objective", (), {"clip_high": config.learner.clip_high})
    logprobs_a = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss_a = loss(objective, torch.tensor([0.5, 9.0]), torch.tensor([1.0, -1.0]), logprobs_a)
    assert loss_a.tolist() == [0.5 * 1.0, -4.0 * 2.0]  # ratio 9 is clipped to 1 + 3
    loss_a.sum().backward()
    assert logprobs_a.grad.tolist() == [-0.5, 4.0]


def test_the_advantage_of_the_page_ranks_siblings(here: Path) -> None:
    import numpy as np

    save_files(page_of("learner.advantage"))
    ranked = import_object("", "my_advantage:ranked")
    found = ranked(np.array([3.0, 0.0, 1.0, 5.0, 5.0, 7.0]), ["a", "b", "a", "b", "b", "a"], None)
    assert found.tolist() == [0.0, -1.0, -1.0, 0.5, 0.5, 1.0]


def test_the_strategy_of_the_page_can_be_simulated_and_its_knobs_used_alone(here: Path) -> None:
    save_files(page_of("schedule.strategy"))
    trace = ["simulate", "--trace", "lognormal(3, 1, 200)", "--slots", "8", "--update-batch", "8", "--samples", "64"]
    done = CliRunner().invoke(app, [*trace, "--strategy", "sync,my_strategy:LongPromptsFirst", "--json"])
    assert done.exit_code == 0, done.output
    assert "my_strategy:LongPromptsFirst" in done.stdout
    knobs = SortedConfig.load("run.toml", ["schedule.strategy=my_strategy:PATIENT"]).knobs
    assert (knobs.interrupted, knobs.max_staleness, knobs.on_bound, knobs.lookahead) == ("resume", 4, "wait", 1)
    assert SortedConfig.load("run.toml").knobs.lookahead == 2
