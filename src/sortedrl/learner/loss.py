"""The policy-gradient loss over answer tokens.

`learner/torch.py` calls it once per micro-batch. The loss is a sum over the micro-batch's tokens, divided by a number
that is counted over the whole mini-batch (`LossInputs.divisor`). So the gradients of micro-batches add up to the same
update however the mini-batch is split. Log-probs are taken at the sampling temperature; otherwise the ratio would not
be 1 for a policy that has not moved.

Shapes: a answer tokens, s samples, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sortedrl.errors import LearnerError
from sortedrl.learner.algorithms import MaskLevel, Objective

_MAX_LOG_RATIO = 20.0  # keeps exp finite; tokens beyond it get no gradient
_MAX_LOG_WEIGHT = 80.0  # exp of more overflows float32, so weights without a cap stay finite
_ENTROPY_ROWS = 4096  # rows of logits that the entropy handles at once


@dataclass(slots=True, kw_only=True, frozen=True)
class TokenInputs:
    """What the loss reads at the answer tokens of a micro-batch. A sample's tokens are all in one micro-batch."""

    sample_a: Tensor  # a number that identifies the token's sample
    behaviour_a: Tensor  # log-probs of the policy that sampled the token
    advantages_a: Tensor
    staleness_a: Tensor
    old_a: Tensor | None = None  # log-probs at the start of the update; None: the ratio is to `behaviour_a`
    drift_a: Tensor | None = None  # log-probs at the start of the update minus `behaviour_a`, where they are known
    reference_a: Tensor | None = None  # log-probs of the reference model, for the KL penalty
    scale_a: Tensor | None = None  # the token's weight in the mean; None: 1
    values_a: Tensor | None = None  # the critic's values at the start of the update
    returns_a: Tensor | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class PolicyRatios:
    """How far the policy has moved from the policies that sampled the tokens; without gradients."""

    ratio_a: Tensor  # the ratio that the loss clips
    is_clipped_a: Tensor
    log_ratio_a: Tensor  # to the behaviour policy, token by token
    drift_a: Tensor  # the same at the start of the update; before the first step both are equal
    is_masked_a: Tensor | None = None  # tokens that `learner.importance_mask` leaves out


