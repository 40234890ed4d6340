"""Configuration: files, overrides, presets, and messages that name the key and the remedy."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from sortedrl.config.config import SortedConfig, reference
from sortedrl.config.plug_points import POINTS
from sortedrl.config.shipped import shipped_path
from sortedrl.errors import ConfigError
from sortedrl.schedule import Fate, HarvestRule, Strategy

QUICKSTART = shipped_path("quickstart")


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_go_on_top(tmp_path: Path) -> None:
    path = write(tmp_path, '[run]\nname = "a"\n[schedule]\nupdate_batch = 16\n')
    config = SortedConfig.load(path, ["run.seed=7", "learner.lr=1e-3", "engine=local", "run.name=b c"])
    assert (config.run.seed, config.learner.lr, config.engine.kind, config.run.name) == (7, 1e-3, "local", "b c")
    assert config.schedule.update_batch == 16


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.update_bach=4", r"schedule\.update_bach.*did you mean schedule\.update_batch\?"),
        ("shedule.update_batch=4", r"shedule.*did you mean schedule\?"),
        ("schedule.update_batch=many", r"schedule\.update_batch: .*integer.*not 'many'"),
        ("engine.slots=0", r"engine\.slots: .*greater than or equal to 1, not 0"),
        ("schedule.max_staleness=-1", r"^schedule\.max_staleness: input should be greater than or equal to 0, not -1$"),
        (
            "environment.max_output_chars=80001",
            r"^environment\.max_output_chars: .*less than or equal to 80000, not 80001$",
        ),
        ("schedule.max_staleness=true", r"^schedule\.max_staleness: .*not True$"),
        ("engine.slots=true", r"engine\.slots: .*valid integer, not True"),
        ("engine.slots=16.0", r"engine\.slots: .*valid integer, not 16\.0"),
        ("learner.betas=[0.9,1.5]", r"learner\.betas: .*less than 1"),
        ("learner.lr=inf", r"learner\.lr: .*finite"),
        ('model.path=""', r"model\.path: .*at least 1 character"),
        ('run.name=""', r"run\.name"),
        ('run.name="../x"', r"run\.name"),
        ("schedule.strategy=sortd", r"schedule\.strategy.*'sortd'"),
        ("run.samples=16", r"update_batch 32 is larger than run\.samples 16: lower it"),
        ("learner.group_size=1", "grpo compares siblings"),
        ("schedule.update_batch=36", "must be a multiple of learner.group_size 8"),
        ("run.samples=8190", "run.samples 8190 must be a multiple"),
        ("schedule.on_bound", "write section.name=value"),
        ("schedule.strategy.x=1", "schedule.strategy.x"),
    ],
)
def test_bad_values_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SortedConfig.load(QUICKSTART, ["schedule.update_batch=32", "learner.group_size=8", "learner=grpo", override])
    assert "\n" not in str(raised.value)


def test_combinations_that_cannot_be_kept_are_named() -> None:
    overrides = ["schedule.overlap=true", "schedule.max_staleness=0", "schedule.on_bound=wait"]
    with pytest.raises(ConfigError, match="cannot be kept"):
        SortedConfig.load(QUICKSTART, ["schedule.strategy=sorted-partial", *overrides])


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        SortedConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        SortedConfig.load(write(tmp_path, "[run\n"))
    with pytest.raises(ConfigError, match="unknown configuration key 'runs'"):
        SortedConfig(runs={})


def test_a_strategy_chosen_later_is_really_that_strategy() -> None:
    knobs = SortedConfig.load(QUICKSTART, ["schedule.strategy=sync"]).knobs
    assert (knobs.cohort_batches, knobs.lookahead, knobs.harvest) == (1, 0, HarvestRule.DRAIN)
    replaced = SortedConfig.load(QUICKSTART).with_strategy("april", seed=3).knobs
    assert (replaced.lookahead, replaced.interrupted) == (None, Fate.RESUME)


def test_an_explicit_knob_beats_the_chosen_strategy() -> None:
    config = SortedConfig.load(QUICKSTART, ["schedule.strategy=sorted-partial", "schedule.max_staleness=3"])
    assert (config.knobs.max_staleness, config.knobs.on_bound) == (3, Fate.WAIT)


@pytest.mark.parametrize("strategy", list(Strategy))
def test_the_saved_configuration_means_the_same(strategy: Strategy, tmp_path: Path) -> None:
    config = SortedConfig.load(QUICKSTART, [f"schedule.strategy={strategy}", 'run.name="a \\"b\\""'])
    again = SortedConfig.load(write(tmp_path, config.to_toml()))
    assert again.knobs == config.knobs
    assert again.run == config.run
    assert again.learner == config.learner
    assert again.to_toml() == config.to_toml()


def test_odd_values_survive_writing_and_loading(tmp_path: Path) -> None:
    config = SortedConfig(
        run={"name": 'a "b" c', "dir": "runs/\u00fc\t\x7f"},
        task={"columns": {"prompt": "a.b c", "an swer": "x\ny"}, "options": {"ops": ["+", 1, 2.5, True], "n": 3}},
        schedule={"strategy": "april", "max_staleness": "none"},
        engine={"kv_gb": 1e-5, "stop": ["\n\n", "</s>"]},
        reward={"weights": [1.0, 1e16]},
    )
    again = SortedConfig.load(write(tmp_path, config.to_toml()))
    assert again.resolved() == config.resolved()
    assert list(tomllib.loads(config.to_toml())) == list(SortedConfig.model_fields)


def test_inline_tables_and_quoted_keys_load(tmp_path: Path) -> None:
    """Run directories of earlier versions have them in config.toml."""
    lines = ['[task]\nname = "knights"\ncolumns = {  }\noptions = {  }', 'people = { "2" = 4.0, "3" = 3.0 }']
    config = SortedConfig.load(write(tmp_path, "\n".join([*lines, "[learner]\nbetas = [0.9, 0.95]\n"])))
    assert (config.task.columns, config.task.people) == ({}, {"2": 4.0, "3": 3.0})
    assert config.learner.betas == (0.9, 0.95)


def test_the_reference_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert page.endswith(reference()), "docs/reference/configuration.md must end with config.reference()"


def test_every_field_is_described() -> None:
    built_in = {point.key: point.names for point in POINTS}
    for name, section in SortedConfig.model_fields.items():
        fields = section.annotation.model_fields
        for key, field in fields.items():
            assert field.description, f"{name}.{key} has no description"
            for choice in (*choices(field.annotation), *built_in.get(f"{name}.{key}", ())):
                assert f"`{choice}`" in field.description, f"the description of {name}.{key} does not name {choice}"


def choices(annotation: Any) -> list[str]:
    """The texts that a key accepts, if it accepts only some."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if choice != "none"]
    return [choice for part in get_args(annotation) for choice in choices(part)]
