"""The learner on PyTorch: a batch becomes advantages, packed micro-batches, gradients and AdamW steps.

The controller calls `start`; without overlap the update is done when it returns, with overlap one worker thread does it
while engines go on, and `source` hands out snapshots so that nobody samples from half-updated weights. What it keeps
true:
- advantages come from the whole batch, mini-batches are cut in the batch's order, and micro-batches change nothing;
- a sample of 0 tokens counts in its group's statistics and nowhere else;
- a step whose loss or gradient is not finite is not taken; three such in a row stop the run, the batch saved;
- gradients that do not fit in memory are computed again in micro-batches of half the size, before any weight has moved;
- the module's train or eval mode and its attention are as they were, whatever happens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from sortedrl.errors import ConfigError, LearnerError
from sortedrl.learner.advantage import AdvantageEstimator
from sortedrl.learner.algorithms import estimator_of, needs_more_siblings, objective_of
from sortedrl.learner.base import UpdateResult
from sortedrl.learner.critic import Critic, value_loss
from sortedrl.learner.logprobs import Scorer, Scores
from sortedrl.learner.loss import divergence, policy_loss
from sortedrl.learner.loss_inputs import (
    ByPlace,
    Terms,
    add_values,
    by_place,
    cut,
    kl_penalties,
    make_terms,
    marks,
    shaped_rewards,
)
from sortedrl.learner.memory import first_line, free_unused, give_back, is_out_of_memory, keep_small_blocks
from sortedrl.learner.nonfinite_dump import try_to_save
from sortedrl.learner.optimizer import LearnerSettings, learning_rate, make_optimizer
from sortedrl.learner.pack import MicroBatch, check_packing, pack, packed_attention
from sortedrl.learner.precision import passes_in
from sortedrl.learner.reference import Reference
from sortedrl.learner.update_metrics import Found, Tally
from sortedrl.records import Batch, Sample
from sortedrl.weights import ModuleWeights

MAX_SKIPPED = 3  # steps in a row that are not finite before training stops

__all__ = ["LearnerSettings", "TorchLearner", "cut", "is_out_of_memory", "learning_rate"]

log = logging.getLogger(__name__)


class TorchLearner:
    """Trains a transformers causal language model in place. `temperature` is the one that answers are sampled with."""

    def __init__(self, model: Any, settings: LearnerSettings, *, temperature: float, overlap: bool = False) -> None:
        self.objective = objective_of(settings)
        if needs_more_siblings(settings.algorithm, settings.group_size):
            raise ConfigError(
                f"learner.group_size is {settings.group_size}: {settings.algorithm} compares siblings, "
                "set it to 2 or more or use reinforce++"
            )
        self._check_model(model)
        keep_small_blocks()
        self.model = model
        self.settings = settings
        self.temperature = temperature
        self._scorer = Scorer(temperature)
        self.advantages = AdvantageEstimator(
            *estimator_of(self.objective.algorithm, settings.group_size, settings.advantage_scope)
        )
        self.critic = Critic(model) if self.objective.algorithm.has_critic else None
        self.reference = Reference(model) if self.objective.has_reference else None
        self._place_weights()
        self.optimizer = make_optimizer(model, self.critic, settings)
        self.inspect_dir: Path | None = None  # where a batch that stops the run is saved
        self.num_samples = 0  # trained so far
        self.num_steps = 0
        self.num_skipped = 0
        self._skipped_in_row = 0
        self._micro_tokens = settings.micro_tokens  # less once memory has run out
        if settings.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._live = ModuleWeights(model)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sortedrl-learner") if overlap else None
        self._source = self._live.snapshot() if overlap else self._live
        self._update: Future[UpdateResult] | None = None

    @property
    def source(self) -> ModuleWeights:
        """The live module, or with overlap a snapshot taken at the end of the last finished update."""
        return self._source

    def start(self, batch: Batch) -> Future[UpdateResult]:
        assert batch.samples, f"update {batch.update} has no samples"
        assert self._update is None or self._update.done(), "an update is under way: wait for its result first"
        if self._worker is not None:
            self._update = self._worker.submit(self._work, batch)
        else:
            self._update = Future()
            self._update.set_result(self._work(batch))
        return self._update

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: tensors under "optimizer", plain JSON values elsewhere."""
        assert self._update is None or self._update.done(), "an update is under way: its state cannot be saved"
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        for name, value in self._own_tensors().items():
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
        own: dict[str, Tensor] = {}
        for path, value in state["optimizer"].items():
            name, _, key = path.rpartition("/")
            if key == "value":
                own[name] = value
                continue
            if name not in parameters:
                raise LearnerError(
                    f"the optimiser state names {name!r}, which the model lacks: load the model it is of"
                )
            if key != "step" and value.shape != parameters[name].shape:
                raise LearnerError(f"the optimiser state of {name!r} has another shape: load the model it is of")
            loaded.setdefault(name, {})[key] = value
        self._load_own(own)
        self.optimizer.state.clear()
        for name, values in loaded.items():
            device = parameters[name].device
            self.optimizer.state[parameters[name]] = {key: value.clone().to(device) for key, value in values.items()}
        self.advantages.load_state_dict(state["advantage"])
        counters = state["counters"]
        self.num_samples, self.num_steps = counters["num_samples"], counters["num_steps"]
        self.num_skipped, self._skipped_in_row = counters["num_skipped"], counters["skipped_in_row"]
        if self._worker is not None:
            self._source = self._live.snapshot()

    def _check_model(self, model: Any) -> None:
        check_packing(model)

    def _place_weights(self) -> None:
        """Comes before the optimiser takes them: for learners that keep weights elsewhere."""

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Everything that is trained, by name."""
        named = dict(self.model.named_parameters())
        if self.critic is not None:
            named |= {f"critic.{name}": parameter for name, parameter in self.critic.named_parameters()}
        return named

    def _own_tensors(self) -> dict[str, Tensor]:
        """Weights that are no part of the model, by name."""
        tensors = {} if self.critic is None else {f"critic.{k}": v.data for k, v in self.critic.named_parameters()}
        if self.reference is not None:
            tensors |= {f"reference.{name}": value for name, value in self.reference.tensors().items()}
        return tensors

    @torch.no_grad()
    def _load_own(self, loaded: dict[str, Tensor]) -> None:
        mine = self._own_tensors()
        if {name: value.shape for name, value in mine.items()} != {name: v.shape for name, v in loaded.items()}:
            raise LearnerError(
                "the saved critic or reference does not fit: resume with the model, learner.algorithm and "
                "learner.kl_coef that the run began with"
            )
        for name, value in mine.items():
            value.copy_(loaded[name])

    def _work(self, batch: Batch) -> UpdateResult:
        """One update, in whichever thread."""
        was_training = self.model.training
        self.model.eval()  # dropout would move log-probs away from those sampled with
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # recomputed in train mode only; what it holds stays
                module.training = module.gradient_checkpointing
        try:
            with packed_attention(self.model):
                result = self._train(batch)
        finally:
            self.model.train(was_training)
            self.optimizer.zero_grad()
        if self._worker is not None:
            self._source = self._live.snapshot()
        return result

    def _train(self, batch: Batch) -> UpdateResult:
        terms, metrics = self._prepare(batch)
        self.num_samples += len(batch.samples)
        rate = learning_rate(self.settings, batch.progress, self.num_samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        tally = Tally()
        for _ in range(self.settings.inner_epochs):
            for start, stop in cut(len(batch.samples), self.settings.inner_steps):
                self._step(batch, terms, range(start, stop), tally)
        self.num_steps += tally.num_steps
        self.num_skipped += tally.num_skipped
        num_tokens = float(sum(sample.num_tokens for sample in batch.samples))
        is_degenerate = any(value for name, value in metrics.items() if name.startswith("degenerate_all"))
        metrics |= {
            "lr": rate,
            "num_tokens": num_tokens,
            "degenerate_learned": float(is_degenerate and tally.num_steps > 0),
            "degenerate_passed_over": float(is_degenerate and tally.num_steps == 0),
            **tally.metrics(),
        }
        return UpdateResult(optimizer_steps=tally.num_steps, metrics=metrics)

    def _prepare(self, batch: Batch) -> tuple[Terms, dict[str, float]]:
        """Everything that the steps need beside the policy of the moment; the weights have not moved yet."""
        objective, samples = self.objective, batch.samples
        reference = self._score_reference(samples) if self.reference is not None else None
        rewards = shaped_rewards(samples, objective)
        penalties = kl_penalties(samples, objective, reference) if objective.kl_in == "reward" and reference else {}
        if self.critic is None:
            rewards = [r - float(penalties[i].sum()) if i in penalties else r for i, r in enumerate(rewards)]
        advantages, metrics = self.advantages.estimate(samples, rewards)
        terms = make_terms(batch, objective, advantages, reference)
        if self.critic is not None or objective.importance != "none":
            old, values = self._score(self.model, samples, terms.learned(range(len(samples))))
            terms.old = old if objective.importance != "none" else None
            if self.critic is not None:
                add_values(terms, objective, values, rewards, penalties)
        metrics["masked_samples"] = float(sum(terms.is_masked))
        metrics["filtered_samples"] = float(sum(terms.is_filtered))
        return terms, metrics

    def _score_reference(self, samples: Sequence[Sample]) -> ByPlace:
        assert self.reference is not None, "there is no reference"
        answered = [place for place, sample in enumerate(samples) if sample.num_sampled]
        with self.reference.module() as module, packed_attention(module):
            return self._score(module, samples, answered, is_policy=False)[0]

    @torch.no_grad()
    def _score(
        self, module: Any, samples: Sequence[Sample], places: Sequence[int], *, is_policy: bool = True
    ) -> tuple[ByPlace, ByPlace]:
        """Log-probs of the answers under a module, and the critic's values if it is the policy and there is one."""
        logprobs: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}

        def visit(micro: MicroBatch) -> None:
            scores, values_a = self._forward(module, micro, has_values=is_policy)
            logprobs.update(by_place(micro, scores.logprobs_a))
            if values_a is not None:
                values.update(by_place(micro, values_a))

        self._visit(samples, places, visit, begin=logprobs.clear)
        return logprobs, values

    def _forward(self, module: Any, micro: MicroBatch, *, has_values: bool) -> tuple[Scores, Tensor | None]:
        """Scores of a micro-batch's answer tokens under a module, and values where there are such."""
        is_bonus = self.objective.entropy_coef > 0
        with self.critic.listening() if self.critic is not None and has_values else nullcontext():
            with passes_in(self.settings.dtype, self.model.device):
                scores = self._scorer.score(module, micro, has_entropy_gradient=is_bonus)
            return scores, self.critic.values() if self.critic is not None and has_values else None

    def _step(self, batch: Batch, terms: Terms, places: range, tally: Tally) -> None:
        learned = terms.learned(places)
        if not learned:
            return  # nothing to learn from: momentum alone must not move the weights
        found = self._gradients(terms, places, learned)
        tally.num_computed += found.num_computed
        norm = self._clip()
        loss_value, norm_value = torch.stack((found.loss, norm.to(found.loss.dtype))).tolist()
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            self._move_weights()
            self._skipped_in_row = 0
            tally.add(loss_value, norm_value, found)
        else:
            self._skip(batch, terms, f"loss {loss_value}, gradient norm {norm_value}", tally)

    def _clip(self) -> Tensor:  # the norm that it was
        return torch.nn.utils.clip_grad_norm_(self._parameters().values(), self.settings.grad_clip)

    def _gradients(self, terms: Terms, places: range, learned: Sequence[int]) -> Found:
        """Leave a mini-batch's gradients in the parameters."""
        divisor, num_tokens = terms.divisor(places), terms.num_tokens(places)
        found = Found.zeros(self.model.device)

        def begin() -> None:
            nonlocal found
            self.optimizer.zero_grad()
            found = Found.zeros(self.model.device)

        def visit(micro: MicroBatch) -> None:
            self._backward(micro, terms, divisor, num_tokens, found)

        self._visit(terms.samples, learned, visit, begin=begin)
        return found

    def _visit(
        self,
        samples: Sequence[Sample],
        places: Sequence[int],
        visit: Callable[[MicroBatch], None],
        *,
        begin: Callable[[], None],
    ) -> None:
        """Call `visit` on the samples at some places, in as many micro-batches as memory asks for.

        Where memory runs out all of them are visited again in smaller ones, after another call of `begin`.
        """
        while True:
            begin()
            size = num_rows = 0
            try:
                for micro in pack(samples, marks(len(samples), places), self._micro_tokens, self.model.device):
                    size, num_rows = micro.num_tokens, sum(rows for rows, _ in micro.layout.shapes)
                    visit(micro)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if num_rows < 2:
                    raise LearnerError(
                        f"an update does not fit in memory even one sample at a time ({size} tokens: "
                        f"{first_line(error)}): "
                        "lower engine.max_new_tokens, or take a smaller model or a larger machine"
                    ) from error
                reason = first_line(error)
            self._shrink(size, num_rows, reason)  # out of the except clause: the traceback keeps the graph alive

    def _shrink(self, size: int, num_rows: int, reason: str) -> None:
        """Halve the micro-batches of this and later updates, after one of `num_rows` samples did not fit."""
        self._micro_tokens = size // 2
        free_unused()
        log.warning(
            "out of memory in a micro-batch of %d samples, %d tokens (%s): going on with learner.micro_tokens = %d, "
            "which changes no result; set it from the start to save the second try",
            num_rows,
            size,
            reason,
            self._micro_tokens,
        )

    def _backward(self, micro: MicroBatch, terms: Terms, divisor: float, num_tokens: float, found: Found) -> None:
        """Add one micro-batch's gradients; what it needs besides is free when it returns."""
        objective, tokens = self.objective, terms.tokens(micro)
        scores, values_a = self._forward(self.model, micro, has_values=True)
        loss, moved = policy_loss(objective, tokens, scores.logprobs_a, divisor=divisor)
        sums = {"entropy": scores.entropy.detach()}
        if objective.entropy_coef > 0:
            loss = loss - objective.entropy_coef * scores.entropy / num_tokens
        if tokens.reference_a is not None:
            apart_a = divergence(scores.logprobs_a.detach(), tokens.reference_a, objective.kl_estimator)
            sums["kl_reference"] = apart_a.sum()
        if values_a is not None:
            assert tokens.values_a is not None, "a critic without the values of the start"
            assert tokens.returns_a is not None, "a critic without returns"
            error = value_loss(values_a, tokens.values_a, tokens.returns_a, clip=objective.value_clip)
            loss = loss + objective.value_coef * error / num_tokens
            sums["value_loss"] = error.detach()
        loss.backward()
        found.add(loss.detach(), tokens, moved, **sums)
        found.num_computed += micro.num_tokens

    def _move_weights(self) -> None:
        if not self.optimizer.state:
            give_back()  # the first step takes memory for good: not on top of what activations have left free
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # Not tried again: some of the weights may have moved, and smaller micro-batches would not help.
            raise LearnerError(
                f"the optimiser's state does not fit in memory ({first_line(error)}): take a smaller model "
                "or more memory, and resume from the last checkpoint"
            ) from error

    def _skip(self, batch: Batch, terms: Terms, reason: str, tally: Tally) -> None:
        tally.num_skipped += 1
        self._skipped_in_row += 1
        if self._skipped_in_row < MAX_SKIPPED:
            return
        folder = try_to_save(self.inspect_dir, batch, terms.advantages, reason)
        saved = "" if folder is None else f", the batch is in {folder}"
        raise LearnerError(
            f"{MAX_SKIPPED} steps in a row were not finite ({reason}{saved}): "
            "lower learner.lr, or go on from an earlier checkpoint"
        )