def answer_logprobs(logits_av: Tensor, targets_a: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the answer tokens, and the entropy summed over their positions (no gradient).

    Temperature 0 is greedy sampling; its log-probs are those of temperature 1.
    """
    scaled_av = _scaled(logits_av, temperature)
    logsumexp_a = scaled_av.logsumexp(-1)
    logprobs_a = scaled_av.gather(-1, targets_a[:, None])[:, 0] - logsumexp_a
    return logprobs_a, _entropy_sum(scaled_av.detach(), logsumexp_a.detach())


def entropy_bonus(logits_av: Tensor, temperature: float) -> Tensor:
    """The entropy summed over positions, with a gradient.

    `answer_logprobs` returns the same sum without a gradient, which is cheaper.
    """
    logprobs_av = _scaled(logits_av, temperature).log_softmax(-1)
    return -(logprobs_av.exp() * logprobs_av).sum()


def policy_loss(
    objective: Objective, tokens: TokenInputs, logprobs_a: Tensor, *, divisor: float
) -> tuple[Tensor, PolicyRatios]:
    """A micro-batch's share of the mini-batch's mean loss: clipped surrogate, importance weights, KL penalty."""
    denominator_a = tokens.behaviour_a if tokens.old_a is None else tokens.old_a
    log_ratio_a = (logprobs_a - denominator_a).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if objective.ratio == "sequence":
        log_ratio_a = _sample_mean(log_ratio_a, tokens.sample_a)
    ratio_a = log_ratio_a.exp()
    surrogate = objective.algorithm.surrogate or clipped_surrogate
    loss_a = surrogate(objective, ratio_a, tokens.advantages_a, logprobs_a)
    if loss_a.shape != logprobs_a.shape:
        raise LearnerError(
            f"the surrogate of the algorithm returned a loss of shape {tuple(loss_a.shape)} for {len(logprobs_a)} "
            "tokens: return one number per token"
        )
    if objective.importance != "none":
        assert tokens.old_a is not None, "importance weights need old_a, the log-probs at the start of the update"
        drift_a = tokens.old_a - tokens.behaviour_a
        weight_a = importance_weights(drift_a, tokens.sample_a, level=objective.importance, cap=objective.weight_cap)
        loss_a = loss_a * weight_a
    start_a = logprobs_a.detach() if tokens.old_a is None else tokens.old_a
    drift_a = start_a - tokens.behaviour_a if tokens.drift_a is None else tokens.drift_a
    is_masked_a = None
    if objective.importance_mask != "none":
        low, high = objective.importance_low, objective.importance_high
        is_masked_a = outside_band(drift_a, tokens.sample_a, level=objective.importance_mask, low=low, high=high)
        loss_a = torch.where(is_masked_a, 0.0, loss_a)
    if objective.has_loss_kl:
        assert tokens.reference_a is not None, "a KL penalty needs reference_a, the log-probs of the reference model"
        penalty_a = divergence(logprobs_a, tokens.reference_a, objective.kl_estimator)
        loss_a = loss_a + objective.kl_coef * (penalty_a * ratio_a if objective.kl_weighted else penalty_a)
    if tokens.scale_a is not None:
        loss_a = loss_a * tokens.scale_a
    with torch.no_grad():
        # A token is clipped only where the clipped term is the smaller one: there its gradient is 0.
        clipped_a = ratio_a.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        is_clipped_a = clipped_a * tokens.advantages_a < ratio_a * tokens.advantages_a
        behaviour_log_ratio_a = (logprobs_a - tokens.behaviour_a).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratios = PolicyRatios(
        ratio_a=ratio_a.detach(),
        is_clipped_a=is_clipped_a,
        log_ratio_a=behaviour_log_ratio_a,
        drift_a=drift_a.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO),
        is_masked_a=is_masked_a,
    )
    return loss_a.sum() / divisor, ratios


def clipped_surrogate(objective: Objective, ratio_a: Tensor, advantages_a: Tensor, logprobs_a: Tensor) -> Tensor:
    """PPO's loss of each token: the smaller of the plain and the clipped gain."""
    clipped_a = ratio_a.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return -torch.minimum(ratio_a * advantages_a, clipped_a * advantages_a)


@torch.no_grad()
def importance_weights(
    log_ratio_a: Tensor, sample_a: Tensor, *, level: Literal["token", "sequence"], cap: float | None
) -> Tensor:
    """Importance weights of tokens that another policy sampled, each at most `cap`; they carry no gradient.

    `log_ratio_a` is each token's log-prob under the current policy minus its log-prob under the policy that sampled it.
    Level "token" weights each token by its own ratio. Level "sequence" weights all tokens of a sample by the product of
    their ratios; without a cap, this makes gradient estimates unbiased.
    """
    log_weight_a = log_ratio_a if level == "token" else _sample_sum(log_ratio_a, sample_a)
    weight_a = log_weight_a.clamp(max=_MAX_LOG_WEIGHT).exp()
    return weight_a if cap is None else weight_a.clamp(max=cap)


@torch.no_grad()
def outside_band(log_ratio_a: Tensor, sample_a: Tensor, *, level: MaskLevel, low: float, high: float) -> Tensor:
    """Which tokens have a ratio below `low` or above `high`: then engine and trainer disagree too much to learn.

    Level "token" asks for each token's own ratio (IcePop). Level "sequence" asks for the product of its sample's ratios
    (sequence-level masked importance sampling), "geometric" for their geometric mean: whole samples are left out.
    """
    if level != "token":
        log_ratio_a = (_sample_sum if level == "sequence" else _sample_mean)(log_ratio_a, sample_a)
    ratio_a = log_ratio_a.clamp(max=_MAX_LOG_WEIGHT).exp()
    return (ratio_a < low) | (ratio_a > high)


def divergence(logprobs_a: Tensor, reference_a: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimates of KL(policy, reference) at tokens that the policy sampled."""
    log_ratio_a = (logprobs_a - reference_a).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return log_ratio_a
        case "k2":
            return 0.5 * log_ratio_a.square()
        case "k3":
            return (-log_ratio_a).exp() - 1 + log_ratio_a


def _sample_sum(values_a: Tensor, sample_a: Tensor) -> Tensor:
    """For each token, the sum over all tokens of its sample."""
    # `unique` would number the samples too, but the host would wait to know how many there are.
    ordered_a, order_a = sample_a.sort(stable=True)
    is_next_a = torch.cat((ordered_a.new_zeros(1), (ordered_a.diff() != 0).long()))[: len(ordered_a)]
    position_a = torch.empty_like(order_a).scatter_(0, order_a, is_next_a.cumsum(0))
    return values_a.new_zeros(len(values_a)).index_add(0, position_a, values_a)[position_a]


def _sample_mean(values_a: Tensor, sample_a: Tensor) -> Tensor:
    return _sample_sum(values_a, sample_a) / _sample_sum(torch.ones_like(values_a), sample_a)


def _scaled(logits_av: Tensor, temperature: float) -> Tensor:
    scaled_av = logits_av.float()
    return scaled_av if temperature in (0.0, 1.0) else scaled_av / temperature


@torch.no_grad()
def _entropy_sum(scaled_av: Tensor, logsumexp_a: Tensor) -> Tensor:
    total = logsumexp_a.sum()
    for scaled, logsumexp in zip(scaled_av.split(_ENTROPY_ROWS), logsumexp_a.split(_ENTROPY_ROWS), strict=True):
        total = total - ((scaled - logsumexp[:, None]).exp_() * scaled).sum()
    return total
