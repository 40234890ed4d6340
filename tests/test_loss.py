"""The loss against values worked out by hand and a plain REINFORCE gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sortedrl.learner.loss import answer_logprobs, policy_loss


def surrogate(
    ratios: list[float], advantages: list[float], num_tokens: int | None = None
) -> tuple[float, list[float], list[float]]:
    """Loss, gradients by log-prob and metric sums, at behaviour probability 1/2 for each token."""
    behaviour_a = torch.full((len(ratios),), math.log(0.5))
    logprobs_a = (behaviour_a + torch.tensor(ratios).log()).requires_grad_()
    loss, sums = policy_loss(
        logprobs_a,
        behaviour_a,
        torch.tensor(advantages),
        clip_low=0.2,
        clip_high=0.28,
        num_tokens=num_tokens or len(ratios),
    )
    loss.backward()
    assert logprobs_a.grad is not None
    return loss.item(), logprobs_a.grad.tolist(), sums.tolist()


def test_clipping_is_asymmetric_and_one_sided() -> None:
    # By (ratio, advantage): inside; above and wanted up (clipped at 1.28); above and wanted down (kept); below and
    # wanted down (clipped at 0.8); below and wanted up (kept).
    loss, gradients, sums = surrogate([1.1, 1.5, 1.5, 0.5, 0.5], [1.0, 2.0, -1.0, -1.0, 3.0])
    assert loss == pytest.approx(-(1.1 + 1.28 * 2 - 1.5 - 0.8 + 1.5) / 5, rel=1e-5)
    assert gradients == pytest.approx([-1.1 / 5, 0, 1.5 / 5, 0, -1.5 / 5], rel=1e-5)
    assert sums[0] == pytest.approx(1.1 + 1.5 + 1.5 + 0.5 + 0.5, rel=1e-5)
    assert sums[1] == 2


def test_divergence_from_behaviour() -> None:
    _, _, sums = surrogate([2.0, 0.5], [1.0, 1.0])
    assert sums[2] == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)), rel=1e-5)
    assert sums[3] == pytest.approx(0, abs=1e-6)
    _, _, sums = surrogate([2.0, 2.0], [1.0, 1.0])
    assert sums[3] == pytest.approx(-2 * math.log(2), rel=1e-5)


def test_tokens_of_other_micro_batches_count_in_the_mean() -> None:
    loss, gradients, _ = surrogate([1.0, 1.0], [1.0, -2.0], num_tokens=10)
    assert loss == pytest.approx(0.1)
    assert gradients == pytest.approx([-0.1, 0.2])


def test_an_impossible_ratio_stays_finite() -> None:
    behaviour_a = torch.tensor([-200.0, -1.0])
    logprobs_a = torch.tensor([-1.0, -200.0], requires_grad=True)
    loss, sums = policy_loss(
        logprobs_a, behaviour_a, torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.28, num_tokens=2
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs_a.grad is not None
    assert bool(logprobs_a.grad.isfinite().all())
    assert bool(sums.isfinite().all())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 0.0])
def test_logprobs_are_those_of_the_temperature(temperature: float) -> None:
    logits_av = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])
    logprobs_a, entropy = answer_logprobs(logits_av, torch.tensor([1, 0]), temperature)
    odds = 3 ** (1 / temperature) if temperature else 3.0
    share = odds / (1 + odds)
    assert logprobs_a.tolist() == pytest.approx([math.log(share), math.log(0.5)], rel=1e-5)
    by_hand = -share * math.log(share) - (1 - share) * math.log(1 - share) + math.log(2)
    assert entropy.item() == pytest.approx(by_hand, rel=1e-5)


def test_unmoved_policy_gives_the_reinforce_gradient() -> None:
    torch.manual_seed(0)
    logits_av = torch.randn(7, 5, requires_grad=True)
    targets_a = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    advantages_a = torch.randn(7)

    logprobs_a, _ = answer_logprobs(logits_av, targets_a, 0.7)
    loss, sums = policy_loss(logprobs_a, logprobs_a.detach(), advantages_a, clip_low=0.2, clip_high=0.28, num_tokens=7)
    (ours,) = torch.autograd.grad(loss, logits_av)

    reference_a: Tensor = torch.log_softmax(logits_av / 0.7, -1)[torch.arange(7), targets_a]
    (plain,) = torch.autograd.grad(-(advantages_a * reference_a).mean(), logits_av)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    assert sums.tolist() == pytest.approx([7, 0, 0, 0], abs=1e-6)
