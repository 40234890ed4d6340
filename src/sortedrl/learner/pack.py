"""Pack samples end to end into micro-batches of a token budget, and run a model on them.

`learner/torch.py` and `sft.py` call it. There is no padding between samples. A prompt that siblings share is packed
once; their answers follow it, each with the positions it would have alone. Every layer except attention works token by
token, so only attention must keep samples apart (`attention.py`, or `llama.py` where compiled layers run).

Guarantees: log-probs and gradients equal those of one sample at a time; each sampled answer token is predicted exactly
once; injected tokens of an answer are context only; samples that were not asked for are not computed.

Shapes: n packed tokens, a sampled answer tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortedrl.errors import DataError, ModelError
from sortedrl.learner.attention import Layout, make_layout, packed_attention
from sortedrl.learner.device import to_device, to_host
from sortedrl.learner.llama import can_use_compiled_layers, llama_hidden_states, llama_of
from sortedrl.records import Prompt, Sample, Segment

# Largest accepted difference between logits computed packed and alone, relative to the largest logit.
_FLOAT32_TOLERANCE = 3e-5
_HALF_PRECISION_TOLERANCE = 3e-2


@dataclass(slots=True, kw_only=True, frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and what the loss needs at the answer tokens."""

    indices: list[int]  # of its samples in the batch, in the order of their tokens
    lengths: list[int]  # the number of sampled answer tokens of each
    tokens_n: Tensor
    positions_n: Tensor
    layout: Layout
    predictor_a: Tensor  # the packed token whose logits predict each answer token
    targets_a: Tensor
    behaviour_a: Tensor  # log-probs under the policy that sampled the token
    sample_a: Tensor  # the index of each token's sample in the batch

    @property
    def num_tokens(self) -> int:
        return self.tokens_n.numel()

    @property
    def num_samples(self) -> int:
        return len(self.indices)


@dataclass(slots=True, kw_only=True, frozen=True)
class PromptGroup:
    """Samples that share one packed prompt, by their indices in the batch."""

    prompt: tuple[int, ...]
    indices: list[int]
    num_tokens: int


