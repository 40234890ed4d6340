"""Which off-policy corrections are biased? Each one estimates an exactly known gradient from scheduled samples.

    python -m benchmarks.learner.off_policy [--samples 200000] [--seed 0] [--rates 2 8] [--json]

The scheduler trains samples of a toy policy (`toy_policy.py`) while the weights pass through three versions. Each
version is the previous one plus `rate` x exact gradient. Then each correction estimates the gradient at the third
version. The script measures the bias against the exact gradient, and the variance.

Averages are over all samples of whole cohorts, in whichever batch they were trained, so no samples are selected. The
version that writes a token depends only on earlier draws. With the product of ratios as weight, each answer therefore
counts as if the third version had written it, whatever the scheduler did (docs/research/off_policy.md). Cohorts are
independent of each other, but samples of one cohort are not: standard errors are taken over cohorts.

Shapes: n samples, l positions (padded), a answer tokens (of all samples, concatenated), c cohorts, s states, k free
logits of a state, p all free logits.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.learner.toy_policy import (
    COHORT,
    COHORT_BATCHES,
    Bools,
    Drawn,
    Floats,
    Ints,
    exact,
    train_cohorts,
    trajectory,
)
from benchmarks.record import make_parser, save
from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.learner.loss import importance_weights

CAP, CLIP = 2.0, 0.2
GSPO = "gspo"


def clipped(log_ratio_a: Tensor, advantages_a: Tensor, low: float, high: float) -> Tensor:
    """Derivative of the clipped objective by each token's log-prob; ratios are to the behaviour policy.

    GSPO's ratio, the geometric mean over a sample, has the same form when the tokens of the sample are summed.
    """
    ratio_a = log_ratio_a.exp()
    is_stopped_a = torch.where(advantages_a > 0, ratio_a > 1 + high, ratio_a < 1 - low)
    return torch.where(is_stopped_a, 0.0, ratio_a * advantages_a)


def sample_means(values_a: Tensor, rows_a: Ints) -> Tensor:
    """For each token the mean over all tokens of its sample."""
    sums_n, counts_n = np.bincount(rows_a, weights=values_a.numpy()), np.bincount(rows_a)
    return torch.from_numpy((sums_n / np.maximum(counts_n, 1))[rows_a])


# Estimators with importance weights: the level of the weight, and its cap.
WEIGHTED: Mapping[str, tuple[Literal["token", "sequence"], float | None]] = {
    "sequence": ("sequence", None),
    f"sequence, cap {CAP:g}": ("sequence", CAP),
    "token": ("token", None),
    f"token, cap {CAP:g}": ("token", CAP),
}
ESTIMATORS = (*WEIGHTED, f"clip {CLIP:g}", GSPO, "none")


def coefficients(name: str, drawn: Drawn, weights_sk: Floats) -> Floats:
    """Factor of each token's gradient, [n, l]; the advantage is reward minus expected reward at these weights."""
    is_token_nl = drawn.answers.is_token_nl
    rows_a = np.nonzero(is_token_nl)[0]
    advantages_a = torch.from_numpy((drawn.rewards_n - exact(weights_sk)[0])[rows_a])
    log_ratio_a = torch.from_numpy((drawn.answers.logprobs(weights_sk) - drawn.behaviour_nl)[is_token_nl])
    if name in WEIGHTED:
        level, cap = WEIGHTED[name]
        sample_a = torch.from_numpy(rows_a)
        factors_a = importance_weights(log_ratio_a, sample_a, level=level, cap=cap) * advantages_a
    elif name == "none":
        factors_a = advantages_a
    elif name == GSPO:
        gspo = ALGORITHMS[GSPO]
        factors_a = clipped(sample_means(log_ratio_a, rows_a), advantages_a, gspo.clip_low, gspo.clip_high)
    else:
        factors_a = clipped(log_ratio_a, advantages_a, CLIP, CLIP)
    factors_nl = np.zeros(is_token_nl.shape)
    factors_nl[is_token_nl] = factors_a.numpy()
    return factors_nl


def errors(name: str, drawn: Drawn, weights_sk: Floats) -> Floats:
    """Estimate of each sample minus the exact gradient at these weights, [n, free logits]."""
    return drawn.answers.gradients(weights_sk, coefficients(name, drawn, weights_sk)) - exact(weights_sk)[1]


@dataclass(slots=True, kw_only=True, frozen=True)
class Verdict:
    """A test of whether the mean error is 0."""

    bias: Floats
    stderr: Floats
    chi2: float  # of all coordinates together

    @property
    def z(self) -> Floats:
        return self.bias / self.stderr

    @property
    def p_value(self) -> float:
        """Probability of a larger chi-square without bias, in closed form for six degrees of freedom."""
        half = self.chi2 / 2
        return math.exp(-half) * (1 + half + half**2 / 2)


