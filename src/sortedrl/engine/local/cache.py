"""The key-value cache of the local engine's slots, and attention over it.

A decoder makes queries, keys and values of packed tokens, hands them to the plan of the call, and gets back what they
attend to; the plan alone knows which token belongs to which slot. `PrefillPlan` starts sequences at their first token,
`DecodePlan` adds one token to each running slot. Running slots are compact (0..b-1) and the memory is taken once.

Shapes: t packed tokens, b running slots, l positions, h query heads, k key-value heads, e = 2k (the heads' keys, then
their values), g = h / k, d head size, n sequences of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch

from sortedrl.native.huge_pages import zeros

# Another call of attention costs about as much as this many elements of keys that are read in vain.
_CALL_ELEMENTS = 16384
_MAX_STEPS = 16


class Placed(Protocol):
    """Tokens that have their place in the cache."""

    positions_t: torch.Tensor


class Steps(Placed, Protocol):
    """A token of each running slot, step by step: `num_steps` steps, this one included. `runs`: see `DecodePlan`."""

    num_steps: int
    runs: Sequence[int]

    def advance(self) -> None: ...


class Plan(Protocol):
    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
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
        self.store = zeros(num_layers, 2, slots, kv_heads, max_length, head_dim, dtype=dtype, device=device)
        self.num_layers, self.dtype = num_layers, dtype
        by_head = self.store.view(num_layers, 2, slots * kv_heads, max_length, head_dim)
        self._keys, self._values = by_head[:, 0], by_head[:, 1]
        self._flat = [layer.view(-1, head_dim) for layer in self.store]
        starts = torch.arange(2 * slots * kv_heads, device=device) * max_length
        self._starts_be = starts.view(2, slots, kv_heads).transpose(0, 1).reshape(slots, 2 * kv_heads)

    @property
    def num_bytes(self) -> int:
        return self.store.numel() * self.store.element_size()

    def rows(self, slots_t: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
        """Where keys and values of tokens are stored: rows of the flat cache [t * e]."""
        return (self._starts_be[slots_t] + positions_t.unsqueeze(1)).flatten()

    def decode_rows(self, positions_b: torch.Tensor) -> torch.Tensor:
        """The same for one token of each of the first b slots."""
        return (self._starts_be[: positions_b.shape[0]] + positions_b.unsqueeze(1)).flatten()

    def write(self, layer: int, rows: torch.Tensor, kv_ted: torch.Tensor) -> None:
        self._flat[layer].index_copy_(0, rows, kv_ted.reshape(-1, self.head_dim))

    def window(self, heads: slice, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, keys [heads, d, length] and values [heads, length, d] of these rows of slots x heads."""
        keys = self._keys[:, heads, :length].transpose(2, 3).unbind()
        return list(zip(keys, self._values[:, heads, :length].unbind(), strict=True))

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for target in targets:
            self.store[:, :, target, :, :length].copy_(self.store[:, :, source, :, :length])

    def clear(self, slot: int) -> None:
        """After NaN or infinity got in."""
        self.store[:, :, slot].zero_()

    def plan_prefill(self, slots: Sequence[int], lengths: Sequence[int]) -> Placed:
        return PrefillPlan(self, slots, lengths)

    def plan_decode(self, lengths: Sequence[int], runs: Sequence[int] | None = None) -> Steps:
        return DecodePlan(self, lengths, runs)


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

    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
        self._cache.write(layer, self._rows, kv_ted)
        k_tkd, v_tkd = kv_ted.chunk(2, 1)
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
    """One more token for each running slot, step by step. `lengths` count the first step's token.

    Runs of neighbouring slots attend together, over as many positions as the longest of them has, masked to their own
    (`split_runs`), so that one long answer does not make the others as dear as itself. A plan serves `num_steps` steps:
    where a call costs more than arithmetic, masks and views are made with some room, and `advance` opens a position.
    """

    def __init__(self, cache: SlotCache, lengths: Sequence[int], runs: Sequence[int] | None = None) -> None:
        """`runs`: those of an earlier plan for the same slots, whose lengths have grown alike since."""
        self._cache = cache
        elements = cache.kv_heads * cache.head_dim
        self.num_steps = max(1, min(_MAX_STEPS, _CALL_ELEMENTS // (len(lengths) * elements)))
        self.positions_t = torch.tensor(lengths, device=cache.device) - 1
        self._rows = cache.decode_rows(self.positions_t)
        self.runs: Sequence[int] = split_runs(lengths, elements) if runs is None else runs
        self._openings: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._windows = []
        start = 0
        for count in self.runs:
            end = start + count
            bound = min(max(lengths[start:end]) + self.num_steps - 1, cache.max_length)
            mask = self._make_mask(start, end, bound) if min(lengths[start:end]) < bound else None
            heads = slice(start * cache.kv_heads, end * cache.kv_heads)
            # Views are made for all layers at once: at this size each costs as much as arithmetic.
            self._windows.append((heads, mask, cache.window(heads, bound)))
            start = end

    def _make_mask(self, start: int, end: int, bound: int) -> torch.Tensor:
        """Additive, [run * k, 1, bound]."""
        device, dtype, kv_heads = self._cache.device, self._cache.dtype, self._cache.kv_heads
        last = self.positions_t[start:end].repeat_interleave(kv_heads)
        is_past = torch.arange(bound, device=device) > last.unsqueeze(1)
        mask = torch.zeros(is_past.shape, dtype=dtype, device=device).masked_fill_(is_past, float("-inf"))
        if self.num_steps > 1:
            self._openings.append((mask.view(-1), torch.arange(len(last), device=device) * bound + last))
        return mask.unsqueeze(1)

    def advance(self) -> None:
        """One position further in every slot; at most `num_steps` - 1 times."""
        self.num_steps -= 1
        assert self.num_steps > 0, "the plan has no room for another step"
        self.positions_t += 1
        self._rows += 1
        for mask, opened in self._openings:
            opened += 1
            mask.index_fill_(0, opened, 0.0)

    def attend(self, layer: int, q_thd: torch.Tensor, kv_ted: torch.Tensor, scale: float) -> torch.Tensor:
        self._cache.write(layer, self._rows, kv_ted)
        # The g queries that share a key head take the place of several query positions: no key is copied.
        q = q_thd.reshape(q_thd.shape[0] * self._cache.kv_heads, -1, self._cache.head_dim)
        if len(self._windows) == 1:
            _, mask, window = self._windows[0]
            return _attend(q, window[layer], mask, scale).view(q_thd.shape)
        outputs = [_attend(q[heads], window[layer], mask, scale) for heads, mask, window in self._windows]
        return torch.cat(outputs).view(q_thd.shape)


def _attend(
    q: torch.Tensor, window: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[heads, g, d] x [heads, d, l] x [heads, l, d] -> [heads, g, d]."""
    keys, values = window
    if mask is None:
        scores = torch.bmm(q, keys).mul_(scale)
    else:
        scores = torch.baddbmm(mask, q, keys, alpha=scale)
    if scores.dtype == torch.float32:
        return torch.bmm(torch.softmax(scores, -1), values)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def split_runs(lengths: Sequence[int], position_elements: int) -> list[int]:
    """Sizes of the runs of neighbours that cost least, in elements read and calls; O(n^2)."""
    num_vain = len(lengths) * max(lengths) - sum(lengths)
    if num_vain * position_elements <= _CALL_ELEMENTS:
        return [len(lengths)]  # another call would cost more than all that it could save
    best = [0.0] * (len(lengths) + 1)  # cost of the first so many slots
    sizes = [0] * (len(lengths) + 1)  # of the run that ends there
    for end in range(1, len(lengths) + 1):
        best[end] = float("inf")
        longest = 0
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            cost = best[start] + (end - start) * longest * position_elements + _CALL_ELEMENTS
            if cost < best[end]:
                best[end], sizes[end] = cost, end - start
            if (end - start) * longest * position_elements + _CALL_ELEMENTS > best[end]:
                break  # a longer run only costs more
    runs = []
    end = len(lengths)
    while end:
        runs.append(sizes[end])
        end -= sizes[end]
    return runs[::-1]
