"""From TRL's arguments to a configuration of ours, its knobs and an engine. Both trainers' adapters use it.

TRL's arguments say how many answers there are and how they are sampled; the user says how they are scheduled. What
cannot be kept is refused here, in one line, before anything is generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sortedrl.adapters.host import HostSettings
from sortedrl.config import SortedConfig
from sortedrl.engine.base import Engine, InFlight
from sortedrl.errors import ConfigError

# Of the section `engine`: TRL's loss computes with its own values.
SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_tokens"}
FOLDER = "sortedrl"  # the run directory inside TRL's output_dir


@dataclass(slots=True, kw_only=True, frozen=True)
class Wishes:
    """What the user asks of our scheduler.

    `engine` and `schedule` hold keys of these sections of docs/reference/configuration.md.
    """

    strategy: str
    run_dir: str | Path | None = None  # default: `sortedrl` in TRL's output_dir
    max_prompt_tokens: int = 512
    engine: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, frozen=True)
class Sizes:
    """How many answers the trainer takes."""

    update_batch: int
    siblings: int
    num_updates: int


def make_config(args: Any, wishes: Wishes, sizes: Sizes, stop_tokens: tuple[int, ...]) -> SortedConfig:
    """A configuration with TRL's sampling and sizes and the user's schedule."""
    if getattr(args, "repetition_penalty", 1.0) != 1.0:
        raise ConfigError("repetition_penalty changes what is sampled and not what is scored: set it to 1.0")
    if getattr(args, "generation_kwargs", None):
        raise ConfigError("generation_kwargs are arguments of transformers' generate: pass engine={...} instead")
    taken = {"update_batch", "exact_batch"} & set(wishes.schedule) | SAMPLING & set(wishes.engine)
    if taken:
        raise ConfigError(f"{min(taken)} follows from TRL's arguments: leave it out")
    schedule = dict(wishes.schedule)
    if wishes.strategy == "async" and schedule.get("on_bound") is None:
        schedule["on_bound"] = "replay"  # a batch of exactly U samples cannot wait for all that is at its bound
    engine = {
        "slots": sizes.update_batch,
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": max(0, args.top_k or 0),
        "min_p": args.min_p or 0.0,
        "stop_tokens": stop_tokens,
        **wishes.engine,
    }
    return SortedConfig(
        run={"seed": args.seed, "samples": sizes.update_batch * sizes.num_updates},
        task={"max_prompt_tokens": wishes.max_prompt_tokens},
        schedule={
            **schedule,
            "strategy": wishes.strategy,
            "update_batch": sizes.update_batch,
            "exact_batch": True,
        },
        engine=engine,
        learner={"algorithm": "grpo" if sizes.siblings > 1 else "reinforce++", "group_size": sizes.siblings},
    )


def host_settings(config: SortedConfig, wishes: Wishes, output_dir: str | None) -> HostSettings:
    from sortedrl.run.builders.engine import build_sampling

    run_dir = wishes.run_dir
    if run_dir is None and output_dir is not None:
        run_dir = Path(output_dir) / FOLDER
    return HostSettings(
        strategy=config.strategy_name,
        knobs=config.knobs,
        total_samples=config.run.samples,
        siblings=config.learner.group_size,
        max_new_tokens=config.engine.max_new_tokens,
        sampling=build_sampling(config, config.engine.stop_tokens or ()),
        seed=config.run.seed,
        run_dir=None if run_dir is None else Path(run_dir),
        in_flight=InFlight(config.engine.in_flight),
        replay_tolerance=config.engine.replay_tolerance,
    )


def make_engine(config: SortedConfig, model: Any, tokenizer: Any) -> Engine:
    """The configured engine with a copy of the model, since the trainer changes its own while answers are written."""
    import copy

    from sortedrl.run.builders.engine import build_engine

    own = copy.deepcopy(model).requires_grad_(False).eval()
    return build_engine(config, own, config.knobs, decode=tokenizer.decode)
