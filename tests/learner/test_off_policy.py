"""Off-policy correction on a toy policy whose exact gradient is known: 20k samples, trained by the real scheduler.

The weights go through three versions while a cohort is trained, and the gradient of the third is estimated from all its
samples. Seeds are fixed: a test of significance gives the same figure each time, and fails only if the code changes.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.learner import off_policy, toy_policy
from benchmarks.learner.toy_policy import COHORT, END, LONGEST, Drawn
from sortedrl.config.sections import LearnerSection
from sortedrl.engine.sampling.noise import gumbel_scalar
from sortedrl.learner.algorithms import objective_of
from sortedrl.learner.loss import TokenInputs, policy_loss
from sortedrl.records import FinishReason, sample_seed

NUM_COHORTS = 834  # of 24 samples
RATE = 8.0
VERSIONS = toy_policy.trajectory(RATE)
TARGET = VERSIONS[-1]
SEQUENCE, CAPPED_SEQUENCE, TOKEN, CAPPED_TOKEN, CLIPPED, GSPO, NONE = off_policy.ESTIMATORS


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return Drawn.of(toy_policy.train_cohorts(range(NUM_COHORTS), 0, VERSIONS))


def written_out(weights, tokens: tuple[int, ...] = (), chance: float = 1.0) -> list[tuple[tuple[int, ...], float]]:
    """All answers with their probabilities, token by token from the logits."""
    if tokens and (tokens[-1] == END or len(tokens) == LONGEST):
        return [(tokens, chance)]
    logits = weights[tokens[-1] if tokens else 0]
    exps = [math.exp(logits[0]), math.exp(logits[1]), 1.0]
    return [
        answer
        for token, part in enumerate(exps)
        for answer in written_out(weights, (*tokens, token), chance * part / sum(exps))
    ]


def test_enumeration_finds_every_answer_with_its_probability() -> None:
    listed = toy_policy.all_answers()
    chances = np.exp(toy_policy.Answers.of(listed).logprobs(TARGET).sum(axis=1))
    assert len(listed) == 63 + 64
    assert dict(zip(listed, chances, strict=True)) == pytest.approx(dict(written_out(TARGET)), rel=1e-12)
    assert chances.sum() == pytest.approx(1.0, rel=1e-12)


def test_exact_gradient_is_that_of_the_expected_reward() -> None:
    def expected(weights) -> float:
        texts = [("".join(map(str, answer)), chance) for answer, chance in written_out(weights)]
        return sum(chance for text, chance in texts if "12" in text and text.endswith("0"))

    value, gradient = toy_policy.exact(TARGET)
    assert value == pytest.approx(expected(TARGET), rel=1e-12)
    for index in range(6):
        step = np.zeros(6)
        step[index] = 1e-5
        above, below = (expected(TARGET + sign * step.reshape(3, 2)) for sign in (1, -1))
        assert gradient[index] == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_cohort_is_trained_once_with_what_its_versions_wrote() -> None:
    tables = [toy_policy.token_logprobs(weights).tolist() for weights in VERSIONS]
    samples = toy_policy.train_cohort(5, 0, tables)
    assert sorted(sample.index for sample in samples) == list(range(COHORT))
    for sample in samples:
        assert sample.seed == sample_seed(0, 0, "toy5", sample.index)
        state = 0
        for position, (token, logprob, version) in enumerate(
            zip(sample.tokens, sample.logprobs, sample.versions, strict=True)
        ):
            scores = [tables[version][state][t] + gumbel_scalar(sample.seed, position, t) for t in range(3)]
            assert token == scores.index(max(scores))
            assert logprob == tables[version][state][token]
            state = token
        is_ended = sample.tokens[-1] == END
        assert is_ended or sample.num_tokens == LONGEST
        assert sample.finish_reason == (FinishReason.STOP if is_ended else FinishReason.LENGTH)
        assert sample.reward == float(is_ended and (1, 2) in pairwise(sample.tokens))


def test_samples_span_three_versions(drawn: Drawn) -> None:
    assert len(drawn.rewards_n) == 20_016
    of_one, of_two, of_three = np.bincount(drawn.num_versions_n)[1:]
    assert min(of_one, of_two) > 8_000
    assert of_three > 2_000
    assert set(drawn.trained_n.tolist()) == {0, 1, 2}
    assert (drawn.versions_nl.max(axis=1) <= drawn.trained_n).all()


def plain_factors(name: str, logprobs: list[float], behaviour: list[float], advantage: float) -> list[float]:
    """What an estimator makes of one sample's tokens, from its definition."""
    ratios = [math.exp(new - old) for new, old in zip(logprobs, behaviour, strict=True)]
    if name == CLIPPED:
        is_stopped = [ratio > 1.2 if advantage > 0 else ratio < 0.8 for ratio in ratios]
        return [0.0 if stop else ratio * advantage for stop, ratio in zip(is_stopped, ratios, strict=True)]
    if name == GSPO:
        ratio = math.prod(ratios) ** (1 / len(ratios))
        is_clipped = ratio > 1.0004 if advantage > 0 else ratio < 0.9997
        return [0.0 if is_clipped else ratio * advantage] * len(ratios)
    weights = {
        NONE: [1.0] * len(ratios),
        TOKEN: ratios,
        CAPPED_TOKEN: [min(ratio, 2.0) for ratio in ratios],
        SEQUENCE: [math.prod(ratios)] * len(ratios),
        CAPPED_SEQUENCE: [min(math.prod(ratios), 2.0)] * len(ratios),
    }
    return [weight * advantage for weight in weights[name]]


