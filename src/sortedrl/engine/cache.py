"""The key-value cache of the local engine's slots, and attention over it.

A decoder makes queries, keys and values of packed tokens, hands them to the plan of the call, and gets back what they
attend to; the plan alone knows which token belongs to which slot. `PrefillPlan` starts sequences at their first token,
`DecodePlan` adds one token to each running slot. Running slots are compact (0..b-1) and the memory is taken once.

Shapes: t packed tokens, b running slots, l positions, h query heads, k key-value heads, g = h / k, d head size,
n sequences of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch

# Attending to one slot apart costs about as much as this many elements of keys attended to along with the others.
_APART_ELEMENTS = 32768


class Plan(Protocol):
    def attend(
        self, layer: int, q_thd: torch.Tensor, k_tkd: torch.Tensor, v_tkd: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store keys and values, return the heads' outputs [t, h, d]."""
        ...


class SlotCache:
    """Keys and values [slots, k, max_length, d] of every layer. What lies past a slot's length is finite garbage."""

    def __init__(
        self,
        *,
        num_layers: int,
        slots: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.kv_heads, self.max_length, self.head_dim = slots, kv_heads, max_length, head_dim
        self.device = device
        # Zeros, not whatever memory holds: a masked position has weight 0, and 0 times NaN is NaN.
        self._store = torch.zeros(2, num_layers, slots, kv_heads, max_length, head_dim, dtype=dtype, device=device)
        self.num_layers, self.dtype = num_layers, dtype
        self._keys, self._values = self._store.view(2, num_layers, slots * kv_heads, max_length, head_dim)
        self._flat_keys = [layer.view(-1, head_dim) for layer in self._keys]
        self._flat_values = [layer.view(-1, head_dim) for layer in self._values]
        self._head_starts = torch.arange(slots * kv_heads, device=device) * max_length

    @property
    def num_bytes(self) -> int:
        return self._store.numel() * self._store.element_size()

    def rows(self, slots_t: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
        """Where the keys of tokens are stored: rows of the flat cache [t * k]."""
        starts_tk = self._head_starts.view(self.slots, self.kv_heads)[slots_t]
        return (starts_tk + positions_t.unsqueeze(1)).flatten()

    def decode_rows(self, positions_b: torch.Tensor) -> torch.Tensor:
        """The same for one token of each of the first b slots."""
        starts_bk = self._head_starts[: len(positions_b) * self.kv_heads].view(-1, self.kv_heads)
        return (starts_bk + positions_b.unsqueeze(1)).flatten()

    def write(self, layer: int, rows: torch.Tensor, k_tkd: torch.Tensor, v_tkd: torch.Tensor) -> None:
        self._flat_keys[layer].index_copy_(0, rows, k_tkd.reshape(-1, self.head_dim))
        self._flat_values[layer].index_copy_(0, rows, v_tkd.reshape(-1, self.head_dim))

    def window(self, heads: slice, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, keys [heads, d, length] and values [heads, length, d] of these rows of slots x heads."""
        keys = self._keys[:, heads, :length].transpose(2, 3).unbind()
        return list(zip(keys, self._values[:, heads, :length].unbind(), strict=True))

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for target in targets:
            self._store[:, :, target, :, :length].copy_(self._store[:, :, source, :, :length])

    def clear(self, slot: int) -> None:
        """After NaN or infinity got in."""
        self._store[:, :, slot].zero_()


class PrefillPlan:
    """Whole sequences, packed one behind the other without padding; sequences of one length attend in one call."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        assert list(lengths) == sorted(lengths), "packed sequences must come by length, so that equal ones adjoin"
        self._cache = cache
        self._runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]
        device = cache.device
        self.positions_t = torch.cat([torch.arange(length, device=device) for length in lengths])
        lengths_n = torch.tensor(lengths, device=device)
        self._rows = cache.rows(torch.tensor(slots, device=device).repeat_interleave(lengths_n), self.positions_t)

    def attend(
        self, layer: int, q_thd: torch.Tensor, k_tkd: torch.Tensor, v_tkd: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._cache.write(layer, self._rows, k_tkd, v_tkd)
        group = q_thd.shape[1] // k_tkd.shape[1]
        if group > 1:
            k_tkd = k_tkd.repeat_interleave(group, dim=1)
            v_tkd = v_tkd.repeat_interleave(group, dim=1)
        outputs, start = [], 0
        for length, count in self._runs:
            end = start + length * count
            q, k, v = (x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (q_thd, k_tkd, v_tkd))
            out_nhld = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            outputs.append(out_nhld.transpose(1, 2).flatten(0, 1))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodePlan:
    """One more token for each running slot. `lengths` count that token.

    All slots attend together over `bound` positions, masked to their own; those far longer are few, and attend once
    more by themselves, so that one long answer does not make the others as dear as itself.
    """

    def __init__(self, cache: SlotCache, lengths: Sequence[int]) -> None:
        self._cache = cache
        self._num_heads = len(lengths) * cache.kv_heads
        self._bound, apart = choose_bound(lengths, cache.kv_heads * cache.head_dim)
        self.positions_b = torch.tensor(lengths, device=cache.device) - 1
        self._rows = cache.decode_rows(self.positions_b)
        self._mask = self._make_mask() if min(lengths) < self._bound else None
        # Views are made for all layers at once: at this size each costs as much as arithmetic.
        self._window = cache.window(slice(0, self._num_heads), self._bound)
        self._apart = []
        for slot in apart:
            heads = slice(slot * cache.kv_heads, (slot + 1) * cache.kv_heads)
            self._apart.append((heads, cache.window(heads, lengths[slot])))

    def _make_mask(self) -> torch.Tensor:
        """Additive, [b * k, 1, bound]."""
        is_past_bl = torch.arange(self._bound, device=self._cache.device) > self.positions_b.unsqueeze(1)
        mask_bl = torch.zeros(is_past_bl.shape, dtype=self._cache.dtype, device=self._cache.device).masked_fill_(
            is_past_bl, float("-inf")
        )
        return mask_bl.repeat_interleave(self._cache.kv_heads, dim=0).unsqueeze(1)

    def attend(
        self, layer: int, q_thd: torch.Tensor, k_tkd: torch.Tensor, v_tkd: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._cache.write(layer, self._rows, k_tkd, v_tkd)
        # The g queries that share a key head take the place of several query positions: no key is copied.
        q = q_thd.reshape(self._num_heads, -1, self._cache.head_dim)
        keys, values = self._window[layer]
        out = _attend(q, keys, values, self._mask, scale)
        for heads, window in self._apart:
            keys, values = window[layer]
            out[heads] = _attend(q[heads], keys, values, None, scale)
        return out.view(q_thd.shape)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[heads, g, d] x [heads, d, l] x [heads, l, d] -> [heads, g, d]."""
    if mask is None:
        scores = torch.bmm(q, keys).mul_(scale)
    else:
        scores = torch.baddbmm(mask, q, keys, alpha=scale)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def choose_bound(lengths: Sequence[int], position_elements: int) -> tuple[int, list[int]]:
    """How far all slots attend together, and which of them go further, apart; the cheapest split by elements read."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    best_cost, best_split = float("inf"), 0
    apart_cost = 0
    for split, slot in enumerate(order):
        cost = len(lengths) * lengths[slot] * position_elements + apart_cost
        if cost < best_cost:
            best_cost, best_split = cost, split
        apart_cost += lengths[slot] * position_elements + _APART_ELEMENTS
    return lengths[order[best_split]], order[:best_split]
