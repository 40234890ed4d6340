"""The table of algorithms, and updates with each of them compared with values worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sortedrl.config import SortedConfig
from sortedrl.config.sections import LearnerSection
from sortedrl.errors import ConfigError, LearnerError
from sortedrl.learner.advantage import overlong_penalty
from sortedrl.learner.algorithms import ALGORITHMS, Algorithm, Objective, objective_of
from sortedrl.learner.critic import gae, value_loss, whitened
from sortedrl.learner.loss import answer_logprobs, clipped_surrogate
from sortedrl.learner.pack import pack, packed_attention, packed_logits
from sortedrl.learner.torch import TorchLearner
from sortedrl.learner.update_metrics import effective_share
from sortedrl.records import Batch, FinishReason, Segment
from tests.support.learners import (
    Settings,
    advantage_estimator,
    assert_same,
    caught_gradients,
    logprobs_of,
    make_batch,
    make_model,
    rewarded_samples,
    weights,
)


def train(settings: Settings, batch: Batch | None = None, **options: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Gradients and metrics of one update, by default on `make_batch`."""
    model = make_model()
    learner = TorchLearner(model, settings, temperature=1.0)
    caught = caught_gradients(learner)
    return caught, learner.start(batch or make_batch(model, **options)).result().metrics


def test_the_configuration_knows_the_table() -> None:
    single = [name for name in ALGORITHMS if not SortedConfig(learner={"algorithm": name}).is_grouped]
    assert single == ["reinforce++", "ppo"]
    assert not SortedConfig(learner={"algorithm": "rloo", "group_size": 1}).is_grouped
    with pytest.raises(ConfigError, match="compares siblings"):
        SortedConfig(learner={"algorithm": "dr_grpo", "group_size": 1})


def test_defaults_are_those_of_the_first_algorithms() -> None:
    for name in ("reinforce++", "grpo"):
        objective = objective_of(SortedConfig(learner={"algorithm": name}).learner)
        assert (objective.ratio, objective.loss_mean, objective.overlong) == ("token", "token", "keep")
        assert (objective.clip_low, objective.clip_high) == (0.2, 0.28)
        assert not objective.learns_from_all
        assert objective.importance == "none"


def test_keys_override_the_algorithm() -> None:
    plain = objective_of(LearnerSection(algorithm="gspo"))
    assert (plain.ratio, plain.loss_mean, plain.clip_low, plain.clip_high) == ("sequence", "sequence", 3e-4, 4e-4)
    changed = objective_of(LearnerSection(algorithm="gspo", loss_mean="token", clip_high=0.1, importance_cap="none"))
    assert (changed.ratio, changed.loss_mean, changed.clip_low, changed.clip_high) == ("sequence", "token", 3e-4, 0.1)
    assert changed.weight_cap is None
    dapo = objective_of(LearnerSection(algorithm="dapo"))
    assert (dapo.overlong, dapo.flat_groups) == ("shape", "zero")
    assert objective_of(LearnerSection(algorithm="dapo", flat_groups="keep")).flat_groups == "keep"


def test_settings_without_the_keys_have_their_defaults() -> None:
    class Few:
        algorithm = "grpo"

    assert objective_of(Few()) == objective_of(LearnerSection(algorithm="grpo"))
    assert isinstance(objective_of(Few()), Objective)
    Few.algorithm = "grop"
    with pytest.raises(ConfigError, match="reinforce"):
        objective_of(Few())


# Groups a: 1, 0, 0, 0 and b: 5, 7. Centred: 3/4, -1/4 (three times), -1, 1, whose mean is 0 and whose variance is
# (9/16 + 3/16 + 2) / 6 = 11/24.
CENTRED = [0.75, -0.25, -0.25, -0.25, -1, 1]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("dr_grpo", CENTRED),
        ("reinforce++-baseline", [value / math.sqrt(11 / 24) for value in CENTRED]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3, -2, 2]),  # k / (k - 1) times the centred rewards
        ("grpo", [math.sqrt(3), *[-1 / math.sqrt(3)] * 3, -1, 1]),
        ("dapo", [math.sqrt(3), *[-1 / math.sqrt(3)] * 3, -1, 1]),
        ("gspo", [math.sqrt(3), *[-1 / math.sqrt(3)] * 3, -1, 1]),
        ("ppo", [1, 0, 0, 0, 5, 7]),  # raw rewards, the input of the critic
    ],
)
def test_advantages_by_hand(algorithm: str, expected: list[float]) -> None:
    samples = rewarded_samples([1, 0, 0, 0, 5, 7], prompts=["a", "a", "a", "a", "b", "b"])
    assert advantage_estimator(algorithm).estimate(samples)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["dr_grpo", "rloo", "reinforce++-baseline"])
