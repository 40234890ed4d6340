"""Builds the parts of a run that need no run directory: task, model, learner, engine, rewards.

`trainer.py` calls `build_parts` before it touches the run directory. Everything that can be wrong with the
configuration, the task or the model raises here, so a run that cannot start leaves an earlier run of its name alone.
`loop.py` puts the parts together with the files of the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.config.sections import LoraSection
from sortedrl.engine.base import Engine, Sampling
from sortedrl.environment.scorer import no_reward
from sortedrl.errors import ConfigError, ModelError
from sortedrl.external.hub import Commits, commit_of, fetch, find_cached, shown, split_revision
from sortedrl.learner.lora import (
    ADAPTER_FOLDER,
    adapt,
    check_base,
    check_peft_config,
    limit_layers,
    name_base,
    peft_config_of,
    read_peft_config,
    restore_adapters,
)
from sortedrl.learner.model import check_model_folder, load_tokenizer, read_window
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.sharded.shards import weights_of
from sortedrl.learner.smollm2 import smollm2_path
from sortedrl.records import Prompt
from sortedrl.reward.pool import RewardPool
from sortedrl.run.builders.engine import build_engine, build_sampling, engine_model
from sortedrl.run.builders.environment import RunEnvironment, build_environment, find_environment
from sortedrl.run.builders.generation import fill_from_model
from sortedrl.run.builders.learner import RunLearner, build_learner
from sortedrl.run.builders.machines import check_gpus, engine_places
from sortedrl.run.builders.task import build_task
from sortedrl.run.builders.trackers import check_trackers
from sortedrl.run.checkpoint_folder import load_model, load_state
from sortedrl.run.learning_alarm import LearningAlarm
from sortedrl.tasks.base import PromptStream, RewardFunc, Task, make_prompt
from sortedrl.tasks.fingerprint import RowFingerprint, check_same_rows, fingerprint_rows
from sortedrl.tasks.loader import SampleLoader
from sortedrl.tasks.reward_model import load_reward_models
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.tasks.tools_model import tools_tiny_path
from sortedrl.weights import is_adapted

EMBEDDED = ("knights-tiny", "tools-tiny", "smollm2-135m")  # models that the package ships or makes


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
    alarm: LearningAlarm
    sampling: Sampling
    loader: SampleLoader
    heldout: list[Prompt]
    rows: RowFingerprint  # of the training rows
    commits: Commits  # of what came from the hub
    base_model: str  # the name of the model that training started from; empty if it has none
    from_python: tuple[str, ...]  # "task" and "model", if they were given as objects
    config: SortedConfig  # with what was taken from the model
    notice: str = ""  # a line for the user on what was taken
    environment: RunEnvironment | None = None  # of a run with tools

    def close(self) -> None:
        self.rewards.close()
        self.heldout_rewards.close()
        if self.environment is not None:
            self.environment.close()
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
    check_trackers(config.track.trackers)
    check_gpus(config)
    config = config.in_older_keys()
    torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    given = {"task": task, "model": model}
    base_model = config.model.path if model is None else name_of(model)
    commits = saved_commits(checkpoint)
    task = task or build_task(config, commits)
    load_reward_models(task.reward_funcs, commits)
    rewards = build_rewards(config, task.reward_funcs)
    heldout_rewards = build_rewards(config, task.reward_funcs, is_heldout=True)
    adapters = choose_adapters(config, peft_config, commits, checkpoint)
    folder = None
    if model is None:  # a checkpoint of adapters has merged weights, so their base is needed again
        folder = model_path(config, commits) if checkpoint is None or adapters.is_wanted else checkpoint
    tokenizer = tokenizer or own_tokenizer(config, folder, checkpoint)
    spec = find_environment(config, task)
    if list(task.reward_funcs) == [no_reward] and (spec is None or not spec.has_reward):
        raise ConfigError("nothing gives a reward: set task.reward, or give the class of tools a method get_reward")
    tools = () if spec is None else spec.tools
    check_prompts(config, task, tokenizer, tools)
    environment = None
    if spec is not None:
        environment = build_environment(config, spec, prompt_stream(config, task, tokenizer, tools))
    rows = fingerprint(config, task, tokenizer, checkpoint)
    heldout = heldout_prompts(config, task, tokenizer, tools)
    model = build_model(config, folder if model is None else model, adapters, checkpoint)
    config, notice = fill_from_model(config, model, tokenizer)
    learner = build_learner(config, model, initial_weights(folder, model))
    try:
        weights = engine_model(config, model, learner.source)
        places = engine_places(config, learner.gpus) if isinstance(learner, ShardedLearner) else []
        engine = build_engine(
            config,
            weights,
            config.knobs,
            decode=tokenizer.decode,
            source=learner.source,
            places=places,
            has_tools=spec is not None,
        )
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
        alarm=LearningAlarm(
            update_batch=config.schedule.update_batch,
            reward_functions=rewards.function_names,
            is_fatal=config.run.on_no_signal == "stop",
        ),
        sampling=build_sampling(config, config.engine.stop_tokens or ()),
        loader=SampleLoader(
            stream=prompt_stream(config, task, tokenizer, tools),
            seed=config.run.seed,
            total_samples=config.run.samples,
            siblings=config.learner.group_size,
            max_new_tokens=config.engine.max_new_tokens,
        ),
        heldout=heldout,
        rows=rows,
        config=config,
        notice=notice,
        commits=commits,
        base_model=base_model,
        from_python=tuple(name for name, part in given.items() if part is not None),
        environment=environment,
    )
    try:  # last, so that no worker process is left behind when something else is wrong
        rewards.start()
        if environment is not None:
            environment.start()
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


def name_of(model: Any) -> str:
    """The folder or id that a model object was loaded from; empty if it does not say."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", ""))


