"""Metrics of an update: summed per step next to its gradients, then over all steps of the update.

`learner/torch.py` fills them and returns `UpdateMetrics.metrics` to the controller. Figures of single tokens stay on
the device until the end of the update. Guarantees: steps that were not taken count in no mean, and every metric is a
finite number.

Mismatch is how far the learner's log-probs, before the first step, are from those that the engine recorded under the
same version: tokens of older versions do not count.

Shapes: a answer tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from sortedrl.learner.device import to_host
from sortedrl.learner.loss import PolicyRatios, TokenInputs

MEANS = ("ratio_mean", "clip_fraction", "kl_behaviour", "kl_behaviour_k1", "entropy")  # over tokens, always reported
_QUANTILES = {"ratio_p05": 0.05, "ratio_p50": 0.5, "ratio_p95": 0.95}


_STEP = 1 << 32  # more than a batch has samples


@dataclass(slots=True, kw_only=True, frozen=True)
class TokenFigures:
    """What metrics need to know of single tokens. A sample's tokens are all in one of these."""

    sample_a: Tensor
    staleness_a: Tensor
    ratio_a: Tensor  # the ratio that is clipped
    log_ratio_a: Tensor  # to the behaviour policy
    drift_a: Tensor  # the same at the start of the update; not a number where it is not known

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.sample_a, self.staleness_a, self.ratio_a, self.log_ratio_a, self.drift_a)


_COLUMNS = tuple(field.name for field in fields(TokenFigures))


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """Sums over the micro-batches of one optimizer step."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)  # over tokens
    num_learned: int = 0  # answer tokens with a gradient
    num_computed: int = 0  # packed tokens that went through the model
    has_start: bool = False  # drift is known in every step, because log-probs were computed at the update's start
    tokens: list[TokenFigures] = field(default_factory=list)  # one per micro-batch

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
        if ratios.is_masked_a is not None:
            all_sums["mask_fraction"] = ratios.is_masked_a.sum().float()
        self.loss += loss
        for name, value in all_sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.num_learned += ratio_a.numel()
        self.has_start = tokens.drift_a is not None
        self.tokens.append(
            TokenFigures(
                sample_a=tokens.sample_a,
                staleness_a=tokens.staleness_a,
                ratio_a=ratio_a,
                log_ratio_a=log_ratio_a,
                drift_a=ratios.drift_a,
            )
        )


class UpdateMetrics:
    """Sums over the steps of one update that were taken, and over the answer tokens that they learned from."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self.num_computed = 0
        self._num_learned = 0
        self._loss = 0.0
        self._grad_norm = 0.0
        self._sums: dict[str, float] = dict.fromkeys(MEANS, 0.0)
        self.tokens: list[TokenFigures] = []  # of all steps; samples are numbered anew in each step

    def add(self, loss: float, grad_norm: float, sums: Sequence[float], step: StepMetrics) -> None:
        """Add a step that was taken. `sums` are the values of `step.sums`."""
        for figures in step.tokens:
            # Without log-probs from the start of the update, only the first step sees weights that have not moved.
            is_known = step.has_start or self.num_steps == 0
            drift_a = figures.drift_a if is_known else torch.full_like(figures.drift_a, math.nan)
            self.tokens.append(replace(figures, sample_a=figures.sample_a + _STEP * self.num_steps, drift_a=drift_a))
        self.num_steps += 1
        self._loss += loss
        self._grad_norm += grad_norm
        self._num_learned += step.num_learned
        for name, value in zip(step.sums, sums, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        steps, learned = max(self.num_steps, 1), max(self._num_learned, 1)
        return {
            "loss": self._loss / steps,
            "grad_norm": self._grad_norm / steps,
            "skipped_steps": float(self.num_skipped),
            "learned_tokens": float(self._num_learned),
            "computed_tokens": float(self.num_computed),
            **{name: total / learned for name, total in self._sums.items()},
            **(_distributions(self.tokens) if self._num_learned else {}),
        }


def _distributions(tokens: Sequence[TokenFigures]) -> dict[str, float]:
    """Quantiles of the clipped ratio, KL to the behaviour policy by staleness, effective sample share, mismatch."""
    on_host = to_host([tensor for figures in tokens for tensor in figures.tensors()])
    columns = [[tensor.numpy() for tensor in on_host[first :: len(_COLUMNS)]] for first in range(len(_COLUMNS))]
    samples, all_staleness, all_ratios, all_log_ratios, all_drifts = columns
    log_weights: list[np.ndarray] = []  # per sample: the sum of its tokens' log-ratios
    for sample_a, log_ratio_a in zip(samples, all_log_ratios, strict=True):
        _, sample_of_token = np.unique(sample_a, return_inverse=True)
        log_weights.append(np.bincount(sample_of_token, weights=log_ratio_a.astype(np.float64)))
    staleness, log_ratios = np.concatenate(all_staleness), np.concatenate(all_log_ratios).astype(np.float64)
    quantiles = np.quantile(np.concatenate(all_ratios), list(_QUANTILES.values())).tolist()
    metrics = dict(zip(_QUANTILES, quantiles, strict=True))
    k3 = np.expm1(log_ratios) - log_ratios
    for age in np.unique(staleness).tolist():
        metrics[f"kl_behaviour_staleness_{age}"] = float(k3[staleness == age].mean())
    metrics["effective_sample_share"] = effective_share(np.concatenate(log_weights))
    return metrics | mismatch(np.concatenate(all_drifts).astype(np.float64)[staleness == 0])


def mismatch(drifts: np.ndarray) -> dict[str, float]:
    """How far apart engine and trainer are on tokens of the same weights; empty if that is known of no token."""
    known = drifts[~np.isnan(drifts)]
    if not known.size:
        return {}
    return {
        "mismatch_mean": float(np.abs(known).mean()),
        "mismatch_max": float(np.abs(known).max()),
        "mismatch_kl": float((np.expm1(known) - known).mean()),
    }


def effective_share(log_weights: np.ndarray) -> float:
    """Effective sample size as a share of the samples, (sum w)^2 / (n sum w^2): 1 where all weights are equal."""
    weights = np.exp(log_weights - log_weights.max())  # a common factor cancels, and this one prevents overflow
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