def judge(errors_np: Floats, is_counted_n: Bools | None = None) -> Verdict:
    """Test the mean error; the variance is taken over sums of cohorts, since samples of a cohort are dependent."""
    counted_n = np.ones(len(errors_np)) if is_counted_n is None else is_counted_n.astype(np.float64)
    sums_cp = (errors_np * counted_n[:, None]).reshape(-1, COHORT, errors_np.shape[1]).sum(axis=1)
    num_cohorts, per_cohort = len(sums_cp), counted_n.sum() * COHORT / len(errors_np)
    bias = sums_cp.mean(axis=0) / per_cohort
    # Batches differ in size between cohorts, so the spread is taken around the common mean.
    counts_c = counted_n.reshape(-1, COHORT).sum(axis=1)
    covariance = np.cov(sums_cp - counts_c[:, None] * bias, rowvar=False) / num_cohorts / per_cohort**2
    chi2 = float(bias @ np.linalg.solve(covariance, bias))
    return Verdict(bias=bias, stderr=np.sqrt(np.diag(covariance)), chi2=chi2)


# ---- measurement -----------------------------------------------------------------------------------------------


def figures(errors_np: Floats, gradient_norm: float, is_counted_n: Bools | None = None) -> dict[str, Any]:
    """Bias and variance in units of the norm of the exact gradient."""
    verdict = judge(errors_np, is_counted_n)
    counted_np = errors_np if is_counted_n is None else errors_np[is_counted_n]
    return {
        "bias": float(np.linalg.norm(verdict.bias)) / gradient_norm,
        "bias_stderr": float(np.linalg.norm(verdict.stderr)) / gradient_norm,
        "max_z": float(np.abs(verdict.z).max()),
        "chi2": verdict.chi2,
        "p_value": verdict.p_value,
        "variance": float(counted_np.var(axis=0).sum()) / gradient_norm**2,
    }


def measure(rate: float, num_cohorts: int, seed: int, *, is_quiet: bool) -> dict[str, Any]:
    versions = trajectory(rate)
    cohorts = track(range(num_cohorts), f"rate {rate:g}", console=Console(stderr=True), disable=is_quiet)
    drawn = Drawn.of(train_cohorts(cohorts, seed, versions))
    norms = [float(np.linalg.norm(exact(weights_sk)[1])) for weights_sk in versions]
    log_ratio_nl = drawn.answers.logprobs(versions[-1]) - drawn.behaviour_nl
    products_n = np.exp(log_ratio_nl.sum(axis=1))
    rows: dict[str, dict[str, Any]] = {}
    for name in ESTIMATORS:
        errors_vnp = np.stack([errors(name, drawn, weights_sk) for weights_sk in versions])
        trained_np = np.take_along_axis(errors_vnp, drawn.trained_n[None, :, None], axis=0)[0]
        rows[name] = {
            "cohort": figures(errors_vnp[-1], norms[-1]),
            # As in training: each batch at its own version, and all batches of a cohort together.
            "batches": [figures(errors_vnp[v], norms[v], drawn.trained_n == v) for v in range(COHORT_BATCHES)],
            "batches_together": figures(trained_np, norms[-1]),
        }
    return {
        "rate": rate,
        "samples": len(products_n),
        "expected_rewards": [exact(weights_sk)[0] for weights_sk in versions],
        "versions_per_sample": (np.bincount(drawn.num_versions_n) / len(products_n)).tolist(),
        "trained_per_version": (np.bincount(drawn.trained_n) / len(products_n)).tolist(),
        "token_kl": float(-log_ratio_nl.sum() / drawn.answers.is_token_nl.sum()),
        "effective_samples": float(products_n.sum() ** 2 / (products_n**2).sum() / len(products_n)),
        "products_over_cap": float((products_n > CAP).mean()),
        "largest_product": float(products_n.max()),
        "estimators": rows,
    }


def table(run: dict[str, Any]) -> Table:
    shown = Table(title=f"rate {run['rate']:g}, {run['samples']:,} samples; in units of the norm of the exact gradient")
    batches = [f"batch {version}" for version in range(COHORT_BATCHES)]
    for column in ("weights", "bias", "max |z|", "p", "variance", "crossover", *batches, "together"):
        shown.add_column(column, justify="left" if column == "weights" else "right")
    unbiased = run["estimators"]["sequence"]["cohort"]
    for name, row in run["estimators"].items():
        cohort = row["cohort"]
        # With fewer samples than this, the mean has a smaller squared error than the unbiased estimator.
        crossover = (unbiased["variance"] - cohort["variance"]) / cohort["bias"] ** 2
        shown.add_row(
            name,
            f"{cohort['bias']:.3f} ± {cohort['bias_stderr']:.3f}",
            f"{cohort['max_z']:.1f}",
            f"{cohort['p_value']:.2g}",
            f"{cohort['variance']:.1f}",
            "" if name == "sequence" else f"{max(crossover, 0.0):.0f}",
            *(f"{batch['bias']:.2f}" for batch in row["batches"]),
            f"{row['batches_together']['bias']:.3f}",
        )
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=200_000, help="rounded up to whole cohorts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 8.0])
    options = parser.parse_args()
    num_cohorts = math.ceil(options.samples / COHORT)
    runs = [measure(rate, num_cohorts, options.seed, is_quiet=options.json) for rate in options.rates]
    if options.json:
        print(json.dumps({"runs": runs}))
        return
    for run in runs:
        Console(width=120).print(table(run))
    print(f"saved {save('off_policy', {'arguments': vars(options), 'runs': runs})}", file=sys.stderr)


if __name__ == "__main__":
    main()