def saved_commits(checkpoint: Path | None) -> Commits:
    """The commits that a checkpoint recorded, so that a resumed run uses them again."""
    return {} if checkpoint is None else dict(load_state(checkpoint).get("hub_commits", {}))


@dataclass(slots=True, kw_only=True, frozen=True)
class Adapters:
    """The adapters to train: new ones as `peft_config` says, or those in the folder `start`. Without both: none."""

    peft_config: Any = None
    start: Path | None = None

    @property
    def is_wanted(self) -> bool:
        return self.peft_config is not None


def choose_adapters(
    config: SortedConfig, peft_config: Any, commits: Commits | None = None, checkpoint: Path | None = None
) -> Adapters:
    """The adapters that the configuration or the user asks for, checked. A checkpoint's own replace `lora.path`."""
    settings, start = config.lora, None
    configured = peft_config_of(settings)
    if settings.path:
        check_own_settings(settings)
        if checkpoint is None:
            start = fetch(settings.path, key="lora.path", revision=settings.revision, commits=commits)
        else:
            start = checkpoint / ADAPTER_FOLDER
        configured = read_peft_config(start)
    if configured is not None and peft_config is not None:
        name = "lora.path" if settings.path else "lora.rank"
        raise ConfigError(f"{name} and peft_config both ask for adapters: remove one of them")
    chosen = configured or peft_config
    if chosen is not None:
        check_peft_config(chosen)
    return Adapters(peft_config=chosen, start=start)


def check_own_settings(settings: LoraSection) -> None:
    for key in ("rank", "alpha", "target_modules", "last_layers"):
        if getattr(settings, key) != LoraSection.model_fields[key].default:
            raise ConfigError(f"lora.{key} has no effect on the adapters of lora.path, which bring theirs: remove it")


def own_tokenizer(config: SortedConfig, folder: Path | None, checkpoint: Path | None) -> Any:
    """The configured tokenizer, or that of the model's folder; a resumed run has it in its checkpoint."""
    if checkpoint is not None:
        return load_tokenizer(check_model_folder(checkpoint))
    if config.model.tokenizer:
        name, revision = split_revision(config.model.tokenizer)
        return load_tokenizer(fetch(name, key="model.tokenizer", revision=revision, has_weights=False))
    if folder is None:
        raise ConfigError("a model object needs its tokenizer: pass processing_class=tokenizer")
    return load_tokenizer(check_model_folder(folder))


def build_model(config: SortedConfig, model: Any, adapters: Adapters, checkpoint: Path | None) -> Any:
    """The model to train, from an object or a folder, with adapters if any, and with a checkpoint's weights."""
    has_adapters = adapters.is_wanted or is_adapted(model)
    if checkpoint is not None and (checkpoint / ADAPTER_FOLDER).is_dir() and not has_adapters:
        raise ConfigError(f"{checkpoint} belongs to a run with adapters: pass its peft_config again")
    commit = ""
    if isinstance(model, Path):
        folder, commit = check_model_folder(model), commit_of(model)
        check_window(config, folder)
        model, _ = load_model(folder, dtype=base_dtype(config, adapters))
    elif checkpoint is not None and not has_adapters:
        model.load_state_dict(load_model(checkpoint)[0].state_dict())
    if adapters.is_wanted:
        if config.lora.rank:  # not for adapters that bring their own settings
            limit_layers(adapters.peft_config, model, config.lora.last_layers)
        model = adapt(model, adapters.peft_config, checkpoint=checkpoint, start=adapters.start)
        if commit:
            name_base(model, config.model.path, commit)
    elif checkpoint is not None and has_adapters:
        restore_adapters(model, checkpoint)
    if checkpoint is not None and has_adapters:
        check_base(model, checkpoint)
    return model


