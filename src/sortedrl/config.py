"""The configuration of a run: typed sections, read from TOML, overridden by `section.key=value`.

Every section is frozen and refuses unknown keys by naming the nearest known one. Validators check, they never rewrite;
the knobs that a preset leaves open are resolved in `schedule.py`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sortedrl.errors import ConfigError
from sortedrl.schedule import Knobs, Strategy, resolve_knobs


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class RunSection(Section):
    name: str = Field("run", description="Name of the run; its directory is <dir>/<name>.")
    dir: str = Field("runs", description="Where run directories live.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling noise and learner.")
    samples: int = Field(8192, ge=1, description="Samples to train in all: the run's data budget.")
    threads: int = Field(1, ge=1, description="CPU threads for torch.")
    report: bool = Field(True, description="Write report.html at the end.")
    checkpoint: bool = Field(True, description="Save the trained model at the end.")


class TaskSection(Section):
    name: str = Field("knights", description="The task: where prompts, rewards and held-out prompts come from.")
    people: dict[str, float] = Field(
        default={"2": 4, "3": 3, "4": 2, "5": 1}, description="Knights and Knaves: weight of each number of people."
    )


class ModelSection(Section):
    path: str = Field("knights-tiny", description="A folder that from_pretrained loads, or the embedded knights-tiny.")


class ScheduleSection(Section):
    """Knobs left out (or null) take the strategy's preset; `none` lifts a bound."""

    strategy: Strategy = Field(Strategy.SORTED_REPLAY, description="The preset.")
    update_batch: int = Field(32, ge=1, description="U: samples per update.")
    cohort_batches: int | None = Field(None, ge=1, description="n: update batches loaded at once.")
    lookahead: int | Literal["none"] | None = Field(None, description="L: later cohorts that may fill idle slots.")
    max_staleness: int | Literal["none"] | None = Field(None, description="Bound on staleness; 0 is on-policy.")
    interrupted: Literal["resume", "replay", "restart"] | None = Field(None, description="What an interrupted one does.")
    on_bound: Literal["replay", "restart", "wait"] | None = Field(None, description="What a sample at the bound does.")
    harvest: Literal["batch", "drain"] | None = Field(None, description="When an update batch is taken.")
    order: Literal["shortest-first", "longest-first", "interleaved", "shuffled"] | None = Field(
        None, description="How a drain is dealt and inner mini-batches are cut."
    )
    admission: Literal["load-order", "longest-expected-first", "tail-last"] | None = Field(
        None, description="Which waiting sample gets a free slot."
    )
    overlap: bool | None = Field(None, description="Rollout goes on during the update.")
    restart_noise: Literal["seeded", "fresh"] | None = Field(None, description="Noise of a restarted sample.")


class EngineSection(Section):
    kind: Literal["local"] = Field("local", description="The engine.")
    slots: int = Field(32, ge=1, description="Q: sequences that run at once.")
    max_new_tokens: int = Field(512, ge=1, description="Token budget of an answer, over all its segments.")
    temperature: float = Field(1.0, ge=0.0, description="Sampling temperature.")
    replay_tolerance: float = Field(0.0, ge=0.0, description="Accept a cached token within this of the best; 0 = exact.")
    in_flight: Literal["reprefill", "keep"] = Field("reprefill", description="KV of running samples at a publication.")


class RewardSection(Section):
    timeout_s: float = Field(10.0, gt=0, description="Time limit of one call of the reward functions.")
    workers: int = Field(1, ge=1, description="Scoring workers.")


class LearnerSection(Section):
    algorithm: Literal["reinforce++", "grpo"] = Field("grpo", description="Advantage estimator and loss.")
    group_size: int = Field(8, ge=1, description="k: samples per prompt.")
    advantage_scope: Literal["batch", "cohort", "running"] = Field("batch", description="What statistics run over.")
    lr: float = Field(3e-4, gt=0, description="Peak learning rate.")
    lr_final: float = Field(0.05, ge=0, le=1, description="Share of the peak that is left at the end (linear decay).")
    warmup_samples: int = Field(0, ge=0, description="Samples over which the rate rises from 0.")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's.")
    clip_low: float = Field(0.2, gt=0, description="Ratio clip below 1.")
    clip_high: float = Field(0.28, gt=0, description="Ratio clip above 1.")
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    inner_steps: int = Field(1, ge=1, description="Mini-batches per update.")
    inner_epochs: int = Field(1, ge=1, description="Passes over a batch.")
    micro_tokens: int = Field(16384, ge=1, description="Tokens per packed micro-batch.")


class EvalSection(Section):
    prompts: int = Field(256, ge=0, description="Held-out prompts; 0 turns evaluation off.")
    samples: int = Field(1, ge=1, description="Sampled answers per held-out prompt.")


class SortedConfig(Section):
    """Everything a run needs to know."""

    run: RunSection = RunSection()
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
