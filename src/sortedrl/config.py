"""The configuration of a run: typed sections, read from TOML, overridden by `section.key=value`.

Every section is frozen and refuses unknown keys by naming the nearest known one. Validators check, they never rewrite;
the knobs that a preset leaves open are resolved in `schedule.py`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sortedrl.config_text import parse_override, put, section_toml, toml_value
from sortedrl.errors import ConfigError
from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.redact import redact
from sortedrl.schedule import PRESETS, Knobs, Strategy, resolve_knobs

Int = Annotated[int, Field(strict=True)]  # neither true nor "16" nor 16.0
Bound = Annotated[int, Field(strict=True, ge=0)] | Literal["none"] | None
Decay = Annotated[float, Field(ge=0, lt=1)]
# Those that train the siblings of a prompt together.
GROUPED_ALGORITHMS = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.needs_siblings)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSection(Section):
    name: str = Field(
        default="run", pattern=r"^[^/\\\s.][^/\\]*$", description="Name of the run; its directory is <dir>/<name>."
    )
    dir: str = Field(default="runs", description="Where run directories live.")
    seed: Int = Field(default=0, ge=0, description="Seed of data order, sampling noise and learner.")
    samples: Int = Field(default=8192, ge=1, description="Samples to train in all: the run's data budget.")
    threads: Int = Field(default=1, ge=1, description="CPU threads for torch.")
    report: bool = Field(default=True, description="Write report.html at the end.")


class TaskSection(Section):
    name: str = Field(default="knights", description="The task: where prompts, rewards and held-out prompts come from.")
    max_prompt_tokens: Int = Field(default=256, ge=1, description="A longer prompt is refused.")
    people: dict[str, float] = Field(
        default={"2": 4, "3": 3, "4": 2, "5": 1}, description="Knights and Knaves: weight of each number of people."
    )


class ModelSection(Section):
    path: str = Field(
        default="knights-tiny",
        min_length=1,
        description="A folder that from_pretrained loads, or the embedded knights-tiny.",
    )


class LoraSection(Section):
    """Adapters of low rank, trained in place of all weights."""

    rank: Int = Field(default=0, ge=0, description="Rank of the adapters; 0 trains all weights.")
    alpha: float = Field(default=32.0, gt=0, description="Adapters count alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        default=(), description="Names of the modules that get adapters; left out, all linear ones but the head."
    )


class ScheduleSection(Section):
    """Knobs left out (or null) take the strategy's preset; `none` lifts a bound."""

    strategy: Strategy = Field(default=Strategy.SORTED_REPLAY, description="The preset.")
    update_batch: Int = Field(default=32, ge=1, description="U: samples per update.")
    cohort_batches: Int | None = Field(default=None, ge=1, description="n: update batches loaded at once.")
    lookahead: Bound = Field(default=None, description="L: later cohorts that may fill idle slots.")
    max_staleness: Bound = Field(default=None, description="Bound on staleness; 0 is on-policy.")
    interrupted: Literal["resume", "replay", "restart"] | None = Field(
        default=None, description="What interrupted ones do."
    )
    on_bound: Literal["replay", "restart", "wait"] | None = Field(
        default=None, description="What a sample at the bound does."
    )
    harvest: Literal["batch", "drain"] | None = Field(default=None, description="When an update batch is taken.")
    order: Literal["shortest-first", "longest-first", "interleaved", "shuffled"] | None = Field(
        default=None, description="How a drain is dealt and inner mini-batches are cut."
    )
    admission: Literal["load-order", "longest-expected-first", "tail-last"] | None = Field(
        default=None, description="Which waiting sample gets a free slot."
    )
    overlap: bool | None = Field(default=None, description="Rollout goes on during the update.")
    restart_noise: Literal["seeded", "fresh"] | None = Field(default=None, description="Noise of a restarted sample.")


class EngineSection(Section):
    kind: Literal["local"] = Field(default="local", description="The engine.")
    slots: Int = Field(default=32, ge=1, description="Q: sequences that run at once.")
    max_new_tokens: Int = Field(default=512, ge=1, description="Token budget of an answer, over all its segments.")
    temperature: float = Field(default=1.0, ge=0.0, description="Sampling temperature.")
    replay_tolerance: float = Field(default=0.0, ge=0.0, description="A cached token this close to the best is kept.")
    in_flight: Literal["reprefill", "keep"] = Field(
        default="reprefill", description="KV of running samples at a publication."
    )
    watchdog_s: float = Field(
        default=600.0, gt=0.0, description="An engine that does not answer for so long is given up."
    )


class RewardSection(Section):
    timeout_s: float = Field(default=10.0, gt=0, description="Time limit of one call of the reward functions.")
    grace_s: float = Field(
        default=0.25, ge=0, description="How long a full batch waits for answers that are being scored."
    )
    workers: Int = Field(default=1, ge=1, description="Scoring workers.")
    memory_mb: Int = Field(default=4096, ge=64, description="Memory limit of a scoring worker.")
    keep_env: tuple[str, ...] = Field(
        default=(), description="Environment variables that rewards need beyond the usual ones."
    )
    weights: tuple[float, ...] = Field(default=(), description="Weight of each reward function; left out, all are 1.")
    on_error: Literal["zero", "skip", "stop"] = Field(
        default="zero", description="An answer that cannot be scored: reward 0, no weight in training, or the run ends."
    )


