"""A tiny learner and what its tests compare: settings, a model, a batch, weights, gradients and advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sortedrl.learner.advantage import AdvantageEstimator
from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment

VOCABULARY = 11


@dataclass(slots=True, kw_only=True, frozen=True)
class Settings:
    algorithm: str = "reinforce++"
    group_size: int = 2
    advantage_scope: str = "batch"
    lr: float = 1e-2
    lr_final: float = 0.05
    warmup_samples: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip_low: float | None = 0.2
    clip_high: float | None = 0.28
    ratio: str | None = None
    loss_mean: str | None = None
    overlong: str | None = None
    overlong_buffer: float = 0.2
    flat_groups: str | None = None
    flat_extra: int = 2
    importance: str = "none"
    importance_cap: float | str = 2.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coef: float = 0.1
    value_clip: float = 0.2
    critic_lr: float | None = None
    grad_clip: float = 1e9
    inner_steps: int = 1
    inner_epochs: int = 1
    micro_tokens: int = 16384
    recompute: bool = False
    offload: bool = False
    offload_activations: bool = False
    context_parallel: int = 1
    dtype: str = "auto"
    device: str = "auto"
    fp32_head: bool = False
    importance_mask: str = "none"
    importance_low: float = 0.5
    importance_high: float = 5.0
    rank_replicas: int = 1
    host_states: bool = False


def make_model(seed: int = 0, heads: int = 2, kv_heads: int = 2) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def logprobs_of(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> Tensor:
    tokens = torch.tensor([*prompt, *answer])
    table = (model(tokens[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    return table[:-1].gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]


def make_batch(model: Any, *, temperature: float = 1.0, off_policy: float = 0.0, progress: float = 0.0) -> Batch:
    """Eight samples of four prompts. Behaviour log-probs are the model's, changed by up to `off_policy`."""
    noise = torch.Generator().manual_seed(7)
    samples: list[Sample] = []
    for index, length in enumerate([3, 9, 1, 5, 14, 2, 7, 4]):
        prompt = [1 + index // 2, 2, 3]
        answer = torch.randint(0, VOCABULARY, (length,), generator=noise).tolist()
        with torch.no_grad():
            logprobs = logprobs_of(model, prompt, answer, temperature)
        logprobs = logprobs + off_policy * (2 * torch.rand(length, generator=noise) - 1)
        samples.append(
            Sample(
                id=index,
                prompt=Prompt(id=str(index // 2), tokens=tuple(prompt), content=""),
                index=index % 2,
                epoch=0,
                cohort=0,
                seed=index,
                budget=16,
                segments=[Segment(version=0, tokens=answer, logprobs=logprobs.tolist())],
                finish_reason=FinishReason.STOP,
                reward=[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.25][index],
            )
        )
    return Batch(update=0, version=0, samples=tuple(samples), progress=progress)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def caught_gradients(learner: TorchLearner) -> dict[str, Tensor]:
    """A dictionary that is filled with the gradients of the learner's next step."""
    caught: dict[str, Tensor] = {}

    def catch(*_: object) -> None:
        for name, parameter in learner.model.named_parameters():
            caught[name] = parameter.grad.clone()

    learner.optimizer.register_step_pre_hook(catch)
    return caught


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(value.norm()) for value in theirs.values())
    assert scale > 0
    for name, value in theirs.items():
        assert float((ours[name] - value).norm()) <= tolerance * scale, name


def rewarded_samples(
    rewards: list[float],
    *,
    prompts: list[str] | None = None,
    cohort: int = 0,
    reason: FinishReason = FinishReason.STOP,
) -> list[Sample]:
    names = prompts or [str(index) for index in range(len(rewards))]
    return [
        Sample(
            id=index,
            prompt=Prompt(id=name, tokens=(1,), content=""),
            index=index,
            epoch=0,
            cohort=cohort,
            seed=index,
            budget=8,
            reward=reward,
            finish_reason=reason,
        )
        for index, (reward, name) in enumerate(zip(rewards, names, strict=True))
    ]


def advantage_estimator(algorithm: str, scope: str = "batch", **options: float) -> AdvantageEstimator:
    return AdvantageEstimator(ALGORITHMS[algorithm].advantage, scope, **options)
