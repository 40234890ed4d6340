"""The whole learner: updates compared with a plain reference, its safety checks, its learning rate, and learning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError, LearnerError, ModelError
from sortedrl.learner.loss_inputs import mini_batches
from sortedrl.learner.optimizer import LearnerSettings, learning_rate
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment
from tests.support.learners import Settings, assert_same, caught_gradients, logprobs_of, make_batch, make_model, weights


def test_settings_are_the_configuration_section() -> None:
    settings: LearnerSettings = SortedConfig().learner
    TorchLearner(make_model(), settings, temperature=1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_unmoved_policy_takes_the_reinforce_step(temperature: float) -> None:
    model = make_model()
    batch = make_batch(model, temperature=temperature)
    rewards = torch.tensor([sample.reward for sample in batch.samples])
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    num_tokens = 3 + 9 + 1 + 5 + 14 + 2 + 7 + 4
    for sample, advantage in zip(batch.samples, advantages, strict=True):
        logprobs = logprobs_of(model, list(sample.prompt.tokens), sample.tokens, temperature)
        (-advantage * logprobs.sum() / num_tokens).backward()
    reference = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    learner = TorchLearner(model, Settings(), temperature=temperature)
    caught = caught_gradients(learner)
    metrics = learner.start(batch).result().metrics
    assert_same(caught, reference, 1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["num_tokens"] == num_tokens
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in reference.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++"])
def test_micro_batches_change_nothing(algorithm: str) -> None:
    caught: list[dict[str, Tensor]] = []
    losses: list[float] = []
    for micro_tokens in (16384, 24, 1):
        model = make_model()
        learner = TorchLearner(model, Settings(algorithm=algorithm, micro_tokens=micro_tokens), temperature=1.0)
        caught.append(caught_gradients(learner))
        losses.append(learner.start(make_batch(model, off_policy=0.5)).result().metrics["loss"])
    assert_same(caught[1], caught[0], 1e-6)
    assert_same(caught[2], caught[0], 1e-6)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


def test_a_failed_sample_counts_for_its_siblings_only() -> None:
    model = make_model()
    batch = make_batch(model)
    batch.samples[1].segments = []
    batch.samples[1].finish_reason = FinishReason.FAILED
    learner = TorchLearner(model, Settings(algorithm="grpo"), temperature=1.0)
    metrics = learner.start(batch).result().metrics
    # Its sibling still has an advantage of 1, like all other pairs, so all other samples are learned from.
    assert metrics["learned_tokens"] == metrics["num_tokens"] == 3 + 1 + 5 + 14 + 2 + 7 + 4
    assert metrics["zero_advantage_fraction"] == 0


def test_a_batch_without_answers_takes_no_step() -> None:
    model = make_model()
    batch = make_batch(model)
    for sample in batch.samples:
        sample.segments = []
    before = weights(model)
    result = TorchLearner(model, Settings(), temperature=1.0).start(batch).result()
    assert result.optimizer_steps == 0
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_a_batch_without_spread_moves_nothing_at_first() -> None:
    model = make_model()
    batch = make_batch(model)
    for sample in batch.samples:
        sample.reward = 1.0
    before = weights(model)
    result = TorchLearner(model, Settings(), temperature=1.0).start(batch).result()
    assert result.metrics["degenerate_all_right"] == 1
    assert result.metrics["learned_tokens"] == 0
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def test_inner_steps_and_epochs() -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(inner_steps=4, inner_epochs=2), temperature=1.0)
    result = learner.start(make_batch(model)).result()
    assert result.optimizer_steps == learner.num_steps == 8
    assert learner.num_samples == 8
    assert result.metrics["kl_behaviour"] > 1e-6  # the policy moved between the steps


def test_mini_batches_are_cut_in_order_and_never_empty() -> None:
    assert mini_batches(8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert mini_batches(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert mini_batches(2, 5) == [range(1), range(1, 2)]


def test_learning_rate_by_hand() -> None:
    settings = Settings(lr=0.1, lr_final=0.5, warmup_samples=100)
    assert learning_rate(settings, 0.0, 32) == pytest.approx(0.1 * 0.32)
    assert learning_rate(settings, 0.1, 200) == pytest.approx(0.1 * 0.95)
    assert learning_rate(settings, 1.0, 900) == pytest.approx(0.05)
    assert learning_rate(replace(settings, warmup_samples=0), 0.0, 1) == pytest.approx(0.1)


def test_the_rate_reaches_the_optimizer() -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(lr=0.01, lr_final=0.0, warmup_samples=16), temperature=1.0)
    metrics = learner.start(make_batch(model, progress=0.5)).result().metrics
    assert metrics["lr"] == pytest.approx(0.01 * 0.5 * 0.5)
    assert [group["lr"] for group in learner.optimizer.param_groups] == [metrics["lr"]] * 2


def test_gradients_are_clipped() -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(grad_clip=1e-3), temperature=1.0)
    caught = caught_gradients(learner)
    metrics = learner.start(make_batch(model)).result().metrics
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in caught.values()))
    assert norm == pytest.approx(1e-3, rel=1e-2)
    assert metrics["grad_norm"] > 1e-3  # the metric is the norm before


def test_a_step_that_makes_weights_infinite_stops_the_run() -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(lr=1e40), temperature=1.0)
    with pytest.raises(LearnerError, match=r"update 0 .*not finite.*lower learner\.lr"):
        learner.start(make_batch(model))


def test_steps_that_are_not_finite_are_skipped_and_three_in_a_row_stop_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(), temperature=1.0)
    good, bad = make_batch(model), make_batch(model)
    bad.samples[0].segments[0].logprobs[0] = math.nan
    before = weights(model)
    for _ in range(2):
        result = learner.start(bad).result()
        assert result.optimizer_steps == 0
        assert result.metrics["skipped_steps"] == 1
        assert all(math.isfinite(value) for value in result.metrics.values())
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    assert "update 0" in warned[0]
    assert "not finite" in warned[0]
    assert learner.start(good).result().optimizer_steps == 1
    learner.start(bad)
    learner.start(bad)
    with pytest.raises(LearnerError, match=r"learner\.lr"):
        learner.start(bad)
    assert all(bool(value.isfinite().all()) for value in weights(model).values())


@pytest.mark.parametrize("is_training", [True, False])
def test_the_module_is_left_as_it_was(is_training: bool) -> None:
    model = make_model().train(is_training)
    attention = model.config._attn_implementation
    learner = TorchLearner(model, Settings(), temperature=1.0)
    learner.start(make_batch(model))
    assert model.training is is_training
    assert model.config._attn_implementation == attention
    assert learner.source.module is model
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradient_checkpointing_gives_the_same_update() -> None:
    plain, checkpointed = make_model(), make_model()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, checkpointed):
        TorchLearner(model, Settings(), temperature=1.0).start(make_batch(model))
    assert_same(weights(checkpointed), weights(plain), 1e-6)


def test_overlap_gives_the_same_update_and_snapshots() -> None:
    plain, overlapped = make_model(), make_model()
    before = weights(plain)
    batch = make_batch(plain)
    TorchLearner(plain, Settings(), temperature=1.0).start(batch)
    learner = TorchLearner(overlapped, Settings(), temperature=1.0, overlap=True)
    first = learner.source
    assert first.module is not overlapped
    update = learner.start(batch)
    update.result()
    assert update.done()
    learner.close()
    assert_same(weights(overlapped), weights(plain), 1e-7)
    assert all(torch.equal(before[name], value) for name, value in weights(first.module).items())
    assert_same(weights(learner.source.module), weights(overlapped), 0)
    copied: Any = learner.source.module
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


def test_overlap_passes_errors_on() -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(inner_epochs=3), temperature=1.0, overlap=True)
    batch = make_batch(model)
    batch.samples[0].segments[0].logprobs[0] = math.nan
    with pytest.raises(LearnerError, match="in a row"):
        learner.start(batch).result()
    learner.close()


def test_a_batch_without_signal_moves_nothing() -> None:
    # Even after a real step: momentum and weight decay alone must not move the weights.
    model = make_model()
    learner = TorchLearner(model, Settings(weight_decay=0.1), temperature=1.0)
    assert learner.start(make_batch(model)).result().optimizer_steps == 1
    before = weights(model)
    flat = make_batch(model)
    for sample in flat.samples:
        sample.reward = 1.0
    assert learner.start(flat).result().optimizer_steps == 0
    assert_same(weights(model), before, 0)


def test_it_learns_to_sample_the_rewarded_token() -> None:
    model = make_model()
    learner = TorchLearner(model, Settings(algorithm="grpo", group_size=16, lr=1e-2), temperature=1.0)
    noise = torch.Generator().manual_seed(0)
    prompt, wanted = [1, 2], 7

    def probability() -> float:
        with torch.no_grad():
            return float(model(torch.tensor([prompt]), use_cache=False).logits[0, -1].softmax(-1)[wanted])

    before = probability()
    for update in range(25):
        with torch.no_grad():
            table = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
        drawn = torch.multinomial(table.exp(), 16, replacement=True, generator=noise).tolist()
        samples = [
            Sample(
                id=index,
                prompt=Prompt(id="p", tokens=tuple(prompt), content=""),
                index=index,
                epoch=update,
                cohort=update,
                seed=index,
                budget=1,
                segments=[Segment(version=update, tokens=[token], logprobs=[float(table[token])])],
                reward=float(token == wanted),
            )
            for index, token in enumerate(drawn)
        ]
        learner.start(Batch(update=update, version=update, samples=tuple(samples)))
    assert before < 0.2
    assert probability() > 0.9


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="group_size"):
        TorchLearner(make_model(), Settings(algorithm="grpo", group_size=1), temperature=1.0)
    with pytest.raises(ModelError, match="requires_grad_"):
        TorchLearner(make_model().requires_grad_(False), Settings(), temperature=1.0)
