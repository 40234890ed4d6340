"""Builds the parts of a run that need no run directory: task, model, learner, engine, rewards.

`trainer.py` calls `build_parts` before it touches the run directory. Everything that can be wrong with the
configuration, the task or the model raises here, so a run that cannot start leaves an earlier run of its name alone.
`loop.py` puts the parts together with the files of the run directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Engine, Sampling
from sortedrl.errors import ConfigError, ModelError
from sortedrl.learner.lora import ADAPTER_FOLDER, adapt, check_base, check_peft_config, peft_config_of, restore_adapters
from sortedrl.learner.model import check_model_folder, load_tokenizer, read_window
from sortedrl.learner.smollm2 import smollm2_path
from sortedrl.records import Prompt
from sortedrl.reward.pool import RewardPool
from sortedrl.run.builders.engine import build_engine, build_sampling, engine_model
from sortedrl.run.builders.learner import RunLearner, build_learner
from sortedrl.run.builders.task import build_task
from sortedrl.run.checkpoint_folder import load_model, load_state
from sortedrl.tasks.base import PromptStream, RewardFunc, Task, make_prompt
from sortedrl.tasks.fingerprint import RowFingerprint, check_same_rows, fingerprint_rows
from sortedrl.tasks.loader import SampleLoader
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry.trackers import check_trackers
from sortedrl.weights import is_adapted


@dataclass(slots=True, kw_only=True)
class RunParts:
    """The parts of a run that need no run directory. `close` ends their processes and threads."""

    task: Task
    model: Any
    tokenizer: Any
    engine: Engine
    learner: RunLearner
    rewards: RewardPool
    heldout_rewards: RewardPool  # a separate pool, so that an evaluation never takes scores of training
    sampling: Sampling
    loader: SampleLoader
    heldout: list[Prompt]
    rows: RowFingerprint  # of the training rows

    def close(self) -> None:
        self.rewards.close()
        self.heldout_rewards.close()
        self.engine.close()
        self.learner.close()  # last, because it may own the Ray connection that the engine uses


def build_parts(
    config: SortedConfig,
    *,
    task: Task | None = None,
    model: Any = None,
    tokenizer: Any = None,
    checkpoint: Path | None = None,
    peft_config: Any = None,
) -> RunParts:
    """Build the parts of a run. A task, model or tokenizer that is given replaces the configured one.

    `checkpoint` is a folder whose weights replace those of the model. `peft_config` asks for adapters that are trained
    in place of all weights; the configuration must not ask for adapters too.
    """
    check_trackers(config.track.to)
    torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    task = task or build_task(config)
    rewards = build_rewards(config, task.reward_funcs)
    heldout_rewards = build_rewards(config, task.reward_funcs, is_heldout=True)
    peft_config = choose_adapters(config, peft_config)
    tokenizer = tokenizer or own_tokenizer(config, model, checkpoint)
    check_prompts(config, task, tokenizer)
    rows = fingerprint(config, task, tokenizer, checkpoint)
    heldout = heldout_prompts(config, task, tokenizer)
    model = build_model(config, model, peft_config, checkpoint)
    learner = build_learner(config, model)
    try:
        weights = engine_model(config, model, learner.source)
        engine = build_engine(config, weights, config.knobs, decode=tokenizer.decode)
    except BaseException:
        learner.close()
        raise
    parts = RunParts(
        task=task,
        model=model,
        tokenizer=tokenizer,
        engine=engine,
        learner=learner,
        rewards=rewards,
        heldout_rewards=heldout_rewards,
        sampling=build_sampling(config, stop_token_ids(model, tokenizer)),
        loader=SampleLoader(
            stream=prompt_stream(config, task, tokenizer),
            seed=config.run.seed,
            total_samples=config.run.samples,
            siblings=config.learner.group_size,
            max_new_tokens=config.engine.max_new_tokens,
        ),
        heldout=heldout,
        rows=rows,
    )
    try:  # last, so that no worker process is left behind when something else is wrong
        rewards.start()
    except BaseException:
        parts.close()
        raise
    return parts


def build_rewards(config: SortedConfig, functions: Sequence[RewardFunc], *, is_heldout: bool = False) -> RewardPool:
    settings = config.reward
    return RewardPool(
        functions,
        timeout_s=settings.timeout_s,
        workers=settings.workers,
        memory_bytes=settings.memory_mb * 2**20,
        keep_env=settings.keep_env,
        weights=settings.weights or None,
        on_error="zero" if is_heldout and settings.on_error == "skip" else settings.on_error,
    )


def choose_adapters(config: SortedConfig, peft_config: Any) -> Any:
    """The peft configuration of the adapters to train, checked; None to train all weights."""
    configured = peft_config_of(config.lora)
    if configured is not None and peft_config is not None:
        raise ConfigError("lora.rank and peft_config both ask for adapters: remove one of them")
    chosen = configured or peft_config
    if chosen is not None:
        check_peft_config(chosen)
    return chosen


def own_tokenizer(config: SortedConfig, model: Any, checkpoint: Path | None) -> Any:
    """The tokenizer in the model folder."""
    if model is not None:
        raise ConfigError("a model object needs its tokenizer: pass processing_class=tokenizer")
    folder = check_model_folder(checkpoint or model_path(config))
    return load_tokenizer(folder)


def build_model(config: SortedConfig, model: Any, peft_config: Any, checkpoint: Path | None) -> Any:
    """The model to train: the given or the configured one, with adapters if any, and with a checkpoint's weights."""
    has_adapters = peft_config is not None or is_adapted(model)
    if checkpoint is not None and (checkpoint / ADAPTER_FOLDER).is_dir() and not has_adapters:
        raise ConfigError(f"{checkpoint} belongs to a run with adapters: pass its peft_config again")
    if model is None:
        folder = check_model_folder(checkpoint if checkpoint is not None and not has_adapters else model_path(config))
        check_window(config, folder)
        model, _ = load_model(folder)
    elif checkpoint is not None and not has_adapters:
        model.load_state_dict(load_model(checkpoint)[0].state_dict())
    if peft_config is not None:
        model = adapt(model, peft_config, checkpoint=checkpoint)
    elif checkpoint is not None and has_adapters:
        restore_adapters(model, checkpoint)
    if checkpoint is not None and has_adapters:
        check_base(model, checkpoint)
    return model


