"""Prefixes that wait for their trajectory: the cache of a finished turn stays in a spare row while a tool works.

The local engine calls it when an attempt ends with a stop token, and when attempts start. An attempt that resumes a
kept prefix prefills only the tokens after it: the last one that was sampled, and what the tool returned. With a large
model these share passes with decoding slots (`mixed_pass.py`); otherwise they get a pass of their own.
Guarantees: a prefix is used only under the weights that computed it, and only by an attempt of its sample whose tokens
begin with those of the prefix. Answers and log-probs are the same with and without it, to the last bit, because the
native decoder computes a token alike in any batch; other decoders keep nothing. When all rows are taken, the oldest
prefix gives way, and its trajectory is prefilled from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.local.cache import SlotCache
from sortedrl.engine.local.native_decoder import KernelPlan
from sortedrl.engine.local.prefill import ReplayCheck
from sortedrl.records import Mode


@dataclass(slots=True, kw_only=True, frozen=True)
class KeptPrefix:
    row: int  # of the cache
    tokens: list[int]  # that the row holds, prompt included


@dataclass(slots=True, kw_only=True, frozen=True)
class SuffixPrefill:
    """One pass over the tokens that follow kept prefixes, attempt by attempt."""

    tokens_t: torch.Tensor
    plan: KernelPlan
    rows_r: torch.Tensor  # the last token of each attempt
    checks: list[ReplayCheck]

    @classmethod
    def begin(cls, returning: Sequence[Attempt], lengths: Sequence[int], first_slot: int) -> SuffixPrefill:
        """`lengths`: the tokens of each attempt that its slot holds already."""
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for slot, (attempt, start) in enumerate(zip(returning, lengths, strict=True), start=first_slot):
            tokens += [*attempt.request.prompt, *attempt.tokens][start:]
            slots += [slot] * (attempt.length - start)
            positions += range(start, attempt.length)
            ends.append(len(tokens) - 1)
        columns = np.array((tokens, slots, positions), dtype=np.int64)
        tokens_t, slots_t, positions_t = torch.from_numpy(columns).unbind()
        checks = [
            ReplayCheck(attempt=attempt, cached=[], is_masked=[], rows=range(place, place + 1))
            for place, attempt in enumerate(returning)
        ]
        return cls(
            tokens_t=tokens_t,
            plan=KernelPlan(slots_t=slots_t, positions_t=positions_t),
            rows_r=torch.tensor(ends),
            checks=checks,
        )


class KeptPrefixes:
    """`first_row`: the first row of the cache that no running attempt uses."""

    def __init__(self, cache: SlotCache, first_row: int) -> None:
        self._cache = cache
        self._free = list(range(first_row, cache.slots))
        self._kept: dict[int, KeptPrefix] = {}  # by sample, oldest first
        self._mixed: set[int] = set()  # running samples whose cache is partly of older weights
        self._num_saved = 0

    @property
    def stats(self) -> dict[str, int]:
        """Prefilled tokens that were saved."""
        return {"kept_prefix_tokens": self._num_saved}

    def keep(self, attempt: Attempt, slot: int) -> None:
        """Copy what the slot holds of an attempt whose turn is over. The model has not read its last token."""
        sample = attempt.request.sample
        if sample in self._mixed or not (self._free or self._kept):
            return
        self._drop(sample)
        if not self._free:
            self._drop(next(iter(self._kept)))
        tokens = [*attempt.request.prompt, *attempt.tokens[:-1]]
        row = self._free.pop()
        self._cache.copy(slot, [row], len(tokens))
        self._kept[sample] = KeptPrefix(row=row, tokens=tokens)

    def split(self, attempts: Sequence[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
        """Of attempts that start: those that resume a kept prefix, and the others."""
        self._mixed.difference_update(attempt.request.sample for attempt in attempts)
        returning = [attempt for attempt in attempts if self._resumes(attempt)]
        if not returning:
            return [], list(attempts)
        samples = {attempt.request.sample for attempt in returning}
        return returning, [attempt for attempt in attempts if attempt.request.sample not in samples]

    def restore(self, returning: Sequence[Attempt], first_slot: int) -> list[int]:
        """Copy the prefixes of these attempts into their slots, and forget them; returns their lengths."""
        lengths: list[int] = []
        for slot, attempt in enumerate(returning, start=first_slot):
            kept = self._kept[attempt.request.sample]
            lengths.append(len(kept.tokens))
            self._cache.copy(kept.row, [slot], lengths[-1])
            self._drop(attempt.request.sample)
        self._num_saved += sum(lengths)
        return lengths

    def clear(self, running: Iterable[Attempt]) -> None:
        """Forget all prefixes, because the weights change. `running` attempts continue over their old cache."""
        for sample in list(self._kept):
            self._drop(sample)
        self._mixed = {attempt.request.sample for attempt in running}

    def _resumes(self, attempt: Attempt) -> bool:
        kept = self._kept.get(attempt.request.sample)
        if kept is None or attempt.request.mode is not Mode.RESUME or attempt.length <= len(kept.tokens):
            return False
        return [*attempt.request.prompt, *attempt.tokens][: len(kept.tokens)] == kept.tokens

    def _drop(self, sample: int) -> None:
        if (kept := self._kept.pop(sample, None)) is not None:
            self._free.append(kept.row)
