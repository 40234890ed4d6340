"""Rollouts for TRL's AsyncGRPOTrainer: one object is its `rollout_worker` and its `weight_transfer`.

    worker = sorted_worker("async-on-policy", model=MODEL, reward_funcs=[...], args=args, train_dataset=rows)
    trainer = AsyncGRPOTrainer(MODEL, args=args, train_dataset=rows, rollout_worker=worker, weight_transfer=worker)
    worker.attach(trainer)

The trainer drains a queue of scored samples and sends its weights after each step. Here the queue gets one update's
samples at a time, and the weights are what ends the update. Samples carry their log-probs token by token, so strategies
with staleness are corrected by the trainer's loss.

`attach` replaces the trainer's data loader: accelerate's fetches a micro-batch ahead, which a schedule without overlap
cannot give before the weights of the running update are there, and both would wait for each other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from sortedrl.adapters.host import Answer, FunctionRewards, HostRun
from sortedrl.adapters.rows import RowStream, shuffled
from sortedrl.adapters.trl.completions import completions_of
from sortedrl.adapters.trl.learner_metrics import KL_OF_ASYNC_GRPO, learner_metrics
from sortedrl.adapters.trl.settings import Sizes, Wishes, host_settings, make_config, make_engine
from sortedrl.errors import ConfigError, RewardError
from sortedrl.records import Batch, Sample
from sortedrl.tasks.base import RowSequence, encode_prompt
from sortedrl.telemetry.summary import Summary
from sortedrl.weights import ModuleWeights

log = logging.getLogger(__name__)

CHECK_S = 0.2  # how often a trainer that waits for samples looks for an error


def sorted_worker(
    strategy: str = "async-on-policy",
    *,
    model: Any,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
    args: Any,
    train_dataset: RowSequence,
    processing_class: Any = None,
    run_dir: str | None = None,
    max_prompt_tokens: int = 512,
    engine: dict[str, Any] | None = None,
    **schedule: Any,
) -> SortedWorker:
    """A worker for AsyncGRPOTrainer, from the arguments that the trainer gets too.

    `strategy` and further keywords are keys of the configuration's section `schedule`; `engine` holds keys of its
    section `engine`. The ledger, events and summary go to `run_dir`, by default `sortedrl` in args.output_dir.
    """
    wishes = Wishes(
        strategy=strategy,
        run_dir=run_dir,
        max_prompt_tokens=max_prompt_tokens,
        engine=engine or {},
        schedule=schedule,
    )
    functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    return SortedWorker(wishes, model, functions, args, train_dataset, processing_class)


class SampleQueue(queue.Queue[RolloutSample]):
    """The queue that the trainer drains. A trainer that waits for a sample learns of an error at once."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self._check()
            left = until - time.monotonic()
            try:
                return super().get(block, min(max(left, 0.0), CHECK_S))
            except queue.Empty:
                if not block or left <= CHECK_S:
                    raise