class LearnerSection(Section):
    """Keys left out (or null) that a preset has are the algorithm's (see docs/learning.md)."""

    algorithm: Literal["reinforce++", "reinforce++-baseline", "grpo", "dr_grpo", "rloo", "dapo", "gspo", "ppo"] = Field(
        default="grpo", description="Advantage estimator and loss; its presets are in learning.md."
    )
    group_size: Int = Field(default=8, ge=1, description="k: samples per prompt.")
    advantage_scope: Literal["batch", "cohort", "running"] = Field(
        default="batch", description="What statistics run over."
    )
    lr: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    lr_final: float = Field(
        default=0.05, ge=0, le=1, description="Share of the peak that is left at the end (linear decay)."
    )
    warmup_samples: Int = Field(default=0, ge=0, description="Samples over which the rate rises from 0.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's.")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="AdamW's.")
    clip_low: float | None = Field(default=None, gt=0, lt=1, description="Ratio clip below 1.")
    clip_high: float | None = Field(default=None, gt=0, description="Ratio clip above 1.")
    ratio: Literal["token", "sequence"] | None = Field(
        default=None, description="What is clipped: each token's ratio, or the geometric mean over its sample."
    )
    loss_mean: Literal["token", "sequence", "constant"] | None = Field(
        default=None, description="Mean over tokens, over samples of their means, or over the tokens of the budget."
    )
    overlong: Literal["keep", "mask", "shape"] | None = Field(
        default=None, description="Truncated answers: like any other, without gradient, or length punished smoothly."
    )
    overlong_buffer: float = Field(
        default=0.2, gt=0, le=1, description="Last share of the token budget in which `shape` punishes length."
    )
    filter_groups: bool | None = Field(
        default=None, description="Siblings that were all rewarded alike count in no mean."
    )
    importance: Literal["none", "token", "sequence"] = Field(
        default="none", description="Weights for tokens of older policies; `none`: the clipped ratio is all there is."
    )
    importance_cap: Annotated[float, Field(gt=0)] | Literal["none"] = Field(
        default=2.0, description="Largest such weight; `none`: no limit, unbiased and of high variance."
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL penalty to the initial model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="How a token's KL is estimated.")
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="Where the penalty goes.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="ppo: discount by token.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="ppo: GAE's lambda.")
    value_coef: float = Field(default=0.1, gt=0, description="ppo: weight of the value loss.")
    value_clip: float = Field(default=0.2, gt=0, description="ppo: how far a value may move in an update.")
    critic_lr: float | None = Field(default=None, gt=0, description="ppo: peak rate of the value head; open: `lr`.")
    grad_clip: float = Field(default=1.0, gt=0, description="Largest gradient norm.")
    inner_steps: Int = Field(default=1, ge=1, description="Mini-batches per update.")
    inner_epochs: Int = Field(default=1, ge=1, description="Passes over a batch.")
    micro_tokens: Int = Field(default=16384, ge=1, description="Tokens per packed micro-batch.")


class EvalSection(Section):
    prompts: Int = Field(default=256, ge=0, description="Held-out prompts; 0 turns evaluation off.")
    samples: Int = Field(default=1, ge=1, description="Sampled answers per held-out prompt.")
    every_samples: Int = Field(
        default=0, ge=0, description="Evaluate each time this many more are trained; 0: start and end."
    )


class CheckpointSection(Section):
    save: bool = Field(default=True, description="Make checkpoints; without them a run cannot be resumed.")
    every_updates: Int = Field(
        default=25, ge=0, description="Updates from one checkpoint to the next; 0: only at the end or when stopped."
    )
    keep: Int = Field(default=2, ge=1, description="Checkpoints that stay; older ones are removed.")


# Keys that may differ when a run is resumed: they change neither what was done so far nor what it means.
CHANGEABLE = frozenset(
    {
        "run.dir",
        "run.name",
        "run.samples",
        "run.threads",
        "run.report",
        "engine.watchdog_s",
        "reward.timeout_s",
        "reward.grace_s",
        "reward.workers",
        "reward.memory_mb",
        "reward.keep_env",
        "reward.on_error",
        "learner.micro_tokens",
        "eval.every_samples",
        "checkpoint.save",
        "checkpoint.every_updates",
        "checkpoint.keep",
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
        if self.learner.algorithm in GROUPED_ALGORITHMS and group < 2:
            raise ValueError(f"learner.group_size {group}: {self.learner.algorithm} compares siblings, set 2 or more")
        if self.run.samples % group:
            raise ValueError(f"run.samples {self.run.samples} must be a multiple of learner.group_size {group}")
        if batch % group:
            raise ValueError(f"schedule.update_batch {batch} must be a multiple of learner.group_size {group}")
        _ = self.knobs
        return self

    @property
    def knobs(self) -> Knobs:
        """The schedule's settings with the preset filled in."""
        explicit = self.schedule.model_dump(exclude={"strategy"})
        return resolve_knobs(self.schedule.strategy, **explicit)

    @property
    def is_grouped(self) -> bool:
        return self.learner.algorithm in GROUPED_ALGORITHMS

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
