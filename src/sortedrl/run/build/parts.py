"""From a configuration to the objects of a run: with the other build files, the only place that names concrete classes.

`trainer.py` calls `build_run`. Everything that can be wrong with the configuration, the task or the model is found
here, before the first token is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sortedrl.buffer import Buffer
from sortedrl.run.build.engine import build_engine, build_sampling, engine_model
from sortedrl.run.build.learner import RunLearner, build_learner
from sortedrl.run.build.task import build_task
from sortedrl.clock import Clock
from sortedrl.config import SortedConfig
from sortedrl.controller import Controller
from sortedrl.engine.base import Engine, EngineStats, InFlight
from sortedrl.errors import ConfigError, ModelError
from sortedrl.run.evaluate import Evaluator
from sortedrl.run.checkpoint import load_model
from sortedrl.learner.lora import ADAPTER_FOLDER, adapt, check_base, check_peft_config, peft_config_of, restore_adapters
from sortedrl.learner.model import check_model_folder, load_tokenizer, read_window
from sortedrl.learner.smollm2 import smollm2_path
from sortedrl.records import Prompt
from sortedrl.reward.pool import RewardCall, RewardPool
from sortedrl.reward.scorer import SampleScorer
from sortedrl.tasks.base import PromptStream, RewardFunc, Task, make_prompt
from sortedrl.tasks.loader import SampleLoader
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry.events import Emit, RewardCalled
from sortedrl.telemetry.trackers import check_trackers
from sortedrl.weights import is_adapted


@dataclass(slots=True, kw_only=True)
class RunParts:
    """What a run consists of. `close` ends processes and threads."""

    task: Task
    model: Any
    tokenizer: Any
    engine: Engine
    learner: RunLearner
    rewards: RewardPool
    heldout_rewards: RewardPool  # its own, so that an evaluation never takes scores of training
    evaluator: Evaluator
    loader: SampleLoader
    controller: Controller
    carried: EngineStats = field(default_factory=EngineStats)  # counted before the run was resumed

    def stats(self) -> EngineStats:
        """The engine's counters over the whole run, without what evaluation caused."""
        return self.engine.stats().minus(self.evaluator.used).plus(self.carried)

    def close(self) -> None:
        self.rewards.close()
        self.heldout_rewards.close()
        self.engine.close()
        self.learner.close()  # the connection to Ray that both may use is its own