@pytest.mark.parametrize("name", off_policy.ESTIMATORS)
def test_factors_are_those_of_the_definition(name: str, drawn: Drawn) -> None:
    factors_nl = off_policy.coefficients(name, drawn, TARGET)
    logprobs_nl, expected_reward = drawn.answers.logprobs(TARGET), toy_policy.exact(TARGET)[0]
    for row in range(0, len(factors_nl), 37):
        length = int(drawn.answers.is_token_nl[row].sum())
        logprobs, behaviour = logprobs_nl[row, :length].tolist(), drawn.behaviour_nl[row, :length].tolist()
        factors = plain_factors(name, logprobs, behaviour, drawn.rewards_n[row] - expected_reward)
        assert factors_nl[row].tolist() == pytest.approx(factors + [0.0] * (LONGEST - length), rel=1e-9)


SETTINGS = {
    SEQUENCE: {"importance": "sequence", "importance_cap": "none"},
    CAPPED_SEQUENCE: {"importance": "sequence", "importance_cap": 2.0},
    TOKEN: {"importance": "token", "importance_cap": "none"},
    CAPPED_TOKEN: {"importance": "token", "importance_cap": 2.0},
    CLIPPED: {"importance": "none"},
    GSPO: {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_gives_each_token_that_factor(name: str, drawn: Drawn) -> None:
    """At the start of an update, where the policy is the one that old log-probs are of."""
    settings = LearnerSection(**{"algorithm": "reinforce++", "clip_low": 0.2, "clip_high": 0.2, **SETTINGS[name]})
    is_token_nl = drawn.answers.is_token_nl
    rows_a = np.nonzero(is_token_nl)[0]
    logprobs_a = torch.from_numpy(drawn.answers.logprobs(TARGET)[is_token_nl])
    tokens = TokenInputs(
        sample_a=torch.from_numpy(rows_a),
        behaviour_a=torch.from_numpy(drawn.behaviour_nl[is_token_nl]),
        advantages_a=torch.from_numpy((drawn.rewards_n - toy_policy.exact(TARGET)[0])[rows_a]),
        staleness_a=torch.zeros(len(rows_a)),
        old_a=None if name in (CLIPPED, GSPO) else logprobs_a,
    )
    leaf_a = logprobs_a.clone().requires_grad_()
    loss, _ = policy_loss(objective_of(settings), tokens, leaf_a, divisor=1.0)
    (slope_a,) = torch.autograd.grad(loss, leaf_a)
    factors_a = off_policy.coefficients(name, drawn, TARGET)[is_token_nl]
    np.testing.assert_allclose(-slope_a.numpy(), factors_a, rtol=1e-9, atol=1e-12)


def test_untruncated_sequence_product_is_unbiased(drawn: Drawn) -> None:
    verdict = off_policy.judge(off_policy.errors(SEQUENCE, drawn, TARGET))
    assert np.abs(verdict.z).max() < 4
    assert verdict.p_value > 1e-3
    products_n = np.exp((drawn.answers.logprobs(TARGET) - drawn.behaviour_nl).sum(axis=1))
    means_c = products_n.reshape(-1, COHORT).mean(axis=1)
    assert abs(means_c.mean() - 1) < 4 * means_c.std(ddof=1) / math.sqrt(NUM_COHORTS)


@pytest.mark.parametrize("name", [name for name in off_policy.ESTIMATORS if name != SEQUENCE])
def test_every_other_estimator_is_biased(name: str, drawn: Drawn) -> None:
    verdict = off_policy.judge(off_policy.errors(name, drawn, TARGET))
    assert np.abs(verdict.z).max() > 6
    assert verdict.p_value < 1e-9


@pytest.mark.parametrize("version", [0, 1])
def test_logprobs_of_another_version_would_be_noticed(version: int, drawn: Drawn) -> None:
    """An engine that recorded all tokens of an answer as one version's fails the test of the product."""
    wrong = Drawn(
        answers=drawn.answers,
        behaviour_nl=drawn.answers.logprobs(VERSIONS[version]),
        versions_nl=drawn.versions_nl,
        rewards_n=drawn.rewards_n,
        trained_n=drawn.trained_n,
    )
    assert off_policy.judge(off_policy.errors(SEQUENCE, wrong, TARGET)).p_value < 1e-9


def test_truncation_trades_variance_for_bias(drawn: Drawn) -> None:
    errors = {name: off_policy.errors(name, drawn, TARGET) for name in off_policy.ESTIMATORS}
    variance = {name: errors_np.var(axis=0).sum() for name, errors_np in errors.items()}
    bias = {name: np.linalg.norm(errors_np.mean(axis=0)) for name, errors_np in errors.items()}
    assert variance[CAPPED_SEQUENCE] < variance[SEQUENCE] < variance[NONE]
    assert bias[SEQUENCE] < bias[CAPPED_SEQUENCE] < bias[TOKEN] < bias[NONE]


def test_no_weight_undoes_that_a_batch_is_selected_by_length(drawn: Drawn) -> None:
    """The first batch is on-policy to the token, and its mean is not the gradient: its samples are the short ones."""
    is_first_n = drawn.trained_n == 0
    assert (drawn.versions_nl[is_first_n] <= 0).all()
    verdict = off_policy.judge(off_policy.errors(SEQUENCE, drawn, VERSIONS[0]), is_first_n)
    assert np.abs(verdict.z).max() > 20


def test_chi_square_has_the_tail_of_six_degrees_of_freedom() -> None:
    tail = {12.5916: 0.05, 16.8119: 0.01, 22.4577: 0.001}  # of any table
    zeros = np.zeros(6)
    for chi2, chance in tail.items():
        assert off_policy.Verdict(bias=zeros, stderr=zeros, chi2=chi2).p_value == pytest.approx(chance, rel=1e-4)
