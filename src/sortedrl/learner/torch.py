"""The learner on PyTorch: turns a batch into advantages, packed micro-batches, gradients and AdamW steps.

It moves the model to `learner.device`, and the reference model, the critic and every batch with it (`device.py`).

The controller calls `start`. Without overlap the update is finished when `start` returns. With overlap a worker thread
runs it while engines continue, and `source` returns snapshots, so that engines never sample from half-updated weights.

Guarantees:
- advantages come from the whole batch, mini-batches follow the batch's order, and the size of micro-batches changes no
  result;
- a sample without tokens counts in its group's statistics and nowhere else;
- a step whose loss or gradient is not finite is not taken, with a warning; after three in a row the batch is saved and
  the run stops. It also stops when a step makes weights that are not finite;
- if gradients do not fit in memory, they are computed again in micro-batches of half the size, before any weight moves;
- the module's train or eval mode and its attention are restored after every update, also after a failed one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from sortedrl.errors import ConfigError, LearnerError, first_line
from sortedrl.external.plugins import name_of
from sortedrl.learner.advantage import AdvantageEstimator
from sortedrl.learner.algorithms import advantage_function_of, needs_more_siblings, objective_of
from sortedrl.learner.base import UpdateResult
from sortedrl.learner.critic import Critic, value_loss
from sortedrl.learner.device import choose_device, to_host
from sortedrl.learner.finite_weights import check_update
from sortedrl.learner.logprobs import LogprobScorer, Scores
from sortedrl.learner.loss import divergence, policy_loss
from sortedrl.learner.loss_inputs import (
    LossInputs,
    PerToken,
    kl_penalties,
    less_penalties,
    mini_batches,
    shaped_rewards,
    split_by_sample,
)
from sortedrl.learner.memory import (
    Shortage,
    collect_and_release,
    is_out_of_memory,
    keep_freed_blocks,
    release_free_memory,
    try_pass,
)
from sortedrl.learner.nonfinite_dump import try_to_save
from sortedrl.learner.offload import Offload
from sortedrl.learner.optimizer import LearnerSettings, learning_rate, make_optimizer
from sortedrl.learner.pack import MicroBatch, check_packing, pack, packed_attention
from sortedrl.learner.precision import pass_precision
from sortedrl.learner.reference import Reference
from sortedrl.learner.update_metrics import StepMetrics, TokenFigures, UpdateMetrics
from sortedrl.learner.update_runner import UpdateRunner
from sortedrl.records import Batch, Sample
from sortedrl.weights import ModuleWeights

_MAX_SKIPPED = 3  # training stops after this many consecutive steps that are not finite

log = logging.getLogger(__name__)


class TorchLearner:
    """Trains a transformers causal language model in place.

    `temperature` is the sampling temperature. If a batch stops the run, it is saved in `inspect_dir`. `shares_device`:
    between updates an engine needs the device's memory that is free.
    """

    _memory_remedy = "lower engine.max_new_tokens, or use a smaller model or a larger machine"

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        *,
        temperature: float,
        overlap: bool = False,
        inspect_dir: Path | None = None,
        shares_device: bool = False,
    ) -> None:
        self.objective = objective_of(settings)
        if needs_more_siblings(settings):
            raise ConfigError(
                f"learner.group_size is {settings.group_size}, but {name_of(settings.algorithm)} compares siblings: "
                "set it to 2 or more, or use reinforce++"
            )
        self.model = model
        self.settings = settings
        self.device = self._choose_device()
        self._place_model()
        keep_freed_blocks()
        self.temperature = temperature
        self.inspect_dir = inspect_dir
        self._scorer = LogprobScorer(temperature, is_fp32=settings.fp32_head)
        chosen = getattr(settings, "advantage", None)
        self.advantages = AdvantageEstimator(
            *advantage_function_of(self.objective.algorithm, settings.group_size, settings.advantage_scope, chosen)
        )
        self.critic = Critic(model) if self.objective.algorithm.has_critic else None
        self.reference = Reference(model) if self.objective.has_reference else None
        self._place_weights()
        self.optimizer = make_optimizer(model, self.critic, settings)
        self.num_samples = 0  # trained so far
        self.num_steps = 0
        self.num_skipped = 0
        self._skipped_in_row = 0
        self._micro_tokens = settings.micro_tokens  # lowered when memory runs out
        if settings.recompute:
            is_offloaded = settings.offload_activations and self.device.type != "cpu"  # there, the host is the device
            recompute_layers(model, is_offloaded=is_offloaded)
        self._live = ModuleWeights(model)
        self._has_overlap = overlap
        self._source = self._live.snapshot() if overlap else self._live
        self._runner = UpdateRunner(overlap=overlap)
        self._offload = self._make_offload()
        self._shares_device = shares_device
        self._leave_device()

    @property
    def source(self) -> ModuleWeights:
        """The live module, or with overlap a snapshot taken at the end of the last finished update."""
        return self._source

    def start(self, batch: Batch) -> Future[UpdateResult]:
        assert batch.samples, f"update {batch.update} has no samples"
        return self._runner.start(lambda: self._update(batch))

    def close(self) -> None:
        self._runner.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything except the model's weights: tensors under "optimizer", plain JSON values elsewhere."""
        self._runner.assert_idle()
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        for name, value in self._extra_tensors().items():
            tensors[f"{name}/value"] = value
        counters = {
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "skipped_in_row": self._skipped_in_row,
        }
        return {"optimizer": tensors, "advantage": self.advantages.state_dict(), "counters": counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = self._parameters()
        loaded: dict[str, dict[str, Tensor]] = {}
        extra: dict[str, Tensor] = {}
        for path, value in state["optimizer"].items():
            name, _, key = path.rpartition("/")
            if key == "value":
                extra[name] = value
                continue
            if name not in parameters:
                raise LearnerError(
                    f"the optimizer state names {name!r}, which the model does not have: load the model that it was "
                    "saved with"
                )
            if key != "step" and value.shape != parameters[name].shape:
                raise LearnerError(
                    f"the optimizer state of {name!r} has another shape than the model's: load the model that it was "
                    "saved with"
                )
            loaded.setdefault(name, {})[key] = value
        self._load_extra(extra)
        self.optimizer.state.clear()
        for name, values in loaded.items():
            device = parameters[name].device
            self.optimizer.state[parameters[name]] = {key: value.clone().to(device) for key, value in values.items()}
        self.advantages.load_state_dict(state["advantage"])
        counters = state["counters"]
        self.num_samples, self.num_steps = counters["num_samples"], counters["num_steps"]
        self.num_skipped, self._skipped_in_row = counters["num_skipped"], counters["skipped_in_row"]
        self._renew_snapshot()

    def _renew_snapshot(self) -> None:
        if self._has_overlap:
            self._source = self._live.snapshot()

    def _choose_device(self) -> torch.device:
        return choose_device(self.settings.device, self.model)

    def _place_model(self) -> None:
        """Move the model to the device, before reference and critic are made from it."""
        self.model.to(self.device)
        check_packing(self.model)

    def _make_offload(self) -> Offload | None:
        """What moves the learner off its device between updates, if the settings ask for it."""
        if not self.settings.offload:
            return None
        modules: list[torch.nn.Module] = [self.model]
        if self.critic is not None:
            modules.append(self.critic)
        if self.reference is not None:
            with self.reference.module() as module:
                modules.append(module)  # of a peft model, the model itself
        return Offload(modules, self.optimizer, self.device)

    def _place_weights(self) -> None:
        """A hook for learners that move the weights elsewhere before the optimizer is made."""

    def _precision(self) -> AbstractContextManager[object]:
        """The context for one pass."""
        return pass_precision(self.settings.dtype, self.model)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters of the model and the critic, by name."""
        named = dict(self.model.named_parameters())
        if self.critic is not None:
            named |= {f"critic.{name}": parameter for name, parameter in self.critic.named_parameters()}
        return named

    def _extra_tensors(self) -> dict[str, Tensor]:
        """The weights of critic and reference model, by name: they are saved with the state, not with the model."""
        tensors = {} if self.critic is None else {f"critic.{k}": v.data for k, v in self.critic.named_parameters()}
        if self.reference is not None:
            tensors |= {f"reference.{name}": value for name, value in self.reference.tensors().items()}
        return tensors

    @torch.no_grad()
    def _load_extra(self, loaded: dict[str, Tensor]) -> None:
        own = self._extra_tensors()
        if {name: value.shape for name, value in own.items()} != {name: v.shape for name, v in loaded.items()}:
            raise LearnerError(
                "the saved critic or reference model does not fit: resume with the model, learner.algorithm and "
                "learner.kl_coef that the run was started with"
            )
        for name, value in own.items():
            value.copy_(loaded[name])

    def _update(self, batch: Batch) -> UpdateResult:
        """Train on the batch, with the model set up for training and restored afterwards."""
        if self._offload is not None:
            self._offload.bring_back()
        was_training = self.model.training
        self.model.eval()  # with dropout, log-probs would differ from those at sampling
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # it recomputes activations in train mode only
                module.training = module.gradient_checkpointing
        try:
            with packed_attention(self.model):
                result = self._train(batch)
        finally:
            self.model.train(was_training)
            self.optimizer.zero_grad()
            self._leave_device()
        self._check_update(batch, result)
        self._renew_snapshot()
        return result

    def _leave_device(self) -> None:
        """Let an engine on the same device have what the next update does not need meanwhile."""
        if self._offload is not None:
            self._offload.leave()
        elif self._shares_device:
            release_free_memory()  # the allocator keeps as much as the largest pass has used

    def _check_update(self, batch: Batch, result: UpdateResult) -> None:
        check_update(batch.update, result, self._parameters().items())

    def _train(self, batch: Batch) -> UpdateResult:
        inputs, metrics = self._prepare(batch)
        self.num_samples += len(batch.samples)
        rate = learning_rate(self.settings, batch.progress, self.num_samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        totals = UpdateMetrics()
        for _ in range(self.settings.inner_epochs):
            for indices in mini_batches(len(batch.samples), self.settings.inner_steps):
                self._step(batch, inputs, indices, totals)
        self.num_steps += totals.num_steps
        self.num_skipped += totals.num_skipped
        totals.tokens = self._all_tokens(totals.tokens)
        num_tokens = float(sum(sample.num_tokens for sample in batch.samples))
        is_degenerate = any(value for name, value in metrics.items() if name.startswith("degenerate_all"))
        metrics |= {
            "lr": rate,
            "num_tokens": num_tokens,
            "degenerate_learned": float(is_degenerate and totals.num_steps > 0),
            "degenerate_passed_over": float(is_degenerate and totals.num_steps == 0),
            **totals.metrics(),
        }
        return UpdateResult(optimizer_steps=totals.num_steps, metrics=metrics)

    def _all_tokens(self, tokens: list[TokenFigures]) -> list[TokenFigures]:
        """The tokens that the update's metrics are about; a hook for learners that computed a share of them."""
        return tokens

    def _prepare(self, batch: Batch) -> tuple[LossInputs, dict[str, float]]:
        """Compute the loss inputs that stay fixed during the update, before any weight moves; with metrics."""
        objective, samples = self.objective, batch.samples
        reference = self._score_reference(samples) if self.reference is not None else None
        rewards = shaped_rewards(samples, objective)
        penalties = kl_penalties(samples, objective, reference) if objective.kl_in == "reward" and reference else {}
        if self.critic is None:
            rewards = less_penalties(rewards, penalties)
        advantages, metrics = self.advantages.estimate(samples, rewards)
        inputs = LossInputs.of(batch, objective, advantages, reference)
        if self.critic is not None or objective.needs_start_logprobs:
            inputs.start, values = self._score(self.model, samples, inputs.learned(range(len(samples))))
            if self.critic is not None:
                inputs.add_values(objective, values, rewards, penalties)
        metrics["masked_samples"] = float(sum(inputs.is_masked))
        metrics["filtered_samples"] = float(sum(inputs.is_filtered))
        return inputs, metrics

    def _score_reference(self, samples: Sequence[Sample]) -> PerToken:
        assert self.reference is not None, "the learner has no reference model"
        answered = [index for index, sample in enumerate(samples) if sample.num_sampled]
        with self.reference.module() as module, packed_attention(module):
            return self._score(module, samples, answered, is_policy=False)[0]

    @torch.no_grad()
    def _score(
        self, module: Any, samples: Sequence[Sample], indices: Sequence[int], *, is_policy: bool = True
    ) -> tuple[PerToken, PerToken]:
        """Log-probs of the answers under a module; and the critic's values, if the module is the policy."""
        logprobs: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}

        def idle(micro: MicroBatch) -> None:
            self._forward(module, micro, has_values=is_policy)

        def score(micro: MicroBatch) -> None:
            scores, values_a = self._forward(module, micro, has_values=is_policy)
            logprobs.update(split_by_sample(micro, scores.logprobs_a))
            if values_a is not None:
                values.update(split_by_sample(micro, values_a))

        def begin() -> None:
            logprobs.clear()
            values.clear()

        self._run_micro_batches(samples, indices, score, begin=begin, idle=idle)
        return logprobs, values

    def _forward(self, module: Any, micro: MicroBatch, *, has_values: bool) -> tuple[Scores, Tensor | None]:
        """Scores of a micro-batch's answer tokens under a module; and the critic's values, if they are asked for."""
        critic = self.critic if has_values else None
        with critic.capturing() if critic is not None else nullcontext():
            with self._precision():
                scores = self._scorer.score(module, micro, has_entropy_gradient=self.objective.entropy_coef > 0)
            return scores, critic.values() if critic is not None else None

    def _step(self, batch: Batch, inputs: LossInputs, indices: range, totals: UpdateMetrics) -> None:
        """Take one optimizer step on a mini-batch."""
        learned = inputs.learned(indices)
        if not learned:
            return  # momentum alone must not move the weights
        step = self._gradients(inputs, indices, learned)
        totals.num_computed += step.num_computed
        norm = self._clip_gradients()
        (figures,) = to_host([torch.stack((step.loss, norm.to(step.loss.dtype), *step.sums.values()))])
        loss_value, norm_value, *sums = figures.tolist()
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            self._move_weights()
            self._skipped_in_row = 0
            totals.add(loss_value, norm_value, sums, step)
        else:
            totals.num_skipped += 1
            self._count_skipped(batch, inputs, f"loss {loss_value}, gradient norm {norm_value}")

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients and return the norm that they had before."""
        return torch.nn.utils.clip_grad_norm_(self._parameters().values(), self.settings.grad_clip)

    def _gradients(self, inputs: LossInputs, indices: range, learned: Sequence[int]) -> StepMetrics:
        """Compute a mini-batch's gradients into the parameters; `learned` are the samples that give one."""
        divisor, num_tokens = inputs.divisor(indices), inputs.num_tokens(indices)
        step = StepMetrics.zeros(self.device)

        def begin() -> None:
            nonlocal step
            self.optimizer.zero_grad()
            step = StepMetrics.zeros(self.device)

        def backward(micro: MicroBatch) -> None:
            self._backward(micro, inputs, divisor, num_tokens, step)

        self._run_micro_batches(inputs.samples, learned, backward, begin=begin, idle=self._idle_backward)
        return step

    def _run_micro_batches(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        run: Callable[[MicroBatch], None],
        *,
        begin: Callable[[], None],
        idle: Callable[[MicroBatch], None],
    ) -> None:
        """Call `run` on micro-batches that hold the samples at `indices`.

        If memory runs out, start over with smaller micro-batches. `begin` is called before each attempt. `idle` makes a
        pass without any effect, for learners whose processes must make equally many.
        """
        while True:
            begin()
            shortage = self._attempt(samples, indices, run, idle)
            if shortage is None:
                return
            if shortage.num_samples == 1:
                raise LearnerError(
                    f"an update does not fit in memory even one sample at a time ({shortage.num_tokens} tokens: "
                    f"{shortage.reason}): {self._memory_remedy}"
                )
            self._micro_tokens = shortage.num_tokens // 2
            collect_and_release()
            log.warning(
                "out of memory in a micro-batch of %d samples, %d tokens (%s): continuing with learner.micro_tokens = "
                "%d, which changes no result; set it in the configuration to save the failed attempt",
                shortage.num_samples,
                shortage.num_tokens,
                shortage.reason,
                self._micro_tokens,
            )

    def _attempt(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        run: Callable[[MicroBatch], None],
        idle: Callable[[MicroBatch], None],
    ) -> Shortage | None:
        """Run all micro-batches; returns the one that did not fit in memory, if any."""
        for micro in pack(samples, indices, self._micro_tokens, self.device):
            shortage = try_pass(run, micro)
            if shortage is not None:
                return shortage
        return None

    def _idle_backward(self, micro: MicroBatch) -> None:
        """A pass of the model and its gradient, which is 0."""
        scores, values_a = self._forward(self.model, micro, has_values=True)
        total = scores.logprobs_a.sum() + scores.entropy
        (0.0 * (total if values_a is None else total + values_a.sum())).backward()

    def _backward(
        self, micro: MicroBatch, inputs: LossInputs, divisor: float, num_tokens: float, step: StepMetrics
    ) -> None:
        """Add one micro-batch's gradients and metrics. Its activations are free when this returns."""
        objective, tokens = self.objective, inputs.tokens(micro)
        scores, values_a = self._forward(self.model, micro, has_values=True)
        loss, ratios = policy_loss(objective, tokens, scores.logprobs_a, divisor=divisor)
        sums = {"entropy": scores.entropy.detach()}
        if objective.entropy_coef > 0:
            loss = loss - objective.entropy_coef * scores.entropy / num_tokens
        if tokens.reference_a is not None:
            kl_a = divergence(scores.logprobs_a.detach(), tokens.reference_a, objective.kl_estimator)
            sums["kl_reference"] = kl_a.sum()
        if values_a is not None:
            assert tokens.values_a is not None, "the critic's values at the start of the update are missing"
            assert tokens.returns_a is not None, "the critic's returns are missing"
            error = value_loss(values_a, tokens.values_a, tokens.returns_a, clip=objective.value_clip)
            loss = loss + objective.value_coef * error / num_tokens
            sums["value_loss"] = error.detach()
        loss.backward()
        step.add(loss.detach(), tokens, ratios, **sums)
        step.num_computed += micro.num_tokens

    def _move_weights(self) -> None:
        if not self.optimizer.state:
            release_free_memory()  # the first step allocates the optimizer state, which stays
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # No second attempt: some weights may have moved already, and smaller micro-batches would not help.
            raise LearnerError(
                f"the optimizer state does not fit in memory ({first_line(error)}): use a smaller model "
                "or more memory, and resume from the last checkpoint"
            ) from error

    def _count_skipped(self, batch: Batch, inputs: LossInputs, reason: str) -> None:
        """Count a step that was not finite; stop the run if there were too many in a row."""
        self._skipped_in_row += 1
        if self._skipped_in_row < _MAX_SKIPPED:
            return
        folder = None
        if self.inspect_dir is not None:
            folder = try_to_save(self.inspect_dir, batch, inputs.advantages, reason)
        saved = "" if folder is None else f", the batch is in {folder}"
        raise LearnerError(
            f"{_MAX_SKIPPED} steps in a row were not finite ({reason}{saved}): "
            "lower learner.lr, or resume from an earlier checkpoint"
        )


def recompute_layers(model: Any, *, is_offloaded: bool) -> None:
    """Let layers keep their inputs only, on the device or in host memory, and compute the rest for the gradient."""
    options: dict[str, Any] = {"offload": True} if is_offloaded else {}
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
    except TypeError as error:
        raise ConfigError(
            "learner.offload_activations needs a newer transformers, whose gradient_checkpointing_enable takes "
            "offload: upgrade it, or remove the key"
        ) from error
