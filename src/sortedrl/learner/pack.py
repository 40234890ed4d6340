"""Samples packed end to end into micro-batches of a token budget, and attention that keeps them apart.

`learner/torch.py` packs a mini-batch and runs the model on each micro-batch. There is no padding between samples, and a
prompt that siblings share is packed once: their answers follow it, each with the positions that it would have alone.
Every layer but attention works token by token, so only attention has to know who belongs to whom. It is registered with
transformers under the name `PACKED`: it lays the samples out as rows, rows of similar length together, attends causally
within each row, and puts the results back. The padding at the end of a row comes after every real token, so causality
alone keeps it out.

What it keeps true: log-probs and gradients equal those of one sample at a time; every answer token that the policy
sampled is predicted exactly once, and those that were fed into the answer are context alone; what cannot be learned
from (no answer tokens, or mark 0) is not computed.

Shapes: n packed tokens, a sampled answer tokens, p row slots (b rows of l tokens over all buckets), h heads, d head
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from sortedrl.errors import DataError, ModelError
from sortedrl.records import Prompt, Sample, Segment

PACKED = "sortedrl_packed"
ROUNDING = 3e-5  # largest difference between packed and alone, relative to the largest logit, in fp32
COARSE_ROUNDING = 3e-2  # and in shorter formats
SIMILAR = 0.8  # rows share a bucket while the shortest is at least this share of the longest
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # what some architectures ask of attention and ours does not give


@dataclass(slots=True, kw_only=True, frozen=True)
class Layout:
    """How packed tokens are laid out as rows for attention, and found again."""

    index_p: Tensor  # the packed token in each row slot; padding repeats token 0
    slot_n: Tensor  # a row slot of each packed token
    shapes: tuple[tuple[int, int], ...]  # (b, l) of each bucket


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
        layout=_rows(rows, len(tokens), device),
        predictor_a=torch.from_numpy(np.concatenate(predictors)).to(device),
        targets_a=torch.tensor(targets, device=device),
        behaviour_a=torch.tensor(behaviour, dtype=torch.float32, device=device),
        mark_a=torch.from_numpy(np.repeat(np.array(marks, dtype=np.float32), repeats)).to(device),
    )


def _rows(rows: Sequence[np.ndarray], num_tokens: int, device: torch.device | str) -> Layout:
    """Buckets of rows of similar length, the longest first."""
    ordered = sorted(rows, key=lambda row: -len(row))
    index: list[np.ndarray] = []
    shapes: list[tuple[int, int]] = []
    slot = np.zeros(num_tokens, dtype=np.int64)
    start = 0
    while start < len(ordered):
        length = len(ordered[start])
        stop = start + 1
        while stop < len(ordered) and len(ordered[stop]) >= SIMILAR * length:
            stop += 1
        block = np.zeros((stop - start, length), dtype=np.int64)
        base = sum(block.size for block in index)
        for row, members in enumerate(ordered[start:stop]):
            block[row, : len(members)] = members
            # Siblings compute the same thing on their prompt, so it does not matter whose result is kept.
            slot[members] = base + row * length + np.arange(len(members))
        index.append(block.reshape(-1))
        shapes.append((stop - start, length))
        start = stop
    return Layout(
        index_p=torch.from_numpy(np.concatenate(index)).to(device),
        slot_n=torch.from_numpy(slot).to(device),
        shapes=tuple(shapes),
    )


def packed_logits(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Logits at the answer positions only, [a, vocabulary]. Call it, and backward, within `packed_attention(model)`."""
    output = model(
        input_ids=micro.tokens_n[None],
        position_ids=micro.positions_n[None],
        use_cache=False,
        logits_to_keep=micro.predictor_a,
        packing=micro.layout,
    )
    return output.logits[0]


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Let the model attend by row; whoever else uses the module gets its own attention back afterwards."""
    before = model.config._attn_implementation
    model.config._attn_implementation = PACKED
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers calls: [1, h, n, d] in, [1, n, h, d] out."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} wants {name} in attention, which packed training lacks")
    sizes = [num_rows * length for num_rows, length in packing.shapes]
    query_p, key_p, value_p = (_spread(states, packing.index_p, sizes) for states in (query, key, value))
    outputs: list[Tensor] = []
    for shape, query_bl, key_bl, value_bl in zip(packing.shapes, query_p, key_p, value_p, strict=True):
        length = shape[1]
        mask_ll = None
        if sliding_window is not None and length > sliding_window:
            ones_ll = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask_ll = ones_ll.tril() & ones_ll.triu(1 - sliding_window)
        output_bhld = functional.scaled_dot_product_attention(
            query_bl.view(*shape, *query_bl.shape[1:]).transpose(1, 2),
            key_bl.view(*shape, *key_bl.shape[1:]).transpose(1, 2),
            value_bl.view(*shape, *value_bl.shape[1:]).transpose(1, 2),
            attn_mask=mask_ll,
            dropout_p=dropout,
            is_causal=mask_ll is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output_bhld.transpose(1, 2).flatten(0, 1).flatten(1))
    output_n = torch.cat(outputs).index_select(0, packing.slot_n)
    return output_n.view(1, query.shape[2], query.shape[1], -1), None


def _spread(states: Tensor, index_p: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """[1, h, n, d] -> per bucket [b * l, h, d]."""
    _, h, n, d = states.shape
    states_p = states[0].transpose(0, 1).reshape(n, h * d).index_select(0, index_p)
    return states_p.view(-1, h, d).split(sizes)


AttentionInterface.register(PACKED, _attend)


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
