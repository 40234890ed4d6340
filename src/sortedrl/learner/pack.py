"""Samples packed end to end into micro-batches of a token budget.

`learner/torch.py` packs a mini-batch and runs the model on each micro-batch. There is no padding between samples, and a
prompt that siblings share is packed once: their answers follow it, each with the positions that it would have alone.
Every layer but attention works token by token, so only attention has to know who belongs to whom (`attention.py`, or
`llama.py` where its layers run in place of the model's own).

What it keeps true: log-probs and gradients equal those of one sample at a time; every answer token that the policy
sampled is predicted exactly once, and those that were fed into the answer are context alone; what cannot be learned
from (no answer tokens, or mark 0) is not computed.

Shapes: n packed tokens, a sampled answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortedrl.errors import DataError, ModelError
from sortedrl.learner.attention import Layout, lay_rows, packed_attention
from sortedrl.learner.llama import hidden_states, is_lean
from sortedrl.records import Prompt, Sample, Segment

ROUNDING = 3e-5  # largest difference between packed and alone, relative to the largest logit, in fp32
COARSE_ROUNDING = 3e-2  # and in shorter formats


@dataclass(slots=True, kw_only=True, frozen=True)
class MicroBatch:
    """What one forward pass takes, and what the loss needs at the answer positions."""

    tokens_n: Tensor
    positions_n: Tensor
    layout: Layout
    predictor_a: Tensor  # the packed token whose logits predict each answer token
    targets_a: Tensor
    behaviour_a: Tensor
    mark_a: Tensor  # the number that came with each token's sample

    @property
    def num_tokens(self) -> int:
        return self.tokens_n.numel()


@dataclass(slots=True, kw_only=True, frozen=True)
class _Family:
    """Samples that share one packed prompt."""

    prompt: tuple[int, ...]
    members: list[tuple[Sample, float]]  # with their marks
    num_tokens: int


def pack(
    samples: Sequence[Sample], marks: Sequence[float], micro_tokens: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_tokens` tokens; a sample longer than that goes alone."""
    families = _families(samples, marks, micro_tokens)
    bins: list[list[_Family]] = []
    room: list[int] = []
    for family in sorted(families, key=lambda family: -family.num_tokens):  # first fit, longest first
        place = next((i for i, free in enumerate(room) if family.num_tokens <= free), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(micro_tokens)
        bins[place].append(family)
        room[place] -= family.num_tokens
    return [_lay_out(families, device) for families in bins]


def _families(samples: Sequence[Sample], marks: Sequence[float], micro_tokens: int) -> list[_Family]:
    """Group what is to be learned from by prompt, no family larger than the budget unless a single sample is."""
    by_prompt: dict[tuple[int, ...], list[tuple[Sample, float]]] = {}
    for sample, mark in zip(samples, marks, strict=True):
        if sample.num_sampled == 0 or mark == 0:
            continue
        if not sample.prompt.tokens:
            raise DataError(f"prompt {sample.prompt.id!r} has no tokens: give it at least a begin-of-text token")
        by_prompt.setdefault(sample.prompt.tokens, []).append((sample, mark))
    families: list[_Family] = []
    for prompt, members in by_prompt.items():
        kept: list[tuple[Sample, float]] = []
        size = len(prompt)
        for member in members:
            length = member[0].num_tokens - 1  # nothing is predicted from the last token
            if kept and size + length > micro_tokens:
                families.append(_Family(prompt=prompt, members=kept, num_tokens=size))
                kept, size = [], len(prompt)
            kept.append(member)
            size += length
        families.append(_Family(prompt=prompt, members=kept, num_tokens=size))
    return families


def _lay_out(families: Sequence[_Family], device: torch.device | str) -> MicroBatch:
    tokens: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    marks: list[float] = []
    repeats: list[int] = []
    for family in families:
        prompt_range = np.arange(len(tokens), len(tokens) + len(family.prompt))
        tokens.extend(family.prompt)
        positions.append(np.arange(len(family.prompt)))
        for sample, mark in family.members:
            answer, logprobs = sample.tokens, sample.logprobs
            assert len(answer) == len(logprobs), f"sample {sample.id}: {len(answer)} tokens, {len(logprobs)} log-probs"
            answer_range = np.arange(len(tokens), len(tokens) + len(answer) - 1)
            tokens.extend(answer[:-1])
            positions.append(np.arange(len(family.prompt), len(family.prompt) + len(answer) - 1))
            rows.append(np.concatenate((prompt_range, answer_range)))
            is_sampled = np.array(sample.is_sampled)
            predictors.append(np.concatenate((prompt_range[-1:], answer_range))[is_sampled])
            targets.extend(compress(answer, is_sampled))
            behaviour.extend(compress(logprobs, is_sampled))
            marks.append(mark)
            repeats.append(int(is_sampled.sum()))
    return MicroBatch(
        tokens_n=torch.tensor(tokens, device=device),
        positions_n=torch.from_numpy(np.concatenate(positions)).to(device),
        layout=lay_rows(rows, len(tokens), device),
        predictor_a=torch.from_numpy(np.concatenate(predictors)).to(device),
        targets_a=torch.tensor(targets, device=device),
        behaviour_a=torch.tensor(behaviour, dtype=torch.float32, device=device),
        mark_a=torch.from_numpy(np.repeat(np.array(marks, dtype=np.float32), repeats)).to(device),
    )


def packed_logits(model: Any, micro: MicroBatch) -> Tensor:
    """Logits at the answer positions only, [a, vocabulary]. Call it, and backward, within `packed_attention(model)`."""
    if is_lean(model, micro.layout):
        hidden_nm = hidden_states(model.model, micro.tokens_n, micro.positions_n, micro.layout)
        return model.lm_head(hidden_nm.index_select(0, micro.predictor_a)[None])[0]
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
    """Refuse a model whose layers mix packed samples, by comparing two of them packed and alone."""
    name = type(model).__name__
    if not (hasattr(model, "config") and hasattr(model, "_can_set_attn_implementation")):
        raise ModelError(f"{name} is no transformers model: load one with AutoModelForCausalLM")
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
    (micro,) = pack(samples, [1.0, 1.0], 100, model.device)
    was_training = model.training
    model.eval()
    try:
        with packed_attention(model):
            packed_av = packed_logits(model, micro).float()
        alone_av = torch.cat([_alone(model, sample) for sample in samples])
    except TypeError as error:
        raise ModelError(f"{name} refuses what packed training passes to it ({error}): use another model") from error
    finally:
        model.train(was_training)
    error = float((packed_av - alone_av).abs().max() / alone_av.abs().max())
    if error > (ROUNDING if model.dtype == torch.float32 else COARSE_ROUNDING):
        raise ModelError(
            f"{name} mixes samples packed in one row: its layers are not attention alone, use another model"
        )


def _alone(model: Any, sample: Sample) -> Tensor:
    """Logits at the answer positions of one sample, [a, vocabulary]."""
    tokens = torch.tensor([[*sample.prompt.tokens, *sample.tokens]], device=model.device)
    return model(tokens, use_cache=False).logits[0, len(sample.prompt.tokens) - 1 : -1].float()