def initial_weights(folder: Path | None, model: Any) -> Callable[[], dict[str, Any]] | None:
    """Reads the weights of the model again; None for adapters and for a model object, which no folder has."""
    if folder is None or is_adapted(model):
        return None
    return lambda: weights_of(load_model(folder)[0])


def base_dtype(config: SortedConfig, adapters: Adapters) -> torch.dtype:
    """The format in which weights are loaded: float32 if they are trained, the configured one if they are frozen."""
    if config.lora.base_dtype == "float32":
        return torch.float32
    if not adapters.is_wanted:
        raise ConfigError("lora.base_dtype = bfloat16 is for frozen weights: set lora.rank too, or remove it")
    return torch.bfloat16


def check_window(config: SortedConfig, folder: Path) -> None:
    """Refuse prompts and answers that together exceed the model's context window."""
    window, prompt, answer = read_window(folder), config.task.max_prompt_tokens, config.engine.max_new_tokens
    if window is not None and prompt + answer > window:
        raise ModelError(
            f"task.max_prompt_tokens {prompt} and engine.max_new_tokens {answer} add up to {prompt + answer}, more "
            f"than the {window} positions of the model in {shown(folder)}: lower one of them"
        )


def check_prompts(config: SortedConfig, task: Task, tokenizer: Any, tools: Sequence[Any] = ()) -> None:
    """Encode every row of a dataset that the run will use, so that a bad row is found before training starts."""
    size = task.train.size
    num_used = config.run.samples // config.learner.group_size
    stream = prompt_stream(config, task, tokenizer, tools)
    for _ in range(1 if size is None else min(size, num_used)):
        stream.take(1)


def fingerprint(config: SortedConfig, task: Task, tokenizer: Any, checkpoint: Path | None) -> RowFingerprint:
    """The fingerprint of the rows that the run will use; raises DataError if they are not those of the checkpoint."""
    stream = prompt_stream(config, task, tokenizer)
    saved = None if checkpoint is None else load_state(checkpoint).get("rows")  # older versions saved none
    if saved is not None:
        check_same_rows(saved, stream)
    return fingerprint_rows(stream, config.run.samples // config.learner.group_size)


def model_path(config: SortedConfig, commits: Commits | None = None) -> Path:
    return named_model_path(config.model.path, config.model.revision, commits)


def named_model_path(name: str, revision: str = "", commits: Commits | None = None) -> Path:
    """The folder of a model: one that the package ships or can build, by its name, any path, or an id on the hub."""
    if revision and name in EMBEDDED:
        raise ModelError(
            f"model.path {name} is not on the hub, so it has no revision {revision!r}: remove model.revision"
        )
    match name:
        case "knights-tiny":
            return knights_tiny_path()
        case "tools-tiny":
            return tools_tiny_path()
        case "smollm2-135m":
            return smollm2_path()
        case _:
            return fetch(name, key="model.path", revision=revision, commits=commits)


def model_path_here(config: SortedConfig) -> Path | None:
    """The folder of the configured model if no hub is asked for it; None if it is not on this machine."""
    if config.model.path in EMBEDDED:
        return model_path(config)
    return find_cached(config.model.path, config.model.revision)


def prompt_stream(config: SortedConfig, task: Task, tokenizer: Any, tools: Sequence[Any] = ()) -> PromptStream:
    limit, seed = config.task.max_prompt_tokens, config.run.seed
    return PromptStream(task=task, tokenizer=tokenizer, seed=seed, max_prompt_tokens=limit, tools=tools)


def heldout_prompts(config: SortedConfig, task: Task, tokenizer: Any, tools: Sequence[Any] = ()) -> list[Prompt]:
    rows = task.heldout(config.eval.prompts) if config.eval.prompts else []
    limit = config.task.max_prompt_tokens
    return [
        make_prompt(row, tokenizer, prompt_id=f"heldout/{number}", max_tokens=limit, tools=tools)
        for number, row in enumerate(rows)
    ]
