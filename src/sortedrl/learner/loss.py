"""The policy-gradient loss over answer tokens, with the log-probs of whatever policy wrote each of them.

`learner/torch.py` calls it once per micro-batch. The loss is a sum over the micro-batch's tokens divided by something
that is counted over the whole mini-batch (`Terms.divisor`), so the gradients of micro-batches add up to the same update
however it is split, and a batch that ties made larger is weighted by what it really holds. Log-probs are taken at the
temperature that was sampled with: only then is the ratio 1 where the policy has not moved.

Shapes: a answer tokens, s samples, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sortedrl.learner.algorithms import Objective

MAX_LOG_RATIO = 20.0  # exp of more overflows soon; a token so far off is no longer learned from
MAX_LOG_WEIGHT = 80.0  # exp of more is no number in fp32; a weight that is not capped stays finite
ENTROPY_ROWS = 4096  # rows of the vocabulary held at once for the entropy


@dataclass(slots=True, kw_only=True, frozen=True)
class Tokens:
    """What the loss takes at the answer tokens of a micro-batch; all of a sample's tokens are in it."""

    sample_a: Tensor  # whose token it is: any whole numbers
    behaviour_a: Tensor  # log-probs of the policy that wrote it
    advantages_a: Tensor
    staleness_a: Tensor
    old_a: Tensor | None = None  # log-probs of the policy at the start of the update; None: the ratio is to behaviour
    reference_a: Tensor | None = None  # log-probs of the model that KL is measured to
    scale_a: Tensor | None = None  # what the token counts in the mean; None: 1
    values_a: Tensor | None = None  # the critic's at the start of the update
    returns_a: Tensor | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class Moved:
    """How far the policy is from those that wrote the tokens; no gradients."""

    ratio_a: Tensor  # the ratio that is clipped
    is_clipped_a: Tensor
    log_ratio_a: Tensor  # to behaviour, token by token


def answer_logprobs(logits_av: Tensor, targets_a: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the answer tokens, and the entropy summed over their positions (no gradient).

    Temperature 0 is greedy sampling, whose log-probs are those of temperature 1.
    """
    scaled_av = _scaled(logits_av, temperature)
    logsumexp_a = scaled_av.logsumexp(-1)
    logprobs_a = scaled_av.gather(-1, targets_a[:, None])[:, 0] - logsumexp_a
    return logprobs_a, _entropy_sum(scaled_av.detach(), logsumexp_a.detach())


def entropy_bonus(logits_av: Tensor, temperature: float) -> Tensor:
    """The entropy summed over positions, with its gradient: dearer than the metric that `answer_logprobs` gives."""
    logprobs_av = _scaled(logits_av, temperature).log_softmax(-1)
    return -(logprobs_av.exp() * logprobs_av).sum()


def policy_loss(objective: Objective, tokens: Tokens, logprobs_a: Tensor, *, divisor: float) -> tuple[Tensor, Moved]:
    """The clipped surrogate with its weights and the KL penalty, as a share of the mini-batch's mean."""
    denominator_a = tokens.behaviour_a if tokens.old_a is None else tokens.old_a
    log_ratio_a = (logprobs_a - denominator_a).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if objective.ratio == "sequence":
        log_ratio_a = _sample_mean(log_ratio_a, tokens.sample_a)
    ratio_a = log_ratio_a.exp()
    clipped_a = ratio_a.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    loss_a = -torch.minimum(ratio_a * tokens.advantages_a, clipped_a * tokens.advantages_a)
    if objective.importance != "none":
        assert tokens.old_a is not None, "importance weights need the log-probs of the start of the update"
        drift_a = tokens.old_a - tokens.behaviour_a
        weight_a = importance_weights(drift_a, tokens.sample_a, level=objective.importance, cap=objective.weight_cap)
        loss_a = loss_a * weight_a
    if objective.has_loss_kl:
        assert tokens.reference_a is not None, "a KL penalty needs the log-probs of the reference"
        penalty_a = divergence(logprobs_a, tokens.reference_a, objective.kl_estimator)
        loss_a = loss_a + objective.kl_coef * (penalty_a * ratio_a if objective.kl_weighted else penalty_a)
    if tokens.scale_a is not None:
        loss_a = loss_a * tokens.scale_a
    with torch.no_grad():
        # Where the clipped side is the smaller one the gradient vanishes; a clip on the other side changes nothing.
        is_clipped_a = clipped_a * tokens.advantages_a < ratio_a * tokens.advantages_a
        behind_a = (logprobs_a - tokens.behaviour_a).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return loss_a.sum() / divisor, Moved(ratio_a=ratio_a.detach(), is_clipped_a=is_clipped_a, log_ratio_a=behind_a)


@torch.no_grad()
def importance_weights(
    log_ratio_a: Tensor, sample_a: Tensor, *, level: Literal["token", "sequence"], cap: float | None
) -> Tensor:
    """Importance weights of tokens that another policy wrote, each at most `cap`; constants to the gradient.

    `log_ratio_a` is the log-prob of each token under the policy at hand less that under the one that wrote it,
    `sample_a` whose token it is. Level "token": each token's own ratio. Level "sequence": the product over the
    sample's tokens, the same for all of them; without a cap this is the weight that makes estimates unbiased.
    """
    log_weight_a = log_ratio_a if level == "token" else _sample_sum(log_ratio_a, sample_a)
    weight_a = log_weight_a.clamp(max=MAX_LOG_WEIGHT).exp()
    return weight_a if cap is None else weight_a.clamp(max=cap)


def divergence(logprobs_a: Tensor, reference_a: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates of KL(policy, reference) at tokens that the policy wrote."""
    log_ratio_a = (logprobs_a - reference_a).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return log_ratio_a
        case "k2":
            return 0.5 * log_ratio_a.square()
        case "k3":
            return (-log_ratio_a).exp() - 1 + log_ratio_a


def _sample_sum(values_a: Tensor, sample_a: Tensor) -> Tensor:
    """Of each token, the sum over all tokens of its sample."""
    samples_s, place_a = sample_a.unique(return_inverse=True)
    return values_a.new_zeros(samples_s.numel()).index_add(0, place_a, values_a)[place_a]


def _sample_mean(values_a: Tensor, sample_a: Tensor) -> Tensor:
    return _sample_sum(values_a, sample_a) / _sample_sum(torch.ones_like(values_a), sample_a)


def _scaled(logits_av: Tensor, temperature: float) -> Tensor:
    scaled_av = logits_av.float()
    return scaled_av if temperature in (0.0, 1.0) else scaled_av / temperature


@torch.no_grad()
def _entropy_sum(scaled_av: Tensor, logsumexp_a: Tensor) -> Tensor:
    total = logsumexp_a.sum()
    for scaled, logsumexp in zip(scaled_av.split(ENTROPY_ROWS), logsumexp_a.split(ENTROPY_ROWS), strict=True):
        total = total - ((scaled - logsumexp[:, None]).exp_() * scaled).sum()
    return total
