"""The policy-gradient loss over answer tokens, with the log-probs of whatever policy wrote each of them.

`learner/torch.py` calls it once per micro-batch. The loss is a sum over the micro-batch's tokens divided by the number
of answer tokens of the whole mini-batch, so the gradients of micro-batches add up to the same update however it is
split, and a batch that ties made larger is weighted by what it really holds. Log-probs are taken at the temperature
that was sampled with: only then is the ratio 1 where the policy has not moved.

Shapes: a answer tokens, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp of more overflows soon; a token so far off is no longer learned from
ENTROPY_ROWS = 4096  # rows of the vocabulary held at once for the entropy

METRICS = ("ratio_mean", "clip_fraction", "kl_behaviour", "kl_behaviour_k1", "entropy")


def answer_logprobs(logits_av: Tensor, targets_a: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the answer tokens, and the entropy summed over their positions (no gradient).

    Temperature 0 is greedy sampling, whose log-probs are those of temperature 1.
    """
    scaled_av = logits_av.float()
    if temperature not in (0.0, 1.0):
        scaled_av = scaled_av / temperature
    logsumexp_a = scaled_av.logsumexp(-1)
    logprobs_a = scaled_av.gather(-1, targets_a[:, None])[:, 0] - logsumexp_a
    return logprobs_a, _entropy_sum(scaled_av.detach(), logsumexp_a.detach())


def policy_loss(
    logprobs_a: Tensor,
    behaviour_a: Tensor,
    advantages_a: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, and sums over tokens in the order of METRICS without the entropy."""
    log_ratio_a = (logprobs_a - behaviour_a).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_a = log_ratio_a.exp()
    clipped_a = ratio_a.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio_a * advantages_a, clipped_a * advantages_a).sum() / num_tokens
    with torch.no_grad():
        # Where the clipped side is the smaller one the gradient vanishes; a clip on the other side changes nothing.
        is_clipped_a = clipped_a * advantages_a < ratio_a * advantages_a
        k3_a = ratio_a - 1 - log_ratio_a
        sums = torch.stack((ratio_a.sum(), is_clipped_a.sum().float(), k3_a.sum(), -log_ratio_a.sum()))
    return loss, sums


@torch.no_grad()
def _entropy_sum(scaled_av: Tensor, logsumexp_a: Tensor) -> Tensor:
    total = logsumexp_a.sum()
    for scaled, logsumexp in zip(scaled_av.split(ENTROPY_ROWS), logsumexp_a.split(ENTROPY_ROWS), strict=True):
        total = total - ((scaled - logsumexp[:, None]).exp_() * scaled).sum()
    return total