class SortedWorker:
    """TRL's `RolloutWorkerProtocol` and `WeightTransferProtocol` over one run of ours."""

    def __init__(
        self,
        wishes: Wishes,
        model: Any,
        reward_funcs: Sequence[Callable[..., Any]],
        args: Any,
        train_dataset: RowSequence,
        processing_class: Any = None,
    ) -> None:
        check_args(args)
        if not reward_funcs:
            raise ConfigError("sorted_worker needs at least one reward function")
        self.rollout_buffer: Any = SampleQueue(lambda: self._run.check())
        self.metrics_queue: Any = queue.Queue()
        self.reward_funcs = reward_funcs
        self.names = [getattr(function, "__name__", type(function).__name__) for function in reward_funcs]
        self.summary: Summary | None = None
        self._args = args
        self._model, self._tokenizer = load(model, processing_class)
        self._parameters = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        sizes = Sizes(update_batch=samples_per_sync(args), siblings=args.num_generations, num_updates=num_updates(args))
        ends = end_tokens(self._model, self._tokenizer)
        config = make_config(args, wishes, sizes, ends)
        check_staleness(config.knobs.max_staleness, config.knobs.cohort_updates, args.max_staleness, wishes.strategy)
        self._rewards: dict[int, list[float]] = {}  # by sample: one value for each reward function
        self._feeder: threading.Thread | None = None
        self._trainer: Any = None
        self._sync_count = 1  # TRL's count of weight syncs when rollout starts
        self._offset = 1  # TRL's version minus ours
        self._run = HostRun(
            host_settings(config, wishes, args.output_dir),
            engine=make_engine(config, self._model, self._tokenizer),
            source=ModuleWeights(self._model),
            stream=RowStream(
                rows=train_dataset,
                encode=lambda prompt: encode_prompt(prompt, self._tokenizer, "of the dataset"),
                order=shuffled(len(train_dataset), args.seed),
                max_prompt_tokens=wishes.max_prompt_tokens,
            ),
            score=self._score,
            tokenizer=self._tokenizer,
        )

    def attach(self, trainer: Any) -> None:
        """Make the trainer take its micro-batches one by one, and continue a run that it resumes."""
        if trainer.accelerator.num_processes > 1:
            raise ConfigError("sorted_worker works with one training process: start one")
        if trainer.rollout_worker is not self or trainer.weight_transfer is not self:
            raise ConfigError("pass the worker to the trainer as rollout_worker and as weight_transfer")
        get_loader = trainer.get_train_dataloader

        def get_train_dataloader() -> Any:
            loader = get_loader()
            return getattr(loader, "base_dataloader", loader)

        self._trainer, trainer.get_train_dataloader = trainer, get_train_dataloader

    # ---- the rollout worker -----------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._trainer is None:
            raise ConfigError("call worker.attach(trainer) before training")
        updates_done, rest = divmod(self._trainer.state.global_step, self._args.weight_sync_steps)
        if rest:
            raise ConfigError(
                f"TRL's checkpoint at step {self._trainer.state.global_step} is between two weight syncs: resume from "
                "one that is not"
            )
        self._offset = self._sync_count - updates_done
        self._run.start(updates_done=updates_done)
        self._feeder = threading.Thread(target=self._feed, name="sortedrl-feed", daemon=True)
        self._feeder.start()

    def stop(self) -> None:
        self.summary = self._run.close()
        if self._feeder is not None:
            self._feeder.join(10.0)

    def update_model_version(self, model_version: int) -> None:
        """TRL's count of weight syncs. Ours follows from `send_weights`, and continues over a resume."""
        if self._feeder is None:
            self._sync_count = model_version

    def check_health(self, stale_after_s: float) -> None:
        self._run.check()

    # ---- the weight transfer ----------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """The weights are copied within this process, so there is nothing to set up."""

    def pause(self) -> None:
        """The controller pauses rollout itself, where its schedule needs it."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the trainer's weights and publish them. The first call comes before rollout starts."""
        with torch.no_grad():
            for name, tensor in iterator:
                self._parameters[name].copy_(tensor)
        if self._feeder is not None:
            metrics = learner_metrics(self._trainer._metrics["train"], KL_OF_ASYNC_GRPO)
            self._run.publish(optimizer_steps=self._args.weight_sync_steps, metrics=metrics)

    def resume(self) -> None:
        """Rollout goes on by itself once the weights are published."""

    def destroy(self) -> None:
        """`stop` has ended the run."""

    # ---- batches ----------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Put batches into the queue; answers are scored in this thread meanwhile."""
        try:
            while (batch := self._run.next_batch()) is not None:
                for sample in rollout_samples(batch, self._rewards, self.names, self._tokenizer):
                    sample.model_version += self._offset
                    self.rollout_buffer.put(sample)
        except BaseException as error:
            self._run.fail(error)  # `check_health` raises it in the trainer's thread

    def _score(self, answers: Sequence[Answer]) -> list[FunctionRewards]:
        prompts, tokens = [answer.prompt for answer in answers], [list(answer.tokens) for answer in answers]
        completions = completions_of(prompts, tokens, self._tokenizer)
        columns = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
        given = {"prompts": [p.content for p in prompts], "completions": completions, "completion_ids": tokens}
        rows = [call(function, **given, **columns) for function in self.reward_funcs]
        for function, row in zip(self.names, rows, strict=True):
            if len(row) != len(answers):
                raise RewardError(f"{function} returned {len(row)} rewards for {len(answers)} answers: return one each")
        totals = []
        for answer, values in zip(answers, zip(*rows, strict=True), strict=True):
            kept = [math.nan if value is None else float(value) for value in values]
            self._rewards[answer.sample] = kept
            total = math.nan if all(map(math.isnan, kept)) else float(np.nansum(kept))
            totals.append(FunctionRewards.of(self.names, kept, total))
        return totals


