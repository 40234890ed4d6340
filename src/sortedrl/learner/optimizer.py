"""The optimizer and its learning rate, and the settings that a learner reads."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sortedrl.errors import ModelError
from sortedrl.learner.critic import Critic
from sortedrl.learner.precision import Dtype


class LearnerSettings(Protocol):
    """What the learner reads from the configuration's `learner` section; `objective_of` reads the other keys."""

    @property
    def algorithm(self) -> Any: ...
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
    def grad_clip(self) -> float: ...
    @property
    def inner_steps(self) -> int: ...
    @property
    def inner_epochs(self) -> int: ...
    @property
    def micro_tokens(self) -> int: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def offload(self) -> bool: ...
    @property
    def offload_activations(self) -> bool: ...
    @property
    def context_parallel(self) -> int: ...
    @property
    def dtype(self) -> Dtype: ...
    @property
    def device(self) -> str: ...
    @property
    def fp32_head(self) -> bool: ...


def learning_rate(settings: LearnerSettings, progress: float, num_samples: int) -> float:
    """The rate after a linear warm-up, falling linearly with the run's progress to `lr_final` times the peak.

    `num_samples` includes the current batch, so that the first step's rate is not 0.
    """
    decay = 1 - (1 - settings.lr_final) * min(max(progress, 0.0), 1.0)
    warmup = min(1.0, num_samples / settings.warmup_samples) if settings.warmup_samples else 1.0
    return settings.lr * decay * warmup


def make_optimizer(model: Any, critic: Critic | None, settings: LearnerSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only. It is fused, because a small model has many tiny tensors."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ModelError("no parameter of the model requires a gradient: call model.requires_grad_(True)")
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay, "rate": 1.0},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, "rate": 1.0},
    ]
    if critic is not None:  # `rate` is relative to the model's learning rate
        rate = (getattr(settings, "critic_lr", None) or settings.lr) / settings.lr
        groups.append({"params": list(critic.parameters()), "weight_decay": 0.0, "rate": rate})
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
