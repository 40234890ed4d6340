"""The configuration of a run: typed sections, read from TOML, overridden by `section.key=value`.

Commands and `SortedTrainer` load it; every part of a run gets its numbers from it.

Guarantees: a configuration never changes; an unknown key is refused with the nearest known one; validators check and
never rewrite values; what `to_toml` writes loads back as an equal configuration.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, get_args

import tomli_w
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
from sortedrl.redact import REDACTED, find_secret, redact, redact_text
from sortedrl.schedule import PRESETS, HarvestRule, Knobs, Strategy, resolve_knobs

# The key that an override means when it names only the section: `engine=local` is short for `engine.kind=local`.
_MAIN_KEYS = {"engine": "kind", "task": "name", "model": "path", "schedule": "strategy", "learner": "algorithm"}

_MAX_PARTS = 3  # of a dotted key, as in `task.columns.prompt`
# A dotted key of a thousand parts or more: the parser takes minutes for fifty thousand.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:[\w-]++["']?\s*+\.\s*+["']?){1000}""")
_SHOWN = 200  # characters of a value or an override in a message

# Keys that may differ when a run is resumed: they change neither the finished part of the run nor its meaning. The
# optimiser's settings are among them, so that a run whose weights broke can go on; the ledger records such changes.
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
        "learner.lr",
        "learner.lr_final",
        "learner.warmup_samples",
        "learner.weight_decay",
        "learner.betas",
        "learner.grad_clip",
        "learner.critic_lr",
        "eval.every_samples",
        "checkpoint.save",
        "checkpoint.every_updates",
        "checkpoint.keep",
        "track.to",
        "track.project",
        "track.mode",
        *(f"sft.{key}" for key in SftSection.model_fields),  # training does not read them
    }
)

# Keys that name a place. Their values may equal that of an environment variable, such as a user's or a host's name.
_PLACES = frozenset(
    {"run.dir", "task.path", "task.eval_path", "model.path", "engine.address", "engine.cluster", "sft.path"}
)


