"""The configuration of a run: typed sections, read from TOML, overridden by `section.key=value`.

Every section is frozen and refuses unknown keys by naming the nearest known one. Validators check, they never rewrite;
the knobs that a preset leaves open are resolved in `schedule.py`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from sortedrl.config.sections import (
    CheckpointSection,
    EngineSection,
    EvalSection,
    LearnerSection,
    LoraSection,
    ModelSection,
    RewardSection,
    RunSection,
    ScheduleSection,
    Section,
    SftSection,
    TaskSection,
    TrackSection,
)
from sortedrl.errors import ConfigError
from sortedrl.learner.algorithms import is_grouped, needs_more_siblings, objective_of
from sortedrl.redact import redact
from sortedrl.schedule import PRESETS, Harvest, Knobs, Strategy, resolve_knobs

# `engine=local` is short for `engine.kind=local`, and so on: the key that a section is mostly about.
MAIN_KEYS = {"engine": "kind", "task": "name", "model": "path", "schedule": "strategy", "learner": "algorithm"}


def parse_override(text: str) -> tuple[list[str], Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"cannot read the override {text!r}: write section.name=value")
    keys = name.strip().split(".")
    if len(keys) == 1 and keys[0] in MAIN_KEYS:
        keys.append(MAIN_KEYS[keys[0]])
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *path, last = keys
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{'.'.join(keys)}: {key} is a value, not a section")
    tree[last] = value


def section_toml(name: str, section: Mapping[str, Any]) -> str:
    lines = [f"{key} = {toml_value(value)}" for key, value in section.items() if value is not None]
    return "\n".join([f"[{name}]", *lines, ""])


def toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case dict():
            return "{ " + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are JSON's


# Keys that may differ when a run is resumed: they change neither what was done so far nor what it means.
CHANGEABLE = frozenset(
    {
        "run.dir",
        "run.name",
        "run.samples",
        "run.threads",
        "run.report",
        "lora.merge",
        "engine.address",
        "engine.kv_gb",
        "engine.port",
        "engine.watchdog_s",
        "engine.own_process",
        "engine.cluster",
        "engine.replica_cpus",
        "engine.replica_gpus",
        "engine.health_s",
        "learner.ranks",
        "learner.rank_cpus",
        "learner.rank_gpus",
        "learner.rank_timeout_s",
        "reward.timeout_s",
        "reward.grace_s",
        "reward.workers",
        "reward.memory_mb",
        "reward.keep_env",
        "reward.on_error",
        "learner.micro_tokens",
        "learner.recompute",
        "eval.every_samples",
        "checkpoint.save",
        "checkpoint.every_updates",
        "checkpoint.keep",
        "track.to",
        "track.project",
        "track.mode",
        *(f"sft.{key}" for key in SftSection.model_fields),  # of another command
    }
)


class SortedConfig(Section):
    """Everything a run needs to know."""

    run: RunSection = RunSection()
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sft: SftSection = SftSection()
    track: TrackSection = TrackSection()

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(_one_line(error)) from None

    @model_validator(mode="after")
    def check_together(self) -> Self:
        """What no section can see alone."""
        batch, group = self.schedule.update_batch, self.learner.group_size
        if self.run.samples < batch:
            raise ValueError(
                f"schedule.update_batch {batch} is larger than the cohort: run.samples loads only {self.run.samples}"
            )
        if needs_more_siblings(self.learner.algorithm, group):
            raise ValueError(f"learner.group_size {group}: {self.learner.algorithm} compares siblings, set 2 or more")
        if self.run.samples % group:
            raise ValueError(f"run.samples {self.run.samples} must be a multiple of learner.group_size {group}")
        if batch % group:
            raise ValueError(f"schedule.update_batch {batch} must be a multiple of learner.group_size {group}")
        if self.engine.kind == "vllm" and self.engine.dtype == "int16":
            raise ValueError("engine.dtype = int16 is the local engine's: for vllm set auto, float32 or bfloat16")
        if self.knobs.flat_extra and self.knobs.harvest == Harvest.DRAIN:
            raise ValueError(
                "learner.flat_groups = replace needs schedule.harvest = batch: a drained cohort has no other groups to "
                "wait for; choose a sorted strategy, or learner.flat_groups = zero"
            )
        if self.knobs.flat_extra and not self.is_grouped:
            raise ValueError(
                f"learner.flat_groups = replace is for siblings, which {self.learner.algorithm} with "
                f"learner.group_size {group} does not compare: leave it out"
            )
        return self

    @property
    def knobs(self) -> Knobs:
        """The schedule's settings with the preset filled in."""
        explicit = self.schedule.model_dump(exclude={"strategy"})
        replaces = objective_of(self.learner).flat_groups == "replace"
        flat_extra = self.learner.flat_extra * self.schedule.update_batch if replaces else 0
        return resolve_knobs(self.schedule.strategy, flat_extra=flat_extra, **explicit)

    @property
    def slots(self) -> int:
        """Sequences that run at once, over all engines."""
        return self.engine.slots * self.engine.replicas

    @property
    def is_grouped(self) -> bool:
        return is_grouped(self.learner.algorithm, self.learner.group_size)

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> SortedConfig:
        """Read a TOML file and put `section.key=value` overrides on top."""
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
        given = [parse_override(text) for text in overrides]
        strategy = next((value for keys, value in given if keys == ["schedule", "strategy"]), None)
        if strategy is not None:
            _forget_defining_knobs(tree, strategy)
        for keys, value in given:
            put(tree, keys, value)
        return cls(**tree)

    def check_resumable(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse to go on with a run under settings that would make it another one; `saved` is its `in_force`."""
        for section, values in self.in_force().items():
            for key, value in values.items():
                # A key that an older version did not have was in force with its default.
                name, before = f"{section}.{key}", saved.get(section, {}).get(key, value)
                if value != before and name not in CHANGEABLE:
                    raise ConfigError(
                        f"{name} was {before!r} when the run was saved and is {value!r} here: leave it as it was, or "
                        f"start a new run; these may change: {', '.join(sorted(CHANGEABLE))}"
                    )

    def moved(self, folder: Path, name: str) -> SortedConfig:
        """The same run in another place."""
        tree = self.model_dump()
        tree["run"].update(dir=str(folder), name=name)
        return SortedConfig(**tree)

    def with_strategy(self, strategy: str, **run: Any) -> SortedConfig:
        """The same run under another strategy: knobs that define that strategy are taken from its preset."""
        tree = self.model_dump()
        _forget_defining_knobs(tree, strategy)
        tree["schedule"]["strategy"] = strategy
        tree["run"].update(run)
        return SortedConfig(**tree)

    def in_force(self) -> dict[str, dict[str, Any]]:
        """All values by section, every knob as the preset and the configuration together make it."""
        tree = self.model_dump(mode="json")
        knobs = self.knobs
        for name in tree["schedule"]:
            if name != "strategy":
                value = getattr(knobs, name)
                tree["schedule"][name] = "none" if value is None else value
        return tree

    def to_toml(self) -> str:
        """The resolved configuration, without secrets."""
        return "\n".join(section_toml(name, section) for name, section in redact(self.in_force()).items())


def reference() -> str:
    """Every key with its type, default and meaning, as Markdown (docs/configuration.md)."""
    lines: list[str] = []
    for name, section in SortedConfig.model_fields.items():
        lines += [f"## [{name}]", "", "| key | default | on resume | meaning |", "| --- | --- | --- | --- |"]
        for key, field in type(section.default).model_fields.items():
            default = "preset" if field.default is None else toml_value(field.default)
            on_resume = "may change" if f"{name}.{key}" in CHANGEABLE else ""
            lines.append(f"| `{key}` | `{default}` | {on_resume} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


# ---- precedence and messages -----------------------------------------------------------------------------------------


def _forget_defining_knobs(tree: dict[str, Any], strategy: str) -> None:
    """A strategy that is chosen later takes precedence over the knobs that make it what it is."""
    schedule = tree.get("schedule")
    if isinstance(schedule, dict) and strategy in list(Strategy) and schedule.get("strategy") != strategy:
        for knob in PRESETS[Strategy(strategy)]:
            schedule.pop(knob, None)


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    count = len({details["loc"][:2] for details in error.errors()})
    where = ".".join(str(part) for part in first["loc"][:2])  # past section and key come branches of a union
    more = f" (and {count - 1} more)" if count > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown configuration key {where!r}{_nearest(first['loc'])}{more}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if where else message
    given = f", not {first['input']!r}" if where and not isinstance(first["input"], Mapping) else ""
    return f"{where}: {message}{given}{more}" if where else f"{message}{more}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """The known key that is most like an unknown one."""
    fields = SortedConfig.model_fields
    for part in location[:-1]:
        annotation = fields[str(part)].annotation if str(part) in fields else None
        fields = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}
    prefix = ".".join(str(part) for part in (*location[:-1], ""))
    near = difflib.get_close_matches(str(location[-1]), fields, n=1, cutoff=0.5)
    if near:
        return f": did you mean {prefix}{near[0]}?"
    return f": the keys there are {', '.join(fields)}" if fields else ""