def pack(
    samples: Sequence[Sample], indices: Iterable[int], micro_tokens: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Pack the samples at `indices` into micro-batches of at most `micro_tokens` tokens.

    A sample longer than that gets a micro-batch for itself. Samples without sampled tokens are left out.
    """
    groups = prompt_groups(samples, indices, micro_tokens)
    return [lay_out(samples, members, device) for members in first_fit(groups, micro_tokens)]


def first_fit(groups: Iterable[PromptGroup], micro_tokens: int) -> list[list[PromptGroup]]:
    """Collect groups into micro-batches: each goes into the first that has room, the longest first."""
    bins: list[list[PromptGroup]] = []
    room: list[int] = []
    for group in sorted(groups, key=lambda group: -group.num_tokens):
        chosen = next((i for i, free in enumerate(room) if group.num_tokens <= free), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(micro_tokens)
        bins[chosen].append(group)
        room[chosen] -= group.num_tokens
    return bins


def prompt_groups(samples: Sequence[Sample], indices: Iterable[int], micro_tokens: int) -> list[PromptGroup]:
    """Group samples by prompt. No group exceeds the token budget, unless it is a single sample."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index in indices:
        sample = samples[index]
        if sample.num_sampled == 0:
            continue
        if not sample.prompt.tokens:
            raise DataError(f"prompt {sample.prompt.id!r} has no tokens: give it at least a begin-of-text token")
        by_prompt.setdefault(sample.prompt.tokens, []).append(index)
    groups: list[PromptGroup] = []
    for prompt, siblings in by_prompt.items():
        kept: list[int] = []
        size = len(prompt)
        for index in siblings:
            length = samples[index].num_tokens - 1  # the last token predicts nothing
            if kept and size + length > micro_tokens:
                groups.append(PromptGroup(prompt=prompt, indices=kept, num_tokens=size))
                kept, size = [], len(prompt)
            kept.append(index)
            size += length
        groups.append(PromptGroup(prompt=prompt, indices=kept, num_tokens=size))
    return groups


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedArrays:
    """A micro-batch in host memory, before it goes to a device."""

    indices: list[int]
    lengths: list[int]
    tokens_n: np.ndarray
    positions_n: np.ndarray
    rows: list[np.ndarray]  # the packed tokens of each sample with its prompt
    predictor_a: np.ndarray
    targets_a: np.ndarray
    behaviour_a: np.ndarray

    def on(self, device: torch.device | str) -> MicroBatch:
        return MicroBatch(
            indices=self.indices,
            lengths=self.lengths,
            tokens_n=to_device(self.tokens_n, device),
            positions_n=to_device(self.positions_n, device),
            layout=make_layout(self.rows, len(self.tokens_n), device),
            predictor_a=to_device(self.predictor_a, device),
            targets_a=to_device(self.targets_a, device),
            behaviour_a=to_device(self.behaviour_a, device),
            sample_a=to_device(np.repeat(np.array(self.indices, dtype=np.int64), self.lengths), device),
        )


def lay_out(samples: Sequence[Sample], groups: Sequence[PromptGroup], device: torch.device | str) -> MicroBatch:
    """The micro-batch of some groups of samples, on the device."""
    return arrange(samples, groups).on(device)


def arrange(samples: Sequence[Sample], groups: Sequence[PromptGroup]) -> PackedArrays:
    """Pack some groups of samples end to end."""
    tokens: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    lengths: list[int] = []
    for group in groups:
        prompt_range = np.arange(len(tokens), len(tokens) + len(group.prompt))
        tokens.extend(group.prompt)
        positions.append(np.arange(len(group.prompt)))
        for sample in (samples[index] for index in group.indices):
            answer, logprobs = sample.tokens, sample.logprobs
            assert len(answer) == len(logprobs), f"sample {sample.id}: {len(answer)} tokens, {len(logprobs)} log-probs"
            answer_range = np.arange(len(tokens), len(tokens) + len(answer) - 1)
            tokens.extend(answer[:-1])
            positions.append(np.arange(len(group.prompt), len(group.prompt) + len(answer) - 1))
            rows.append(np.concatenate((prompt_range, answer_range)))
            is_sampled = np.array(sample.is_sampled)
            predictors.append(np.concatenate((prompt_range[-1:], answer_range))[is_sampled])
            targets.extend(compress(answer, is_sampled))
            behaviour.extend(compress(logprobs, is_sampled))
            lengths.append(int(is_sampled.sum()))
    return PackedArrays(
        indices=[index for group in groups for index in group.indices],
        lengths=lengths,
        tokens_n=np.array(tokens, dtype=np.int64),
        positions_n=np.concatenate(positions),
        rows=rows,
        predictor_a=np.concatenate(predictors),
        targets_a=np.array(targets, dtype=np.int64),
        behaviour_a=np.array(behaviour, dtype=np.float32),
    )


def packed_logits(model: Any, micro: MicroBatch) -> Tensor:
    """Logits at the answer positions only, [a, vocabulary].

    Call it, and the backward pass, within `packed_attention(model)`.
    """
    if can_use_compiled_layers(model, micro.layout):
        causal = llama_of(model)
        hidden_nm = llama_hidden_states(causal.model, micro.tokens_n, micro.positions_n, micro.layout)
        return causal.lm_head(hidden_nm.index_select(0, micro.predictor_a)[None])[0]
    output = model(
        input_ids=micro.tokens_n[None],
        position_ids=micro.positions_n[None],
        use_cache=False,
        logits_to_keep=micro.predictor_a,
        packing=micro.layout,
    )
    return output.logits[0]


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Raise ModelError if the model's layers mix packed samples: compare two samples packed and alone."""
    name = type(model).__name__
    if not (hasattr(model, "config") and hasattr(model, "_can_set_attn_implementation")):
        raise ModelError(f"{name} is not a transformers model: load one with AutoModelForCausalLM")
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"{name} does not take attention from transformers' AttentionInterface: use another architecture"
        )
    vocabulary = model.config.vocab_size
    prompt = Prompt(id="check", tokens=(0, 1 % vocabulary), content="")
    samples: list[Sample] = []
    for index in range(2):
        answer = [(2 + 3 * index + step) % vocabulary for step in range(3)]
        segment = Segment(version=0, tokens=answer, logprobs=[0.0] * 3)
        samples.append(
            Sample(id=index, prompt=prompt, index=index, epoch=0, cohort=0, seed=0, budget=3, segments=[segment])
        )
    (micro,) = pack(samples, range(2), 100, model.device)
    was_training = model.training
    model.eval()
    try:
        with packed_attention(model):
            packed_av = packed_logits(model, micro).float()
        alone_av = torch.cat([_logits_alone(model, sample) for sample in samples])
    except TypeError as error:
        raise ModelError(
            f"{name} rejects an argument that packed training passes ({error}): use another model"
        ) from error
    finally:
        model.train(was_training)
    error = float(to_host([(packed_av - alone_av).abs().max() / alone_av.abs().max()])[0])
    if error > (_FLOAT32_TOLERANCE if model.dtype == torch.float32 else _HALF_PRECISION_TOLERANCE):
        raise ModelError(
            f"{name} mixes samples that are packed in one row, because a layer other than attention looks at several "
            "tokens: use another model"
        )


def _logits_alone(model: Any, sample: Sample) -> Tensor:
    """Logits at the answer positions of one sample, [a, vocabulary]."""
    tokens = to_device(torch.tensor([[*sample.prompt.tokens, *sample.tokens]]), model.device)
    return model(tokens, use_cache=False).logits[0, len(sample.prompt.tokens) - 1 : -1].float()
