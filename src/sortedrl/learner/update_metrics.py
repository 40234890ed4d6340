"""Metrics of an update: summed per step next to its gradients, then over all steps of the update.

`learner/torch.py` fills them and returns `UpdateMetrics.metrics` to the controller. Guarantees: steps that were not
taken count in no mean, and every metric is a finite number.

Shapes: a answer tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sortedrl.learner.loss import PolicyRatios, TokenInputs

_MEANS = ("ratio_mean", "clip_fraction", "kl_behaviour", "kl_behaviour_k1", "entropy")  # over tokens, always reported
_QUANTILES = {"ratio_p05": 0.05, "ratio_p50": 0.5, "ratio_p95": 0.95}


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """Sums over the micro-batches of one optimizer step."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)  # over tokens
    num_learned: int = 0  # answer tokens with a gradient
    num_computed: int = 0  # packed tokens that went through the model
    micro_batches: list[tuple[TokenInputs, PolicyRatios]] = field(default_factory=list)

    @classmethod
    def zeros(cls, device: torch.device) -> StepMetrics:
        return cls(loss=torch.zeros((), device=device))

    def add(self, loss: Tensor, tokens: TokenInputs, ratios: PolicyRatios, **sums: Tensor) -> None:
        """Add one micro-batch. `sums` are sums over its tokens that `ratios` does not give."""
        ratio_a, log_ratio_a = ratios.ratio_a, ratios.log_ratio_a
        all_sums = {
            "ratio_mean": ratio_a.sum(),
            "clip_fraction": ratios.is_clipped_a.sum().float(),
            "kl_behaviour": (log_ratio_a.exp() - 1 - log_ratio_a).sum(),
            "kl_behaviour_k1": -log_ratio_a.sum(),
            **sums,
        }
        self.loss += loss
        for name, value in all_sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.num_learned += ratio_a.numel()
        self.micro_batches.append((tokens, ratios))


class UpdateMetrics:
    """Sums over the steps of one update that were taken, and over the answer tokens that they learned from."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self.num_computed = 0
        self._num_learned = 0
        self._loss = 0.0
        self._grad_norm = 0.0
        self._sums: dict[str, float] = dict.fromkeys(_MEANS, 0.0)
        self._ratios: list[np.ndarray] = []
        self._log_ratios: list[np.ndarray] = []
        self._staleness: list[np.ndarray] = []
        self._log_weights: list[np.ndarray] = []  # per sample: the sum of its tokens' log-ratios

    def add(self, loss: float, grad_norm: float, step: StepMetrics) -> None:
        self.num_steps += 1
        self._loss += loss
        self._grad_norm += grad_norm
        self._num_learned += step.num_learned
        for name, value in zip(step.sums, torch.stack(list(step.sums.values())).tolist(), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value
        for tokens, ratios in step.micro_batches:
            log_ratios = ratios.log_ratio_a.cpu().numpy().astype(np.float64)
            _, sample_of_token = np.unique(tokens.sample_a.cpu().numpy(), return_inverse=True)
            self._ratios.append(ratios.ratio_a.cpu().numpy())
            self._log_ratios.append(log_ratios)
            self._staleness.append(tokens.staleness_a.cpu().numpy())
            self._log_weights.append(np.bincount(sample_of_token, weights=log_ratios))

    def metrics(self) -> dict[str, float]:
        steps, learned = max(self.num_steps, 1), max(self._num_learned, 1)
        return {
            "loss": self._loss / steps,
            "grad_norm": self._grad_norm / steps,
            "skipped_steps": float(self.num_skipped),
            "learned_tokens": float(self._num_learned),
            "computed_tokens": float(self.num_computed),
            **{name: total / learned for name, total in self._sums.items()},
            **(self._distributions() if self._num_learned else {}),
        }

    def _distributions(self) -> dict[str, float]:
        """Quantiles of the clipped ratio, KL to the behaviour policy by staleness, and the effective sample share."""
        ratios, log_ratios, staleness = map(np.concatenate, (self._ratios, self._log_ratios, self._staleness))
        metrics = dict(zip(_QUANTILES, np.quantile(ratios, list(_QUANTILES.values())).tolist(), strict=True))
        k3 = np.expm1(log_ratios) - log_ratios
        for age in np.unique(staleness).tolist():
            metrics[f"kl_behaviour_staleness_{age}"] = float(k3[staleness == age].mean())
        metrics["effective_sample_share"] = effective_share(np.concatenate(self._log_weights))
        return metrics


def effective_share(log_weights: np.ndarray) -> float:
    """Effective sample size as a share of the samples, (sum w)^2 / (n sum w^2): 1 where all weights are equal."""
    weights = np.exp(log_weights - log_weights.max())  # a common factor cancels, and this one prevents overflow
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
