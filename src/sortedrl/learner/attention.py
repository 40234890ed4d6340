"""Attention that keeps packed samples apart, registered with transformers as "sortedrl_packed".

`pack.py` makes the layout of a micro-batch (`make_layout`); models use it within `packed_attention`. A row is one
sample with its prompt, gathered from the packed tokens. Rows attend causally within themselves, and the results are
scattered back to the packed tokens. On CPUs, rows of similar length share a bucket and one call: padding is at the end
of a row, after every real token, so causality keeps it out. On GPUs in half precision no padding is needed. Guarantees:
no mask over all packed tokens is ever made, so time and memory grow with the rows' own lengths.

Shapes: n packed tokens, t tokens of all rows, p padded positions (b rows of l tokens over all buckets), h heads, d head
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from sortedrl.errors import ModelError
from sortedrl.learner.device import to_device

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None

_PACKED = "sortedrl_packed"
_SIMILAR = 0.8  # rows share a bucket while the shortest is at least this share of the longest
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # attention options of some architectures that we do not implement


class HeadsAcrossRanks(Protocol):
    """Exchanges tokens for heads where several ranks compute one micro-batch (`sharded/context.py`)."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From this rank's tokens of all heads to all tokens of this rank's heads."""
        ...

    def to_tokens(self, output: Tensor) -> Tensor:
        """Back to this rank's tokens of all heads."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class Layout:
    """Where the tokens of each row are among the packed tokens, with padding (buckets) and without."""

    padded_p: Tensor  # the packed token at each padded position; padding repeats token 0
    in_padded_n: Tensor  # the padded position whose result each packed token takes
    shapes: tuple[tuple[int, int], ...]  # (b, l) of each bucket, the longest rows first
    unpadded_t: Tensor  # the packed token of each row's token, rows end to end without padding
    in_unpadded_n: Tensor  # the position there whose result each packed token takes
    edges: Tensor  # where rows begin and end there, [rows + 1]
    heads: HeadsAcrossRanks | None = None  # set if the packed tokens are spread over ranks

    @property
    def longest_row(self) -> int:
        return self.shapes[0][1]


def make_layout(rows: Sequence[np.ndarray], num_tokens: int, device: torch.device | str) -> Layout:
    """Sort the rows into buckets of similar length, the longest first. A row holds indices of packed tokens."""
    ordered = sorted(rows, key=lambda row: -len(row))
    padded: list[np.ndarray] = []
    shapes: list[tuple[int, int]] = []
    in_padded, in_unpadded = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
    edges = np.cumsum([0, *map(len, ordered)])
    start = 0
    while start < len(ordered):
        length = len(ordered[start])
        stop = start + 1
        while stop < len(ordered) and len(ordered[stop]) >= _SIMILAR * length:
            stop += 1
        block = np.zeros((stop - start, length), dtype=np.int64)
        base = sum(block.size for block in padded)
        for row, tokens in enumerate(ordered[start:stop]):
            block[row, : len(tokens)] = tokens
            # Siblings compute the same results on their shared prompt, so the last row's may be the one that is read.
            in_padded[tokens] = base + row * length + np.arange(len(tokens))
            in_unpadded[tokens] = edges[start + row] + np.arange(len(tokens))
        padded.append(block.reshape(-1))
        shapes.append((stop - start, length))
        start = stop
    return Layout(
        padded_p=to_device(np.concatenate(padded), device),
        in_padded_n=to_device(in_padded, device),
        shapes=tuple(shapes),
        unpadded_t=to_device(np.concatenate(ordered), device),
        in_unpadded_n=to_device(in_unpadded, device),
        edges=to_device(edges.astype(np.int32), device),
    )


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Make the model use packed attention inside the block, and restore its own attention afterwards."""
    before = model.config._attn_implementation
    model.config._attn_implementation = _PACKED
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
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} needs {name} in attention, which packed training does not support: use "
                "another model"
            )
    if packing.heads is None:
        return _attend_rows(query, key, value, packing, scaling, dropout, sliding_window), None
    query, key, value = packing.heads.to_heads(query, key, value)
    output = _attend_rows(query, key, value, packing, scaling, dropout, sliding_window)
    return packing.heads.to_tokens(output), None


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Layout,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """Attention within the rows: without padding where the GPU can, otherwise in buckets."""
    if query.is_cuda and varlen_attn is not None and dropout == 0:
        lower = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
        if lower != torch.float32:
            query, key, value = query.to(lower), key.to(lower), value.to(lower)
            return _attend_without_padding(query, key, value, packing, scaling, sliding_window)
    return _attend_in_buckets(query, key, value, packing, scaling, dropout, sliding_window)


def _attend_without_padding(
    query: Tensor, key: Tensor, value: Tensor, packing: Layout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Flash attention over rows of any length."""
    assert varlen_attn is not None, "this torch has no varlen_attn"
    query_t, key_t, value_t = (
        states[0].transpose(0, 1).index_select(0, packing.unpadded_t) for states in (query, key, value)
    )
    output_thd = varlen_attn(
        query_t,
        key_t,
        value_t,
        packing.edges,
        packing.edges,
        packing.longest_row,
        packing.longest_row,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output_thd, Tensor), "varlen_attn returned more than its output"
    return output_thd.index_select(0, packing.in_unpadded_n)[None]


def _attend_in_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Layout,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """torch's scaled_dot_product_attention, one call per bucket."""
    sizes = [num_rows * length for num_rows, length in packing.shapes]
    query_p, key_p, value_p = (_gather_rows(states, packing.padded_p, sizes) for states in (query, key, value))
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
    output_n = torch.cat(outputs).index_select(0, packing.in_padded_n)
    return output_n.view(1, query.shape[2], query.shape[1], -1)


def _gather_rows(states: Tensor, padded_p: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """[1, h, n, d] to one tensor [b * l, h, d] per bucket."""
    _, h, n, d = states.shape
    states_p = states[0].transpose(0, 1).reshape(n, h * d).index_select(0, padded_p)
    return states_p.view(-1, h, d).split(sizes)


AttentionInterface.register(_PACKED, _attend)
