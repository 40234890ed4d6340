"""Rollouts for TRL's GRPOTrainer: one argument, `rollout_func=sorted_rollouts(...)`, and nothing else changes.

TRL calls `rollout_func` when it needs a batch. The prompts of TRL's own batch are not used: the controller takes them
from the trainer's dataset, in the order of the trainer's sampler, and answers several batches at once. So the adapter
also puts the right prompts and columns into the batch that reward functions and the completions table get. Rewards are
computed by the trainer, once per answer, while other answers are written.

TRL's loss takes each batch as sampled by the current weights. So only strategies without staleness are accepted here;
AsyncGRPOTrainer corrects for the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import IterableDataset
from transformers import TrainerCallback

from sortedrl.adapters.host import Answer, FunctionRewards, HostRun
from sortedrl.adapters.rows import RowStream, sampled
from sortedrl.adapters.trl.completions import completions_of
from sortedrl.adapters.trl.learner_metrics import KL_OF_GRPO, learner_metrics
from sortedrl.adapters.trl.settings import Sizes, Wishes, host_settings, make_config, make_engine
from sortedrl.errors import ConfigError, LearnerError
from sortedrl.records import Sample
from sortedrl.telemetry.summary import Summary
from sortedrl.weights import ModuleWeights

log = logging.getLogger(__name__)


def sorted_rollouts(
    strategy: str = "sorted-replay",
    *,
    run_dir: str | None = None,
    max_prompt_tokens: int = 512,
    engine: dict[str, Any] | None = None,
    **schedule: Any,
) -> SortedRollouts:
    """A `rollout_func` for GRPOTrainer.

    `strategy` and further keywords are keys of the configuration's section `schedule`, such as `cohort_batches` and
    `lookahead`; `engine` holds keys of its section `engine`, such as `slots` and `kind`. The ledger, events and summary
    go to `run_dir`, by default `sortedrl` in the trainer's output_dir.
    """
    wishes = Wishes(
        strategy=strategy,
        run_dir=run_dir,
        max_prompt_tokens=max_prompt_tokens,
        engine=engine or {},
        schedule=schedule,
    )
    return SortedRollouts(wishes)


class SortedRollouts:
    """Called by GRPOTrainer for each batch. A run begins with the first training batch and ends with training."""

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.summary: Summary | None = None  # of the last run that ended
        self._session: _Session | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if not trainer.model.training:
            return _generate_as_trl(prompts, trainer)
        if self._session is None:
            self._session = _Session(self.wishes, trainer, on_end=self._end)
        return self._session.next_batch(len(prompts))

    def close(self) -> None:
        """End a run whose training failed; a new call of `train` can then continue it from TRL's checkpoint."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def _end(self, summary: Summary | None) -> None:
        self.summary, self._session = summary, None


