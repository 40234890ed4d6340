"""The loss against values worked out by hand and a plain REINFORCE gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sortedrl.learner.algorithms import ALGORITHMS, Objective
from sortedrl.learner.loss import (
    PolicyRatios,
    TokenInputs,
    answer_logprobs,
    divergence,
    entropy_bonus,
    importance_weights,
    outside_band,
    policy_loss,
)

PLAIN = Objective(
    algorithm=ALGORITHMS["grpo"],
    ratio="token",
    loss_mean="token",
    clip_low=0.2,
    clip_high=0.28,
    overlong="keep",
    flat_groups="keep",
)


def tokens_of(behaviour_a: Tensor, advantages: list[float], **more: Any) -> TokenInputs:
    given = {"sample_a": torch.arange(len(advantages)), "staleness_a": torch.zeros(len(advantages))} | more
    return TokenInputs(behaviour_a=behaviour_a, advantages_a=torch.tensor(advantages), **given)


def surrogate(
    ratios: list[float],
    advantages: list[float],
    objective: Objective = PLAIN,
    divisor: float | None = None,
    **more: Any,
) -> tuple[float, list[float], PolicyRatios]:
    """Loss, gradients by log-prob and what moved, at behaviour probability 1/2 for each token."""
    behaviour_a = torch.full((len(ratios),), math.log(0.5))
    logprobs_a = (behaviour_a + torch.tensor(ratios).log()).requires_grad_()
    tokens = tokens_of(behaviour_a, advantages, **more)
    loss, moved = policy_loss(objective, tokens, logprobs_a, divisor=divisor or len(ratios))
    loss.backward()
    assert logprobs_a.grad is not None
    return loss.item(), logprobs_a.grad.tolist(), moved


def test_clipping_is_asymmetric_and_one_sided() -> None:
    # By (ratio, advantage): inside; above and wanted up (clipped at 1.28); above and wanted down (kept); below and
    # wanted down (clipped at 0.8); below and wanted up (kept).
    ratios = [1.1, 1.5, 1.5, 0.5, 0.5]
    loss, gradients, moved = surrogate(ratios, [1.0, 2.0, -1.0, -1.0, 3.0])
    assert loss == pytest.approx(-(1.1 + 1.28 * 2 - 1.5 - 0.8 + 1.5) / 5, rel=1e-5)
    assert gradients == pytest.approx([-1.1 / 5, 0, 1.5 / 5, 0, -1.5 / 5], rel=1e-5)
    assert moved.ratio_a.tolist() == pytest.approx(ratios, rel=1e-5)
    assert moved.is_clipped_a.tolist() == [False, True, False, True, False]
    assert moved.log_ratio_a.tolist() == pytest.approx([math.log(ratio) for ratio in ratios], rel=1e-5)


def test_token_loss_is_the_plain_expression_bit_by_bit() -> None:
    torch.manual_seed(3)
    logprobs_a, behaviour_a, advantages_a = -torch.rand(257), -torch.rand(257), torch.randn(257)
    logprobs_a.requires_grad_()
    loss, _ = policy_loss(PLAIN, tokens_of(behaviour_a, advantages_a.tolist()), logprobs_a, divisor=300)
    (ours,) = torch.autograd.grad(loss, logprobs_a)
    ratio_a = (logprobs_a - behaviour_a).clamp(-20, 20).exp()
    plain = -torch.minimum(ratio_a * advantages_a, ratio_a.clamp(1 - 0.2, 1 + 0.28) * advantages_a).sum() / 300
    (theirs,) = torch.autograd.grad(plain, logprobs_a)
    assert torch.equal(loss, plain)
    assert torch.equal(ours, theirs)


def test_sequence_ratio_is_the_geometric_mean() -> None:
    # Sample 0 has ratios 2 and 1/2, so 1 together; sample 1 has 4 and 1, so 2, which is clipped at 1.28.
    objective = replace(PLAIN, ratio="sequence")
    loss, gradients, moved = surrogate(
        [2.0, 0.5, 4.0, 1.0], [1.0, 1.0, 1.0, 1.0], objective, sample_a=torch.tensor([7, 7, 2, 2])
    )
    assert moved.ratio_a.tolist() == pytest.approx([1, 1, 2, 2], rel=1e-5)
    assert loss == pytest.approx(-(1 + 1 + 1.28 + 1.28) / 4, rel=1e-5)
    # Each token of sample 0 moves the ratio of both by half of it: twice 1/2 of 1/4.
    assert gradients == pytest.approx([-0.25, -0.25, 0, 0], abs=1e-6)


def test_sequence_mean_scales_tokens_by_their_sample() -> None:
    # Two samples, of one and of three tokens: the mean of 2 and of (1 + 1 + 4) / 3.
    loss, _, _ = surrogate([1.0] * 4, [2.0, 1.0, 1.0, 4.0], divisor=2, scale_a=torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3]))
    assert loss == pytest.approx(-(2 + 2) / 2, rel=1e-5)


def test_tokens_of_other_micro_batches_count_in_the_mean() -> None:
    loss, gradients, _ = surrogate([1.0, 1.0], [1.0, -2.0], divisor=10)
    assert loss == pytest.approx(0.1)
    assert gradients == pytest.approx([-0.1, 0.2])


@pytest.mark.parametrize(
    ("level", "cap", "expected"),
    [
        ("token", None, [2, 0.5, 3, 4]),
        ("token", 2.5, [2, 0.5, 2.5, 2.5]),
        ("sequence", None, [6, 2, 6, 2]),
        ("sequence", 2.5, [2.5, 2, 2.5, 2]),
    ],
)
def test_importance_weights_by_hand(level: Any, cap: float | None, expected: list[float]) -> None:
    log_ratio_a = torch.tensor([2.0, 0.5, 3.0, 4.0]).log().requires_grad_()
    weight_a = importance_weights(log_ratio_a, torch.tensor([0, 1, 0, 1]), level=level, cap=cap)
    assert weight_a.tolist() == pytest.approx(expected, rel=1e-5)
    assert not weight_a.requires_grad


def test_importance_weights_stay_finite_without_a_cap() -> None:
    log_ratio_a = torch.full((40,), 10.0)
    weight_a = importance_weights(log_ratio_a, torch.zeros(40, dtype=torch.long), level="sequence", cap=None)
    assert bool(weight_a.isfinite().all())


def test_importance_weighs_the_ratio_to_the_start_of_the_update() -> None:
    # Behaviour 1/2; at the start of the update 3/4 and 1/4, so weights 3/2 and 1/2; the policy is 1.1 of the start.
    objective = replace(PLAIN, importance="token", importance_cap=1.25)
    old_a = torch.tensor([0.75, 0.25]).log()
    loss, gradients, moved = surrogate([1.65, 0.55], [1.0, 2.0], objective, old_a=old_a)
    assert moved.ratio_a.tolist() == pytest.approx([1.1, 1.1], rel=1e-5)
    assert moved.log_ratio_a.exp().tolist() == pytest.approx([1.65, 0.55], rel=1e-5)
    assert loss == pytest.approx(-(1.25 * 1.1 + 0.5 * 1.1 * 2) / 2, rel=1e-5)
    assert gradients == pytest.approx([-1.25 * 1.1 / 2, -0.5 * 1.1 * 2 / 2], rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", 0.5 - 1 + math.log(2), 0.5)],
)
def test_kl_estimators_by_hand(estimator: Any, value: float, slope: float) -> None:
    # The policy gives the token twice what the reference does; k3 is 1/2 - 1 + log 2, its slope 1 - 1/2.
    logprobs_a = torch.tensor([math.log(0.5)], requires_grad=True)
    reference_a = torch.tensor([math.log(0.25)])
    found = divergence(logprobs_a, reference_a, estimator)
    found.sum().backward()
    assert found.item() == pytest.approx(value, rel=1e-5)
    assert logprobs_a.grad is not None
    assert logprobs_a.grad.item() == pytest.approx(slope, rel=1e-5)
    objective = replace(PLAIN, kl_coef=0.5, kl_estimator=estimator)
    loss, gradients, _ = surrogate([1.0], [3.0], objective, reference_a=reference_a)
    assert loss == pytest.approx(-3 + 0.5 * value, rel=1e-5)
    assert gradients == pytest.approx([-3 + 0.5 * slope], rel=1e-5)


def test_an_impossible_ratio_stays_finite() -> None:
    logprobs_a = torch.tensor([-1.0, -200.0], requires_grad=True)
    loss, moved = policy_loss(PLAIN, tokens_of(torch.tensor([-200.0, -1.0]), [-1.0, 1.0]), logprobs_a, divisor=2)
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs_a.grad is not None
    assert bool(logprobs_a.grad.isfinite().all())
    assert bool(moved.ratio_a.isfinite().all())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 0.0])
def test_logprobs_are_those_of_the_temperature(temperature: float) -> None:
    logits_av = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])
    logprobs_a, entropy = answer_logprobs(logits_av, torch.tensor([1, 0]), temperature)
    odds = 3 ** (1 / temperature) if temperature else 3.0
    share = odds / (1 + odds)
    assert logprobs_a.tolist() == pytest.approx([math.log(share), math.log(0.5)], rel=1e-5)
    by_hand = -share * math.log(share) - (1 - share) * math.log(1 - share) + math.log(2)
    assert entropy.item() == pytest.approx(by_hand, rel=1e-5)
    assert entropy_bonus(logits_av, temperature).item() == pytest.approx(by_hand, rel=1e-5)


def test_the_entropy_bonus_has_a_gradient() -> None:
    # At probabilities 3/4 and 1/4 the entropy falls by p (log p + H) with the logit of p.
    logits_av = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    entropy = entropy_bonus(logits_av, 1.0)
    entropy.backward()
    assert logits_av.grad is not None
    by_hand = [-p * (math.log(p) + entropy.item()) for p in (0.75, 0.25)]
    assert logits_av.grad[0].tolist() == pytest.approx(by_hand, rel=1e-5)


def test_unmoved_policy_gives_the_reinforce_gradient() -> None:
    torch.manual_seed(0)
    logits_av = torch.randn(7, 5, requires_grad=True)
    targets_a = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    advantages_a = torch.randn(7)

    logprobs_a, _ = answer_logprobs(logits_av, targets_a, 0.7)
    tokens = tokens_of(logprobs_a.detach(), advantages_a.tolist())
    loss, moved = policy_loss(PLAIN, tokens, logprobs_a, divisor=7)
    (ours,) = torch.autograd.grad(loss, logits_av)

    reference_a: Tensor = torch.log_softmax(logits_av / 0.7, -1)[torch.arange(7), targets_a]
    (plain,) = torch.autograd.grad(-(advantages_a * reference_a).mean(), logits_av)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    assert moved.ratio_a.tolist() == pytest.approx([1] * 7, abs=1e-6)
    assert not moved.is_clipped_a.any()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # Ratios of sample 0: 2 and 8, product 16, geometric mean 4. Of sample 1: 1/4 and 4, product and mean 1.
        ("token", [False, True, True, False]),
        ("sequence", [True, False, True, False]),
        ("geometric", [False, False, False, False]),
    ],
)
def test_masks_by_hand(level: Any, expected: list[bool]) -> None:
    log_ratio_a = torch.tensor([2.0, 0.25, 8.0, 4.0]).log()
    found = outside_band(log_ratio_a, torch.tensor([0, 1, 0, 1]), level=level, low=0.5, high=5.0)
    assert found.tolist() == expected


def test_a_masked_token_has_no_gradient_and_counts_in_the_mean() -> None:
    # IcePop: behaviour 1/2; at the start of the update ratios 1.2 and 0.4, of which the second is masked.
    objective = replace(PLAIN, importance="token", importance_cap="none", importance_mask="token")
    old_a = torch.tensor([0.6, 0.2]).log()
    loss, gradients, moved = surrogate([1.2, 0.4], [1.0, 2.0], objective, old_a=old_a)
    assert loss == pytest.approx(-1.2 * 1.0 / 2, rel=1e-5)
    assert gradients == pytest.approx([-0.6, 0], rel=1e-5)
    assert moved.is_masked_a is not None
    assert moved.is_masked_a.tolist() == [False, True]
    assert moved.drift_a.exp().tolist() == pytest.approx([1.2, 0.4], rel=1e-5)


def test_a_mask_without_weights_keeps_the_ratio_to_the_behaviour_policy() -> None:
    objective = replace(PLAIN, importance_mask="token")
    drift_a = torch.tensor([1.0, 6.0]).log()
    loss, _, moved = surrogate([1.1, 1.1], [1.0, 1.0], objective, drift_a=drift_a)
    assert moved.ratio_a.tolist() == pytest.approx([1.1, 1.1], rel=1e-5)
    assert loss == pytest.approx(-1.1 / 2, rel=1e-5)