def build_run(
    config: SortedConfig,
    *,
    emit: Emit,
    clock: Clock,
    should_stop: Callable[[], bool],
    task: Task | None = None,
    model: Any = None,
    tokenizer: Any = None,
    checkpoint: Path | None = None,
    peft_config: Any = None,
) -> RunParts:
    """Make every part of a run; a task, model or tokenizer that is given replaces the configured one.

    `checkpoint`: the folder whose weights are taken instead, those of a given model included. `peft_config`: adapters
    to train in place of all weights, other than those that the configuration may ask for.
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
    heldout = heldout_prompts(config, task, tokenizer)
    model = build_model(config, model, peft_config, checkpoint)
    knobs = config.knobs
    learner = build_learner(config, model)
    try:
        engine = build_engine(config, engine_model(config, model, learner.source), knobs, decode=tokenizer.decode)
    except BaseException:
        learner.close()
        raise
    sampling = build_sampling(config, stop_token_ids(model, tokenizer))
    evaluator = Evaluator(
        engine=engine,
        prompts=heldout,
        scorer=SampleScorer(pool=heldout_rewards, tokenizer=tokenizer),
        sampling=sampling,
        budget=config.engine.max_new_tokens,
        seed=config.run.seed,
        clock=clock,
        emit=emit,
        right_above=config.eval.right_above,
        num_samples=config.eval.samples,
        group_column=task.group_column,
        every_samples=config.eval.every_samples,
    )
    loader = SampleLoader(
        stream=prompt_stream(config, task, tokenizer),
        seed=config.run.seed,
        total_samples=config.run.samples,
        siblings=config.learner.group_size,
        max_new_tokens=config.engine.max_new_tokens,
    )
    controller = Controller(
        buffer=Buffer(grouped=config.is_grouped),
        knobs=knobs,
        engine=engine,
        learner=learner,
        scorer=SampleScorer(
            pool=rewards,
            tokenizer=tokenizer,
            on_skipped=learner.skip,
            on_call=reward_call_emitter(emit, clock),
        ),
        load_samples=loader.load,
        total_samples=config.run.samples,
        sampling=sampling,
        clock=clock,
        emit=emit,
        replay_tolerance=config.engine.replay_tolerance,
        in_flight=InFlight(config.engine.in_flight),
        score_grace_s=config.reward.grace_s,
        should_stop=lambda: should_stop() or rewards.failure is not None,
        pause=evaluator,
    )
    parts = RunParts(
        task=task,
        model=model,
        tokenizer=tokenizer,
        engine=engine,
        learner=learner,
        rewards=rewards,
        heldout_rewards=heldout_rewards,
        evaluator=evaluator,
        loader=loader,
        controller=controller,
    )
    try:  # last, so that no worker is left behind when something else is wrong
        rewards.start()
    except BaseException:
        parts.close()
        raise
    return parts


def reward_call_emitter(emit: Emit, clock: Clock) -> Callable[[RewardCall], None]:
    """A callback that reports each finished call of a reward function as a RewardCalled event."""

    def report(call: RewardCall) -> None:
        lag_s = time.monotonic() - call.ended
        emit(
            RewardCalled(
                t=clock.now(), worker=call.worker, seconds=call.seconds, lag_s=lag_s, num_samples=call.num_samples
            )
        )

    return report


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
    """The adapters that are asked for, checked; None when all weights are to be trained."""
    configured = peft_config_of(config.lora)
    if configured is not None and peft_config is not None:
        raise ConfigError("lora.rank and peft_config both ask for adapters: leave one of them out")
    chosen = configured or peft_config
    if chosen is not None:
        check_peft_config(chosen)
    return chosen


def own_tokenizer(config: SortedConfig, model: Any, checkpoint: Path | None) -> Any:
    """The tokenizer beside the weights, which are not read yet."""
    if model is not None:
        raise ConfigError("a model object needs its tokenizer: pass processing_class=tokenizer")
    folder = check_model_folder(checkpoint or model_path(config))
    return load_tokenizer(folder)


def build_model(config: SortedConfig, model: Any, peft_config: Any, checkpoint: Path | None) -> Any:
    """The model to train: the given or configured one, with adapters if any, and the weights of a checkpoint."""
    has_adapters = peft_config is not None or is_adapted(model)
    if checkpoint is not None and (checkpoint / ADAPTER_FOLDER).is_dir() and not has_adapters:
        raise ConfigError(f"{checkpoint} is of a run with adapters: pass its peft_config again")
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
    """Refuse prompts and answers that are longer together than what the model can look at."""
    window, prompt, answer = read_window(folder), config.task.max_prompt_tokens, config.engine.max_new_tokens
    if window is not None and prompt + answer > window:
        raise ModelError(
            f"task.max_prompt_tokens {prompt} and engine.max_new_tokens {answer} are {prompt + answer} together, more "
            f"than the {window} positions of the model in {folder}: lower one of them"
        )


def check_prompts(config: SortedConfig, task: Task, tokenizer: Any) -> None:
    """Encode every row of a dataset that the run will use: a bad one is to be found before training, not in it."""
    size = task.train.size
    num_used = config.run.samples // config.learner.group_size
    stream = prompt_stream(config, task, tokenizer)
    for _ in range(1 if size is None else min(size, num_used)):
        stream.take(1)


def model_path(config: SortedConfig) -> Path:
    return named_model_path(config.model.path)


def named_model_path(name: str) -> Path:
    """The folder of a model that is called by a name of this package's, or by its path."""
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
    """Every token that ends an answer, by the model's generation settings and its tokenizer."""
    named = [tokenizer.eos_token_id, getattr(getattr(model, "generation_config", None), "eos_token_id", None)]
    flat = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
    return tuple(sorted({int(token) for token in flat if token is not None}))