class _Session(TrainerCallback):
    """One call of `trainer.train()`."""

    def __init__(self, wishes: Wishes, trainer: Any, *, on_end: Callable[[Summary | None], None]) -> None:
        check_trainer(trainer)
        self.trainer = trainer
        self.on_end = on_end
        self.is_closed = False
        self.batch: Sequence[Sample] = ()  # the batch whose rewards TRL asks for next
        self.rewards: dict[int, torch.Tensor] = {}  # by sample: one value for each reward function
        self.extra_logs: dict[int, dict[str, Any]] = {}  # by sample: columns that reward functions logged
        self.steps_per_update, num_updates = steps_and_updates(trainer)
        sizes = Sizes(
            update_batch=trainer.args.generation_batch_size,
            siblings=trainer.num_generations,
            num_updates=num_updates,
        )
        config = make_config(trainer.args, wishes, sizes, tuple(trainer.eos_token_ids))
        check_on_policy(config.knobs.max_staleness, wishes.strategy)
        source = ModuleWeights(trainer.accelerator.unwrap_model(trainer.model))
        self.run = HostRun(
            host_settings(config, wishes, trainer.args.output_dir),
            engine=make_engine(config, source.module, trainer.processing_class),
            source=source,
            stream=RowStream(
                rows=trainer.train_dataset,
                encode=lambda prompt: trainer._tokenize_prompts([prompt])[0][0],
                order=sampled(trl_epochs(trainer)),
                max_prompt_tokens=wishes.max_prompt_tokens,
            ),
            score=self.score,
            tokenizer=trainer.processing_class,
        )
        self._calculate_rewards = trainer._calculate_rewards
        trainer._calculate_rewards = self.known_rewards
        trainer.add_callback(self)
        self.run.start(updates_done=updates_done(trainer))

    def next_batch(self, num_prompts: int) -> dict[str, Any]:
        """Report the last update and wait for the next batch."""
        if self.run.has_open_update:
            self._publish()
        batch = self.run.next_batch()
        if batch is None:
            raise LearnerError(
                "TRL asks for more batches than max_steps needs: if the checkpoint to resume from has all steps, raise "
                "max_steps; otherwise set max_steps before training starts"
            )
        assert len(batch.samples) == num_prompts, f"TRL takes {num_prompts} samples, not {len(batch.samples)}"
        self.batch = batch.samples
        trainer, metrics = self.trainer, self.trainer._metrics["train"]
        metrics["sortedrl/staleness_max"].append(float(max(s.staleness(batch.version) for s in batch.samples)))
        metrics["sortedrl/decode_steps"].append(float(self.run.decode_steps))
        end = [trainer.eos_token_ids[0]]  # TRL needs a token; an answer that failed has none
        return {
            "prompt_ids": [list(sample.prompt.tokens) for sample in batch.samples],
            "completion_ids": [sample.tokens or end for sample in batch.samples],
            "logprobs": [sample.logprobs or [0.0] for sample in batch.samples],
        }

    # ---- rewards ----------------------------------------------------------------------------------------------------

    def score(self, answers: Sequence[Answer]) -> list[FunctionRewards]:
        """Have the trainer's reward functions score complete answers; returns their weighted sums too."""
        trainer, prompts = self.trainer, [answer.prompt for answer in answers]
        tokens = [list(answer.tokens) for answer in answers]
        inputs = [{"prompt": prompt.content, **prompt.columns} for prompt in prompts]
        completions = completions_of(prompts, tokens, trainer.processing_class)
        found = self._calculate_rewards(inputs, [prompt.content for prompt in prompts], completions, tokens)
        pending = trainer._pending_extra_logs
        for place, answer in enumerate(answers):
            self.rewards[answer.sample] = found[place]
            self.extra_logs[answer.sample] = {name: values[place] for name, values in pending.items()}
        pending.clear()
        weights = trainer.reward_weights.to(found.device)
        totals = (found * weights).nansum(dim=1)
        totals[torch.isnan(found).all(dim=1)] = math.nan
        names = trainer.reward_func_names
        rows = zip(found.tolist(), totals.tolist(), strict=True)
        return [FunctionRewards.of(names, values, total) for values, total in rows]

    def known_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]
    ) -> torch.Tensor:
        """In place of the trainer's `_calculate_rewards`: the rewards of the batch, which are known already.

        TRL built `inputs` and `prompts` from its own batch. They get the prompts and columns of ours, because the
        completions table is made from them.
        """
        if not self.batch:  # an evaluation
            return self._calculate_rewards(inputs, prompts, completions, completion_ids)
        batch, self.batch = self.batch, ()
        for place, sample in enumerate(batch):
            prompts[place] = sample.prompt.content
            inputs[place].clear()
            inputs[place].update({"prompt": sample.prompt.content, **sample.prompt.columns})
            for name, value in self.extra_logs.pop(sample.id, {}).items():
                self.trainer._log_completion_extra(name, [value])
        unknown = torch.full((len(self.trainer.reward_funcs),), math.nan, device=self.trainer.accelerator.device)
        return torch.stack([self.rewards.pop(sample.id, unknown) for sample in batch])

    # ---- the end ----------------------------------------------------------------------------------------------------

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_closed:  # of an earlier call of `train`
            return
        if self.run.has_open_update:
            self._publish()
        self.close()

    def close(self) -> None:
        self.is_closed = True
        self.trainer._calculate_rewards = self._calculate_rewards
        summary = None
        try:
            summary = self.run.close()
        finally:
            self.on_end(summary)

    def _publish(self) -> None:
        logs = self.trainer.state.log_history
        last = next((entry for entry in reversed(logs) if "loss" in entry), {})
        self.run.publish(optimizer_steps=self.steps_per_update, metrics=learner_metrics(last, KL_OF_GRPO))


