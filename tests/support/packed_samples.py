"""Samples of given lengths, packed, and the gradients that a model gets from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sortedrl.learner.pack import MicroBatch, packed_attention, packed_logits
from sortedrl.records import Prompt, Sample, Segment

VOCABULARY = 23


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


MIXED = [(0, 4, 9), (1, 3, 1), (0, 4, 30), (2, 7, 12), (1, 3, 8), (0, 4, 2), (3, 1, 25), (2, 7, 11)]


ADVANTAGES = [1.0, -0.5, 0.7, 2.0, -1.5, 0.3, -0.2, 0.9]


def samples_of(lengths: list[tuple[int, int, int]]) -> list[Sample]:
    """Samples of (prompt id, prompt length, answer length), with random tokens that depend only on their index."""
    samples: list[Sample] = []
    for index, (prompt, prompt_length, length) in enumerate(lengths):
        prompt_noise = torch.Generator().manual_seed(1000 + prompt)
        noise = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (length,), generator=noise).tolist()
        logprobs = (-3 * torch.rand(length, generator=noise)).tolist()
        half = length // 2
        samples.append(
            Sample(
                id=index,
                prompt=Prompt(
                    id=str(prompt),
                    tokens=tuple(torch.randint(0, VOCABULARY, (prompt_length,), generator=prompt_noise).tolist()),
                    content="",
                ),
                index=index,
                epoch=0,
                cohort=0,
                seed=index,
                budget=64,
                segments=[
                    Segment(version=0, tokens=tokens[:half], logprobs=logprobs[:half]),
                    Segment(version=1, tokens=tokens[half:], logprobs=logprobs[half:]),
                ],
            )
        )
    return samples


def _take_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def packed_gradients(model: nn.Module, micros: list[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all micro-batches, in order, and the gradient of their sum weighted by ADVANTAGES."""
    values: list[Tensor] = []
    with packed_attention(model):
        for micro in micros:
            logprobs_av = packed_logits(model, micro).log_softmax(-1)
            logprobs_a = logprobs_av.gather(-1, micro.targets_a[:, None])[:, 0]
            (logprobs_a * torch.tensor(ADVANTAGES)[micro.sample_a]).sum().backward()
            values.append(logprobs_a.detach())
    return torch.cat(values), _take_gradients(model)


def gradients_one_by_one(model: nn.Module, samples: list[Sample]) -> dict[str, Tensor]:
    """The same gradient, from one sample at a time and without packing."""
    for sample, advantage in zip(samples, ADVANTAGES, strict=True):
        if sample.num_tokens == 0:
            continue
        tokens = torch.tensor([*sample.prompt.tokens, *sample.tokens])
        logprobs = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
        picked = logprobs[:-1].gather(-1, tokens[1:, None])[len(sample.prompt.tokens) - 1 :, 0]
        (picked.sum() * advantage).backward()
    return _take_gradients(model)
