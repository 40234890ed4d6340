"""The key-value cache of the local engine's slots, and attention over it.

A decoder computes queries, keys and values of packed tokens and passes them to the plan of the call. The plan stores
keys and values and returns the attention output; only the plan knows which token belongs to which slot. `PrefillPlan`
starts sequences at their first token, `DecodePlan` adds one token to each running slot.
Guarantees: running slots are numbered 0..b-1 without gaps, and all memory is allocated once.

Shapes: t packed tokens, b running slots, l positions, h query heads, k key-value heads, e = 2k (keys of all heads, then
values of all heads), g = h / k, d head size, n sequences of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch

from sortedrl.native.huge_pages import zeros_in_huge_pages

# One more attention call costs about as much as reading this many elements of keys.
_CALL_ELEMENTS = 16384
_MAX_STEPS = 16


class TokenPlan(Protocol):
    """The cache positions of the tokens of one forward call."""

    positions_t: torch.Tensor


class StepPlan(TokenPlan, Protocol):
    """A plan for `num_steps` decode steps, the current one included. `group_sizes`: see `DecodePlan`."""

    num_steps: int
    group_sizes: Sequence[int]

    def advance(self) -> None: ...


class AttentionPlan(Protocol):
    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
        """Store keys and values, return the attention output [t, h, d]."""
        ...


class SlotCache:
    """Keys and values [slots, k, max_length, d] of every layer. Positions past a slot's length hold finite garbage."""

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
        self.num_layers, self.slots, self.kv_heads = num_layers, slots, kv_heads
        self.max_length, self.head_dim, self.dtype, self.device = max_length, head_dim, dtype, device
        # Zeros instead of uninitialised memory: a masked position has weight 0, and 0 times NaN is NaN.
        shape = (num_layers, 2, slots, kv_heads, max_length, head_dim)
        self.store = zeros_in_huge_pages(*shape, dtype=dtype, device=device)
        by_head = self.store.view(num_layers, 2, slots * kv_heads, max_length, head_dim)
        self._keys, self._values = by_head[:, 0], by_head[:, 1]
        self._flat = [layer.view(-1, head_dim) for layer in self.store]
        starts = torch.arange(2 * slots * kv_heads, device=device) * max_length
        self._starts_be = starts.view(2, slots, kv_heads).transpose(0, 1).reshape(slots, 2 * kv_heads)

    @property
    def num_bytes(self) -> int:
        return self.store.numel() * self.store.element_size()

    def rows(self, slots_t: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
        """Rows of the flat cache [t * e] where keys and values of these tokens are stored."""
        return (self._starts_be[slots_t] + positions_t.unsqueeze(1)).flatten()

    def decode_rows(self, positions_b: torch.Tensor) -> torch.Tensor:
        """`rows` for one token of each of the first b slots."""
        return (self._starts_be[: positions_b.shape[0]] + positions_b.unsqueeze(1)).flatten()

    def write(self, layer: int, rows: torch.Tensor, kv_ted: torch.Tensor) -> None:
        self._flat[layer].index_copy_(0, rows, kv_ted.reshape(-1, self.head_dim))

    def views(self, heads: slice, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each layer, keys [heads, d, length] and values [heads, length, d]; `heads` indexes slots x heads."""
        keys = self._keys[:, heads, :length].transpose(2, 3).unbind()
        return list(zip(keys, self._values[:, heads, :length].unbind(), strict=True))

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for target in targets:
            self.store[:, :, target, :, :length].copy_(self.store[:, :, source, :, :length])

    def clear(self, slot: int) -> None:
        """Remove NaN or infinity that a sequence left in its slot."""
        self.store[:, :, slot].zero_()

    def plan_prefill(self, slots: Sequence[int], lengths: Sequence[int]) -> TokenPlan:
        return PrefillPlan(self, slots, lengths)

    def plan_decode(self, lengths: Sequence[int], group_sizes: Sequence[int] | None = None) -> StepPlan:
        return DecodePlan(self, lengths, group_sizes)


class PrefillPlan:
    """Whole sequences, packed one after the other without padding. Sequences of one length attend in one call."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        assert list(lengths) == sorted(lengths), "packed sequences must be sorted by length, so that equal ones adjoin"
        self._cache = cache
        self._lengths_and_counts = [(length, sum(1 for _ in group)) for length, group in groupby(lengths)]
        device = cache.device
        self.positions_t = torch.cat([torch.arange(length, device=device) for length in lengths])
        lengths_n = torch.tensor(lengths, device=device)
        self._rows = cache.rows(torch.tensor(slots, device=device).repeat_interleave(lengths_n), self.positions_t)

    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
        self._cache.write(layer, self._rows, kv_ted)
        k_tkd, v_tkd = kv_ted.chunk(2, 1)
        group = q_thd.shape[1] // k_tkd.shape[1]
        if group > 1:
            k_tkd = k_tkd.repeat_interleave(group, dim=1)
            v_tkd = v_tkd.repeat_interleave(group, dim=1)
        outputs, start = [], 0
        for length, count in self._lengths_and_counts:
            end = start + length * count
            q, k, v = (x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (q_thd, k_tkd, v_tkd))
            out_nhld = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            outputs.append(out_nhld.transpose(1, 2).flatten(0, 1))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodePlan:
    """One more token for each running slot, for `num_steps` steps. `lengths` include the first step's token.

    Neighbouring slots form groups (`split_into_groups`). A group attends in one call, over as many positions as its
    longest sequence has, with a mask per sequence. So one long answer does not make all short ones expensive.
    Where a call costs more than its arithmetic, masks and views are made a few positions longer than needed, and
    `advance` unmasks one more position for the next step.
    """

    def __init__(self, cache: SlotCache, lengths: Sequence[int], group_sizes: Sequence[int] | None = None) -> None:
        """`group_sizes`: of an earlier plan for the same slots, if all lengths have grown equally since then."""
        self._cache = cache
        elements = cache.kv_heads * cache.head_dim
        self.num_steps = max(1, min(_MAX_STEPS, _CALL_ELEMENTS // (len(lengths) * elements)))
        self.positions_t = torch.tensor(lengths, device=cache.device) - 1
        self._rows = cache.decode_rows(self.positions_t)
        self.group_sizes: Sequence[int] = split_into_groups(lengths, elements) if group_sizes is None else group_sizes
        self._masks_and_ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._groups = []
        start = 0
        for count in self.group_sizes:
            end = start + count
            bound = min(max(lengths[start:end]) + self.num_steps - 1, cache.max_length)
            mask = self._make_mask(start, end, bound) if min(lengths[start:end]) < bound else None
            heads = slice(start * cache.kv_heads, end * cache.kv_heads)
            # Make the views of all layers now: for a small model each view costs as much as the arithmetic.
            self._groups.append((heads, mask, cache.views(heads, bound)))
            start = end

    def _make_mask(self, start: int, end: int, bound: int) -> torch.Tensor:
        """Additive mask [group * k, 1, bound]."""
        device, dtype, kv_heads = self._cache.device, self._cache.dtype, self._cache.kv_heads
        last = self.positions_t[start:end].repeat_interleave(kv_heads)
        is_past = torch.arange(bound, device=device) > last.unsqueeze(1)
        mask = torch.zeros(is_past.shape, dtype=dtype, device=device).masked_fill_(is_past, float("-inf"))
        if self.num_steps > 1:
            self._masks_and_ends.append((mask.view(-1), torch.arange(len(last), device=device) * bound + last))
        return mask.unsqueeze(1)

    def advance(self) -> None:
        """Move every slot to its next position; at most `num_steps` - 1 times."""
        self.num_steps -= 1
        assert self.num_steps > 0, "the plan has no room for another step"
        self.positions_t += 1
        self._rows += 1
        for mask, ends in self._masks_and_ends:
            ends += 1
            mask.index_fill_(0, ends, 0.0)

    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
        self._cache.write(layer, self._rows, kv_ted)
        # The g queries that share a key head are treated as g query positions, so that no key is copied.
        q = q_thd.reshape(q_thd.shape[0] * self._cache.kv_heads, -1, self._cache.head_dim)
        if len(self._groups) == 1:
            _, mask, views = self._groups[0]
            return _attend(q, views[layer], mask, scale).view(q_thd.shape)
        outputs = [_attend(q[heads], views[layer], mask, scale) for heads, mask, views in self._groups]
        return torch.cat(outputs).view(q_thd.shape)


def _attend(
    q: torch.Tensor, keys_values: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[heads, g, d] x [heads, d, l] x [heads, l, d] -> [heads, g, d]."""
    keys, values = keys_values
    if mask is None:
        scores = torch.bmm(q, keys).mul_(scale)
    else:
        scores = torch.baddbmm(mask, q, keys, alpha=scale)
    if scores.dtype == torch.float32:
        return torch.bmm(torch.softmax(scores, -1), values)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def split_into_groups(lengths: Sequence[int], position_elements: int) -> list[int]:
    """Sizes of the groups of neighbouring slots with the least cost in elements read and calls; O(n^2)."""
    num_wasted = len(lengths) * max(lengths) - sum(lengths)
    if num_wasted * position_elements <= _CALL_ELEMENTS:
        return [len(lengths)]  # a second call would cost more than it could save
    best = [0.0] * (len(lengths) + 1)  # best[n]: least cost of the first n slots
    sizes = [0] * (len(lengths) + 1)  # sizes[n]: size of the last group in that split
    for end in range(1, len(lengths) + 1):
        best[end] = float("inf")
        longest = 0
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            group_cost = (end - start) * longest * position_elements + _CALL_ELEMENTS
            if group_cost > best[end]:
                break  # a larger group only costs more
            if best[start] + group_cost < best[end]:
                best[end], sizes[end] = best[start] + group_cost, end - start
    groups = []
    end = len(lengths)
    while end:
        groups.append(sizes[end])
        end -= sizes[end]
    return groups[::-1]