def test_flat_groups_and_single_samples_give_exactly_nothing(algorithm: str) -> None:
    samples = rewarded_samples([0.1, 0.1, 0.1, 3], prompts=["a", "a", "a", "alone"])
    assert advantage_estimator(algorithm).estimate(samples)[0] == [0, 0, 0, 0]


def test_overlong_penalty_by_hand() -> None:
    # The numbers of the DAPO paper: at most 20480 tokens, with a penalty on the last 4096.
    assert overlong_penalty(16384, 20480, 0.2) == 0
    assert overlong_penalty(18432, 20480, 0.2) == pytest.approx(-0.5)
    assert overlong_penalty(20480, 20480, 0.2) == pytest.approx(-1)
    assert overlong_penalty(0, 20480, 0.2) == 0


def plain_gradient(means: list[float], advantages: list[float]) -> dict[str, Any]:
    """The REINFORCE gradient: each sample's summed log-prob times its advantage and its weight in the mean."""
    model = make_model()
    for sample, mean, advantage in zip(make_batch(model).samples, means, advantages, strict=True):
        logprobs = logprobs_of(model, list(sample.prompt.tokens), sample.tokens)
        (-mean * advantage * logprobs.sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


LENGTHS = [3, 9, 1, 5, 14, 2, 7, 4]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.25]


@pytest.mark.parametrize(
    ("loss_mean", "means"),
    [
        ("token", [1 / sum(LENGTHS)] * 8),
        ("sequence", [1 / (8 * length) for length in LENGTHS]),
        ("constant", [1 / (8 * 16)] * 8),  # budgets of 16 tokens
    ],
)
def test_means_by_hand(loss_mean: str, means: list[float]) -> None:
    signs = np.sign(np.array(REWARDS) - np.repeat(np.array(REWARDS).reshape(4, 2).mean(1), 2))
    gradients, _ = train(Settings(algorithm="grpo", loss_mean=loss_mean))
    assert_same(gradients, plain_gradient(means, signs.tolist()), 1e-4)


def test_masked_samples_count_for_their_siblings_only() -> None:
    model = make_model()
    batch = make_batch(model)
    batch.samples[1].finish_reason = FinishReason.LENGTH
    gradients, metrics = train(Settings(algorithm="grpo", overlong="mask"), batch)
    signs = [1, 0, -1, 1, 1, -1, -1, 1]
    assert_same(gradients, plain_gradient([1 / (sum(LENGTHS) - 9)] * 8, signs), 1e-4)
    assert metrics["masked_samples"] == 1
    assert metrics["learned_tokens"] == sum(LENGTHS) - 9


def test_shaping_punishes_long_answers() -> None:
    # Budget 16, with a penalty on the last half: 14 tokens cost 6/8, 9 cost 1/8.
    model = make_model()
    batch = make_batch(model)
    settings = Settings(algorithm="dr_grpo", overlong="shape", overlong_buffer=0.5, loss_mean="token")
    gradients, metrics = train(settings, batch)
    rewards = [1, -0.125, 0, 1, 0.25, 0, 0, 0.25]
    centred = [r - (rewards[i - i % 2] + rewards[i - i % 2 + 1]) / 2 for i, r in enumerate(rewards)]
    assert_same(gradients, plain_gradient([1 / sum(LENGTHS)] * 8, centred), 1e-4)
    assert metrics["reward_mean"] == pytest.approx(sum(REWARDS) / 8)  # before shaping


def test_filtered_groups_count_in_no_mean() -> None:
    model = make_model()
    batch = make_batch(model)
    batch.samples[0].reward = batch.samples[1].reward = 1.0
    signs = [0, 0, -1, 1, 1, -1, -1, 1]
    for flat_groups in ("keep", "zero", "replace"):
        num_filtered, num_tokens = (0, sum(LENGTHS)) if flat_groups == "keep" else (2, sum(LENGTHS) - 12)
        gradients, metrics = train(Settings(algorithm="grpo", flat_groups=flat_groups), batch)
        assert_same(gradients, plain_gradient([1 / num_tokens] * 8, signs), 1e-4)
        assert metrics["filtered_samples"] == num_filtered
        assert metrics["degenerate_groups"] == 1