class SortedConfig(Section):
    """All settings of a run, by section. docs/reference/configuration.md lists the keys."""

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
        """Check what depends on several sections."""
        batch, group = self.schedule.update_batch, self.learner.group_size
        if self.run.samples < batch:
            raise ValueError(
                f"schedule.update_batch {batch} is larger than run.samples {self.run.samples}: lower it, or raise "
                "run.samples"
            )
        if needs_more_siblings(self.learner.algorithm, group):
            raise ValueError(f"learner.group_size {group}: {self.learner.algorithm} compares siblings, set 2 or more")
        if self.run.samples % group:
            raise ValueError(f"run.samples {self.run.samples} must be a multiple of learner.group_size {group}")
        if batch % group:
            raise ValueError(f"schedule.update_batch {batch} must be a multiple of learner.group_size {group}")
        if self.engine.kind == "vllm" and self.engine.dtype == "int16":
            raise ValueError("engine.dtype = int16 needs engine.kind = local: for vllm set auto, float32 or bfloat16")
        if self.knobs.flat_extra and self.knobs.harvest == HarvestRule.DRAIN:
            raise ValueError(
                "learner.flat_groups = replace needs schedule.harvest = batch, because a drained cohort has no other "
                "groups to wait for: choose a sorted strategy, or set learner.flat_groups = zero"
            )
        if self.knobs.flat_extra and not self.is_grouped:
            raise ValueError(
                f"learner.flat_groups = replace needs an algorithm that compares siblings, and "
                f"{self.learner.algorithm} with learner.group_size {group} does not: leave it out"
            )
        return self

    @property
    def knobs(self) -> Knobs:
        """The schedule's settings. Where the configuration sets none, the strategy's value is used."""
        explicit = self.schedule.model_dump(exclude={"strategy"})
        replaces = objective_of(self.learner).flat_groups == "replace"
        flat_extra = self.learner.flat_extra * self.schedule.update_batch if replaces else 0
        return resolve_knobs(self.schedule.strategy, flat_extra=flat_extra, **explicit)

    @property
    def slots(self) -> int:
        """Number of sequences that run at once, over all engines."""
        return self.engine.slots * self.engine.replicas

    @property
    def is_grouped(self) -> bool:
        return is_grouped(self.learner.algorithm, self.learner.group_size)

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> SortedConfig:
        """Read a TOML file and apply `section.key=value` overrides to it."""
        try:
            tree = _parse_toml(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
        given = [_parse_override(text) for text in overrides]
        strategy = next((value for keys, value in given if keys == ["schedule", "strategy"]), None)
        if strategy is not None:
            _forget_defining_knobs(tree, strategy)
        for keys, value in given:
            _put(tree, keys, value)
        return cls(**tree)

    def check_resumable(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse to resume a run with settings that would change its meaning; `saved` is what `resolved` returned."""
        for name, (before, value) in _differences(saved, self.resolved()).items():
            if name not in CHANGEABLE:
                is_alike = redact_text(repr(value)) == redact_text(repr(before))
                note = ", which differ in what looks like a secret" if is_alike else ""
                raise ConfigError(
                    f"{name} was {before!r} when the run was saved and is {value!r} here{note}: set it back, or "
                    f"start a new run; these keys may change: {', '.join(sorted(CHANGEABLE))}"
                )

    def changes_since(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
        """The keys that differ from `saved`, without secrets, each with the value before and now.

        The place of the run directory does not count.
        """
        changes = _differences(redact(saved), redact(self.resolved()))
        return {name: values for name, values in changes.items() if name not in ("run.dir", "run.name")}

    def check_startable(self) -> None:
        """Refuse a configuration that holds a secret or a redaction mark: a run saves its configuration as it is."""
        for section in type(self).model_fields:
            values: Section = getattr(self, section)
            for key, field in type(values).model_fields.items():
                value = getattr(values, key)
                if value != field.default and _allows_text(field.annotation):
                    for text in _texts(value):
                        _check_text(f"{section}.{key}", text)

    def moved(self, folder: Path, name: str) -> SortedConfig:
        """The same configuration with another run directory."""
        tree = self.model_dump()
        tree["run"].update(dir=str(folder), name=name)
        return SortedConfig(**tree)

    def with_strategy(self, strategy: str, **run: Any) -> SortedConfig:
        """The same configuration under another strategy, which replaces the keys that define it."""
        tree = self.model_dump()
        _forget_defining_knobs(tree, strategy)
        tree["schedule"]["strategy"] = strategy
        tree["run"].update(run)
        return SortedConfig(**tree)

    def resolved(self) -> dict[str, dict[str, Any]]:
        """All values by section, with those of the strategy where the configuration has none."""
        tree = self.model_dump(mode="json")
        knobs = self.knobs
        for name in tree["schedule"]:
            if name != "strategy":
                value = getattr(knobs, name)
                tree["schedule"][name] = "none" if value is None else value
        return tree

    def to_toml(self) -> str:
        """The resolved configuration as TOML. Nothing is redacted, because a resumed run reads it again."""
        tree = self.resolved()  # TOML has no null: unset keys are left out
        return tomli_w.dumps({name: _without_none(section) for name, section in tree.items()})


def reference() -> str:
    """Every key with its default and meaning, as Markdown: the tables of docs/reference/configuration.md."""
    lines: list[str] = []
    for name, section in SortedConfig.model_fields.items():
        kind = type(section.default)
        lines += [f"## [{name}]", ""]
        if kind.__doc__:
            lines += [" ".join(kind.__doc__.split()), ""]
        lines += ["| key | default | on resume | meaning |", "| --- | --- | --- | --- |"]
        for key, field in kind.model_fields.items():
            on_resume = "may change" if f"{name}.{key}" in CHANGEABLE else ""
            meaning = " ".join((field.description or "").split())
            lines.append(f"| `{key}` | {_default_text(field.default)} | {on_resume} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _differences(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, each with the saved value and the value now."""
    found: dict[str, tuple[Any, Any]] = {}
    for section, values in now.items():
        for key, value in values.items():
            # A run saved by an older version of this package lacks newer keys: it used their defaults.
            before = saved.get(section, {}).get(key, value)
            if any(REDACTED in text for text in _texts(before)):  # older versions saved redacted values
                value = redact({key: value})[key]
            if value != before:
                found[f"{section}.{key}"] = (before, value)
    return found


def _without_none(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _default_text(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, dict):
        items = ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items())
        return f"`{{ {items} }}`" if items else "`{}`"
    return f"`{json.dumps(value)}`"


# ---- secrets ---------------------------------------------------------------------------------------------------------


def _allows_text(annotation: Any) -> bool:
    """Whether a key of this type holds text that the user makes up, not only a choice from a list."""
    return annotation is str or any(_allows_text(part) for part in get_args(annotation))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, keys of tables included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield str(key)
                yield from _texts(item)
        case list() | tuple():
            for item in value:
                yield from _texts(item)
        case _:
            pass


def _check_text(name: str, text: str) -> None:
    if REDACTED in text:
        raise ConfigError(
            f"{name} holds {REDACTED}: an earlier version, a log or a page left out a text there; set {name} to the "
            "text that it replaces"
        )
    variable = None if name in _PLACES else find_secret(text)
    if variable is not None:
        raise ConfigError(
            f"{name} holds the value of the environment variable {variable}, which looks like a secret, and a run "
            f"saves its configuration in clear: remove it from the configuration, or unset {variable}"
        )


# ---- overrides and messages ------------------------------------------------------------------------------------------


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; raises TOMLDecodeError for other text, and ConfigError for TOML that Python cannot hold."""
    too_deep = f"{where} is nested too deeply: a configuration has sections, keys and flat values"
    if _LONG_KEY.search(text):
        raise ConfigError(too_deep)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ConfigError(too_deep) from None
    except ValueError:  # Python converts at most 4,300 digits
        raise ConfigError(f"{where} has a number of more digits than any key takes: write a smaller one") from None


def _parse_override(text: str) -> tuple[list[str], Any]:
    """Split `section.key=value` into its keys and its value; a value that is not TOML is taken as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"cannot read the override {_shown(text)}: write section.name=value")
    keys = name.strip().split(".")
    if len(keys) > _MAX_PARTS:
        raise ConfigError(
            f"cannot set {name.strip()[:_SHOWN]}: a key has at most {_MAX_PARTS} parts, as in task.columns.prompt"
        )
    if len(keys) == 1 and keys[0] in _MAIN_KEYS:
        keys.append(_MAIN_KEYS[keys[0]])
    try:
        return keys, _parse_toml(f"value = {value}", f"the override {name.strip()[:_SHOWN]}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *path, last = keys
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"cannot set {'.'.join(keys)}: {key} is a value, not a section")
    tree[last] = value


def _forget_defining_knobs(tree: dict[str, Any], strategy: str) -> None:
    """Remove the keys that define a strategy: a strategy chosen later replaces them."""
    schedule = tree.get("schedule")
    if isinstance(schedule, dict) and strategy in list(Strategy) and schedule.get("strategy") != strategy:
        for knob in PRESETS[Strategy(strategy)]:
            schedule.pop(knob, None)


def _one_line(error: ValidationError) -> str:
    """The first mistake in one line, and how many more there are."""
    first = error.errors()[0]
    count = len({details["loc"][:2] for details in error.errors()})
    where = ".".join(str(part) for part in first["loc"][:2])  # what follows section and key are branches of a union
    more = f" (and {count - 1} more)" if count > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown configuration key {where!r}{_nearest(first['loc'])}{more}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if where else message
    given = f", not {_shown(first['input'])}" if where and not isinstance(first["input"], Mapping) else ""
    return f"{where}: {message}{given}{more}" if where else f"{message}{more}"


def _shown(value: Any) -> str:
    """The value as it is written in Python, cut short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits, and deep lists
        return "a value that is too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _nearest(location: tuple[int | str, ...]) -> str:
    """A hint that names the known key most like an unknown one, or else all known keys."""
    fields = SortedConfig.model_fields
    for part in location[:-1]:
        annotation = fields[str(part)].annotation if str(part) in fields else None
        fields = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}
    prefix = ".".join(str(part) for part in (*location[:-1], ""))
    near = difflib.get_close_matches(str(location[-1]), fields, n=1, cutoff=0.5)
    if near:
        return f": did you mean {prefix}{near[0]}?"
    return f": the keys there are {', '.join(fields)}" if fields else ""