def rollout_samples(
    batch: Batch, rewards: dict[int, list[float]], names: Sequence[str], tokenizer: Any
) -> list[RolloutSample]:
    """A batch as TRL's samples: each with the advantage over its siblings, and the version of its oldest token."""
    advantages = group_advantages(batch.samples)
    prompts = [sample.prompt for sample in batch.samples]
    completions = completions_of(prompts, [sample.tokens for sample in batch.samples], tokenizer)
    samples = []
    for sample, completion, advantage in zip(batch.samples, completions, advantages, strict=True):
        num_prompt, tokens = len(sample.prompt.tokens), sample.tokens
        values = rewards.pop(sample.id, [math.nan] * len(names))
        reward = math.nan if sample.reward is None else sample.reward
        oldest = batch.version if sample.oldest_version is None else sample.oldest_version
        samples.append(
            RolloutSample(
                prompt=as_messages(sample.prompt.content, "user"),
                completion=as_messages(completion, "assistant"),
                input_ids=np.array([*sample.prompt.tokens, *tokens], dtype=np.int64),
                completion_mask=np.array([0] * num_prompt + [int(kept) for kept in sample.is_sampled], dtype=np.int64),
                old_log_probs=np.array([0.0] * num_prompt + sample.logprobs, dtype=np.float32),
                advantage=advantage,
                model_version=oldest,
                group_id=sample.id - sample.index,
                metrics={"reward": reward, **{f"rewards/{n}": v for n, v in zip(names, values, strict=True)}},
                enqueued_at=time.time(),
            )
        )
    return samples


def group_advantages(samples: Sequence[Sample]) -> list[float]:
    """Rewards minus the mean of their group, over its standard deviation; 0 for an answer without a reward."""
    groups: dict[tuple[int, str], list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(math.nan if sample.reward is None else sample.reward)
    advantages = []
    for sample in samples:
        known = [reward for reward in groups[sample.group] if not math.isnan(reward)]
        if sample.reward is None or math.isnan(sample.reward):
            advantages.append(0.0)
            continue
        advantages.append((sample.reward - float(np.mean(known))) / (float(np.std(known)) + 1e-8))
    return advantages


def as_messages(content: Any, role: str) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"role": role, "content": content}]


def call(function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """The rewards of a plain or an async reward function."""
    found = function(**arguments)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


# ---- what the trainer asks for --------------------------------------------------------------------------------------


def samples_per_sync(args: Any) -> int:
    """Samples that the trainer takes from one weight sync to the next."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.weight_sync_steps


def num_updates(args: Any) -> int:
    return math.ceil(args.max_steps / args.weight_sync_steps)


def check_args(args: Any) -> None:
    """Refuse arguments under which the number of samples of a step is not known before."""
    if args.max_steps <= 0:
        raise ConfigError("sorted_worker needs to know how long it trains: set max_steps")
    if args.token_budget is None or args.token_budget > 0:
        raise ConfigError(
            "token_budget makes batches whose number of samples depends on their lengths: set token_budget=0"
        )


def check_staleness(bound: int | None, updates: int | None, allowed: int, strategy: str) -> None:
    """TRL drops samples that are staler than its own limit; a sample that is dropped would be lost."""
    most = bound if bound is not None else (None if updates is None else updates)
    if most is None or most > allowed:
        shown = "any number of" if most is None else str(most)
        raise ConfigError(
            f"{strategy} may train answers that are {shown} versions old, and TRL drops those older than "
            f"max_staleness={allowed}: raise max_staleness in AsyncGRPOConfig, or set a smaller max_staleness here"
        )


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = named if isinstance(named, list) else [named]
    return tuple(sorted({int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None}))


def load(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The model that answers are written with, from a folder, an id or an object, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if isinstance(model, str):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if tokenizer is None:
        raise ConfigError("a model object needs its tokenizer: pass processing_class")
    return model.requires_grad_(False).eval(), tokenizer