VARIANTS = [
    *({"algorithm": name} for name in ALGORITHMS),
    {"algorithm": "grpo", "importance": "sequence", "importance_cap": "none"},
    {"algorithm": "grpo", "importance": "token", "loss_mean": "sequence"},
    {"algorithm": "reinforce++", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    {"algorithm": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01, "loss_mean": "constant"},
    {"algorithm": "ppo", "kl_coef": 0.1, "kl_in": "reward"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))
def test_micro_batches_change_no_algorithm(variant: dict[str, Any]) -> None:
    whole, metrics = train(Settings(**variant, clip_low=None, clip_high=None), off_policy=0.3)
    split, split_metrics = train(Settings(**variant, clip_low=None, clip_high=None, micro_tokens=1), off_policy=0.3)
    assert_same(split, whole, 1e-6)
    for name, value in metrics.items():
        if name != "computed_tokens":
            assert split_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_untruncated_weights_give_the_plain_gradient_times_the_weights() -> None:
    # At the first step the policy has not moved, so only the weight of the whole sample remains.
    model = make_model()
    batch = make_batch(model, off_policy=0.3)
    advantages, _ = advantage_estimator("dr_grpo").estimate(batch.samples)
    products = []
    for sample in batch.samples:
        with torch.no_grad():
            drift = logprobs_of(model, list(sample.prompt.tokens), sample.tokens) - torch.tensor(sample.logprobs)
        products.append(math.exp(float(drift.sum())))
    settings = Settings(algorithm="dr_grpo", importance="sequence", importance_cap="none", loss_mean="token")
    gradients, metrics = train(settings, batch)
    weighted = [advantage * product for advantage, product in zip(advantages, products, strict=True)]
    assert_same(gradients, plain_gradient([1 / sum(LENGTHS)] * 8, weighted), 1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl_behaviour"] > 1e-3
    assert metrics["effective_sample_share"] == pytest.approx(
        sum(products) ** 2 / (8 * sum(product**2 for product in products)), rel=1e-4
    )


def test_effective_share_by_hand() -> None:
    assert effective_share(np.log([1.0, 1.0, 1.0])) == pytest.approx(1)
    assert effective_share(np.log([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_share(np.array([5000.0, 0.0])) == pytest.approx(0.5)


def test_metrics_report_divergence_by_staleness_and_ratios_by_quantile() -> None:
    model = make_model()
    batch = make_batch(model)
    # The first half of each answer comes from an older version, the second half from the current one.
    for sample in batch.samples:
        (segment,) = sample.segments
        half = len(segment.tokens) // 2
        moved = [logprob - math.log(2) for logprob in segment.logprobs[:half]]
        sample.segments = [
            Segment(version=3, tokens=segment.tokens[:half], logprobs=moved),
            Segment(version=5, tokens=segment.tokens[half:], logprobs=segment.logprobs[half:]),
        ]
    batch = Batch(update=5, version=5, samples=batch.samples)
    _, metrics = train(Settings(algorithm="grpo"), batch)
    # Twice as likely as at sampling: k3 is 2 - 1 - log 2.
    assert metrics["kl_behaviour_staleness_2"] == pytest.approx(1 - math.log(2), rel=1e-3)
    assert metrics["kl_behaviour_staleness_0"] == pytest.approx(0, abs=1e-6)
    assert metrics["ratio_p05"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_p95"] == pytest.approx(2, rel=1e-4)
    ratios = sorted([2.0] * sum(length // 2 for length in LENGTHS) + [1.0] * sum(-(-length // 2) for length in LENGTHS))
    assert metrics["ratio_p50"] == pytest.approx(float(np.median(ratios)), rel=1e-4)


def test_degenerate_batches_are_learned_from_or_passed_over() -> None:
    model = make_model()
    batch = make_batch(model)
    for sample in batch.samples:
        sample.reward = 0.0
    _, metrics = train(Settings(), batch)
    assert (metrics["degenerate_all_wrong"], metrics["degenerate_passed_over"], metrics["degenerate_learned"]) == (
        1,
        1,
        0,
    )
    _, metrics = train(Settings(entropy_coef=0.01), batch)
    assert (metrics["degenerate_all_wrong"], metrics["degenerate_passed_over"], metrics["degenerate_learned"]) == (
        1,
        0,
        1,
    )


def test_kl_in_the_reward_by_hand() -> None:
    # The reference is the initial model and the policy has moved: behaviour is 0.1 above it at each token of sample 0.
    model = make_model()
    batch = make_batch(model)
    segment = batch.samples[0].segments[0]
    segment.logprobs[:] = [logprob + 0.1 for logprob in segment.logprobs]
    settings = Settings(algorithm="dr_grpo", kl_coef=0.5, kl_in="reward", kl_estimator="k1", loss_mean="token")
    gradients, _ = train(settings, batch)
    rewards = [1 - 0.5 * 0.3, *REWARDS[1:]]
    centred = [r - (rewards[i - i % 2] + rewards[i - i % 2 + 1]) / 2 for i, r in enumerate(rewards)]
    centred[0] *= math.exp(-0.1)  # the ratio of the policy to the behaviour policy
    assert_same(gradients, plain_gradient([1 / sum(LENGTHS)] * 8, centred), 1e-4)


# ---- the critic -----------------------------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    # Values 1, 2, 4 and reward 3 at the end; gamma 1/2, lambda 1/2.
    # Errors: -1 at the end; 0 + 2 - 2 = 0; 0 + 1 - 1 = 0. Advantages: -1; 0 - 1/4; 0 - 1/16.
    found = gae(torch.tensor([0.0, 0.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]), [3], gamma=0.5, lam=0.5)
    assert found.tolist() == pytest.approx([-1 / 16, -1 / 4, -1])
    # With lambda 1 the advantage is the return less the value.
    found = gae(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]), [3], gamma=1.0, lam=1.0)
    assert found.tolist() == pytest.approx([3, 1, -1])


def test_gae_of_many_answers_is_that_of_each() -> None:
    """Against the definition, one token after the other."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 3, 64, 5, 300, 17]
    rewards_a, values_a = torch.randn(2, sum(lengths), generator=generator)
    for gamma, lam in ((1.0, 0.95), (0.9, 1.0), (1.0, 1.0), (0.5, 0.0)):
        expected: list[float] = []
        for rewards_t, values_t in zip(rewards_a.split(lengths), values_a.split(lengths), strict=True):
            rewards, values = rewards_t.tolist(), [*values_t.tolist(), 0.0]
            following, estimates = 0.0, []
            for t in range(len(rewards) - 1, -1, -1):
                following = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * following
                estimates.append(following)
            expected += estimates[::-1]
        found = gae(rewards_a, values_a, lengths, gamma=gamma, lam=lam)
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_whitening_is_over_all_tokens() -> None:
    found = whitened(torch.tensor([1.0, 3.0, 5.0, 7.0]))
    assert found.tolist() == pytest.approx([share / math.sqrt(5) for share in (-3, -1, 1, 3)], rel=1e-5)
    assert whitened(torch.tensor([2.0, 2.0])).tolist() == [0, 0]


def test_value_loss_by_hand() -> None:
    # Within the clip: (1.1 - 2)^2. Beyond: 1.5 counts as 1.2, the larger error. Away from the return: its own error.
    values_a = torch.tensor([1.1, 1.5, 0.5], requires_grad=True)
    loss = value_loss(values_a, torch.ones(3), torch.full((3,), 2.0), clip=0.2)
    assert loss.item() == pytest.approx(0.5 * (0.81 + 0.64 + 2.25), rel=1e-5)
    loss.backward()
    assert values_a.grad is not None
    assert values_a.grad.tolist() == pytest.approx([-0.9, 0, -1.5], rel=1e-5)


def test_the_critic_learns_the_mean_reward_and_survives_a_checkpoint() -> None:
    model = make_model()
    settings = Settings(algorithm="ppo", lr=1e-4, critic_lr=3e-2, value_clip=10.0)
    learner = TorchLearner(model, settings, temperature=1.0)
    batch = make_batch(model)
    losses = [learner.start(batch).result().metrics["value_loss"] for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert [group["rate"] for group in learner.optimizer.param_groups] == [1, 1, pytest.approx(300)]

    twin_model = make_model()
    twin_model.load_state_dict(model.state_dict())
    twin = TorchLearner(twin_model, settings, temperature=1.0)
    state = learner.state_dict()
    twin.load_state_dict({name: dict(value) for name, value in state.items()})
    for each in (learner, twin):
        each.start(batch).result()
    assert_same(weights(twin_model), weights(model), 0)
    assert twin.critic is not None
    assert learner.critic is not None
    assert torch.equal(twin.critic.head.weight, learner.critic.head.weight)
    with pytest.raises(LearnerError, match="critic"):
        TorchLearner(make_model(), Settings(algorithm="ppo"), temperature=1.0).load_state_dict(
            TorchLearner(make_model(), Settings(), temperature=1.0).state_dict()
        )


def test_the_reference_of_a_resumed_run_is_the_initial_model() -> None:
    model = make_model()
    settings = Settings(algorithm="grpo", kl_coef=0.1)
    learner = TorchLearner(model, settings, temperature=1.0)
    batch = make_batch(model)
    learner.start(batch)
    resumed_model = make_model()
    resumed_model.load_state_dict(model.state_dict())
    resumed = TorchLearner(resumed_model, settings, temperature=1.0)
    resumed.load_state_dict(learner.state_dict())
    found = [each.start(batch).result().metrics["kl_reference"] for each in (learner, resumed)]
    assert found[0] > 1e-4
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert_same(weights(resumed_model), weights(model), 0)


def test_a_batch_that_stops_the_run_is_saved(tmp_path: Path) -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(inner_epochs=3), temperature=1.0, inspect_dir=tmp_path / "run")
    batch = make_batch(model)
    batch.samples[1].segments[0].logprobs[2] = math.nan
    with pytest.raises(LearnerError, match="rejected-0"):
        learner.start(batch)
    tensors = load_file(tmp_path / "run" / "rejected-0" / "batch.safetensors")
    page = json.loads((tmp_path / "run" / "rejected-0" / "batch.json").read_text())
    sample = page["samples"][1]
    assert (sample["start"], sample["num_tokens"], sample["reward"]) == (3, 9, 0.0)
    assert tensors["tokens"][3:12].tolist() == batch.samples[1].tokens
    assert tensors["logprobs"].isnan().nonzero().tolist() == [[5]]
    assert "nan" in page["reason"]


def test_a_batch_that_cannot_be_saved_still_stops_the_run(tmp_path: Path) -> None:
    model = make_model()
    (tmp_path / "file").write_text("")
    learner = TorchLearner(model, Settings(inner_epochs=3), temperature=1.0, inspect_dir=tmp_path / "file")
    batch = make_batch(model)
    batch.samples[1].segments[0].logprobs[2] = math.nan
    with pytest.raises(LearnerError, match="in a row"):
        learner.start(batch)


@pytest.mark.parametrize("algorithm", ["reinforce++", "grpo"])
def test_defaults_take_the_plain_step_bit_by_bit(algorithm: str) -> None:
    model, plain = make_model(), make_model()
    batch = make_batch(model, off_policy=0.4)
    TorchLearner(model, Settings(algorithm=algorithm), temperature=1.0).start(batch)

    advantages, _ = advantage_estimator(algorithm).estimate(batch.samples)
    (micro,) = pack(batch.samples, range(len(batch.samples)), 16384)
    advantages_a = torch.tensor(advantages)[micro.sample_a]
    groups = [[p for p in plain.parameters() if (p.ndim >= 2) is is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.0} for group in groups], lr=1e-2, betas=(0.9, 0.95), fused=True
    )
    with packed_attention(plain):
        logprobs_a, _ = answer_logprobs(packed_logits(plain, micro), micro.targets_a, 1.0)
        ratio_a = (logprobs_a - micro.behaviour_a).clamp(-20, 20).exp()
        clipped_a = ratio_a.clamp(1 - 0.2, 1 + 0.28)
        least_a = torch.minimum(ratio_a * advantages_a, clipped_a * advantages_a)
        (-least_a.sum() / sum(LENGTHS)).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    optimizer.step()
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(model).items())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"function wrong returned an array of shape \(1,\) for \d+ rewards: return one number per reward"),
        (None, "function wrong returned an array of shape"),
        ("many", "function wrong returned 'many': return an array"),
        (math.nan, "function wrong returned a number that is not finite"),
    ],
)
def test_what_an_advantage_function_returns_is_checked(returned: Any, message: str) -> None:
    def wrong(rewards: np.ndarray, groups: Any, scope: Any) -> Any:
        return np.full_like(rewards, returned) if isinstance(returned, float) else returned

    wrong.__qualname__ = "wrong"
    settings = SortedConfig(learner={"algorithm": "grpo", "advantage": wrong}).learner
    with pytest.raises(LearnerError, match=message):
        train(settings)


def test_a_surrogate_of_another_shape_is_refused() -> None:
    summed = Algorithm(
        advantage=ALGORITHMS["grpo"].advantage, surrogate=lambda objective, r, a, logprobs: logprobs.sum()
    )
    with pytest.raises(LearnerError, match=r"a loss of shape \(\) for \d+ tokens: return one number per token"):
        train(SortedConfig(learner={"algorithm": summed}).learner)


def test_a_surrogate_of_ones_own_makes_the_gradient() -> None:
    def gradients(surrogate: Any) -> dict[str, Any]:
        algorithm = Algorithm(advantage=ALGORITHMS["grpo"].advantage, surrogate=surrogate)
        return train(SortedConfig(learner={"algorithm": algorithm, "grad_clip": 1e9}).learner)[0]

    ours = gradients(None)
    assert any(value.abs().max() > 1e-4 for value in ours.values())
    doubled = gradients(lambda *arguments: 2 * clipped_surrogate(*arguments))
    assert_same(doubled, {name: 2 * value for name, value in ours.items()}, 1e-6)
