"""The learner on PyTorch: a batch becomes advantages, packed micro-batches, gradients and AdamW steps.

The controller calls `start`; without overlap the update is done when it returns, with overlap one worker thread does it
while engines go on, and `source` hands out snapshots so that nobody samples from half-updated weights. What it keeps
true:
- advantages come from the whole batch, mini-batches are cut in the batch's order, and micro-batches change nothing;
- a sample of 0 tokens counts in its group's statistics and nowhere else;
- a step whose loss or gradient is not finite is not taken; three such in a row stop the run;
- gradients that do not fit in memory are computed again in micro-batches of half the size, before any weight has moved;
- the module's train or eval mode and its attention are as they were, whatever happens.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sortedrl.errors import ConfigError, LearnerError, ModelError
from sortedrl.learner.advantage import AdvantageEstimator
from sortedrl.learner.base import UpdateResult
from sortedrl.learner.loss import METRICS, answer_logprobs, policy_loss
from sortedrl.learner.pack import MicroBatch, check_packing, pack, packed_attention, packed_logits
from sortedrl.records import Batch, Sample
from sortedrl.weights import ModuleWeights

MAX_SKIPPED = 3  # steps in a row that are not finite before training stops
# What allocators other than CUDA's say in a plain RuntimeError, or libraries under it when they could not allocate.
MEMORY_WORDS = ("can't allocate memory", "Cannot allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED")

log = logging.getLogger(__name__)


class LearnerSettings(Protocol):
    """What the learner reads of the configuration's `learner` section."""

    @property
    def algorithm(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def advantage_scope(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def lr_final(self) -> float: ...
    @property
    def warmup_samples(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def grad_clip(self) -> float: ...
    @property
    def inner_steps(self) -> int: ...
    @property
    def inner_epochs(self) -> int: ...
    @property
    def micro_tokens(self) -> int: ...


class TorchLearner:
    """Trains a transformers causal language model in place. `temperature` is the one that answers are sampled with."""

    def __init__(self, model: Any, settings: LearnerSettings, *, temperature: float, overlap: bool = False) -> None:
        if settings.algorithm == "grpo" and settings.group_size < 2:
            raise ConfigError("learner.group_size is 1: GRPO compares siblings, set it to 2 or more or use reinforce++")
        check_packing(model)
        self.model = model
        self.settings = settings
        self.temperature = temperature
        self.advantages = AdvantageEstimator(settings.algorithm, settings.advantage_scope)
        self.optimizer = _optimizer(model, settings)
        self.num_samples = 0  # trained so far
        self.num_steps = 0
        self.num_skipped = 0
        self._skipped_in_row = 0
        self._micro_tokens = settings.micro_tokens  # less once memory has run out
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
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        counters = {
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "skipped_in_row": self._skipped_in_row,
        }
        return {"optimizer": tensors, "advantage": self.advantages.state_dict(), "counters": counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        loaded: dict[str, dict[str, Tensor]] = {}
        for path, value in state["optimizer"].items():
            name, _, key = path.rpartition("/")
            if name not in parameters:
                raise LearnerError(
                    f"the optimiser state names {name!r}, which the model lacks: load the model it is of"
                )
            if key != "step" and value.shape != parameters[name].shape:
                raise LearnerError(f"the optimiser state of {name!r} has another shape: load the model it is of")
            loaded.setdefault(name, {})[key] = value
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

    def _work(self, batch: Batch) -> UpdateResult:
        """One update, in whichever thread."""
        was_training = self.model.training
        # Dropout would move log-probs away from those sampled with; transformers checkpoints in train mode only.
        self.model.train(getattr(self.model, "is_gradient_checkpointing", False))
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
        advantages, metrics = self.advantages.estimate(batch.samples)
        self.num_samples += len(batch.samples)
        rate = learning_rate(self.settings, batch.progress, self.num_samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tally = _Tally()
        for _ in range(self.settings.inner_epochs):
            for start, stop in cut(len(batch.samples), self.settings.inner_steps):
                self._step(batch.samples[start:stop], advantages[start:stop], tally)
        self.num_steps += tally.num_steps
        self.num_skipped += tally.num_skipped
        num_tokens = float(sum(sample.num_tokens for sample in batch.samples))
        metrics |= {"lr": rate, "num_tokens": num_tokens, **tally.metrics()}
        return UpdateResult(optimizer_steps=tally.num_steps, metrics=metrics)

    def _step(self, samples: Sequence[Sample], advantages: Sequence[float], tally: _Tally) -> None:
        num_tokens = sum(sample.num_tokens for sample in samples)
        if not any(sample.num_tokens and advantage for sample, advantage in zip(samples, advantages, strict=True)):
            return  # nothing to learn from: momentum alone must not move the weights
        found = self._gradients(samples, advantages, num_tokens)
        tally.num_computed += found.num_computed
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        loss_value, norm_value = torch.stack((found.loss, norm.to(found.loss.dtype))).tolist()
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            self._move_weights()
            self._skipped_in_row = 0
            tally.add(loss_value, norm_value, found.sums, found.num_learned)
        else:
            self._skip(loss_value, norm_value, tally)

    def _gradients(self, samples: Sequence[Sample], advantages: Sequence[float], num_tokens: int) -> _Found:
        """Leave a mini-batch's gradients in the parameters, in as many micro-batches as memory asks for."""
        while True:
            self.optimizer.zero_grad()
            found = _Found.zeros(self.model.device)
            size = num_rows = 0
            try:
                for micro in pack(samples, advantages, self._micro_tokens, self.model.device):
                    size, num_rows = micro.num_tokens, sum(rows for rows, _ in micro.layout.shapes)
                    self._backward(micro, num_tokens, found)
                return found
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if num_rows < 2:
                    raise LearnerError(
                        f"an update does not fit in memory even one sample at a time ({size} tokens: {_short(error)}): "
                        "lower engine.max_new_tokens, or take a smaller model or a larger machine"
                    ) from error
                reason = _short(error)
            self._shrink(size, num_rows, reason)  # out of the except clause: the traceback keeps the graph alive

    def _shrink(self, size: int, num_rows: int, reason: str) -> None:
        """Halve the micro-batches of this and later updates, after one of `num_rows` samples did not fit."""
        self._micro_tokens = size // 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning(
            "out of memory in a micro-batch of %d samples, %d tokens (%s): going on with learner.micro_tokens = %d, "
            "which changes no result; set it from the start to save the second try",
            num_rows,
            size,
            reason,
            self._micro_tokens,
        )

    def _backward(self, micro: MicroBatch, num_tokens: int, found: _Found) -> None:
        """Add one micro-batch's gradients; what it needs besides is free when it returns."""
        logits_av = packed_logits(self.model, micro)
        logprobs_a, entropy = answer_logprobs(logits_av, micro.targets_a, self.temperature)
        partial, moved = policy_loss(
            logprobs_a,
            micro.behaviour_a,
            micro.advantages_a,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            num_tokens=num_tokens,
        )
        partial.backward()
        found.loss += partial.detach()
        found.sums += torch.cat((moved, entropy[None]))
        found.num_learned += micro.targets_a.numel()
        found.num_computed += micro.num_tokens

    def _move_weights(self) -> None:
        try:
            self.optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # Not tried again: some of the weights may have moved, and smaller micro-batches would not help.
            raise LearnerError(
                f"the optimiser's state does not fit in memory ({_short(error)}): take a smaller model or more memory, "
                "and resume from the last checkpoint"
            ) from error

    def _skip(self, loss: float, norm: float, tally: _Tally) -> None:
        tally.num_skipped += 1
        self._skipped_in_row += 1
        if self._skipped_in_row >= MAX_SKIPPED:
            raise LearnerError(
                f"{MAX_SKIPPED} steps in a row were not finite (loss {loss}, gradient norm {norm}): "
                "lower learner.lr, or go on from an earlier checkpoint"
            )


@dataclass(slots=True, kw_only=True)
class _Found:
    """What the micro-batches of one step add up to, next to their gradients."""

    loss: Tensor
    sums: Tensor  # by METRICS
    num_learned: int = 0
    num_computed: int = 0

    @classmethod
    def zeros(cls, device: torch.device) -> _Found:
        return cls(loss=torch.zeros((), device=device), sums=torch.zeros(len(METRICS), device=device))


class _Tally:
    """Sums over one update: over its steps that were taken, and their answer tokens that had an advantage."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self.num_computed = 0  # packed tokens that went through the model
        self._num_learned = 0
        self._loss = 0.0
        self._norm = 0.0
        self._sums = [0.0] * len(METRICS)

    def add(self, loss: float, norm: float, sums: Tensor, num_learned: int) -> None:
        self.num_steps += 1
        self._loss += loss
        self._norm += norm
        self._num_learned += num_learned
        self._sums = [total + value for total, value in zip(self._sums, sums.tolist(), strict=True)]

    def metrics(self) -> dict[str, float]:
        steps, learned = max(self.num_steps, 1), max(self._num_learned, 1)
        return {
            "loss": self._loss / steps,
            "grad_norm": self._norm / steps,
            "skipped_steps": float(self.num_skipped),
            "learned_tokens": float(self._num_learned),
            "computed_tokens": float(self.num_computed),
            **{name: total / learned for name, total in zip(METRICS, self._sums, strict=True)},
        }


def learning_rate(settings: LearnerSettings, progress: float, num_samples: int) -> float:
    """Linear from the peak to `lr_final` of it as the run progresses, after a linear warm-up.

    `num_samples` includes the batch at hand, so that the first step is not one of rate 0.
    """
    decay = 1 - (1 - settings.lr_final) * min(max(progress, 0.0), 1.0)
    warmup = min(1.0, num_samples / settings.warmup_samples) if settings.warmup_samples else 1.0
    return settings.lr * decay * warmup


def cut(num_samples: int, num_parts: int) -> list[tuple[int, int]]:
    """Bounds of consecutive mini-batches, equal but for one sample; never an empty one."""
    parts = min(num_samples, num_parts)
    edges = [num_samples * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means that memory ran out, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS)


def _short(error: BaseException) -> str:
    """The first line of an error; allocators write many."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _optimizer(model: Any, settings: LearnerSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices only; fused, since a small model is many tiny tensors."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ModelError("the model has no parameter that requires a gradient: call model.requires_grad_(True)")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
