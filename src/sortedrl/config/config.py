"""The configuration of a run: typed sections, read from TOML, overridden by `section.key=value`.

Commands and `SortedTrainer` load it; every part of a run gets its numbers from it.

Guarantees: a configuration never changes; an unknown key is refused with the nearest known one; validators check and
never rewrite values; what `to_toml` writes loads back as an equal configuration. Only an object that was given in
Python does not: `to_toml` writes its name, which cannot be loaded.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, get_args, get_origin

import tomli_w
from pydantic import ValidationError, model_validator

from sortedrl.config.overrides import parse_override, parse_toml, put
from sortedrl.config.placement import SAME_KEYS, check_placement
from sortedrl.config.plug_points import POINTS, STRATEGY, TRACKER, own_schedule, preset_of
from sortedrl.config.sections import (
    CheckpointSection,
    EngineSection,
    EnvironmentSection,
    EvalSection,
    LearnerSection,
    LoraSection,
    ModelSection,
    PlacementSection,
    RewardSection,
    RunSection,
    ScheduleSection,
    Section,
    SftSection,
    TaskSection,
    TrackSection,
)
from sortedrl.config.shipped import find_config
from sortedrl.config.validation_line import one_line
from sortedrl.errors import ConfigError
from sortedrl.external.plugins import PlugPoint, name_of
from sortedrl.learner.algorithms import find_advantage, is_grouped, needs_more_siblings, objective_of
from sortedrl.redact import REDACTED, find_secret, redact, redact_text
from sortedrl.schedule import HarvestRule, Knobs, Schedule, check_strategy, reported_name, resolve_knobs

_MAX_TOLD = 5  # changed keys that one message names

# Keys that may differ when a run is resumed: they change neither the finished part of the run nor its meaning. The
# optimiser's settings are among them, so that a run whose weights broke can go on; the ledger records such changes.
CHANGEABLE = frozenset(
    {
        "run.dir",
        "run.name",
        "run.samples",
        "run.threads",
        "run.report",
        "run.started_in",
        "run.on_no_signal",
        "lora.merge",
        "engine.address",
        "engine.kv_gb",
        "engine.memory_share",
        "engine.transfer",
        "engine.start_s",
        "engine.publish_s",
        "engine.tensor_parallel",
        "engine.port",
        "engine.watchdog_s",
        "engine.drafts",
        "engine.kept_prefixes",
        "engine.own_process",
        "engine.cluster",
        "engine.replica_cpus",
        "engine.replica_gpus",
        "engine.health_s",
        "learner.device",
        "learner.ranks",
        "learner.context_parallel",
        "learner.own_process",
        "learner.rank_cpus",
        "learner.rank_gpus",
        "learner.rank_timeout_s",
        "learner.max_restarts",
        "learner.rank_replicas",
        "learner.host_states",
        "reward.timeout_s",
        "reward.grace_s",
        "reward.workers",
        "reward.memory_mb",
        "reward.keep_env",
        "reward.on_error",
        "environment.run_in",
        "environment.workers",
        "environment.timeout_s",
        "environment.memory_mb",
        "environment.keep_env",
        "learner.micro_tokens",
        "learner.recompute",
        "learner.offload_activations",
        "learner.offload",
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
        "checkpoint.sharded",
        "checkpoint.export",
        "track.to",
        "track.project",
        "track.mode",
        *(f"placement.{key}" for key in PlacementSection.model_fields),  # their meaning is in the keys that they name
        *(f"sft.{key}" for key in SftSection.model_fields),  # training does not read them
    }
)

# Keys that name a place. Their values may equal that of an environment variable, such as a user's or a host's name.
PLACES = frozenset(
    {
        "run.dir",
        "run.started_in",
        "task.path",
        "task.eval_path",
        "model.path",
        "model.tokenizer",
        "lora.path",
        "engine.address",
        "engine.cluster",
        "sft.path",
    }
)

# Keys that a run records at its start: a resumed run takes the recorded values where it sets none.
_RECORDED = (("run", "started_in"), ("engine", "stop_tokens"))


class SortedConfig(Section):
    """All settings of a run, by section. docs/reference/configuration.md lists the keys."""

    run: RunSection = RunSection()
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    placement: PlacementSection = PlacementSection()
    reward: RewardSection = RewardSection()
    environment: EnvironmentSection = EnvironmentSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sft: SftSection = SftSection()
    track: TrackSection = TrackSection()

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(one_line(error, type(self).model_fields)) from None

    @model_validator(mode="after")
    def check_together(self) -> Self:
        """Check names of the user's objects, and what depends on several sections."""
        for point in POINTS:
            for value in self._plugged(point.key):
                point.check_name(value)
        self._check_algorithm()
        batch, group = self.schedule.update_batch, self.learner.group_size
        if self.run.samples < batch:
            raise ValueError(
                f"schedule.update_batch {batch} is larger than run.samples {self.run.samples}: lower it, or raise "
                "run.samples"
            )
        if needs_more_siblings(self.learner):
            chosen = self.learner.algorithm if self.learner.advantage is None else self.learner.advantage
            raise ValueError(f"learner.group_size {group}: {name_of(chosen)} compares siblings, set 2 or more")
        if self.run.samples % group:
            raise ValueError(f"run.samples {self.run.samples} must be a multiple of learner.group_size {group}")
        if batch % group:
            raise ValueError(f"schedule.update_batch {batch} must be a multiple of learner.group_size {group}")
        if self.engine.temperature == 0 and group > 1:
            raise ValueError(
                f"engine.temperature = 0 makes all {group} answers to a prompt equal, and equal answers teach nothing: "
                "raise it, or set learner.group_size = 1 with learner.algorithm = reinforce++"
            )
        check_strategy(name_of(self.schedule.strategy), self.knobs)
        check_placement(self)
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
                f"{name_of(self.learner.algorithm)} with learner.group_size {group} does not: leave it out"
            )
        return self

    def _check_algorithm(self) -> None:
        algorithm = objective_of(self.learner).algorithm
        if self.learner.advantage is not None:
            find_advantage(self.learner.advantage)
            if algorithm.has_critic:
                raise ValueError(
                    f"learner.advantage has no effect on {name_of(self.learner.algorithm)}, whose critic makes the "
                    "advantages: remove it"
                )

    def _plugged(self, key: str) -> tuple[Any, ...]:
        """The values of a key that takes the user's objects."""
        if key == TRACKER.key:
            return self.track.trackers
        section, name = key.split(".")
        value = getattr(getattr(self, section), name)
        return () if value is None else (value,)

    @property
    def knobs(self) -> Knobs:
        """The schedule's settings. Where the configuration sets none, the strategy's value is used."""
        explicit, strategy = self.schedule.model_dump(exclude={"strategy"}), self.schedule.strategy
        replaces = objective_of(self.learner).flat_groups == "replace"
        flat_extra = self.learner.flat_extra * self.schedule.update_batch if replaces else 0
        is_ours = isinstance(strategy, str) and strategy in STRATEGY.names
        return resolve_knobs(strategy if is_ours else preset_of(strategy), flat_extra=flat_extra, **explicit)

    @property
    def own_schedule(self) -> Schedule | None:
        """The decisions of the strategy, if they are the user's; None if they are ours."""
        return own_schedule(self.schedule.strategy)

    @property
    def strategy_name(self) -> str:
        """The strategy, or "custom" if keys were set that make it another one."""
        return reported_name(name_of(self.schedule.strategy), self.knobs)

    @property
    def slots(self) -> int:
        """Number of sequences that run at once, over all engines."""
        return self.engine.slots * self.num_engines

    @property
    def num_engines(self) -> int:
        return self.engine.replicas if self.placement.engines is None else self.placement.engines

    @property
    def tensor_parallel(self) -> int:
        """GPUs of each engine."""
        chosen = self.placement.tensor_parallel
        return self.engine.tensor_parallel if chosen is None else chosen

    @property
    def num_ranks(self) -> int:
        return self.learner.ranks if self.placement.ranks is None else self.placement.ranks

    @property
    def context_parallel(self) -> int:
        """Ranks that compute a micro-batch together."""
        chosen = self.placement.context_parallel
        return self.learner.context_parallel if chosen is None else chosen

    @property
    def has_rank_actors(self) -> bool:
        """Whether the learner runs in Ray actors. A single one does if it has a GPU of its own."""
        return self.num_ranks > 1 or self.placement.mode == "separate"

    def has_sharded_checkpoints(self, *, has_adapters: bool) -> bool:
        """Whether ranks write their own shards of a checkpoint. Adapters are small, and saved whole."""
        return self.has_rank_actors and self.checkpoint.sharded and not has_adapters

    @property
    def has_engine_pool(self) -> bool:
        """Whether the engines run outside of this process, also a single one."""
        engine = self.engine
        is_placed = self.placement.mode is not None and self.has_rank_actors
        return self.num_engines > 1 or engine.own_process or bool(engine.cluster) or is_placed

    @property
    def engine_gpus(self) -> float:
        """GPUs that Ray reserves for each engine. Colocated engines use those that are reserved for ranks."""
        match self.placement.mode:
            case None:
                return self.engine.replica_gpus
            case "separate":
                return float(self.tensor_parallel)
            case "colocated":
                return 0.0

    @property
    def has_gpu_engines(self) -> bool:
        """Whether engines outside of this process compute on GPUs, their own or those of ranks."""
        return self.engine_gpus > 0 or self.placement.mode == "colocated"

    @property
    def rank_gpus(self) -> float:
        """GPUs that Ray reserves for each rank."""
        return self.learner.rank_gpus if self.placement.mode is None else 1.0

    def in_older_keys(self) -> SortedConfig:
        """The same configuration with its placement in the older keys too, for all code that reads those."""
        if self.placement == PlacementSection():
            return self
        engine = {"replicas": self.num_engines, "tensor_parallel": self.tensor_parallel}
        engine |= {"replica_gpus": self.engine_gpus, "own_process": self.engine.own_process or self.has_engine_pool}
        learner = {"ranks": self.num_ranks, "rank_gpus": self.rank_gpus, "context_parallel": self.context_parallel}
        return self.replaced(engine=engine, learner=learner)

    @property
    def is_grouped(self) -> bool:
        return is_grouped(self.learner)

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @classmethod
    def load(
        cls, path: str | Path, overrides: Iterable[str] = (), *, given: SortedConfig | None = None
    ) -> SortedConfig:
        """Read a TOML file, or a shipped configuration by its name, and apply `section.key=value` overrides to it.

        Where the file has only the name of an object that was given in Python, the object is taken from `given`.
        """
        path = find_config(path)
        try:
            tree = parse_toml(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
        parsed = [parse_override(text) for text in overrides]
        strategy = next((value for keys, value in parsed if keys == ["schedule", "strategy"]), None)
        if strategy is not None:
            _forget_defining_knobs(tree, strategy)
        model = next((value for keys, value in parsed if keys == ["model", "path"]), None)
        if model is not None:
            _forget_model_values(tree, model)
        for keys, value in parsed:
            _forget_other_name(tree, keys)
            put(tree, keys, [value] if isinstance(value, str) and _takes_list(keys) else value)
        _take_objects(tree, given)
        return cls(**tree)

    def check_resumable(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse to resume a run with settings that would change its meaning; `saved` is what `resolved` returned."""
        found = {key: both for key, both in _differences(saved, self.resolved()).items() if key not in CHANGEABLE}
        if "schedule.strategy" in found:  # the keys that it sets are not the user's
            found = {key: both for key, both in found.items() if not self._is_of_strategy(key)}
        if not found:
            return
        told = [_told_difference(name, before, value) for name, (before, value) in found.items()]
        more = f" (and {len(told) - _MAX_TOLD} more)" if len(told) > _MAX_TOLD else ""
        raise ConfigError(
            f"{'; '.join(told[:_MAX_TOLD])}{more}: set {'it' if len(told) == 1 else 'them'} back, or start a new run"
        )

    def _is_of_strategy(self, name: str) -> bool:
        """Whether the strategy gives a key of `schedule` its value."""
        section, _, key = name.partition(".")
        return section == "schedule" and getattr(self.schedule, key) is None

    def continuing(self, saved: Mapping[str, Mapping[str, Any]]) -> SortedConfig:
        """The configuration of a resumed run: what the run recorded at its start counts where this one sets nothing."""
        taken: dict[str, dict[str, Any]] = {}
        for section, key in _RECORDED:
            value = saved.get(section, {}).get(key)
            if value is not None and getattr(getattr(self, section), key) in (None, ""):
                taken[section] = {key: value}
        return self.replaced(**taken)

    def changes_since(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
        """The keys that differ from `saved`, without secrets, each with the value before and now.

        The place of the run directory does not count.
        """
        changes = _differences(redact(saved), redact(self.resolved()))
        places = ("run.dir", "run.name", "run.started_in")
        return {name: values for name, values in changes.items() if name not in places}

    def check_startable(self) -> None:
        """Refuse a configuration that holds a secret or a redaction mark: a run saves its configuration as it is."""
        for section in type(self).model_fields:
            values: Section = getattr(self, section)
            for key, field in type(values).model_fields.items():
                value = getattr(values, key)
                if value != field.default and _allows_text(field.annotation):
                    for text in _texts(value):
                        _check_text(f"{section}.{key}", text)

    def tree(self) -> dict[str, dict[str, Any]]:
        """The values that are set, by section, the user's objects as they are: what `SortedConfig(**tree)` takes."""
        return {name: {key: getattr(section, key) for key in section.model_fields_set} for name, section in self}

    def moved(self, folder: Path, name: str) -> SortedConfig:
        """The same configuration with another run directory."""
        return self.replaced(run={"dir": str(folder), "name": name})

    def with_model(self, path: str) -> SortedConfig:
        """The same configuration with another model, which replaces what was taken from the model before."""
        tree = self.tree()
        _forget_model_values(tree, path)
        tree["model"]["path"] = path
        return SortedConfig(**tree)

    def replaced(self, **sections: Mapping[str, Any]) -> SortedConfig:
        """The same configuration with other values of some keys. Keys that were left unset stay unset."""
        tree = self.tree()
        for name, values in sections.items():
            tree[name].update(values)
        return SortedConfig(**tree)

    def with_strategy(self, strategy: Any, **run: Any) -> SortedConfig:
        """The same configuration under another strategy, which replaces the keys that define it."""
        tree = self.tree()
        tree["schedule"].setdefault("strategy", self.schedule.strategy)
        _forget_defining_knobs(tree, strategy)
        tree["schedule"]["strategy"] = strategy
        tree["run"].update(run)
        return SortedConfig(**tree)

    def with_objects(self, objects: Mapping[PlugPoint, Any]) -> SortedConfig:
        """The same configuration with these objects, or names, at their plug points."""
        if not objects:
            return self
        tree = self.tree()
        for point, value in objects.items():
            section, key = point.key.split(".")
            tree[section][key] = value
        return SortedConfig(**tree)

    def resolved(self) -> dict[str, dict[str, Any]]:
        """All values by section, with those of the strategy where the configuration has none."""
        tree = self.model_dump(mode="json")
        knobs = self.knobs
        for name in tree["schedule"]:
            if name != "strategy":
                value = getattr(knobs, name)
                tree["schedule"][name] = "none" if value is None else value
        for (ours, key), (theirs, other) in SAME_KEYS.items():  # one name is enough, and older versions know this one
            if tree[ours][key] is not None:
                tree[theirs][other], tree[ours][key] = tree[ours][key], None
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


def _told_difference(name: str, before: Any, value: Any) -> str:
    is_alike = redact_text(repr(value)) == redact_text(repr(before))
    note = ", which differ in what looks like a secret" if is_alike else ""
    return f"{name} was {before!r} when the run was saved and is {value!r} here{note}"


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
    return annotation in (str, Any) or any(_allows_text(part) for part in get_args(annotation))


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
    variable = None if name in PLACES else find_secret(text)
    if variable is not None:
        raise ConfigError(
            f"{name} holds the value of the environment variable {variable}, which looks like a secret, and a run "
            f"saves its configuration in clear: remove it from the configuration, or unset {variable}"
        )


# ---- overrides -------------------------------------------------------------------------------------------------------


def _takes_list(keys: list[str]) -> bool:
    """Whether the key is a list, such as `lora.target_modules`: one text on the command line is its only item."""
    section = SortedConfig.model_fields.get(keys[0])
    field = type(section.default).model_fields.get(keys[-1]) if section is not None and len(keys) == 2 else None
    return field is not None and get_origin(field.annotation) is tuple


def _take_objects(tree: dict[str, Any], given: SortedConfig | None) -> None:
    """Put the objects of `given` where the tree, read from a file, has their names; a file holds no objects."""
    for point in POINTS:
        section, key = point.key.split(".")
        values = tree.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        if isinstance(value, dict):
            raise ConfigError(f"{point.key} must be text, not a table: write a name or module:Object")
        if value is None or given is None:
            continue
        objects = {name_of(item): item for item in given._plugged(point.key)}
        if isinstance(value, list):
            tree[section][key] = [objects.get(item, item) if isinstance(item, str) else item for item in value]
        elif isinstance(value, str):
            tree[section][key] = objects.get(value, value)


def _forget_defining_knobs(tree: dict[str, Any], strategy: Any) -> None:
    """Remove the keys that define a strategy: a strategy chosen later replaces them."""
    schedule = tree.get("schedule")
    if isinstance(schedule, dict) and schedule.get("strategy") != strategy:
        try:
            preset = preset_of(strategy)
        except ConfigError:
            return  # the configuration's own checks report it
        for knob in preset:
            schedule.pop(knob, None)


def _forget_other_name(tree: dict[str, Any], keys: list[str]) -> None:
    """Remove the other name of a key that is set later: the last setting counts."""
    for ours, theirs in SAME_KEYS.items():
        for name, (section, key) in ((ours, theirs), (theirs, ours)):
            if keys == list(name) and isinstance(values := tree.get(section), dict):
                values.pop(key, None)


def _forget_model_values(tree: dict[str, Any], path: object) -> None:
    """Remove the end tokens of a model: a model chosen later has others."""
    engine, model = tree.get("engine"), tree.get("model")
    before = model.get("path") if isinstance(model, dict) else None
    if isinstance(engine, dict) and before != path:
        engine.pop("stop_tokens", None)
