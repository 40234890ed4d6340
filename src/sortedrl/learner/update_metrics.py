"""What is counted on the way through an update: per step next to its gradients, and over all steps of the update.

`learner/torch.py` fills it and hands `Tally.metrics` to the controller. Steps that were not taken are in none of the
means. All metrics are finite numbers, whatever the batch held.

Shapes: a answer tokens, s samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sortedrl.learner.loss import Moved, Tokens

MEANS = ("ratio_mean", "clip_fraction", "kl_behaviour", "kl_behaviour_k1", "entropy")  # of tokens, always reported
QUANTILES = {"ratio_p05": 0.05, "ratio_p50": 0.5, "ratio_p95": 0.95}


@dataclass(slots=True, kw_only=True)
class Found:
    """What the micro-batches of one step add up to, next to their gradients."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)  # over tokens
    num_learned: int = 0
    num_computed: int = 0
    parts: list[tuple[Tokens, Moved]] = field(default_factory=list)

    @classmethod
    def zeros(cls, device: torch.device) -> Found:
        return cls(loss=torch.zeros((), device=device))

    def add(self, loss: Tensor, tokens: Tokens, moved: Moved, **sums: Tensor) -> None:
        """One micro-batch; `sums` over its tokens are those that `moved` does not give."""
        ratio_a, log_ratio_a = moved.ratio_a, moved.log_ratio_a
        known = {
            "ratio_mean": ratio_a.sum(),
            "clip_fraction": moved.is_clipped_a.sum().float(),
            "kl_behaviour": (log_ratio_a.exp() - 1 - log_ratio_a).sum(),
            "kl_behaviour_k1": -log_ratio_a.sum(),
            **sums,
        }
        self.loss += loss
        for name, value in known.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.num_learned += ratio_a.numel()
        self.parts.append((tokens, moved))


class Tally:
    """Sums over one update: over its steps that were taken, and their answer tokens that were learned from."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_skipped = 0
        self.num_computed = 0  # packed tokens that went through the model
        self._num_learned = 0
        self._loss = 0.0
        self._norm = 0.0
        self._sums: dict[str, float] = dict.fromkeys(MEANS, 0.0)
        self._ratios: list[np.ndarray] = []
        self._log_ratios: list[np.ndarray] = []
        self._staleness: list[np.ndarray] = []
        self._log_weights: list[np.ndarray] = []  # of whole samples: the log-ratios of their tokens added up

    def add(self, loss: float, norm: float, found: Found) -> None:
        self.num_steps += 1
        self._loss += loss
        self._norm += norm
        self._num_learned += found.num_learned
        for name, value in zip(found.sums, torch.stack(list(found.sums.values())).tolist(), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value
        for tokens, moved in found.parts:
            log_ratios = moved.log_ratio_a.cpu().numpy().astype(np.float64)
            _, places = np.unique(tokens.sample_a.cpu().numpy(), return_inverse=True)
            self._ratios.append(moved.ratio_a.cpu().numpy())
            self._log_ratios.append(log_ratios)
            self._staleness.append(tokens.staleness_a.cpu().numpy())
            self._log_weights.append(np.bincount(places, weights=log_ratios))

    def metrics(self) -> dict[str, float]:
        steps, learned = max(self.num_steps, 1), max(self._num_learned, 1)
        return {
            "loss": self._loss / steps,
            "grad_norm": self._norm / steps,
            "skipped_steps": float(self.num_skipped),
            "learned_tokens": float(self._num_learned),
            "computed_tokens": float(self.num_computed),
            **{name: total / learned for name, total in self._sums.items()},
            **(self._spread() if self._num_learned else {}),
        }

    def _spread(self) -> dict[str, float]:
        """Quantiles of the clipped ratio, KL to behaviour by staleness, and the effective share of the samples."""
        ratios, log_ratios, staleness = map(np.concatenate, (self._ratios, self._log_ratios, self._staleness))
        found = dict(zip(QUANTILES, np.quantile(ratios, list(QUANTILES.values())).tolist(), strict=True))
        k3 = np.expm1(log_ratios) - log_ratios
        for age in np.unique(staleness).tolist():
            found[f"kl_behaviour_staleness_{age}"] = float(k3[staleness == age].mean())
        found["effective_sample_share"] = effective_share(np.concatenate(self._log_weights))
        return found


def effective_share(log_weights: np.ndarray) -> float:
    """Effective sample size as a share of the samples, (sum w)^2 / (n sum w^2): 1 where all weights are equal."""
    weights = np.exp(log_weights - log_weights.max())  # a common factor changes nothing, and this one cannot overflow
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
