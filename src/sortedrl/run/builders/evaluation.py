"""Builds an evaluation outside of training: a model, an engine and reward workers, but no learner and no files.

`SortedTrainer.evaluate` calls it, before or after training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.external.hub import Commits
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.engine import build_engine, build_sampling
from sortedrl.run.builders.environment import build_environment, find_environment
from sortedrl.run.builders.generation import stop_token_ids
from sortedrl.run.builders.parts import (
    build_model,
    build_rewards,
    choose_adapters,
    heldout_prompts,
    model_path,
    own_tokenizer,
    prompt_stream,
)
from sortedrl.run.builders.task import build_task
from sortedrl.run.evaluate import Evaluator
from sortedrl.tasks.base import DatasetTask, RowSequence, Task
from sortedrl.tasks.reward_model import load_reward_models
from sortedrl.telemetry.events import Emit
from sortedrl.weights import ModuleWeights


@contextmanager
def standalone_evaluator(
    config: SortedConfig,
    *,
    emit: Emit,
    task: Task | None = None,
    rows: RowSequence | None = None,
    model: Any = None,
    tokenizer: Any = None,
    peft_config: Any = None,
    commits: Commits | None = None,
) -> Iterator[Evaluator]:
    """An evaluator of `model`, or of the configured one, on the task's held-out rows or on `rows`.

    `peft_config` is for a model that has yet to get its adapters; `commits` are those of a run to repeat.
    """
    commits = dict(commits or {})
    torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    task = task or build_task(config, commits)
    if rows is not None:
        task = DatasetTask(rows=rows, reward_funcs=task.reward_funcs, eval_rows=rows, name=task.name)
    load_reward_models(task.reward_funcs, commits)
    folder = model_path(config, commits) if model is None else None
    tokenizer = tokenizer or own_tokenizer(config, folder, None)
    if folder is not None:
        model = build_model(config, folder, choose_adapters(config, peft_config, commits), None)
    spec = find_environment(config, task)
    tools = () if spec is None else spec.tools
    prompts = heldout_prompts(config, task, tokenizer, tools)
    if not prompts:
        raise ConfigError("there are no held-out prompts: pass eval_dataset, or set eval.prompts and task.eval_path")
    weights = ModuleWeights(cast("Any", model))
    with ExitStack() as stack:
        engine = build_engine(config, weights.module, config.knobs, decode=tokenizer.decode)
        stack.callback(engine.close)
        rewards = stack.enter_context(build_rewards(config, task.reward_funcs, is_heldout=True))
        rewards.start()
        environment, scorer = None, SampleScorer(pool=rewards, tokenizer=tokenizer)
        if spec is not None:
            environment = build_environment(config, spec, prompt_stream(config, task, tokenizer, tools))
            stack.callback(environment.close)
            scorer = environment.heldout_scorer(
                SampleScorer(pool=rewards, tokenizer=tokenizer, conversation=environment.dialect.conversation)
            )
        yield Evaluator(
            engine=engine,
            prompts=prompts,
            scorer=scorer,
            tools=None if environment is None else environment.answer_turns(),
            has_environment_reward=spec is not None and spec.has_reward,
            sampling=build_sampling(config, stop_token_ids(model, tokenizer)),
            budget=config.engine.max_new_tokens,
            seed=config.run.seed,
            clock=WallClock(),
            emit=emit,
            right_above=config.eval.right_above,
            num_samples=config.eval.samples,
            group_column=task.group_column,
        )
