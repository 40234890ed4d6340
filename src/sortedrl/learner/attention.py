"""Attention over packed samples that keeps them apart, registered with transformers under the name `PACKED`.

`pack.py` lays a micro-batch out (`lay_rows`); models attend by it within `packed_attention`. A row is a sample with its
prompt, gathered from the packed tokens; rows attend causally within themselves, and results are put back. Rows of
similar length make one call, a bucket: padding at the end of a row comes after every real token, so causality alone
keeps it out. On GPUs in half precision rows need no padding at all. Neither way makes a mask over all tokens: time and
memory go with the rows' own lengths.

Shapes: n packed tokens, t tokens of all rows, p row slots (b rows of l tokens over all buckets), h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from sortedrl.errors import ModelError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # of an older torch
    varlen_attn = None

PACKED = "sortedrl_packed"
SIMILAR = 0.8  # rows share a bucket while the shortest is at least this share of the longest
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # what some architectures ask of attention and ours does not give


@dataclass(slots=True, kw_only=True, frozen=True)
class Layout:
    """How packed tokens are laid out as rows for attention, and found again."""

    index_p: Tensor  # the packed token in each row slot; padding repeats token 0
    slot_n: Tensor  # a row slot of each packed token
    shapes: tuple[tuple[int, int], ...]  # (b, l) of each bucket
    index_t: Tensor  # the packed token of each row's token: as `index_p`, without padding
    place_n: Tensor  # where in those each packed token is
    edges: Tensor  # where rows begin and end in those, [rows + 1]


def lay_rows(rows: Sequence[np.ndarray], num_tokens: int, device: torch.device | str) -> Layout:
    """Buckets of rows of similar length, the longest first."""
    ordered = sorted(rows, key=lambda row: -len(row))
    index: list[np.ndarray] = []
    shapes: list[tuple[int, int]] = []
    slot, place = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
    edges = np.cumsum([0, *map(len, ordered)])
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
            place[members] = edges[start + row] + np.arange(len(members))
        index.append(block.reshape(-1))
        shapes.append((stop - start, length))
        start = stop
    return Layout(
        index_p=torch.from_numpy(np.concatenate(index)).to(device),
        slot_n=torch.from_numpy(slot).to(device),
        shapes=tuple(shapes),
        index_t=torch.from_numpy(np.concatenate(ordered)).to(device),
        place_n=torch.from_numpy(place).to(device),
        edges=torch.from_numpy(edges.astype(np.int32)).to(device),
    )


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
    if query.is_cuda and varlen_attn is not None and dropout == 0:
        lower = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
        if lower != torch.float32:
            query, key, value = query.to(lower), key.to(lower), value.to(lower)
            return _attend_by_edges(query, key, value, packing, scaling, sliding_window), None
    return _attend_by_bucket(query, key, value, packing, scaling, dropout, sliding_window), None


def _attend_by_edges(
    query: Tensor, key: Tensor, value: Tensor, packing: Layout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """By flash attention over rows of any length, without padding."""
    assert varlen_attn is not None, "this torch has no attention over rows of any length"
    longest = packing.shapes[0][1]
    query_t, key_t, value_t = (
        states[0].transpose(0, 1).index_select(0, packing.index_t) for states in (query, key, value)
    )
    output_thd = varlen_attn(
        query_t,
        key_t,
        value_t,
        packing.edges,
        packing.edges,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output_thd, Tensor), "nothing but the output was asked for"
    return output_thd.index_select(0, packing.place_n)[None]


def _attend_by_bucket(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Layout,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """By torch's own attention, on rows of similar length at once."""
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
    return output_n.view(1, query.shape[2], query.shape[1], -1)


def _spread(states: Tensor, index_p: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """[1, h, n, d] -> per bucket [b * l, h, d]."""
    _, h, n, d = states.shape
    states_p = states[0].transpose(0, 1).reshape(n, h * d).index_select(0, index_p)
    return states_p.view(-1, h, d).split(sizes)


AttentionInterface.register(PACKED, _attend)