# ---- what the trainer asks for --------------------------------------------------------------------------------------


def check_trainer(trainer: Any) -> None:
    """Refuse settings of GRPOTrainer that the adapter cannot serve."""
    if trainer.accelerator.num_processes > 1:
        raise ConfigError("sorted_rollouts works with one training process: start one, or use AsyncGRPOTrainer")
    if trainer.use_vllm:
        raise ConfigError(
            "use_vllm=True makes TRL generate with vLLM beside our engine: leave it out, and pass sorted_rollouts "
            "engine={'kind': 'vllm'}, with 'address' for a server"
        )
    if trainer.tools or trainer.environment_factories is not None or getattr(trainer, "_is_vlm", False):
        raise ConfigError("sorted_rollouts has no tools, environments and images: leave them out")
    if isinstance(trainer.train_dataset, IterableDataset):
        raise ConfigError("sorted_rollouts needs a dataset with a length: pass a Dataset instead of an IterableDataset")


def check_on_policy(max_staleness: int | None, strategy: str) -> None:
    if max_staleness != 0:
        raise ConfigError(
            f"{strategy} trains tokens of older weights, and GRPOTrainer does not use the log-probs that would correct "
            "for them: choose sorted-replay, sorted-on-policy, sync or async-on-policy, or use AsyncGRPOTrainer"
        )


def steps_and_updates(trainer: Any) -> tuple[int, int]:
    """Optimizer steps that TRL makes of one batch (at least 1), and the batches that it will ask for."""
    args, state = trainer.args, trainer.state
    micro = args.steps_per_generation * trainer.num_iterations  # micro-batches that a batch gives
    steps = state.save_steps if args.save_strategy == "steps" else 0
    if steps and steps < state.max_steps and (steps * args.gradient_accumulation_steps) % micro:
        raise ConfigError(
            f"save_steps {steps} falls into the middle of a batch, which gives {micro} micro-batches of "
            f"{args.gradient_accumulation_steps} to a step: choose a multiple, so that nothing is trained twice"
        )
    num_micro = state.max_steps * args.gradient_accumulation_steps
    return max(1, micro // args.gradient_accumulation_steps), math.ceil(num_micro / micro)


def updates_done(trainer: Any) -> int:
    """Batches that were trained before TRL's checkpoint, from which it resumes; 0 in a new run."""
    micro = trainer.args.steps_per_generation * trainer.num_iterations
    done, rest = divmod(trainer.state.global_step * trainer.args.gradient_accumulation_steps, micro)
    if rest:
        raise ConfigError(
            f"TRL's checkpoint at step {trainer.state.global_step} is in the middle of a batch: resume from one that "
            f"is not"
        )
    return done


def trl_epochs(trainer: Any) -> Callable[[], list[int]]:
    """The row numbers of the trainer's epochs, one epoch at each call, without the repetitions that TRL needs."""
    sampler = trainer._get_train_sampler()
    siblings, repeats = trainer.num_generations, trainer.num_iterations * trainer.args.steps_per_generation

    def epoch() -> list[int]:
        numbers, size = list(sampler), trainer.args.generation_batch_size
        return [n for start in range(0, len(numbers), size * repeats) for n in numbers[start : start + size : siblings]]

    return epoch


def _generate_as_trl(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Answers for an evaluation, as TRL makes them without a `rollout_func`."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    tokens, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations_eval)
    return {"prompt_ids": prompt_ids, "completion_ids": tokens, "logprobs": logprobs}