def check_window(config: SortedConfig, folder: Path) -> None:
    """Refuse prompts and answers that together exceed the model's context window."""
    window, prompt, answer = read_window(folder), config.task.max_prompt_tokens, config.engine.max_new_tokens
    if window is not None and prompt + answer > window:
        raise ModelError(
            f"task.max_prompt_tokens {prompt} and engine.max_new_tokens {answer} add up to {prompt + answer}, more "
            f"than the {window} positions of the model in {folder}: lower one of them"
        )


def check_prompts(config: SortedConfig, task: Task, tokenizer: Any) -> None:
    """Encode every row of a dataset that the run will use, so that a bad row is found before training starts."""
    size = task.train.size
    num_used = config.run.samples // config.learner.group_size
    stream = prompt_stream(config, task, tokenizer)
    for _ in range(1 if size is None else min(size, num_used)):
        stream.take(1)


def fingerprint(config: SortedConfig, task: Task, tokenizer: Any, checkpoint: Path | None) -> RowFingerprint:
    """The fingerprint of the rows that the run will use; raises DataError if they are not those of the checkpoint."""
    stream = prompt_stream(config, task, tokenizer)
    saved = None if checkpoint is None else load_state(checkpoint).get("rows")  # older versions saved none
    if saved is not None:
        check_same_rows(saved, stream)
    return fingerprint_rows(stream, config.run.samples // config.learner.group_size)


def model_path(config: SortedConfig) -> Path:
    return named_model_path(config.model.path)


def named_model_path(name: str) -> Path:
    """The folder of a model: one that the package ships or can build, by its name, or any path."""
    match name:
        case "knights-tiny":
            return knights_tiny_path()
        case "smollm2-135m":
            return smollm2_path()
        case path:
            return Path(path)


def prompt_stream(config: SortedConfig, task: Task, tokenizer: Any) -> PromptStream:
    return PromptStream(
        task=task, tokenizer=tokenizer, seed=config.run.seed, max_prompt_tokens=config.task.max_prompt_tokens
    )


def heldout_prompts(config: SortedConfig, task: Task, tokenizer: Any) -> list[Prompt]:
    rows = task.heldout(config.eval.prompts) if config.eval.prompts else []
    limit = config.task.max_prompt_tokens
    return [
        make_prompt(row, tokenizer, prompt_id=f"heldout/{number}", max_tokens=limit) for number, row in enumerate(rows)
    ]


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end an answer, from the model's generation settings and the tokenizer."""
    named = [tokenizer.eos_token_id, getattr(getattr(model, "generation_config", None), "eos_token_id", None)]
    flat = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
    return tuple(sorted({int(token) for token in flat if token is not None}))
